"""Errors of low-rank starts beside the accuracy of the runs: rows, their rank correlations and their figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from papers.lib.ranks import rank_correlation

Row = dict[str, Any]
# Over which runs a correlation is taken.
EVERY, WITHIN, FROM_DENSE = "all runs", "within rank scale and decay", "the same, starts from a dense network alone"
AXES = ("relative error of the start, mean over layers", "test accuracy, percent")


def row_of(report: dict[str, Any], method: str, error: float) -> Row:
    """What is plotted of a run.

    Args:
        report: its metrics.json, of a low-rank network.
        method: its name in the sweep.
        error: of its start, the mean over the layers.

    Returns:
        among others "decay", whether the factors had Frobenius decay instead of weight decay.
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
    """Over which runs -> Spearman's correlation of error and score, fields of `Correlation`; None if there is none."""
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
    """Value, interval and runs."""
    if correlation is None:
        return "none, for lack of runs that differ"
    low, high = f"{correlation['low']:+.2f}", f"{correlation['high']:+.2f}"
    return f"{correlation['value']:+.2f} ({low} to {high}; {correlation['points']} runs)"


def panels(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """A panel per task and rank scale: initialisation -> (error, accuracy in percent)."""
    made: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in sorted(rows, key=lambda row: (row["task"], row["rank_scale"], row["init"])):
        panel = made.setdefault(f"{row['task']}, rank scale {row['rank_scale']:g}", {})
        panel.setdefault(row["init"], []).append((row["error"], 100 * row["score"]))
    return made
