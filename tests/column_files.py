"""Small files in the official layouts of CoverType, HIGGS and HEPMASS."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

COLUMNS = {"covertype": 54, "higgs": 28, "hepmass": 28}


def write_columns(
    folder: Path, name: str, *, rows: int = 130, packed: bool = False
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write the files; split -> (values, class ids): CoverType split at 80 and 100, HIGGS before the last 30."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    values = rng.integers(-30, 30, (rows, COLUMNS[name])) / 10
    labels = (values[:, 0] + values[:, 1] > 0).astype(int)

    def write(file: str, part: slice, header: str = "") -> None:
        lines = []
        for row, label in zip(values[part], labels[part], strict=True):
            cells = [f"{value:.1f}" for value in row]
            lines.append(",".join([*cells, str(label + 1)] if name == "covertype" else [f"{label:.18e}", *cells]))
        text = header + "\n".join(lines) + "\n"
        if packed:
            (folder / f"{file}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / file).write_text(text)

    if name == "covertype":
        write("covtype.data", slice(None))
        parts = {"train": slice(0, 80), "validation": slice(80, 100), "test": slice(100, None)}
    elif name == "higgs":
        write("HIGGS.csv", slice(None))
        parts = {"train": slice(0, -30), "test": slice(-30, None)}
    else:
        parts = {"train": slice(0, 100), "test": slice(100, None)}
        header = "# label," + ",".join(f"f{index}" for index in range(27)) + ",mass\n"
        for split, part in parts.items():
            write(f"all_{split}.csv", part, header)
    return {split: (values[part], labels[part]) for split, part in parts.items()}
