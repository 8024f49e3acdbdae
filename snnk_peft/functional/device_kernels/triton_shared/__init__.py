"""Code shared by the kernels of all folders: `tiles` on the device, `launching` and `operating` on the host."""
