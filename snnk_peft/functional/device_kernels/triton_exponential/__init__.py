"""Attention over positive exponential features as Triton kernels: features are never written to memory.

`key_sums`, `queries` and `causal` are kernels, `launches` calls them, `operators` makes torch operators of the
launches, which `cuda_exponential.py` registers under the seam; `decode` takes a few tokens in one launch. A kernel
never loads what the same launch writes: a tile is held by several warps, and one may write before another has read.
"""
