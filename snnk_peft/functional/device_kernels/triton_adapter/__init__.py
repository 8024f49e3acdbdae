"""An adapter's step in Triton: one launch forward, two backward.

`kernels.py` computes, `launches.py` takes tensors, `step.py` has the gradients.
"""
