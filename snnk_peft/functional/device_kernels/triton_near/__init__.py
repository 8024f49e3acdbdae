"""Attention in a band with sinks, and what is known of far keys under the same normalisation, as Triton kernels.

`kernels`, `launches` and `operators` are what they are in `triton_exponential/`.
"""
