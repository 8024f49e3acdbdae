"""Data sets with their metrics, one file each, found by name through `TASKS`.

A task (`Task`) has labels, metrics and one `load`; its class says what an example is: a text (`TextTask`; `TaskSpec`
describes a data set as plain data, `TASKS["table"].with_settings` makes a task of any table), a picture (`ImageTask`),
a long sequence of tokens (`SequenceTask`) or a row of numbers (`ColumnsTask`). Importing this package and reading the
registry need nothing beyond numpy; `datasets`, `evaluate`, Pillow, scikit-learn and scipy (the `recipes` extra) are
imported when data are loaded or a metric is computed.

Example:
    >>> from snnk_peft.tasks import TASKS
    >>> TASKS["mrpc"].label_names
    ('not_equivalent', 'equivalent')
    >>> TASKS["mnli"].validation_splits
    ('validation_matched', 'validation_mismatched')
"""

from snnk_peft.registry import Registry
from snnk_peft.tasks._tsv import TsvLayout
from snnk_peft.tasks.base import Split, Task
from snnk_peft.tasks.base_columns import Columns, ColumnsTask
from snnk_peft.tasks.base_image import HubSource, Images, ImageTask
from snnk_peft.tasks.base_sequence import Sequences, SequenceTask
from snnk_peft.tasks.base_text import TaskSpec, TextTask

TASKS: Registry[Task] = Registry("task", __name__)

__all__ = [
    "TASKS",
    "Columns",
    "ColumnsTask",
    "HubSource",
    "ImageTask",
    "Images",
    "SequenceTask",
    "Sequences",
    "Split",
    "Task",
    "TaskSpec",
    "TextTask",
    "TsvLayout",
]
