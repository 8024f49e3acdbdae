"""Scores as plain functions and as `evaluate.Metric` classes that need no network.

`evaluate.load("glue")` downloads its code from the Hub; the classes `Accuracy`, `F1`, `MacroF1`, `MicroF1`,
`MatthewsCorrelation`, `Pearson` and `Spearmanr` here are installed with the package, so they also work offline, alone,
in `evaluate.combine` and as the metric of an evaluator. scikit-learn, scipy and evaluate are imported on first use.
Shapes: predictions and references are (examples,).

Example:
    >>> from snnk_peft.tasks.metrics import load_metric
    >>> load_metric("accuracy").compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, 0])
    {'accuracy': 0.75}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks._files import require

if TYPE_CHECKING:
    import evaluate

_TAG = re.compile(r"O|[BI]-.+")


def accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """Share of equal labels, 0 to 1."""
    return float(require("sklearn.metrics").accuracy_score(references, predictions))


def f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """Harmonic mean of precision and recall of class 1; 0 when there is no true positive."""
    return float(require("sklearn.metrics").f1_score(references, predictions, zero_division=0))


def macro_f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """Mean of the F1 of every class that occurs among predictions or references; 0 for one without a true positive."""
    return float(require("sklearn.metrics").f1_score(references, predictions, average="macro", zero_division=0))


def micro_f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """Harmonic mean of precision and recall of all labels together, 0 to 1; of one class per example its accuracy."""
    return float(require("sklearn.metrics").f1_score(references, predictions, average="micro", zero_division=0))


def matthews_correlation(predictions: ArrayLike, references: ArrayLike) -> float:
    """Correlation of two labelings, -1 to 1; 0 when one of them is constant."""
    return float(require("sklearn.metrics").matthews_corrcoef(references, predictions))


def pearson(predictions: ArrayLike, references: ArrayLike) -> float:
    """Linear correlation, -1 to 1; 0 when one side is constant."""
    return _correlation("pearsonr", predictions, references)


def spearmanr(predictions: ArrayLike, references: ArrayLike) -> float:
    """Correlation of ranks, -1 to 1; 0 when one side is constant."""
    return _correlation("spearmanr", predictions, references)


def _correlation(function: str, predictions: ArrayLike, references: ArrayLike) -> float:
    x, y = np.asarray(predictions, dtype=np.float64), np.asarray(references, dtype=np.float64)
    # Undefined against a constant. A collapsed model must rank last in checkpoint selection, and NaN ranks nowhere.
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(getattr(require("scipy.stats"), function)(x, y)[0])


METRICS: dict[str, Callable[[ArrayLike, ArrayLike], float]] = {
    function.__name__: function
    for function in (accuracy, f1, macro_f1, matthews_correlation, micro_f1, pearson, spearmanr)
}
"""Score functions by the key under which they are reported."""


def is_iob(labels: Sequence[str]) -> bool:
    """Return whether the labels are IOB2 tags: O, B-x and I-x, with at least one B-x."""
    return all(_TAG.fullmatch(label) for label in labels) and any(label.startswith("B-") for label in labels)


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return (type, first word, last word) of every entity in one sentence.

    An entity begins at B-x, and at I-x after O, after another type or at the beginning of a sentence, as in the
    evaluation of CoNLL 2003 (Tjong Kim Sang and De Meulder 2003).
    """
    spans: set[tuple[str, int, int]] = set()
    kind, first = "", 0
    for at, tag in enumerate([*tags, "O"]):
        if kind and tag != f"I-{kind}":
            spans.add((kind, first, at - 1))
            kind = ""
        if not kind and tag != "O":
            kind, first = tag[2:], at
    return spans


def entity_f1(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Harmonic mean of precision and recall over all entities of all sentences; 0 where no entity is right."""
    pairs = [(entities(mine), entities(true)) for mine, true in zip(predictions, references, strict=True)]
    right = sum(len(mine & true) for mine, true in pairs)
    total = sum(len(mine) + len(true) for mine, true in pairs)
    return 2 * right / total if right else 0.0


_CLASSES = {
    "Accuracy": "accuracy",
    "F1": "f1",
    "MacroF1": "macro_f1",
    "MatthewsCorrelation": "matthews_correlation",
    "MicroF1": "micro_f1",
    "Pearson": "pearson",
    "Spearmanr": "spearmanr",
}
_INPUTS = """
Args:
    predictions: predicted label ids (or numbers, for correlations), one per example.
    references: true label ids (or numbers), one per example.
Returns:
    a dict with one value under the metric's name.
"""


def load_metric(name: str, **kwargs: Any) -> evaluate.Metric:
    """Return an `evaluate.Metric` by name, without network access.

    Args:
        name: a key of `METRICS`.
        kwargs: arguments of `evaluate.Metric`, e.g. `num_process` and `process_id` in a distributed run.

    Raises:
        ConfigError: unknown name.
        ImportError: the `recipes` extra is not installed.
    """
    if name not in METRICS:
        raise ConfigError(did_you_mean("metric", name, sorted(METRICS)))
    return _metric_class(next(kind for kind, key in _CLASSES.items() if key == name))(**kwargs)


@cache
def _metric_class(kind: str) -> type[evaluate.Metric]:
    name = _CLASSES[kind]
    function, dtype = METRICS[name], "float64" if name in ("pearson", "spearmanr") else "int32"
    datasets, evaluate = require("datasets"), require("evaluate")

    def _info(self: Any) -> Any:
        features = datasets.Features({key: datasets.Value(dtype) for key in ("predictions", "references")})
        return evaluate.MetricInfo(
            description=function.__doc__ or "", citation="", inputs_description=_INPUTS, features=features
        )

    def _compute(self: Any, predictions: Any, references: Any) -> dict[str, float]:
        return {name: function(predictions, references)}

    return type(
        kind,
        (evaluate.Metric,),
        {"__module__": __name__, "__doc__": function.__doc__, "_info": _info, "_compute": _compute},
    )


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _metric_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
