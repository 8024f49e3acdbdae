"""Tests of Triton kernels import Triton; where it is not installed, test_triton.py says so for all of them."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["test_triton_*.py"]
