"""Linear attention over features of any kind as Triton kernels: features are loaded, sums are never written per token.

`tiles` holds code shared by the kernels besides `triton_shared`; `sums` and `causal` are kernels,
`launches` calls them, `operators` turns the launches into torch operators, which `cuda_linear.py` registers for
dispatch; `decode` handles a few tokens in one launch. As there, no kernel loads what the same launch writes.
"""
