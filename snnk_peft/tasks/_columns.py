"""The columns of a table: their settings, inference of kind and labels, and the examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks import _cells as cell
from snnk_peft.tasks._files import listed
from snnk_peft.tasks._rows import Rows, read_split, read_table
from snnk_peft.tasks.metrics import is_iob

CLASSES, NUMBERS, TOKENS = "classification", "regression", "token_classification"
LABELS = "multi_label_classification"
KINDS = (CLASSES, NUMBERS, TOKENS, LABELS)
_NOTHING = {"NA", "N/A", "NaN", "nan", "null", "NULL", "None", "<NA>", "#N/A"}
_MANY = 20  # integers with more distinct values than this may not be classes


@dataclass(frozen=True)
class TableSettings:
    """Location of the rows and meaning of their columns; the keys are those of the `data` section of recipes.

    Args:
        train_file: .csv, .tsv, .jsonl, .parquet, or a folder of `Dataset.save_to_disk`.
        eval_file: the same; None uses `eval_split` of the data set, or holds out part of the training rows.
        dataset: instead of train_file: a folder of `DatasetDict.save_to_disk`, or a data set on the Hub.
        dataset_config: configuration of the data set.
        train_split: split to train on.
        eval_split: split to evaluate on; `train_split` holds out part of the training rows.
        text: column of the text, or of the list of words. In CSV and TSV files, words are separated by spaces.
        text_pair: column of the second text of a pair, or None.
        label: column of the class, the number, the list of tags, or the list of any number of labels (separated by
            commas in CSV and TSV files).
        kind: one of `KINDS`; None infers it from the training rows.
        labels: class names in the order of their ids; None uses those of the training rows, sorted.
        metric: selects the best checkpoint; None uses accuracy, pearson, micro_f1 for multiple labels, or entity_f1 for
            tags (macro_f1 if they are not IOB2).
        hold_out: share of the training rows, stratified by class, to hold out if no evaluation rows are given.
        split_seed: seed of that split.
        max_unreadable: maximum number of faulty rows per file to skip with a warning; more are an error.
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
    max_unreadable: int = 0

    @property
    def columns(self) -> list[str]:
        return [self.text, *([] if self.text_pair is None else [self.text_pair]), self.label]

    @property
    def held_out(self) -> bool:
        """Return True if the evaluation rows are split off the training rows."""
        return self.eval_file is None and (self.dataset is None or self.eval_split == self.train_split)

    def faults(self) -> list[str]:
        faults = []
        if self.train_file is not None and self.dataset is not None:
            faults.append("train_file and dataset are both given; expected one of them")
        if len(set(self.columns)) < len(self.columns):
            faults.append(f"text, text_pair and label are {', '.join(self.columns)}; expected different columns")
        if self.kind is not None and self.kind not in KINDS:
            faults.append(f"kind: {did_you_mean('kind', self.kind, list(KINDS))}")
        if self.kind == TOKENS and self.text_pair is not None:
            faults.append("text_pair is given, but token_classification reads one list of words; leave it out")
        if self.labels is not None and self.kind == NUMBERS:
            faults.append("labels are given, but a regression has none; leave them out or set kind to classification")
        if self.labels is not None and (
            len(self.labels) < 2 or len({str(name) for name in self.labels}) < len(self.labels)
        ):
            faults.append(f"labels are {list(self.labels)}; expected at least two names, each once")
        if not 0 < self.hold_out < 1:
            faults.append(f"hold_out is {self.hold_out}; expected a share above 0 and below 1")
        return faults

    @classmethod
    def among(cls, settings: Mapping[str, Any]) -> TableSettings:
        """Build from the `settings` that are fields, None for the default; ignore other keys."""
        names = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in settings.items() if key in names and value is not None})

    @property
    def train_source(self) -> str:
        """The file or data set of the training rows, for messages."""
        return self.train_file or self.dataset or self.eval_file or ""

    def read(self, split: str, cache_dir: str | None = None) -> Rows:
        """Read the rows of "train" or "validation".

        Raises:
            ConfigError: no source is given; or see `read_table` and `read_split`.
        """
        file = self.train_file if split == "train" else self.eval_file
        if file is not None:
            return read_table(Path(file).expanduser(), self.columns)
        if self.dataset is None:
            raise ConfigError(
                f"no rows for {split}: data.{split.replace('validation', 'eval')}_file is missing; expected a table "
                "(.csv, .tsv, .jsonl, .parquet), or data.dataset"
            )
        name = self.train_split if split == "train" else self.eval_split
        return read_split(self.dataset, self.dataset_config, name, self.columns, cache_dir)


def unnamed(count: int) -> list[str]:
    """Return transformers' names for unnamed classes."""
    return [f"LABEL_{index}" for index in range(count)]


def of_model(known: TableSettings, model: Mapping[str, Any]) -> TableSettings:
    """Fill in missing kind and labels from a model's config."""
    if any("ForTokenClassification" in name for name in model.get("architectures") or ()):
        kind = TOKENS
    else:
        kind = model["problem_type"] if model.get("problem_type") in (NUMBERS, LABELS) else CLASSES
    # transformers omits the classes from config.json only if there are two unnamed ones.
    names = model.get("id2label") or dict(enumerate(unnamed(2)))
    labels = [names[key] for key in sorted(names, key=int)] if kind != NUMBERS and len(names) > 1 else None
    return replace(known, kind=known.kind or kind, labels=known.labels or labels)


def completed(known: TableSettings, rows: Rows, notes: list[str]) -> TableSettings:
    """Fill in missing kind and labels from the rows, appending to `notes` what was inferred."""
    column = f"column {known.label!r} of {rows.source}"
    values = rows.columns[known.label]
    kind = known.kind
    if kind is None:
        kind, why = _kind(known, rows)
        notes.append(f"kind is {kind}, because {why} (data.kind)")
    if kind == NUMBERS or known.labels is not None:
        return replace(known, kind=kind)
    if (names := rows.class_names.get(known.label)) is None:
        seen = {name for value in values for name in _names(known.label, value, str(kind))}
        whole = all(cell.is_whole(name) for name in seen)
        if whole:
            seen = {cell.whole_name(name) for name in seen}
        names = sorted(seen, key=lambda name: (int(name), name) if whole else (0, name))
        if (
            kind == CLASSES
            and any(map(cell.has_decimal_comma, names))
            and all(cell.has_decimal_comma(name) or cell.is_whole(name) for name in names)
        ):
            raise ConfigError(
                f"{column} holds numbers with a decimal comma, such as "
                f"{next(filter(cell.has_decimal_comma, names))!r}; expected a point: "
                "pandas.read_csv(path, decimal=',').to_csv(path, index=False). If they are names of "
                "classes, give data.labels"
            )
        if nothing := sorted(set(names) & _NOTHING):
            if all(name in _NOTHING or isinstance(cell.or_number(name), int | float) for name in names):
                wrong = [
                    (line, f"{known.label} is {value!r} among numbers; leave the row out, or give data.labels")
                    for line, value in zip(rows.numbers, values, strict=True)
                    if isinstance(value, str) and value.strip() in _NOTHING
                ]
                raise ConfigError(rows.messages(wrong))
            notes.append(f"{column}: {listed(nothing)} is taken as a name; leave these rows out, if they have no label")
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


def _names(column: str, value: Any, kind: str) -> Iterator[str]:
    """Yield the names of the classes in a cell; none for a faulty cell, which is reported when the rows are loaded."""
    lists = {TOKENS: cell.tags, LABELS: cell.several}
    with suppress(ConfigError):
        for tag in lists[kind](column, value) if kind in lists else [value]:
            with suppress(ConfigError):
                yield cell.class_name(column, tag)


def _kind(known: TableSettings, rows: Rows) -> tuple[str, str]:
    """Infer the kind from the values, and return it with the reason."""
    texts, values = rows.columns[known.text], [value for value in rows.columns[known.label] if not cell.missing(value)]
    if any(isinstance(value, (list, tuple)) for value in texts):
        return TOKENS, f"{known.text} and {known.label} hold lists"
    if any(isinstance(value, (list, tuple)) for value in values):
        pairs = list(zip(texts, rows.columns[known.label], strict=True))
        fitting = [isinstance(tags, (list, tuple)) and len(str(text).split()) == len(tags) for text, tags in pairs]
        if 2 * sum(fitting) >= len(pairs):
            return TOKENS, f"{known.label} holds lists, as long as {known.text} has words"
        return LABELS, f"{known.label} holds lists"
    if known.label not in rows.class_names and known.labels is None:
        numbers = [value if rows.typed else cell.or_number(value) for value in values]
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in numbers) and not all(
            map(cell.is_whole, numbers)
        ):
            return NUMBERS, f"{known.label} holds numbers with decimals"
    return CLASSES, f"{known.label} holds " + ("whole numbers" if all(map(cell.is_whole, values)) else "names")


def metrics_of(kind: str, labels: Sequence[str] | None) -> list[str]:
    """Return the metrics of a kind; the default is the last one for tokens, otherwise the first."""
    if kind == NUMBERS or labels is None:
        return ["pearson", "spearmanr"]
    if kind == TOKENS:
        return ["accuracy", "macro_f1", *(["entity_f1"] if is_iob(labels) else [])]
    if kind == LABELS:
        return ["micro_f1", "macro_f1", "accuracy"]
    return ["accuracy", "macro_f1", "matthews_correlation", *(["f1"] if len(labels) == 2 else [])]


def examples(known: TableSettings, rows: Rows) -> list[list[Any]]:
    """Return columns of the texts (or words), the labels, and the row indices in the table, from 0.

    Raises:
        ConfigError: lists the faulty rows, if there are more than `max_unreadable` or no others.

    Warns:
        UserWarning: lists the faulty rows that are skipped.
    """
    *texts, label = known.columns
    tokens = known.kind == TOKENS
    ids = {str(name): index for index, name in enumerate(known.labels or ())}
    if known.labels == unnamed(len(ids)):
        ids |= {str(index): index for index in range(len(ids))}  # as tables number classes without names

    def class_id(column: str, value: Any) -> int:
        return cell.class_id(column, value, rows.class_names.get(column), ids)

    def class_ids(column: str, value: Any) -> list[int]:
        return [class_id(column, tag) for tag in cell.tags(column, value)]

    def indicators(column: str, value: Any) -> list[float]:
        found = {class_id(column, name) for name in cell.several(column, value)}
        return [float(index in found) for index in range(len(known.labels or ()))]

    of_kind = {CLASSES: class_id, NUMBERS: cell.number, TOKENS: class_ids, LABELS: indicators}
    readers: list[tuple[str, Callable[[str, Any], Any]]]
    readers = [(name, cell.words if tokens else cell.text) for name in texts]
    readers.append((label, of_kind[str(known.kind)]))
    columns: list[list[Any]] = [[] for _ in range(len(readers) + 1)]
    faults: list[tuple[int, str]] = []
    for at, line in enumerate(rows.numbers):
        example: list[Any] = []
        wrong: list[str] = []
        for name, read in readers:
            try:
                example.append(read(name, rows.columns[name][at]))
            except ConfigError as error:
                wrong += error.faults
        if tokens and not wrong and len(example[0]) != len(example[1]):
            wrong.append(f"{texts[0]} has {len(example[0])} words, {label} {len(example[1])} tags; expected as many")
        faults += [(line, fault) for fault in wrong]
        if not wrong:
            for column, value in zip(columns, [*example, at], strict=True):
                column.append(value)
    if number := len({line for line, _ in [*rows.faults, *faults]}):
        found, most = rows.messages(faults), known.max_unreadable
        if most and (number > most or not columns[0]):
            found = [f"{rows.source}: {number} rows are faulty; expected at most {most} (max_unreadable)", *found]
        if number > most or not columns[0]:
            raise ConfigError(found)
        left = f"{number} faulty rows are left out, {len(columns[0])} are read"
        warnings.warn("\n  ".join([f"{rows.source}: {left}", *found]), stacklevel=2)
    return columns
