"""The score functions of `metrics.py` as `evaluate.Metric` classes; the only module that imports `evaluate` at its top.

Import the classes from `snnk_peft.tasks.metrics`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import datasets
import evaluate

from snnk_peft.tasks._functions import METRICS

_INPUTS = """
Args:
    predictions: predicted label ids (or numbers, for correlations), one per example.
    references: true label ids (or numbers), one per example.
Returns:
    a dict with one value under the metric's name.
"""


class _Metric(evaluate.Metric):
    """One function of `METRICS` with the input types that `evaluate` checks."""

    metric: ClassVar[str]
    dtype: ClassVar[str] = "int32"

    def _info(self) -> Any:
        features = datasets.Features({name: datasets.Value(self.dtype) for name in ("predictions", "references")})
        return evaluate.MetricInfo(
            description=METRICS[self.metric].__doc__ or "", citation="", inputs_description=_INPUTS, features=features
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {self.metric: METRICS[self.metric](predictions, references)}


class Accuracy(_Metric):
    """Share of equal labels."""

    metric = "accuracy"


class F1(_Metric):
    """F1 of class 1."""

    metric = "f1"


class MacroF1(_Metric):
    """Mean of the F1 of every class."""

    metric = "macro_f1"


class MatthewsCorrelation(_Metric):
    """Matthews correlation coefficient."""

    metric = "matthews_correlation"


class Pearson(_Metric):
    """Pearson correlation."""

    metric = "pearson"
    dtype = "float64"


class Spearmanr(_Metric):
    """Spearman rank correlation."""

    metric = "spearmanr"
    dtype = "float64"


CLASSES: dict[str, type[_Metric]] = {
    kind.__name__: kind for kind in (Accuracy, F1, MacroF1, MatthewsCorrelation, Pearson, Spearmanr)
}
"""Metric classes by their names."""
