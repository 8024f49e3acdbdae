"""Linear attention over features of any kind as Triton kernels: features are loaded, sums are never written per token.

`tiles` is what kernels share beside the tiles of `triton_shared`; `sums` and `causal` are kernels,
`launches` calls them, `operators` makes torch operators of the launches, which `cuda_linear.py` registers under the
seam; `decode` takes a few tokens in one launch. As there, no kernel loads what the same launch writes.
"""
