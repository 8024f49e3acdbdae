"""The page on pretraining and fine-tuning with learned kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from papers.lib.reports import Table
from papers.lib.study import PRETRAINING
from snnk_cli.tables import grid, mean_in_words, spread

# Task -> the metrics that the paper prints for it, under our names.
METRICS = {"mrpc": ("accuracy", "f1"), "rte": ("accuracy",), "cola": ("matthews_correlation",)}
METRICS["stsb"] = ("pearson", "spearmanr")
# Learning the Transformer Kernel, Table 3: MRPC, RTE, CoLA (STS-B is not in it).
PAPER = {
    "Softmax Trans.": ("70/82", "60", "18"),
    "GMM-PRF": ("71/82", "59", "21"),
    "FASTFOOD-PRF": ("71/82", "58", "12"),
    "GENERATIVE-PRF": ("71/82", "55", "10"),
    "GMM-RKS": ("70/82", "57", "7"),
    "FASTFOOD-RKS": ("71/82", "56", "13"),
    "GENERATIVE-RKS": ("70/82", "58", "16"),
}


def page(table: Table, out: Path) -> tuple[str, list[str]]:
    """Return the page, and the names of the figures drawn next to it."""
    return render(table), []


def render(table: Table) -> str:
    """Render the page: pretraining runs, and fine-tuning runs from them."""
    before = table.get(PRETRAINING, {})
    tasks = [task for task in METRICS if task in table]
    lines = [
        "# *Learning the Transformer Kernel*, Table 3, at our scale",
        "",
        "Rendered by `study.py page kernels` from the `.jsonl` beside this folder, which `study.py run kernels`",
        "wrote; every line holds settings and environment of its run. Mean ± standard error (number of seeds), in",
        "percent.",
    ]
    if before:
        lines += ["", "## Pretraining by hidden word pieces", "", *described(before), ""]
        lines += [
            '"Without context" is the loss of guessing by how often pieces occur: where a pretraining has come little',
            "below it, its attention has learned little that a task could use.",
            "",
        ]
        header = [
            "attention",
            "masked accuracy",
            "held-out loss, nats",
            "without context",
            "steps",
            "CPU s per step",
            "parameters",
        ]
        lines += grid(header, [_pretrained(name, before[name]) for name in sorted(before)])
    if tasks:
        methods = sorted({method for task in tasks for method in table[task]})
        rows = [[method, *(_cell(table[task].get(method), task) for task in tasks)] for method in methods]
        printed = dict(zip(METRICS, zip(*PAPER.values(), strict=True), strict=False))
        for row, name in enumerate(PAPER):
            rows.append([f"*the paper's {name}*", *(f"*{printed[t][row]}*" if t in printed else "–" for t in tasks)])
        header = ["attention", *(f"{task} ({', '.join(METRICS[task])})" for task in tasks)]
        lines += [
            "",
            "## GLUE, official dev sets, all weights fine-tuned",
            "",
            "All fine-tunings of a method start from its first pretraining, so that errors are those of fine-tuning",
            "alone. The dev set is scored once, behind the last epoch. The rows in italics are the paper's figures",
            "(Table 3): WikiText-103 for five epochs, 512 tokens, heads 64 wide, fine-tuned for ten epochs with the",
            "best of five rates; its PRF estimate the Gaussian kernel, posrf that of softmax. They are a frame, and no",
            "target of runs as short as these.",
            "",
            *grid(header, rows),
            "",
            *(line for task in tasks for line in _settings(task, table[task])),
        ]
    return "\n".join(lines).rstrip() + "\n"


def described(row: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Describe the text and length of the pretraining runs; warn if they differ."""
    found = set()
    for report in (report for reports in row.values() for report in reports):
        config, budget = report["config"], report["config"]["train"]["max_cpu_minutes"]
        limit = f"{config['train']['steps']:,} steps" if budget is None else f"{budget:g} CPU minutes"
        sizes = config["model"]
        found.add(
            f"{report['task']}, {report['tokens']['train']:,} tokens in windows of {config['data']['max_length']}, "
            f"{report['vocabulary']:,} word pieces; {sizes['layers']} layers, {sizes['heads']} heads, "
            f"{sizes['dim']} wide; at most {limit}, batch {config['train']['batch_size']}, "
            f"{report['environment']['torch_threads']} thread(s)."
        )
    return [*sorted(found), *(["**The runs differ: compare with care.**"] if len(found) > 1 else [])]


def with_error(reports: list[dict[str, Any]], key: str, factor: float = 100.0, form: str = ".1f") -> str:
    """Format the mean and, for several seeds, the standard error, in percent unless `factor` says otherwise."""
    return mean_in_words([factor * report[key] for report in reports], form)


def _pretrained(name: str, reports: list[dict[str, Any]]) -> list[str]:
    return [
        name,
        f"{with_error(reports, 'masked_accuracy')} ({len(reports)})",
        with_error(reports, "loss", 1.0, ".3f"),
        f"{spread(reports, 'loss_without_context')[0]:.3f}",
        f"{spread(reports, 'steps')[0]:,.0f}",
        f"{spread(reports, 'cpu_seconds_per_step')[0]:.3f}",
        f"{reports[0]['total_parameters']:,}",
    ]


def _cell(reports: list[dict[str, Any]] | None, task: str) -> str:
    if not reports:
        return "–"
    metrics = [report["metrics"] for report in reports]
    return " / ".join(with_error(metrics, name) for name in METRICS[task]) + f" ({len(reports)})"


def _settings(task: str, row: dict[str, list[dict[str, Any]]]) -> list[str]:
    reports = [report for cell in row.values() for report in cell]
    found = {
        f"{report['examples']['train']:,} examples of up to {report['config']['data']['max_length']} tokens, "
        f"{report['config']['train']['epochs']} epochs, rate {report['config']['train']['learning_rate']:g}"
        for report in reports
    }
    seconds = [report["processor_seconds_per_epoch"] for report in reports]
    return [f"- {task}: {' or '.join(sorted(found))}; {min(seconds):.0f} to {max(seconds):.0f} CPU seconds per epoch"]
