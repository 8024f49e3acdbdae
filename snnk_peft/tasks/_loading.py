"""Where a task's examples come from: official files in a folder, or the Hub; both end in the same columns.

Columns: `sentence1` (and `sentence2`): string; `label`: class id with names, or float32; `idx`: int32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._extras import require
from snnk_peft.tasks._tsv import TsvRows, read_tsv

if TYPE_CHECKING:
    import datasets

    from snnk_peft.tasks.base import TaskSpec


def load_folder(task: TaskSpec, data_dir: Path, splits: Sequence[str] | None) -> dict[str, datasets.Dataset]:
    """Read the official files; `splits` None takes train and every validation split that is there."""
    paths = _locate(task, data_dir, splits)
    rows: dict[str, TsvRows] = {}
    faults: list[str] = []
    for split, path in paths.items():
        try:
            rows[split] = read_tsv(path, task.tsv)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    from_dict = require("datasets").Dataset.from_dict
    features = _features(task)
    result = {}
    for split, content in rows.items():
        columns = dict(zip(task.text_columns, content.texts, strict=True))
        result[split] = from_dict({**columns, "label": content.labels, "idx": content.idx}, features=features)
    return result


def load_hub(task: TaskSpec, splits: Sequence[str] | None, cache_dir: str | Path | None) -> dict[str, datasets.Dataset]:
    """Fetch from the Hub (or its local cache) and rename columns; ConfigError when it cannot be reached."""
    hf = require("datasets")
    try:
        raw = hf.load_dataset(task.hub_path, task.hub_config, cache_dir=None if cache_dir is None else str(cache_dir))
    except (ConnectionError, hf.exceptions.DatasetNotFoundError) as error:
        raise ConfigError(
            f"task {task.name!r} could not be loaded from the Hub ({task.hub_path}, {task.hub_config}): {error}. To "
            f"work offline, give data.dir (data_dir=...): a folder that holds {task.folder}/"
            f"{{{','.join(name + '.tsv' for name in task.files)}}} in the official GLUE layout"
        ) from error
    return {split: _normalise(task, split, raw) for split in (task.splits if splits is None else splits)}


def _normalise(task: TaskSpec, split: str, raw: Mapping[str, datasets.Dataset]) -> datasets.Dataset:
    where = f"{task.hub_path} ({task.hub_config})"
    if split not in raw:
        raise ConfigError(f"{where} has no split {split!r}; found {', '.join(raw)}")
    dataset = raw[split]
    missing = [name for name in (*task.hub_columns, "label", "idx") if name not in dataset.column_names]
    if missing:
        raise ConfigError(
            f"{where}, split {split!r}: no column {', '.join(missing)}; found {', '.join(dataset.column_names)}"
        )
    names = getattr(dataset.features["label"], "names", None)
    if names is not None and tuple(names) != task.label_names:
        raise ConfigError(f"{where}, split {split!r}: labels are {names}; expected {task.label_names}")
    dataset = dataset.select_columns([*task.hub_columns, "label", "idx"])
    dataset = dataset.rename_columns(
        {old: new for old, new in zip(task.hub_columns, task.text_columns, strict=True) if old != new}
    )
    return dataset.cast(_features(task))


def _features(task: TaskSpec) -> datasets.Features:
    hf = require("datasets")
    label = hf.Value("float32") if task.label_names is None else hf.ClassLabel(names=list(task.label_names))
    texts = {name: hf.Value("string") for name in task.text_columns}
    return hf.Features({**texts, "label": label, "idx": hf.Value("int32")})


def _locate(task: TaskSpec, data_dir: Path, splits: Sequence[str] | None) -> dict[str, Path]:
    """File of each split; `data_dir` is the folder of all tasks or the task's own."""
    names = {split: f"{name}.tsv" for split, name in zip(task.splits, task.files, strict=True)}
    if not data_dir.is_dir():
        what = "is a file" if data_dir.exists() else "does not exist"
        raise ConfigError(f"data_dir {data_dir} {what}; expected a folder that holds {task.folder}/")
    folder = data_dir / task.folder
    if not folder.is_dir():
        folder = data_dir
        if not any((folder / name).is_file() for name in names.values()):
            raise ConfigError(
                f"task {task.name!r}: {data_dir} has neither a folder {task.folder}/ nor the files "
                f"{', '.join(names.values())}; found: {_contents(data_dir)}"
            )
    present = {split: folder / name for split, name in names.items() if (folder / name).is_file()}
    if splits is not None:
        missing = [names[split] for split in splits if split not in present]
    else:
        missing = [] if "train" in present else [names["train"]]
        if not any(split in present for split in task.validation_splits):
            missing.append(" or ".join(names[split] for split in task.validation_splits))
    if missing:
        raise ConfigError([f"{folder} has no {name}; found: {_contents(folder)}" for name in missing])
    return {split: present[split] for split in (splits if splits is not None else present)}


def _contents(folder: Path) -> str:
    names = sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())
    return (", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")) or "nothing"
