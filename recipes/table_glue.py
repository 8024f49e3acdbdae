"""Render the table of dev scores from the runs' metrics.json files, and keep those files next to it.

    python recipes/table_glue.py                                  (runs/glue -> model_cards/glue)
    python recipes/table_glue.py --runs path/to/sweep --out path/to/folder

Copies RUNS/<task>/<method>/seed<k>/metrics.json to OUT/<task>/<method>/seed<k>.json, then writes OUT/README.md and
OUT/scores.png from all files in OUT. Without runs, the table is rendered again from the stored files alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from _lib.files import write_text
from _lib.guard import guarded
from _lib.plots import score_bars
from _lib.tables import Table, collect, grid, read_reports, spread

ROOT = Path(__file__).resolve().parent.parent
ORDER = (
    "snnk_relu16",
    "snnk_cos16",
    "snnk_relu32_parallel",
    "snnk_relu8_query_value",
    "snnk_relu8_free",
    "lora_r8",
    "linear_probe",
    "pooler_cos",
    "pooler_dense",
)


def main(argv: list[str] | None = None) -> int:
    """Read the command line; 0 done, 2 nothing to render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/glue", help="folder of recipes/sweep_glue.py")
    parser.add_argument("--out", type=Path, default=ROOT / "model_cards/glue", help="where files and table go")
    arguments = parser.parse_args(argv)
    return guarded(lambda: write(arguments.runs, arguments.out))


def write(runs: Path, out: Path) -> None:
    """Copy the reports, then render page and figure."""
    copied = collect(runs, out)
    table = read_table(out)
    write_text(out / "README.md", render(table))
    scores = {
        task: {method: spread(reports, "score") for method, reports in row.items()} for task, row in table.items()
    }
    score_bars(scores, out / "scores.png", "GLUE dev scores")
    print(f"{copied} new or changed reports; wrote {out / 'README.md'} and scores.png")


def read_table(out: Path) -> Table:
    """All stored reports, tasks and methods in a fixed order."""
    table = read_reports(out, "recipes/sweep_glue.py")
    tasks = sorted(table, key=lambda task: max(r["examples"]["train"] for rs in table[task].values() for r in rs))
    return {task: {method: table[task][method] for method in sorted(table[task], key=rank)} for task in tasks}


def rank(method: str) -> tuple[int, str]:
    """Known methods first, in the order of ORDER."""
    return (ORDER.index(method) if method in ORDER else len(ORDER), method)


def render(table: Table) -> str:
    """The Markdown page."""
    tasks = list(table)
    methods = sorted({method for row in table.values() for method in row}, key=rank)
    reports = [report for row in table.values() for cell in row.values() for report in cell]
    models = ", ".join(sorted({report["config"]["model"]["name_or_path"] for report in reports}))

    def cell(task: str, method: str) -> str:
        if method not in table[task]:
            return "–"
        found = table[task][method]
        mean, deviation = spread(found, "score")
        return f"{100 * mean:.1f}" + (f" ± {100 * deviation:.1f} ({len(found)})" if len(found) > 1 else "")

    # An average over different tasks would compare nothing: only tasks that every method has.
    common = [task for task in tasks if len(table[task]) == len(methods)]

    def average(method: str) -> str:
        if not common:
            return "–"
        return f"{100 * statistics.mean(spread(table[task][method], 'score')[0] for task in common):.1f}"

    def size(method: str) -> str:
        counts = {report["trainable_parameters"] for row in table.values() for report in row.get(method, [])}
        return f"{min(counts):,}" + (f" to {max(counts):,}" if len(counts) > 1 else "")

    def pace(task: str, method: str) -> str:
        return f"{min(r['seconds_per_epoch'] for r in table[task][method]):.1f}" if method in table[task] else "–"

    rows = [[method, *(cell(task, method) for task in tasks), average(method), size(method)] for method in methods]
    times = [[method, *(pace(task, method) for task in tasks)] for method in methods]
    sizes = ["training examples", *(f"{_train(table[task]):,}" for task in tasks), "", ""]
    devices = ", ".join(sorted({f"{r['device']} ({r['environment']['torch_threads']} threads)" for r in reports}))
    return "\n".join(
        [
            f"# GLUE dev scores ({models})",
            "",
            "Rendered by `recipes/table_glue.py` from the JSON files beside this page; every file holds the settings",
            "and the environment of its run. Scores in percent: accuracy (RTE, SST-2), mean of accuracy and F1 (MRPC),",
            "mean of Pearson and Spearman (STS-B), Matthews (CoLA), at the best epoch. The epoch is chosen on the",
            "same dev set, which flatters every method a little. Mean ± standard deviation (number of seeds).",
            f"The average is over the tasks that all methods ran: {', '.join(common) or 'none'}.",
            "",
            *grid(["method", *tasks, "average", "trained parameters"], [*rows, sizes]),
            "",
            f"Seconds per epoch of training on {devices}; wall time of the quickest seed:",
            "",
            *grid(["method", *tasks], times),
            "",
            "![scores](scores.png)",
            "",
        ]
    )


def _train(row: dict[str, list[dict[str, Any]]]) -> int:
    return max(report["examples"]["train"] for cell in row.values() for report in cell)


if __name__ == "__main__":
    sys.exit(main())
