"""Attention over positive exponential features as Triton kernels: features are never written to memory.

`tiles` is what kernels share, `sizes` their block sizes; `key_sums`, `queries` and `causal` are kernels and launches,
`operators` makes torch operators of them, which `cuda_exponential.py` registers under the seam. A kernel never loads
what the same launch writes: a tile is held by several warps, and one may write before another has read.
"""
