"""Errors of low-rank initialisations against the accuracy of the runs: rows, rank correlations and figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from snnk_peft.tasks.metrics import spearmanr

Row = dict[str, Any]
Point = tuple[float, float]
# The sets of runs to compute correlations over.
EVERY, WITHIN, FROM_DENSE = "all runs", "within rank scale and decay", "the same, starts from a dense network alone"
AXES = ("relative error of the start, mean over layers", "test accuracy, percent")


def row_of(report: dict[str, Any], method: str, error: float) -> Row:
    """Return the plotted entries of a run.

    Returns:
        Entries including "decay": whether the factors had Frobenius decay instead of weight decay.
    """
    part = report["config"]["method"]["low_rank"]
    return {
        "task": report["task"],
        "method": method,
        "seed": report["seed"],
        "init": part["init"],
        "rank_scale": part["rank_scale"],
        "decay": bool(part.get("frobenius_decay")),
        "error": error,
        "score": report["score"],
    }


def correlations_of(rows: Sequence[Row]) -> dict[str, dict[str, float] | None]:
    """Return set of runs -> Spearman's correlation of error and score, fields of `Correlation`, or None."""
    places = sorted({(row["rank_scale"], row["decay"]) for row in rows})

    def groups(chosen: Sequence[Row]) -> list[list[tuple[float, float]]]:
        return [[(r["error"], r["score"]) for r in chosen if (r["rank_scale"], r["decay"]) == at] for at in places]

    asked = {
        EVERY: [[(row["error"], row["score"]) for row in rows]],
        WITHIN: groups(rows),
        FROM_DENSE: groups([row for row in rows if row["init"] != "baseline"]),
    }
    found = {name: rank_correlation(each) for name, each in asked.items()}
    return {name: None if value is None else value._asdict() for name, value in found.items()}


def in_words(correlation: dict[str, float] | None) -> str:
    """Format a correlation: value, interval and number of runs."""
    if correlation is None:
        return "none, for lack of runs that differ"
    low, high = f"{correlation['low']:+.2f}", f"{correlation['high']:+.2f}"
    return f"{correlation['value']:+.2f} ({low} to {high}; {correlation['points']} runs)"


def panels(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return a panel per task and rank scale: initialisation -> (error, accuracy in percent)."""
    made: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in sorted(rows, key=lambda row: (row["task"], row["rank_scale"], row["init"])):
        panel = made.setdefault(f"{row['task']}, rank scale {row['rank_scale']:g}", {})
        panel.setdefault(row["init"], []).append((row["error"], 100 * row["score"]))
    return made


# --- rank correlation -------------------------------------------------------------------------------------------------


class Correlation(NamedTuple):
    """Spearman's correlation with its interval.

    Attributes:
        value: the mean over groups.
        low: 2.5th percentile of the resamples.
        high: 97.5th percentile of the resamples.
        points: number of points in the groups used.
        groups: number of groups used.
    """

    value: float
    low: float
    high: float
    points: int
    groups: int


def rank_correlation(groups: Sequence[Sequence[Point]], seed: int = 0, resamples: int = 2000) -> Correlation | None:
    """Compute Spearman's correlation with an interval, as a mean over groups of comparable points, or None.

    Each group is resampled with as many points as it has, and the mean over groups is taken again (stratified
    bootstrap, percentiles). Groups with fewer than three points, or with one side constant, are left out.
    """
    usable = [np.asarray(group, dtype=np.float64) for group in groups if len(group) >= 3]
    usable = [group for group in usable if (np.ptp(group, axis=0) > 0).all()]
    if not usable:
        return None
    value = float(np.mean([spearmanr(*group.T) for group in usable]))
    generator = np.random.default_rng(seed)
    drawn = [
        np.mean([spearmanr(*group[generator.integers(len(group), size=len(group))].T) for group in usable])
        for _ in range(resamples)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Correlation(value, float(low), float(high), sum(map(len, usable)), len(usable))
