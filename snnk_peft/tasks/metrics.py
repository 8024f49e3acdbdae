"""Scores as plain functions and as `evaluate.Metric` classes that need no network.

`evaluate.load("glue")` fetches its program from the Hub; the classes `Accuracy`, `F1`, `MacroF1`,
`MatthewsCorrelation`, `Pearson` and `Spearmanr` here are installed with the package, so they also work offline, alone,
in `evaluate.combine` and as the metric of an evaluator. scikit-learn, scipy and evaluate are imported on first use.
Shapes: predictions and references are (examples,).

Example:
    >>> from snnk_peft.tasks.metrics import load_metric
    >>> load_metric("accuracy").compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, 0])
    {'accuracy': 0.75}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks._extras import require
from snnk_peft.tasks._functions import METRICS, accuracy, f1, macro_f1, matthews_correlation, pearson, spearmanr

if TYPE_CHECKING:
    import evaluate


__all__ = [
    "METRICS",
    "accuracy",
    "f1",
    "load_metric",
    "macro_f1",
    "matthews_correlation",
    "pearson",
    "spearmanr",
]

_CLASSES = {
    "accuracy": "Accuracy",
    "f1": "F1",
    "macro_f1": "MacroF1",
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
