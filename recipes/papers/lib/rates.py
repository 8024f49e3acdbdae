"""Learning rates that were tried, and the best one of every method."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

from papers.lib.reports import read_runs

Rates = dict[str, dict[float, dict[str, float]]]  # method -> learning rate -> task -> score on held-back examples


def rates(study: Path) -> Rates:
    """method -> learning rate -> task -> score on held-back examples, of rates that ran on every task of the study.

    Args:
        study: whose methods are <method>@<rate>.
    """
    found: defaultdict[str, defaultdict[float, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (task, name, _), report in read_runs(study).items():
        method, at, rate = name.rpartition("@")
        if at:
            found[method][float(rate)][task] = report["score_held_back"]
    tasks = {task for tried in found.values() for scores in tried.values() for task in scores}
    whole = {
        method: {rate: scores for rate, scores in tried.items() if scores.keys() == tasks}
        for method, tried in found.items()
    }
    return {method: tried for method, tried in whole.items() if tried}


def chosen_rates(study: Path) -> dict[str, float]:
    """The learning rate of every method: of those tried on all tasks of the tuning the one with the best mean score.

    Args:
        study: the reports of the tuning, as in `rates`.
    """
    means = {
        method: {rate: statistics.mean(scores.values()) for rate, scores in tried.items()}
        for method, tried in rates(study).items()
    }
    return {method: max(tried, key=lambda rate: tried[rate]) for method, tried in means.items()}
