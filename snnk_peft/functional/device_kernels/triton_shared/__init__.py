"""What the kernels of all folders share: `tiles` on the device, `launching` and `operating` on the host."""
