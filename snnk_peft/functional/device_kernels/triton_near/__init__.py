"""Attention in a band with sinks, and a summary of far keys under the same normalisation, as Triton kernels.

`kernels`, `launches` and `operators` have the same roles as in `triton_exponential/`.
"""
