"""Attention over positive exponential features as Triton kernels: features are never written to memory.

`key_sums`, `queries` and `causal` are kernels, `launches` calls them, `operators` turns the launches into
torch operators, which `cuda_exponential.py` registers for dispatch; `decode` handles a few tokens in one launch. A
kernel never loads what the same launch writes: several warps hold a tile, and one may write before another has read.
"""
