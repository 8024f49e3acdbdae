"""Data sets of the papers and benchmarks, one file each or per family; `TASKS` adds them to the package's.

A `TaskSpec` describes a data set of texts with official files as plain data. Other kinds of examples are long
sequences of tokens (`SequenceTask`) and rows of numbers (`ColumnsTask`).

Example:
    >>> from data import TASKS
    >>> TASKS["mrpc"].label_names
    ('not_equivalent', 'equivalent')
    >>> TASKS["mnli"].validation_splits
    ('validation_matched', 'validation_mismatched')
"""

from importlib import import_module
from pkgutil import iter_modules

from data._tsv import TsvLayout
from data.base_columns import Columns, ColumnsTask
from data.base_sequence import Sequences, SequenceTask
from data.base_spec import TaskSpec
from snnk_peft.tasks import TASKS

__all__ = ["TASKS", "Columns", "ColumnsTask", "SequenceTask", "Sequences", "TaskSpec", "TsvLayout"]

for _module in iter_modules(__path__):
    if not _module.name.startswith(("_", "base")):
        import_module(f"{__name__}.{_module.name}")  # each registers its tasks
