"""The score functions of `metrics.py`, from which they are imported. Predictions and references are (examples,)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from snnk_peft.tasks._extras import require


def accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """Share of equal labels, 0 to 1."""
    return float(require("sklearn.metrics").accuracy_score(references, predictions))


def f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """Harmonic mean of precision and recall of class 1; 0 when there is no true positive."""
    return float(require("sklearn.metrics").f1_score(references, predictions, zero_division=0))


def macro_f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """Mean of the F1 of every class that occurs among predictions or references; 0 for one without a true positive."""
    return float(require("sklearn.metrics").f1_score(references, predictions, average="macro", zero_division=0))


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
    function.__name__: function for function in (accuracy, f1, macro_f1, matthews_correlation, pearson, spearmanr)
}
"""Score functions by the key under which they are reported."""
