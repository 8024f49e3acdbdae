"""User data: a table of labelled texts as a task, with columns named by settings.

Each row is an example: a text (or a pair) with a class, a number or any number of labels, or a list of words with a
list of tags. Kind and labels, if not set, are inferred from the training rows. Every faulty row is reported with its
line.

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

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks import TASKS, TextTask
from snnk_peft.tasks._columns import LABELS, NUMBERS, TOKENS, TableSettings, completed, examples, metrics_of, of_model
from snnk_peft.tasks._files import require
from snnk_peft.tasks._rows import Rows
from snnk_peft.tasks.base import IGNORED, Request, held_back, to_numpy
from snnk_peft.tasks.metrics import METRICS, entity_f1

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Table(TextTask):
    """Task for a table; the registered one has no data until `with_settings` gives it a table, with kind and labels.

    Args:
        settings: complete, if there are `metrics`.
        label_names: class names in the order of their ids; None for regression.
        metrics: the computed metrics. Classification: accuracy, macro_f1 (the mean of the F1 of every class),
            matthews_correlation and, for two classes, f1 (of the second). Regression: pearson, spearmanr. Multiple
            labels: micro_f1, macro_f1, accuracy (of whole sets). Tokens, over all words together: accuracy, macro_f1
            and, if the tags are IOB2, entity_f1 (over entities: type, first and last word must match).
        primary: None; `settings.metric` gives the score.
        splits: train and validation.
        notes: description of what was inferred.
        rows: the rows read to infer settings, by split, until `load` uses them, so that each file is read once.
    """

    settings: TableSettings = field(default_factory=TableSettings)
    label_names: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ()
    primary: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("train", "validation")
    notes: tuple[str, ...] = ()
    rows: dict[str, Rows] = field(default_factory=dict, repr=False, compare=False)
    name: str = "table"

    def check(self, settings: Mapping[str, Any]) -> list[str]:
        """List the faults of the settings that can be found without reading any rows."""
        return TableSettings.among(settings).faults()

    def with_settings(self, settings: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> Table:
        """Return the task for a table; missing settings are inferred from the model, or from the training rows.

        Args:
            settings: fields of `TableSettings`, None for the default; other keys are ignored.
            model: config.json of a model that was trained on the table: its classes are the labels.

        Raises:
            ConfigError: contradictory settings, no readable training rows, or invalid labels.
        """
        known = TableSettings.among(settings)
        if faults := known.faults():
            raise ConfigError(faults)
        notes: list[str] = []
        rows: dict[str, Rows] = {}
        if model is not None:
            known = of_model(known, model)
        if known.kind is None or (known.labels is None and known.kind != NUMBERS):
            if known.train_file is None and known.dataset is None and known.labels is not None:
                known = completed(known, known.read("validation"), notes)
            elif known.train_file is None and known.dataset is None:
                raise ConfigError(
                    "data.train_file is missing: a table (.csv, .tsv, .jsonl, .parquet), from which kind and labels "
                    "are inferred; or give data.dataset. Where only rows to score are given, of a model that does not "
                    "say its labels, such as an adapter: data.labels=[...], in the order of its outputs"
                )
            else:
                rows["train"] = known.read("train")
                known = completed(known, rows["train"], notes)
        if faults := known.faults():  # as completed
            raise ConfigError(faults)
        labels = None if known.labels is None else tuple(str(name) for name in known.labels)
        choices = metrics_of(str(known.kind), labels)
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
        return Table(known, labels, tuple(choices), notes=tuple(notes), rows=rows)

    @property
    def inferred(self) -> dict[str, Any]:
        return {name: getattr(self.settings, name) for name in ("kind", "labels", "metric")}

    @property
    def problem_type(self) -> str | None:
        """The `problem_type` of a transformers config; None for tokens, which have only one problem type."""
        return None if self.tokens else LABELS if self.several else super().problem_type

    @property
    def tokens(self) -> bool:
        return self.settings.kind == TOKENS

    @property
    def several(self) -> bool:
        """True if an example has any number of labels, so that its label is a row of zeros and ones."""
        return self.settings.kind == LABELS

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The text columns: ("words",), ("sentence1",) or ("sentence1", "sentence2")."""
        return ("words",) if self.tokens else ("sentence1", "sentence2")[: len(self.settings.columns) - 1]

    @property
    def hub_path(self) -> str | None:
        """The data set on the Hub, if the rows come from there."""
        dataset = self.settings.dataset
        return None if dataset is None or Path(dataset).exists() else dataset

    @property
    def title(self) -> str:
        """The data set on the Hub, or the name of the file without its folder."""
        return self.hub_path or Path(self.settings.train_source).name

    @property
    def source(self) -> str:
        """A description of the table, for model cards."""
        known, train = self.settings, self.title
        if known.held_out:
            return f"the table {train}, of which {known.hold_out:.0%} are held back for evaluation"
        evaluated = Path(known.eval_file).name if known.eval_file is not None else f"its split {known.eval_split}"
        return f"the table {train}, evaluated on {evaluated}"

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Compute the metrics like `Task.compute`; `score` is `settings.metric`.

        Args:
            predictions: as there; for tokens, the logits (examples, length, num_labels).
            references: as there; for tokens, the labels (examples, length), `IGNORED` where no word begins; for
                multiple labels, zeros and ones (examples, num_labels), where logits above 0 predict a label.
        """
        if self.several:
            logits, true = to_numpy(predictions), to_numpy(references)
            if logits.shape != true.shape or true.shape[1:] != (self.num_labels,) or np.isnan(logits).any():
                raise ConfigError(
                    f"predictions {logits.shape}, references {true.shape}; expected logits and labels, both (examples, "
                    f"{self.num_labels}), without NaN"
                )
            result = {name: METRICS[name](logits > 0, true > 0) for name in self.metrics} | {"score": 0.0}
        elif not self.tokens:
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
            result = super(Table, flat).compute(logits[words], true[words])
            if "entity_f1" in self.metrics:
                tags = np.asarray(self.label_names, dtype=object)
                mine, theirs = (
                    [list(tags[row[kept]]) for row, kept in zip(ids, words, strict=True)]
                    for ids in (logits.argmax(-1), np.where(words, true, 0))
                )
                result["entity_f1"] = entity_f1(mine, theirs)
        del result["score"]  # the mean of all metrics
        return {**result, "score": result[str(self.settings.metric)]}

    def _features(self) -> datasets.Features:
        features = super()._features()
        if self.several:
            hf = require("datasets")
            features["label"] = hf.List(hf.Value("float32"))
        return features

    def _read(self, request: Request) -> datasets.DatasetDict:
        if not self.metrics:
            raise ConfigError(
                "task 'table' has no data before with_settings({'train_file': ...}); on the command line, use "
                "recipes/finetune.py with recipes/configs/table.yaml"
            )
        if request.path is not None:
            raise ConfigError(f"data.dir is {request.path}, but a table is given as data.train_file and data.eval_file")
        wanted, held_out = list(request.splits or self.splits), self.settings.held_out
        rows_of: dict[str, datasets.Dataset] = {}
        faults: list[str] = []
        for split in ["train"] if held_out else wanted:
            rows = self.rows.pop(split, None) or self.settings.read(split, request.cache_dir)
            try:
                *texts, labels, idx = examples(self.settings, rows)
                rows_of[split] = self._dataset(texts, labels, idx)
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(faults)
        if held_out:
            rows_of = self._divided(rows_of["train"])
        return require("datasets").DatasetDict({split: rows_of[split] for split in wanted})

    def _divided(self, rows: datasets.Dataset) -> dict[str, datasets.Dataset]:
        """Split the rows into training and held-out rows: a share of every class, at least one of two or more."""
        count, share = len(rows), self.settings.hold_out
        single = self.label_names is not None and not self.tokens and not self.several
        groups = np.asarray(rows["label"][:]) if single else np.zeros(count, int)
        held = held_back(groups, share, self.settings.split_seed)
        if not held:
            raise ConfigError(
                f"{self.settings.train_source}: {count} rows, of which none can be held back (no class has two); "
                "give more rows, or data.eval_file"
            )
        kept = np.setdiff1d(np.arange(count), held)
        return {"train": rows.select(kept.tolist()), "validation": rows.select(held)}


TASKS.register(Table.name, Table())
