"""`TaskSpec`: a data set of texts with official files, described as plain data.

It names columns and labels of both sources (the Hub's copy and the official files) and maps them to the same columns:
`sentence1`, for pairs also `sentence2`, then `label` and `idx`. Label ids are the Hub's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data._tsv import TsvLayout, TsvRows, read_tsv
from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks import TextTask
from snnk_peft.tasks._files import listed, require
from snnk_peft.tasks.base import Request
from snnk_peft.tasks.metrics import METRICS

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class TaskSpec(TextTask):
    """A data set with its labels and metrics.

    Args:
        name: registry key, and the configuration name on the Hub.
        folder: name of the folder of official files, e.g. "CoLA".
        tsv: layout of the official files.
        hub_columns: the one or two text columns on the Hub, in the order sentence1, sentence2.
        label_names: class names in the order of the Hub's integer ids; None for regression.
        metrics: keys of `snnk_peft.tasks.metrics.METRICS` that are reported.
        primary: metrics whose mean is the `score` that selects the best checkpoint; None for all `metrics`.
        splits: names of the splits with public labels; "train" first, the others are validation splits.
        files: official file of each split, without `.tsv`.
        hub_path: data set on the Hub, or None if it is not there.

    Raises:
        ConfigError: fields contradict each other; lists all faults at once.
    """

    name: str
    folder: str
    tsv: TsvLayout
    hub_columns: tuple[str, ...]
    label_names: tuple[str, ...] | None
    metrics: tuple[str, ...]
    primary: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("train", "validation")
    files: tuple[str, ...] = ("train", "dev")
    hub_path: str | None = "nyu-mll/glue"

    def __post_init__(self) -> None:
        faults = [did_you_mean("metric", name, sorted(METRICS)) for name in self.metrics if name not in METRICS]
        if not self.metrics:
            faults.append(f"metrics is empty; expected one or more of {', '.join(METRICS)}")
        if self.primary is not None and (not self.primary or not set(self.primary) <= set(self.metrics)):
            faults.append(f"primary is {self.primary}; expected one or more of metrics {self.metrics}, or None for all")
        if len(self.splits) != len(self.files) or len(self.splits) < 2 or self.splits[0] != "train":
            faults.append(f"splits {self.splits}, files {self.files}: expected a file per split, train first")
        if len(self.hub_columns) != len(self.tsv.text) or len(self.hub_columns) not in (1, 2):
            faults.append(f"hub_columns {self.hub_columns}, tsv.text {self.tsv.text}: expected one or two text columns")
        if len(self.label_names or ()) != len(self.tsv.labels or ()):
            faults.append(f"label_names {self.label_names}, tsv.labels {self.tsv.labels}: expected one cell per class")
        if faults:
            raise ConfigError([f"task {self.name!r}: {fault}" for fault in faults])

    @property
    def hub_config(self) -> str:
        """The configuration name on the Hub."""
        return self.name

    @property
    def source(self) -> str:
        """Description of the data set, for model cards."""
        return f"{self.folder} ({self.hub_path}, {self.hub_config})"

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The text columns: ("sentence1",) or ("sentence1", "sentence2")."""
        return ("sentence1", "sentence2")[: len(self.hub_columns)]

    def _read(self, request: Request) -> datasets.DatasetDict:
        found = self._fetched(request) if request.path is None else self._of_files(request.path, request.splits)
        return require("datasets").DatasetDict(found)

    def _of_files(self, path: Path, splits: Sequence[str] | None) -> dict[str, datasets.Dataset]:
        """Read the official files; with `splits` None, train and every validation split present."""
        rows: dict[str, TsvRows] = {}
        faults: list[str] = []
        for split, file in _locate(self, path, splits).items():
            try:
                rows[split] = read_tsv(file, self.tsv)
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(faults)
        return {split: self._dataset(found.texts, found.labels, found.idx) for split, found in rows.items()}

    def _fetched(self, request: Request) -> dict[str, datasets.Dataset]:
        """Fetch from the Hub (or its local cache) and rename columns; overridden by tasks that generate their rows."""
        hf = require("datasets")
        try:
            raw = hf.load_dataset(self.hub_path, self.hub_config, cache_dir=request.cache_dir)
        except (ConnectionError, hf.exceptions.DatasetNotFoundError) as error:
            raise ConfigError(
                f"task {self.name!r} could not be loaded from the Hub ({self.hub_path}, {self.hub_config}): {error}. "
                f"To work offline, give data.dir (data_dir=...): a folder that holds {self.folder}/"
                f"{{{','.join(name + '.tsv' for name in self.files)}}} in the official GLUE layout"
            ) from error
        return {split: self._normalised(split, raw) for split in request.splits or self.splits}

    def _made(self, request: Request, *examples: Iterable[tuple[str, int]]) -> dict[str, datasets.Dataset]:
        """Build splits from (sentence, label id) of each of `self.splits`, in their order."""
        columns = {split: tuple(zip(*part, strict=True)) for split, part in zip(self.splits, examples, strict=True)}
        wanted = request.splits or self.splits
        return {
            split: self._dataset([texts], labels, range(len(texts)))
            for split, (texts, labels) in columns.items()
            if split in wanted
        }

    def _normalised(self, split: str, raw: Mapping[str, datasets.Dataset]) -> datasets.Dataset:
        where = f"{self.hub_path} ({self.hub_config})"
        if split not in raw:
            raise ConfigError(f"{where} has no split {split!r}; found {', '.join(raw)}")
        dataset = raw[split]
        missing = [name for name in (*self.hub_columns, "label", "idx") if name not in dataset.column_names]
        if missing:
            raise ConfigError(
                f"{where}, split {split!r}: no column {', '.join(missing)}; found {', '.join(dataset.column_names)}"
            )
        names = getattr(dataset.features["label"], "names", None)
        if names is not None and tuple(names) != self.label_names:
            raise ConfigError(f"{where}, split {split!r}: labels are {names}; expected {self.label_names}")
        dataset = dataset.select_columns([*self.hub_columns, "label", "idx"])
        dataset = dataset.rename_columns(
            {old: new for old, new in zip(self.hub_columns, self.text_columns, strict=True) if old != new}
        )
        return dataset.cast(self._features())


def _locate(task: TaskSpec, data_dir: Path, splits: Sequence[str] | None) -> dict[str, Path]:
    """Return the file of each split; `data_dir` is the folder of all tasks or the task's own."""
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
    return listed(sorted(path.name + ("/" if path.is_dir() else "") for path in folder.iterdir())) or "nothing"
