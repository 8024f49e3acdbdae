"""Sums over pairs of which 10 % are relevant (Learning the Transformer Kernel, appendix E.1); see `_sparse_sums.py`."""

from data import TASKS
from data._sparse_sums import sparse_sums

SPARSITY_10 = sparse_sums(10)
TASKS.register(SPARSITY_10.name, SPARSITY_10)
