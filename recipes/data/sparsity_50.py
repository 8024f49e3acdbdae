"""Sums over pairs of which 50 % are relevant (Learning the Transformer Kernel, appendix E.1); see `_sparse_sums.py`."""

from data import TASKS
from data._sparse_sums import sparse_sums

SPARSITY_50 = sparse_sums(50)
TASKS.register(SPARSITY_50.name, SPARSITY_50)
