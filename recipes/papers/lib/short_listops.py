"""Short whole expressions of ListOps, for sweeps whose runs take a minute: written once beside the runs."""

from __future__ import annotations

from pathlib import Path

from data.listops import write_listops
from lib.files import write_folder

BOUNDS = {"min_length": 50, "max_length": 250}  # tokens of an expression


def written(out: Path) -> str:
    """The setting data.dir of their folder below `out`, which is made if absent, with the same expressions always."""
    folder = out / "listops_files"
    if not folder.is_dir():
        low, high = BOUNDS.values()
        print(f"writing expressions of {low} to {high} tokens to {folder}", flush=True)
        out.mkdir(parents=True, exist_ok=True)
        write_folder(folder, lambda place: write_listops(place, **BOUNDS))
    return f"data.dir={folder}"
