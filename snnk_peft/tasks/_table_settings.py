"""`TableSettings`: where the rows of one's own table are, and what its columns mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks._rows import Rows, read_split, read_table

CLASSES, NUMBERS, TOKENS = "classification", "regression", "token_classification"
KINDS = (CLASSES, NUMBERS, TOKENS)


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

    @classmethod
    def among(cls, settings: Mapping[str, Any]) -> TableSettings:
        """Those of `settings` that are fields, None for the default; other keys are passed over."""
        names = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in settings.items() if key in names and value is not None})

    @property
    def train_source(self) -> str:
        """File or data set of the training rows, for messages."""
        return self.train_file or self.dataset or self.eval_file or ""

    def read(self, split: str, cache_dir: str | None = None) -> Rows:
        """The rows of "train" or "validation".

        Raises:
            ConfigError: see `read_table` and `read_split`; or nothing says where the rows are.
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
