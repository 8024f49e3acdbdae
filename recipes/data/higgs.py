"""HIGGS: 11 million simulated collisions, 28 numbers about each, of a Higgs boson or not (Baldi et al. 2014, UCI 280).

The official file HIGGS.csv has the class first, and its last 500,000 rows are the test set. Where only a part of it is
at hand, two files HIGGS_train*.csv and HIGGS_test*.csv take its place.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data import TASKS
from data.base_columns import Columns, ColumnsTask, class_ids, find_file, read_numbers
from snnk_peft.errors import ConfigError

FILE = "HIGGS.csv"
COLUMNS = 28
TEST = 500_000
_WORDS = f"{FILE}, or HIGGS_train*.csv and HIGGS_test*.csv (or .csv.gz)"


def _columns(path: Path, rows: np.ndarray) -> Columns:
    return Columns(rows[:, 1:], class_ids(path, rows[:, 0], {0.0: 0, 1.0: 1}))


def read_higgs(folder: Path) -> dict[str, Columns]:
    """Both splits."""
    if (path := find_file(folder, FILE)) is not None:
        rows = read_numbers(path, COLUMNS + 1)
        if len(rows) <= TEST:
            raise ConfigError(f"{path} has {len(rows):,} rows; expected more than {TEST:,}, the last of which test")
        return {"train": _columns(path, rows[:-TEST]), "test": _columns(path, rows[-TEST:])}
    found, faults = {}, []
    for split in HIGGS.splits:
        paths = sorted(path for end in ("csv", "csv.gz") for path in folder.glob(f"HIGGS_{split}*.{end}"))
        if len(paths) != 1:
            faults.append(f"{folder} has {len(paths)} files HIGGS_{split}*.csv(.gz); expected one, or {FILE}")
            continue
        found[split] = _columns(paths[0], read_numbers(paths[0], COLUMNS + 1))
    if faults:
        raise ConfigError(faults)
    return found


HIGGS = ColumnsTask(
    name="higgs",
    read=read_higgs,
    columns=COLUMNS,
    label_names=("background", "signal"),
    folder=_WORDS,
    source="HIGGS (Baldi, Sadowski and Whiteson 2014, UCI)",
)
TASKS.register(HIGGS.name, HIGGS)
