"""Data sets with their metrics, one file each, found by name through `TASKS`.

A task is plain data (`TaskSpec`): where columns and labels stand on the Hub and in the official files, which metrics
are computed and which of them selects a checkpoint. `TASKS["table"]` is for one's own data: its `with_settings` makes a
task of any table. Importing this package and reading the registry need nothing beyond numpy; `datasets`, `evaluate`,
scikit-learn and scipy (the `recipes` extra) are imported when data are loaded or a metric is computed. Tasks of long
token sequences (`SequenceTask`) bring their own tokens and stand in `LONG_RANGE_TASKS`.

Example:
    >>> from snnk_peft.tasks import TASKS
    >>> TASKS["mrpc"].label_names
    ('not_equivalent', 'equivalent')
    >>> TASKS["mnli"].validation_splits
    ('validation_matched', 'validation_mismatched')
"""

from typing import Any

from snnk_peft.registry import Registry
from snnk_peft.tasks._sequences import Sequences, SequenceTask
from snnk_peft.tasks._tsv import TsvLayout
from snnk_peft.tasks.base import TaskSpec

TASKS: Registry[Any] = Registry("task", __name__)  # TaskSpec; and Table, which makes a task of settings
LONG_RANGE_TASKS: Registry[SequenceTask] = Registry("long-range task", __name__)

__all__ = ["LONG_RANGE_TASKS", "TASKS", "SequenceTask", "Sequences", "TaskSpec", "TsvLayout"]
