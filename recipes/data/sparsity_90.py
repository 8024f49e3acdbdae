"""Sums over pairs of which 90 % are relevant (Learning the Transformer Kernel, appendix E.1); see `_sparse_sums.py`."""

from data import TASKS
from data._sparse_sums import sparse_sums

SPARSITY_90 = sparse_sums(90)
TASKS.register(SPARSITY_90.name, SPARSITY_90)
