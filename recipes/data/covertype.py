"""CoverType: 581,012 plots of forest, 54 numbers about each, seven kinds of cover (Blackard 1998, UCI data set 31).

The official file has one row per plot, its class (1 to 7) last, and a split of its own: the first 11,340 rows to train
on, the next 3,780 to choose by (both have as many of every class), all others to test.
"""

from __future__ import annotations

from pathlib import Path

from data import TASKS
from data.base_columns import Columns, ColumnsTask, class_ids, find_file, read_numbers
from snnk_peft.errors import ConfigError

FILE = "covtype.data"
COLUMNS = 54
TRAIN, VALIDATION = 11_340, 3_780
CLASSES = ("spruce_fir", "lodgepole_pine", "ponderosa_pine", "willow", "aspen", "douglas_fir", "krummholz")


def read_covertype(folder: Path) -> dict[str, Columns]:
    """The three splits of the official file."""
    if (path := find_file(folder, FILE)) is None:
        raise ConfigError(f"{folder} has no {FILE} or {FILE}.gz; expected the official file")
    rows = read_numbers(path, COLUMNS + 1)
    labels = class_ids(path, rows[:, -1], {float(number + 1): number for number in range(len(CLASSES))})
    ends = [0, TRAIN, TRAIN + VALIDATION, len(rows)]
    return {
        split: Columns(rows[start:end, :-1], labels[start:end])
        for split, start, end in zip(COVERTYPE.splits, ends, ends[1:], strict=False)
    }


COVERTYPE = ColumnsTask(
    name="covertype",
    read=read_covertype,
    columns=COLUMNS,
    label_names=CLASSES,
    folder=f"{FILE} or {FILE}.gz",
    source="CoverType (Blackard 1998, UCI)",
    splits=("train", "validation", "test"),
)
TASKS.register(COVERTYPE.name, COVERTYPE)
