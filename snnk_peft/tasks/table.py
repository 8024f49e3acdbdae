"""Own data: a table of texts with labels as a task, its columns named by settings.

One row is one example: a text (or a pair) with a class or a number, or a list of words with a list of tags. What the
settings leave open is read from the training rows: the kind and the labels. Every faulty row is reported with its line.

Example:
    >>> import tempfile, pathlib
    >>> from snnk_peft.tasks import TASKS
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "reviews.csv"
    >>> _ = file.write_text("text,label\\ngood,pos\\nbad,neg\\nfine,pos\\npoor,neg\\n")
    >>> task = TASKS["table"].with_settings({"train_file": str(file)})
    >>> task.settings.kind, task.label_names
    ('classification', ('neg', 'pos'))
    >>> {split: len(rows) for split, rows in task.load().items()}
    {'train': 2, 'validation': 2}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks import TASKS
from snnk_peft.tasks._entities import entity_f1, is_iob
from snnk_peft.tasks._extras import require
from snnk_peft.tasks._row_task import RowTask
from snnk_peft.tasks._rows import Rows, read_split, read_table
from snnk_peft.tasks._scoring import to_numpy
from snnk_peft.tasks._tsv import empty_text, listed

if TYPE_CHECKING:
    import datasets

CLASSES, NUMBERS, TOKENS = "classification", "regression", "token_classification"
KINDS = (CLASSES, NUMBERS, TOKENS)
IGNORED = -100
"""The label of tokens that are not scored, as in torch's cross entropy."""
_MANY = 20  # whole numbers with more values than this are perhaps no classes


@dataclass(frozen=True)
class TableSettings:
    """Where the rows are and what their columns mean; the keys are those of the `data` section of recipes.

    Args:
        train_file: .csv, .tsv, .jsonl, .parquet, or a folder of `Dataset.save_to_disk`.
        eval_file: the same; None takes `eval_split` of the data set, or holds back a part of the training rows.
        dataset: instead of train_file: a folder of `DatasetDict.save_to_disk`, or a data set on the Hub.
        dataset_config: which configuration of it.
        train_split: which split of it is trained on.
        eval_split: which split of it is evaluated; `train_split` holds back a part of the training rows.
        text: column of the text, or of the list of words. In CSV and TSV files words stand between spaces.
        text_pair: column of the second text of a pair, or None.
        label: column of the class, the number, or the list of tags.
        kind: one of `KINDS`; None infers it from the training rows.
        labels: class names in the order of their ids; None takes those of the training rows, sorted.
        metric: selects the best checkpoint; None takes accuracy, pearson, or entity_f1 (macro_f1 if the tags are not
            IOB2).
        hold_out: share of the training rows that is held back where no evaluation rows are given, of every class alike.
        split_seed: decides which ones.
    """

    train_file: str | None = None
    eval_file: str | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    train_split: str = "train"
    eval_split: str = "validation"
    text: str = "text"
    text_pair: str | None = None
    label: str = "label"
    kind: str | None = None
    labels: Sequence[str | int] | None = None
    metric: str | None = None
    hold_out: float = 0.1
    split_seed: int = 0

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [self.text, *([] if self.text_pair is None else [self.text_pair]), self.label]

    @property
    def held_out(self) -> bool:
        """Whether the evaluation rows are a part of the training rows."""
        return self.eval_file is None and (self.dataset is None or self.eval_split == self.train_split)

    def faults(self) -> list[str]:
        """What contradicts itself."""
        found = []
        if self.train_file is not None and self.dataset is not None:
            found.append("train_file and dataset are both given; expected one of them")
        if len(set(self.columns)) < len(self.columns):
            found.append(f"text, text_pair and label are {', '.join(self.columns)}; expected different columns")
        if self.kind is not None and self.kind not in KINDS:
            found.append(f"kind: {did_you_mean('kind', self.kind, list(KINDS))}")
        if self.kind == TOKENS and self.text_pair is not None:
            found.append("text_pair is given, but token_classification reads one list of words; leave it out")
        if self.labels is not None and self.kind == NUMBERS:
            found.append("labels are given, but a regression has none; leave them out or set kind to classification")
        if self.labels is not None and (
            len(self.labels) < 2 or len({str(name) for name in self.labels}) < len(self.labels)
        ):
            found.append(f"labels are {list(self.labels)}; expected at least two names, each once")
        if not 0 < self.hold_out < 1:
            found.append(f"hold_out is {self.hold_out}; expected a share above 0 and below 1")
        return found


class Table:
    """The registry's member: it becomes a task when it is told which table."""

    name = "table"

    def check(self, settings: Mapping[str, Any]) -> list[str]:
        """The faults of the settings as far as they show without reading a row."""
        return _given(settings).faults()

    def load(self, *arguments: Any, **options: Any) -> NoReturn:
        """ConfigError: this is no task yet."""
        raise ConfigError(
            "task 'table' has no data before with_settings({'train_file': ...}); on the command line, use "
            "recipes/finetune.py with recipes/configs/table.yaml"
        )

    def with_settings(self, settings: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> TableTask:
        """The task of one table; what the settings leave open comes from the model, or from the training rows.

        Args:
            settings: fields of `TableSettings`, None for the default; other keys are passed over.
            model: config.json of a model that was trained on the table: its classes are the labels.

        Raises:
            ConfigError: contradictory settings, no readable training rows, or labels that are none.
        """
        known = _given(settings)
        if faults := known.faults():
            raise ConfigError(faults)
        notes: list[str] = []
        if model is not None:
            known = _of_model(known, model)
        if known.kind is None or (known.labels is None and known.kind != NUMBERS):
            if known.train_file is None and known.dataset is None:
                raise ConfigError(
                    "data.train_file is missing: a table (.csv, .tsv, .jsonl, .parquet), from which kind and labels "
                    "are inferred; or give data.dataset, or data.kind and data.labels"
                )
            known = _inferred(known, _read(known, "train", None), notes)
        if faults := known.faults():  # as completed
            raise ConfigError(faults)
        labels = None if known.labels is None else tuple(str(name) for name in known.labels)
        choices = _metrics(str(known.kind), labels)
        metric = known.metric
        if metric is None:
            metric = choices[-1] if known.kind == TOKENS else choices[0]
            notes.append(f"checkpoints are chosen by {metric} (data.metric; also {', '.join(choices)})")
        elif metric not in choices:
            raise ConfigError(f"metric: {did_you_mean(f'metric of a {known.kind}', metric, list(choices))}")
        if known.held_out:
            notes.append(
                f"no evaluation rows are given: {known.hold_out:.0%} of the training rows are held back, always the "
                "same ones (data.hold_out, data.split_seed)"
            )
        known = replace(known, labels=None if labels is None else list(labels), metric=metric)
        return TableTask(known, labels, tuple(choices), notes=tuple(notes))


@dataclass(frozen=True)
class TableTask(RowTask):
    """A table whose kind, labels and metric are known.

    Args:
        settings: complete.
        label_names: class names in the order of their ids; None for regression.
        metrics: what is computed. Classification: accuracy, macro_f1 (the mean of the F1 of every class),
            matthews_correlation and, of two classes, f1 (of the second). Regression: pearson, spearmanr.
            Tokens, over all words together: accuracy, macro_f1 and, if the tags are IOB2, entity_f1 (over entities:
            type, first and last word must agree).
        primary: None; `settings.metric` is the score.
        splits: train and validation.
        notes: what was inferred, in words.
    """

    settings: TableSettings
    label_names: tuple[str, ...] | None
    metrics: tuple[str, ...]
    primary: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("train", "validation")
    notes: tuple[str, ...] = ()
    name: str = Table.name

    @property
    def problem_type(self) -> str | None:
        """As in a transformers model config; None for tokens, where there is one kind of problem only."""
        return None if self.tokens else super().problem_type

    @property
    def tokens(self) -> bool:
        """Whether every word has a label."""
        return self.settings.kind == TOKENS

    @property
    def text_columns(self) -> tuple[str, ...]:
        """("words",), ("sentence1",) or ("sentence1", "sentence2")."""
        return ("words",) if self.tokens else ("sentence1", "sentence2")[: len(self.settings.columns) - 1]

    @property
    def hub_path(self) -> str | None:
        """The data set on the Hub, if the rows come from there."""
        dataset = self.settings.dataset
        return None if dataset is None or Path(dataset).exists() else dataset

    @property
    def title(self) -> str:
        """The data set on the Hub, or the name of the file without its folder."""
        return self.hub_path or Path(_train_source(self.settings)).name

    @property
    def source(self) -> str:
        """The table in words, for model cards."""
        known, train = self.settings, self.title
        if known.held_out:
            return f"the table {train}, of which {known.hold_out:.0%} are held back for evaluation"
        evaluated = Path(known.eval_file).name if known.eval_file is not None else f"its split {known.eval_split}"
        return f"the table {train}, evaluated on {evaluated}"

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """As `Scored.compute`; `score` is `settings.metric`.

        Args:
            predictions: as there; of tokens the logits (examples, length, num_labels).
            references: as there; of tokens the labels (examples, length), `IGNORED` where no word begins.
        """
        if not self.tokens:
            result = super().compute(predictions, references)
        else:
            logits, true = to_numpy(predictions), to_numpy(references).astype(int)
            if logits.shape != (*true.shape, self.num_labels) or true.ndim != 2:
                raise ConfigError(
                    f"predictions {logits.shape}, references {true.shape}; expected logits (examples, length, "
                    f"{self.num_labels}) and labels (examples, length)"
                )
            words = true != IGNORED
            flat = replace(self, metrics=tuple(name for name in self.metrics if name != "entity_f1"))
            result = super(TableTask, flat).compute(logits[words], true[words])
            if "entity_f1" in self.metrics:
                tags = np.asarray(self.label_names, dtype=object)
                mine, theirs = (
                    [list(tags[row[kept]]) for row, kept in zip(ids, words, strict=True)]
                    for ids in (logits.argmax(-1), np.where(words, true, 0))
                )
                result["entity_f1"] = entity_f1(mine, theirs)
        del result["score"]  # the mean of all
        return {**result, "score": result[str(self.settings.metric)]}

    def _read(
        self, data_dir: Path | None, splits: Sequence[str] | None, cache_dir: str | Path | None
    ) -> dict[str, datasets.Dataset]:
        if data_dir is not None:
            raise ConfigError(f"data.dir is {data_dir}, but a table is given as data.train_file and data.eval_file")
        wanted, held_out = list(splits or self.splits), self.settings.held_out
        found: dict[str, datasets.Dataset] = {}
        faults: list[str] = []
        for split in ["train"] if held_out else wanted:
            rows = _read(self.settings, split, None if cache_dir is None else str(cache_dir))
            try:
                found[split] = self._checked(rows)
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(faults)
        if held_out:
            found = self._divided(found["train"])
        return {split: found[split] for split in wanted}

    def _checked(self, rows: Rows) -> datasets.Dataset:
        """The rows as a data set of texts, label and idx; ConfigError with every faulty row."""
        hf = require("datasets")
        ids = {name: index for index, name in enumerate(self.label_names or ())}
        columns: dict[str, list[Any]] = {name: [] for name in (*self.text_columns, "label", "idx")}
        faults: list[tuple[int, str]] = []
        for at, number in enumerate(rows.numbers):
            cells = {name: values[at] for name, values in rows.columns.items()}
            try:
                example = (*self._example(rows, cells, ids), at)
            except ConfigError as error:
                faults += [(number, fault) for fault in error.faults]
                continue
            for column, value in zip(columns.values(), example, strict=True):
                column.append(value)
        if rows.faults or faults:
            raise ConfigError(rows.messages(faults))
        label: Any = hf.Value("float32") if self.label_names is None else hf.ClassLabel(names=list(self.label_names))
        text: Any = hf.Value("string")
        if self.tokens:
            label, text = hf.List(label), hf.List(text)
        features = {**dict.fromkeys(self.text_columns, text), "label": label, "idx": hf.Value("int32")}
        return hf.Dataset.from_dict(columns, features=hf.Features(features))

    def _example(self, rows: Rows, cells: Mapping[str, Any], ids: Mapping[str, int]) -> tuple[Any, ...]:
        """Texts (or words) and label of one row; ConfigError with everything that is wrong in it."""
        faults: list[str] = []

        def tried(read: Callable[..., Any], *given: Any) -> Any:
            try:
                return read(*given)
            except ConfigError as error:
                faults.extend(error.faults)

        *texts, label = self.settings.columns
        found = [tried(_words if self.tokens else _text, column, cells[column]) for column in texts]
        found.append(tried(self._label, rows, cells[label], ids))
        if self.tokens and not faults and len(found[0]) != len(found[1]):
            faults.append(f"{texts[0]} has {len(found[0])} words, {label} {len(found[1])} tags; expected as many")
        if faults:
            raise ConfigError(faults)
        return tuple(found)

    def _label(self, rows: Rows, value: Any, ids: Mapping[str, int]) -> Any:
        """Id, number or list of ids."""
        column = self.settings.label
        if self.label_names is None:
            return _number(column, value)
        return (
            [_id(column, tag, rows, ids) for tag in _tags(column, value)]
            if self.tokens
            else _id(column, value, rows, ids)
        )

    def _divided(self, rows: datasets.Dataset) -> dict[str, datasets.Dataset]:
        """Training rows and those that are held back: of every class its share, at least one of two or more."""
        count, share = len(rows), self.settings.hold_out
        single = self.label_names is not None and not self.tokens
        groups = np.asarray(rows["label"][:]) if single else np.zeros(count, int)
        rng = np.random.default_rng(self.settings.split_seed)
        held: list[int] = []
        for group in np.unique(groups):
            members = rng.permutation(np.flatnonzero(groups == group))
            size = min(max(1, round(share * len(members))), len(members) - 1)
            held += members[:size].tolist()
        if not held:
            raise ConfigError(
                f"{_train_source(self.settings)}: {count} rows, of which none can be held back (no class has two); "
                "give more rows, or data.eval_file"
            )
        kept = np.setdiff1d(np.arange(count), held)
        return {"train": rows.select(kept.tolist()), "validation": rows.select(sorted(held))}


def _given(settings: Mapping[str, Any]) -> TableSettings:
    names = {field.name for field in fields(TableSettings)}
    return TableSettings(**{key: value for key, value in settings.items() if key in names and value is not None})


def _train_source(known: TableSettings) -> str:
    return known.train_file or known.dataset or known.eval_file or ""


def _read(known: TableSettings, split: str, cache_dir: str | None) -> Rows:
    """The rows of "train" or "validation"."""
    file = known.train_file if split == "train" else known.eval_file
    if file is not None:
        return read_table(Path(file).expanduser(), known.columns)
    if known.dataset is None:
        raise ConfigError(
            f"no rows for {split}: data.{split.replace('validation', 'eval')}_file is missing; expected a table (.csv, "
            ".tsv, .jsonl, .parquet), or data.dataset"
        )
    name = known.train_split if split == "train" else known.eval_split
    return read_split(known.dataset, known.dataset_config, name, known.columns, cache_dir)


def _of_model(known: TableSettings, model: Mapping[str, Any]) -> TableSettings:
    """Kind and labels, where they are not given, from a model's config."""
    if any("ForTokenClassification" in name for name in model.get("architectures") or ()):
        kind = TOKENS
    else:
        kind = NUMBERS if model.get("problem_type") == NUMBERS else CLASSES
    names = model.get("id2label") or {}
    labels = [names[key] for key in sorted(names, key=int)] if kind != NUMBERS and len(names) > 1 else None
    return replace(known, kind=known.kind or kind, labels=known.labels or labels)


def _inferred(known: TableSettings, rows: Rows, notes: list[str]) -> TableSettings:
    """The settings with kind and labels; `notes` says what was found."""
    column = f"column {known.label!r} of {rows.source}"
    values = rows.columns[known.label]
    kind = known.kind
    if kind is None:
        kind, why = _kind(known, rows)
        notes.append(f"kind is {kind}, because {why} (data.kind)")
    if kind == NUMBERS or known.labels is not None:
        return replace(known, kind=kind)
    if (names := rows.class_names.get(known.label)) is None:
        cells = [tag for value in values for tag in _or_empty(_tags, known.label, value)] if kind == TOKENS else values
        found = {name for cell in cells for name in _or_empty(lambda *given: [_class_name(*given)], known.label, cell)}
        whole = all(_is_whole(name) for name in found)
        names = sorted(found, key=lambda name: (int(name), name) if whole else (0, name))
        if len(names) < 2:
            raise ConfigError(
                [*rows.messages([]), f"{column} holds {listed(names) or 'no label'}; expected at least two"]
            )
        if kind == CLASSES and whole and len(names) > _MANY:
            notes.append(
                f"{column} holds {len(names)} different whole numbers: if they are amounts, set data.kind=regression"
            )
    notes.append(f"{len(names)} labels from {column}: {listed(names)} (data.labels)")
    return replace(known, kind=kind, labels=names)


def _kind(known: TableSettings, rows: Rows) -> tuple[str, str]:
    """The kind that the values speak for, and why."""
    texts, values = rows.columns[known.text], [value for value in rows.columns[known.label] if not _missing(value)]
    if any(isinstance(value, (list, tuple)) for value in [*texts, *values]):
        return TOKENS, f"{known.text} and {known.label} hold lists"
    if known.label not in rows.class_names and known.labels is None:
        numbers = [value if rows.typed else _or_number(value) for value in values]
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in numbers) and any(
            isinstance(value, float) for value in numbers
        ):
            return NUMBERS, f"{known.label} holds numbers with decimals"
    return CLASSES, f"{known.label} holds " + ("whole numbers" if all(map(_is_whole, values)) else "names")


def _metrics(kind: str, labels: Sequence[str] | None) -> list[str]:
    """What is computed; the default of tokens is the last, otherwise the first."""
    if kind == NUMBERS or labels is None:
        return ["pearson", "spearmanr"]
    if kind == TOKENS:
        return ["accuracy", "macro_f1", *(["entity_f1"] if is_iob(labels) else [])]
    return ["accuracy", "macro_f1", "matthews_correlation", *(["f1"] if len(labels) == 2 else [])]


# --- one cell ---------------------------------------------------------------------------------------------------------


def _missing(value: Any) -> bool:
    return (
        value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, float) and value != value)
    )


def _text(column: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{column} is {_shown(value)}; expected a text")
    if fault := empty_text(column, value or ""):
        raise ConfigError(fault)
    return str(value)


def _words(column: str, value: Any) -> list[str]:
    words = value.split() if isinstance(value, str) else value
    if words is not None and not isinstance(words, (list, tuple)):
        raise ConfigError(f"{column} is {_shown(value)}; expected a list of words")
    if not words:
        raise ConfigError(f"{column} is empty; expected a list of words")
    faults = []
    for at, word in enumerate(words, start=1):
        try:
            _text(f"word {at} of {column}", word)
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return list(words)


def _tags(column: str, value: Any) -> list[Any]:
    if _missing(value):
        raise ConfigError(f"{column} is missing; expected a list of tags")
    tags = value.split() if isinstance(value, str) else value
    if not isinstance(tags, (list, tuple)):
        raise ConfigError(f"{column} is {_shown(value)}; expected a list of tags")
    return list(tags)


def _class_name(column: str, value: Any) -> str:
    if _missing(value):
        raise ConfigError(f"{column} is missing; expected a label")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (str, int, float)):
        raise ConfigError(f"{column} is {_shown(value)}; expected one label")
    return str(value).strip()


def _id(column: str, value: Any, rows: Rows, ids: Mapping[str, int]) -> int:
    names = rows.class_names.get(column)
    if names is not None and isinstance(value, int):  # the Hub's -1 says that the label is kept secret
        value = names[value] if 0 <= value < len(names) else None
    name = _class_name(column, value)
    if name not in ids:
        raise ConfigError(f"{column} is {name!r}, which is not among the labels of training: {listed(ids)}")
    return ids[name]


def _number(column: str, value: Any) -> float:
    if _missing(value):
        raise ConfigError(f"{column} is missing; expected a number")
    number = _or_number(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ConfigError(f"{column} is {_shown(value)}; expected a number")
    return float(number)


def _or_number(value: Any) -> Any:
    """The number that a text is; what is none stays as it is."""
    if not isinstance(value, str):
        return value
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            continue
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(_or_number(value), int) and not isinstance(value, bool)


def _or_empty(read: Callable[[str, Any], list[Any]], column: str, value: Any) -> list[Any]:
    """What `read` returns; nothing for a faulty cell, which is reported when the rows are loaded."""
    try:
        return read(column, value)
    except ConfigError:
        return []


def _shown(value: Any) -> str:
    text = repr(value)
    return (text if len(text) <= 40 else f"{text[:40]}...") + f" ({type(value).__name__})"


TASKS.register(Table.name, Table())
