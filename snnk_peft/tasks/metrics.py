"""Scores of GLUE as plain functions and as `evaluate.Metric` classes that need no network.

`evaluate.load("glue")` fetches its program from the Hub; the classes `Accuracy`, `F1`, `MatthewsCorrelation`, `Pearson`
and `Spearmanr` here are installed with the package, so they also work offline, alone, in `evaluate.combine` and as the
metric of an evaluator. scikit-learn, scipy and evaluate are imported on first use. Shapes: predictions and references
are (examples,).

Example:
    >>> from snnk_peft.tasks.metrics import load_metric
    >>> load_metric("accuracy").compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, 0])
    {'accuracy': 0.75}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks._extras import require

if TYPE_CHECKING:
    import evaluate


def accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """Share of equal labels, 0 to 1."""
    return float(require("sklearn.metrics").accuracy_score(references, predictions))


def f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """Harmonic mean of precision and recall of class 1; 0 when there is no true positive."""
    return float(require("sklearn.metrics").f1_score(references, predictions, zero_division=0))


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
    function.__name__: function for function in (accuracy, f1, matthews_correlation, pearson, spearmanr)
}
"""Score functions by the key under which they are reported."""

_CLASSES = {
    "accuracy": "Accuracy",
    "f1": "F1",
    "matthews_correlation": "MatthewsCorrelation",
    "pearson": "Pearson",
    "spearmanr": "Spearmanr",
}


def load_metric(name: str, **kwargs: Any) -> evaluate.Metric:
    """An `evaluate.Metric` by name, without the network.

    Args:
        name: a key of `METRICS`.
        kwargs: arguments of `evaluate.Metric`, e.g. `num_process` and `process_id` in a distributed run.

    Raises:
        ConfigError: unknown name.
        ImportError: the `recipes` extra is not installed.
    """
    if name not in METRICS:
        raise ConfigError(did_you_mean("metric", name, sorted(METRICS)))
    return _metric_class(_CLASSES[name])(**kwargs)


def _metric_class(name: str) -> type[evaluate.Metric]:
    require("datasets")
    require("evaluate")
    from snnk_peft.tasks._evaluate import CLASSES

    return CLASSES[name]


def __getattr__(name: str) -> Any:
    if name in _CLASSES.values():
        return _metric_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
