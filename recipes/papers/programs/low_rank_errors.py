"""Do low-rank starts that are nearer to the dense layers train to a higher accuracy? Fig. 2 of the low-rank paper.

python recipes/papers/programs/low_rank_errors.py

Reads the finished runs of the study lowrank (model_cards/lowrank.jsonl) and rebuilds the start of each from its
settings: dense network, seed, initialisation and rank scale determine it, so nothing is trained. The error of a start
is E‖f(UVᵀx) − f(Wx)‖² / E‖f(Wx)‖² for x ~ N(0, I), exact, a mean over the layers; the paper plots the excess over the
least possible one, for WS-NKP stopped early and late at one rank scale, three runs each. Writes metrics.json and
error.png: the error against the accuracy of every run, and Spearman's correlation with a 95 % interval (stratified
bootstrap over runs). Runs of one initialisation share their error and everything else particular to it, which no
interval accounts for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from papers.lib.lowrank_model import rebuilt_errors
from papers.lib.lowrank_settings import LowRankConfig
from papers.lib.measured_page import write_figures
from papers.lib.plots import scatter_panels
from papers.lib.reports import read_reports
from papers.lib.start_errors import AXES, correlations_of, in_words, panels, row_of
from snnk_cli.config import load_config
from snnk_cli.lock import hold
from snnk_cli.terminal import bar, show_table
from snnk_peft.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(__file__).resolve().parent / "results" / "low_rank_errors"


def options() -> argparse.ArgumentParser:
    """Create the parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--runs", type=Path, default=ROOT / "model_cards/lowrank.jsonl", help="the stored runs, a line each"
    )
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of metrics.json and error.png")
    return made


def main(argv: list[str] | None = None) -> None:
    """Rebuild every start and write the results."""
    arguments = options().parse_args(argv)
    hold(arguments.output)
    try:
        table = read_reports(arguments.runs, "lowrank")
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    reports = [
        (method, report)
        for row in table.values()
        for method, found in row.items()
        for report in found
        if report["config"]["method"]["low_rank"] is not None
    ]
    if not reports:
        raise SystemExit(
            f"error: {arguments.runs} holds only dense networks; run: python recipes/papers/study.py run lowrank"
        )
    known: dict[str, float] = {}  # decay does not affect the start
    rows = []
    for method, report in bar(reports, "runs"):
        part = report["config"]["method"]["low_rank"]
        start = {key: value for key, value in part.items() if key != "frobenius_decay"}
        key = yaml.safe_dump([report["task"], report["config"]["model"], report["seed"], start])
        if key not in known:
            known[key] = report["init_error"] if "init_error" in report else mean_error(report)
        rows.append(row_of(report, method, known[key]))
    correlations = {task: correlations_of([row for row in rows if row["task"] == task]) for task in table}
    settings = {"runs": len(rows), "starts": len(known)}
    write_figures(arguments.output, {"settings": settings, "correlations": correlations, "rows": rows})
    scatter_panels(panels(rows), arguments.output / "error.png", f"{len(rows)} runs from scratch", AXES)
    show(rows, correlations)
    print(f"written: {arguments.output}")


def mean_error(report: dict[str, Any]) -> float:
    """Compute the mean error over layers of the start that a report's settings describe."""
    errors = rebuilt_errors(load_config(LowRankConfig, {**report["config"], "output": {"dir": "unused"}}))
    return sum(errors.values()) / len(errors)


def show(rows: list[dict[str, Any]], correlations: dict[str, dict[str, Any]]) -> None:
    """Print errors by initialisation and rank scale, and the correlations."""
    lines = []
    for place in sorted({(row["task"], row["init"], row["rank_scale"]) for row in rows}):
        errors = [row["error"] for row in rows if (row["task"], row["init"], row["rank_scale"]) == place]
        lines.append([place[0], place[1], f"{place[2]:g}", f"{sum(errors) / len(errors):.4f}"])
    header = ["task", "initialisation", "rank scale", "error of the start"]
    show_table("low-rank starts", header, lines, text=header[:2])
    for task, named in correlations.items():
        for name, value in named.items():
            print(f"{task}, {name}: Spearman {in_words(value)}")


if __name__ == "__main__":
    main()
