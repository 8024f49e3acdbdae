"""Where the files of a study's tasks are."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from papers.lib import short_listops
from snnk_peft.tasks._image_folders import SUFFIXES


def data_settings(task: str, wanted: str | list[str] | None, data: Path | None, out: Path) -> list[str] | None:
    """The settings that name the files of a task; None, and a note, if they are wanted and absent.

    Args:
        task: its name.
        wanted: see `Task.data`.
        data: folder of the data folders, or None.
        out: folder of all runs, in which files are written that none has.
    """
    if wanted is None:
        return []
    if wanted == "listops_files":
        return [short_listops.written(out)]
    if isinstance(wanted, list):
        return photograph(task, wanted, data)
    if data is None or not (data / wanted).is_dir():
        print(f"note: {task} is left out: --data has no folder {wanted}", flush=True)
        return None
    return [f"data.dir={data / wanted}"]


def photograph(task: str, folders: Sequence[str], data: Path | None) -> list[str] | None:
    """The first image by path of the first folder that has one; None if there is none."""
    for folder in [] if data is None else [data / name for name in folders]:
        for place, below, names in os.walk(folder):  # which ends at the first one: ImageNet has a million
            below.sort()
            for name in sorted(names):
                if name.lower().rpartition(".")[2] in SUFFIXES:
                    return [f"data.file={json.dumps(str(Path(place, name)))}"]  # quoted: a setting is YAML
    print(f"note: {task} is left out: --data has no picture in {' or '.join(folders)}", flush=True)
    return None
