"""Pure tensor mathematics: exact kernels, Hermite series and folding. Tensors in, tensors out; no modules, no models."""
