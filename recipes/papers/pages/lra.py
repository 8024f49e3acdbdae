"""The page on the Long Range Arena, and on Spectraformer's pairs on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import TASKS

from papers.lib import printed_pairs
from papers.lib.plots import score_rows
from papers.lib.reports import Table
from snnk_cli.tables import grid, mean_in_words, spread, standard_error

# Settings that a table may mix, and that readers must know before comparing two numbers.
CAVEATS: dict[str, Callable[[dict[str, Any]], str]] = {
    "longest document": lambda report: f"{report['longest_sequence']:,} tokens",
    "trained on": lambda report: f"{report['examples']['train']:,} examples",
    "checkpoint chosen on": lambda report: f"{report['examples']['validation']:,}",
    "tested on": lambda report: f"{report['examples']['test']:,}",
    "budget": lambda report: _budget(report["config"]["train"]),
    "batch": lambda report: str(
        report["config"]["train"]["batch_size"] * report["config"]["train"]["gradient_accumulation"]
    ),
    "learning rate": lambda report: f"{report['config']['train']['learning_rate']:g}",
    "schedule": lambda report: report["config"]["train"]["schedule"],
    "number format": lambda report: {"no": "fp32"}.get(
        report["config"]["train"]["mixed_precision"], report["config"]["train"]["mixed_precision"]
    ),
    "layers × width": lambda report: f"{report['config']['model']['layers']} × {report['config']['model']['dim']}",
    "computed on": lambda report: report["environment"]["gpu"] if on_gpu(report) else "CPU",
    "threads": lambda report: str(report["environment"]["torch_threads"]),
}


def page(table: Table, out: Path) -> tuple[str, list[str]]:
    """Return the page, and the names of the figures drawn next to it."""
    bars = {task: {name: spread(cell, "accuracy") for name, cell in row.items()} for task, row in table.items()}
    score_rows(bars, out / "accuracy.png", "Long Range Arena", "test accuracy")
    return render(table), ["accuracy.png"]


def render(table: Table) -> str:
    """Render the Markdown page."""
    lines = [
        "# Long Range Arena, trained from scratch",
        "",
        "Rendered by `study.py page lra` from the `.jsonl` beside this folder; every line holds the settings and",
        "the environment of its run. Test accuracy in percent of the checkpoint that is best on validation data;",
        "mean ± standard error over seeds. Times and steps are those of training, without evaluations. Peak memory",
        "is that of the process (on a GPU: of its tensors): with the data loaded, before training → at the end. A",
        "process keeps what its allocator has freed of batches of other lengths, half of it and more, so that methods",
        "are compared on a GPU alone; `recipes/benchmarks/attention.py` compares them side by side.",
        "",
    ]
    for task, row in table.items():
        lines += [f"## {task}", "", *caveats([report for cell in row.values() for report in cell]), ""]
        header = [
            "attention",
            "seeds",
            "accuracy",
            "steps",
            "CPU s per step",
            "CPU min",
            "wall min",
            "memory MB",
            "parameters",
        ]
        lines += [
            *grid(header, [_row(name, cell) for name, cell in row.items()]),
            "",
            *claim(row),
            *printed_pairs.beside(task, row),
        ]
    return "\n".join([*lines, "![accuracy](accuracy.png)", ""])


def caveats(reports: list[dict[str, Any]]) -> list[str]:
    """Describe how the runs differ from the published task and from each other, based on their settings."""
    shared, differing = [], []
    for name, describe in CAVEATS.items():
        found = sorted({describe(report) for report in reports})
        (shared if len(found) == 1 else differing).append(f"{name} {' / '.join(found)}")
    labels = TASKS[reports[0]["task"]].label_names
    text = [f"Chance is {100 / len(labels):.0f} %. All runs: {'; '.join(shared)}."]
    if differing:
        text.append(f"**The runs differ in: {'; '.join(differing)}: compare with care.**")
    seeds = min(
        len({report["seed"] for report in reports if report["method"] == m}) for m in {r["method"] for r in reports}
    )
    if seeds < 3:
        text.append("With fewer than three seeds per method, small differences mean nothing.")
    short = [report for report in reports if report["stopped_early"]]
    if short:
        planned = max(report["config"]["train"]["steps"] for report in short)
        text.append(
            f"{len(short)} of {len(reports)} runs ended before the {planned:,} steps of their recipe: this compares "
            "methods under a budget and says little about their limits."
        )
    full = TASKS[reports[0]["task"]].max_length
    if max(report["config"]["data"]["max_length"] or full for report in reports) < full:
        text.append(f"Documents are kept shorter than the published {full:,} tokens.")
    return text


def claim(row: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return Spectraformer's claim about its best pair with these runs' figures; empty if either is missing."""
    if not {"posrf_mm", "saderf_orf"} <= row.keys():
        return []
    ours, other = row["posrf_mm"], row["saderf_orf"]

    def less(measure: Callable[[dict[str, Any]], float]) -> str:
        first, second = (sum(measure(report) for report in cell) / len(cell) for cell in (ours, other))
        if second <= 0:
            return "no measurable"  # the peak of a few steps may not exceed that of loading the data
        share = 1 - first / second
        return f"{abs(share):.1%} {'less' if share >= 0 else 'more'}".replace("%", " %")

    (first, first_error), (second, second_error) = (standard_error(cell, "accuracy") for cell in (ours, other))
    time = less(lambda report: report["cpu_seconds_per_step"])
    memory = ""
    if all(on_gpu(report) for report in (*ours, *other)):
        grown = less(lambda report: report["peak_memory_bytes"] - report["peak_memory_bytes_before_training"])
        memory = f"{grown} memory (grown in training), "
    several = f" ± {100 * math.hypot(first_error, second_error):.1f}" if min(len(ours), len(other)) > 1 else ""
    points = f"{100 * (first - second):+.1f}{several} points of accuracy"
    return [
        f"PosRF-MM against SADERF-ORF: {time} time per step, {memory}{points}. The paper "
        "has 19.0 % less time, 20.2 % less memory and +0.3 points (its text takes the ratios the other way round, "
        "23.4 % and 25.2 %).",
        "",
    ]


def on_gpu(report: dict[str, Any]) -> bool:
    """Return True if a run's model was on a GPU; reports without a device are from CPUs."""
    return report.get("device", "cpu").startswith("cuda")


def _budget(train: dict[str, Any]) -> str:
    limit = f"{train['steps']:,} steps"
    return limit if train["max_cpu_minutes"] is None else f"{train['max_cpu_minutes']:g} CPU minutes (at most {limit})"


def _row(name: str, cell: list[dict[str, Any]]) -> list[str]:
    def mean(key: str) -> float:
        return spread(cell, key)[0]

    megabytes = [mean(key) / 1e6 for key in ("peak_memory_bytes_before_training", "peak_memory_bytes")]
    return [
        name,
        str(len(cell)),
        mean_in_words([100 * report["accuracy"] for report in cell]),
        f"{mean('steps'):,.0f}",
        f"{mean('cpu_seconds_per_step'):.3g}",
        f"{mean('train_cpu_seconds') / 60:.1f}",
        f"{mean('train_seconds') / 60:.1f}",
        f"{megabytes[0]:,.0f} → {megabytes[1]:,.0f}",
        f"{mean('total_parameters'):,.0f}",
    ]
