"""Pure tensor mathematics: exact kernels, Hermite series, folding. Tensors in, tensors out; no modules or models."""
