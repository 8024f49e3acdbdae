"""An adapter step in Triton: one launch forward, two backward.

`kernels.py` computes, `launches.py` accepts tensors, `step.py` has the gradients.
"""
