"""Three data sets of numeric columns, in the official files of the UCI repository.

CoverType (no. 31, Blackard 1998): 581,012 plots of forest, 54 numbers each, seven kinds of cover. covtype.data
has the class (1 to 7) last, and a split of its own: the first 11,340 rows for training, the next 3,780 for
validation (both class-balanced), all others for testing.

HEPMASS (no. 347, Baldi et al. 2016): 10.5 million simulated collisions, 28 numbers each, with a new particle or not.
all_train.csv and all_test.csv have a header and the class first; the last number is the mass searched for.

HIGGS (no. 280, Baldi et al. 2014): 11 million simulated collisions, 28 numbers each, with a Higgs boson or not.
HIGGS.csv has the class first, and its last 500,000 rows are the test set. Two files HIGGS_train*.csv and
HIGGS_test*.csv with parts of it can take its place.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data import TASKS
from data.base_columns import Columns, ColumnsTask, class_ids, find_file, read_numbers
from snnk_peft.errors import ConfigError

COVER = ("spruce_fir", "lodgepole_pine", "ponderosa_pine", "willow", "aspen", "douglas_fir", "krummholz")
COVER_NUMBERS, COVER_ENDS = 54, (11_340, 15_120)  # numbers per row, and ends of the training and validation rows
COLLISION = ("background", "signal")
COLLISION_NUMBERS = 28
HIGGS_TEST = 500_000


def read_covertype(folder: Path) -> dict[str, Columns]:
    """Read the three splits of the official file."""
    if (path := find_file(folder, "covtype.data")) is None:
        raise ConfigError(f"{folder} has no covtype.data or covtype.data.gz; expected the official file")
    rows = read_numbers(path, COVER_NUMBERS + 1)
    labels = class_ids(path, rows[:, -1], {float(number + 1): number for number in range(len(COVER))})
    parts = zip(*(np.split(values, COVER_ENDS) for values in (rows[:, :-1], labels)), strict=True)
    return {split: Columns(*part) for split, part in zip(("train", "validation", "test"), parts, strict=True)}


def _collisions(path: Path, rows: np.ndarray) -> Columns:
    return Columns(rows[:, 1:], class_ids(path, rows[:, 0], {0.0: 0, 1.0: 1}))


def read_hepmass(folder: Path) -> dict[str, Columns]:
    """Read both splits."""
    paths = {split: find_file(folder, f"all_{split}.csv") for split in ("train", "test")}
    if faults := [f"{folder} has no all_{split}.csv(.gz)" for split, path in paths.items() if path is None]:
        raise ConfigError(faults)
    return {
        split: _collisions(path, read_numbers(path, COLLISION_NUMBERS + 1, header=True))
        for split, path in paths.items()
        if path is not None
    }


def read_higgs(folder: Path) -> dict[str, Columns]:
    """Read both splits."""
    if (path := find_file(folder, "HIGGS.csv")) is not None:
        rows = read_numbers(path, COLLISION_NUMBERS + 1)
        if len(rows) <= HIGGS_TEST:
            raise ConfigError(
                f"{path} has {len(rows):,} rows; expected more than {HIGGS_TEST:,}, the size of the test split"
            )
        return {"train": _collisions(path, rows[:-HIGGS_TEST]), "test": _collisions(path, rows[-HIGGS_TEST:])}
    found, faults = {}, []
    for split in ("train", "test"):
        paths = sorted(path for end in ("csv", "csv.gz") for path in folder.glob(f"HIGGS_{split}*.{end}"))
        if len(paths) != 1:
            faults.append(f"{folder} has {len(paths)} files HIGGS_{split}*.csv(.gz); expected one, or HIGGS.csv")
            continue
        found[split] = _collisions(paths[0], read_numbers(paths[0], COLLISION_NUMBERS + 1))
    if faults:
        raise ConfigError(faults)
    return found


for _task in (
    ColumnsTask(
        name="covertype",
        read=read_covertype,
        columns=COVER_NUMBERS,
        label_names=COVER,
        folder="covtype.data or covtype.data.gz",
        source="CoverType (Blackard 1998, UCI)",
        splits=("train", "validation", "test"),
    ),
    ColumnsTask(
        name="hepmass",
        read=read_hepmass,
        columns=COLLISION_NUMBERS,
        label_names=COLLISION,
        folder="all_train.csv and all_test.csv (or .csv.gz)",
        source="HEPMASS (Baldi et al. 2016, UCI)",
    ),
    ColumnsTask(
        name="higgs",
        read=read_higgs,
        columns=COLLISION_NUMBERS,
        label_names=COLLISION,
        folder="HIGGS.csv, or HIGGS_train*.csv and HIGGS_test*.csv (or .csv.gz)",
        source="HIGGS (Baldi, Sadowski and Whiteson 2014, UCI)",
    ),
):
    TASKS.register(_task.name, _task)
