"""HEPMASS: 10.5 million simulated collisions, 28 numbers each, of a new particle or not (Baldi et al. 2016, UCI 347).

The official files all_train.csv and all_test.csv have a header and the class first; the last of the 28 numbers is the
mass of the particle that is looked for.
"""

from __future__ import annotations

from pathlib import Path

from data import TASKS
from data.base_columns import Columns, ColumnsTask, class_ids, find_file, read_numbers
from snnk_peft.errors import ConfigError

COLUMNS = 28


def read_hepmass(folder: Path) -> dict[str, Columns]:
    """Both splits."""
    paths = {split: find_file(folder, f"all_{split}.csv") for split in HEPMASS.splits}
    if faults := [f"{folder} has no all_{split}.csv(.gz)" for split, path in paths.items() if path is None]:
        raise ConfigError(faults)
    found = {}
    for split, path in paths.items():
        assert path is not None
        rows = read_numbers(path, COLUMNS + 1, header=True)
        found[split] = Columns(rows[:, 1:], class_ids(path, rows[:, 0], {0.0: 0, 1.0: 1}))
    return found


HEPMASS = ColumnsTask(
    name="hepmass",
    read=read_hepmass,
    columns=COLUMNS,
    label_names=("background", "signal"),
    folder="all_train.csv and all_test.csv (or .csv.gz)",
    source="HEPMASS (Baldi et al. 2016, UCI)",
)
TASKS.register(HEPMASS.name, HEPMASS)
