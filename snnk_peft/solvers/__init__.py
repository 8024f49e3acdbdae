"""Solvers that compute a replacement's tensors from pretrained weights alone, or from streamed layer inputs/outputs."""
