"""Kernels for one device type each, in files named after it, which are imported at the first call on such a device.

`cuda_hadamard.py`, for instance:

    @torch.library.custom_op("snnk_peft::hadamard_cuda", mutates_args=(), device_types="cuda")
    def transform(x: Tensor) -> Tensor: ...                          # the launch

    @transform.register_fake
    def _(x): return torch.empty_like(x)                             # for compilers

    def _serves(x: Tensor) -> bool:
        return x.dtype == torch.float32 and x.shape[-1] <= 8192      # else the torch form

    @register_kernel("hadamard_transform", device="cuda", serves=_serves)
    def hadamard_transform(x: Tensor) -> Tensor:
        return transform(x.contiguous())

Folders next to these files are imported only by them: `triton_exponential/` by `cuda_exponential.py` and so on, and
`triton_shared/` by these folders. All of them need Triton.

A kernel's inputs and outputs are specified by the docstring of the operation's torch form, against which it is also
tested; what it may decline, by `backend.register_kernel`. Bundles that load with this package have these
kernels; the code of a bundle, which runs without it, has only the torch forms.
"""
