"""The page on uptraining and poolers on GLUE."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

from papers.lib.plots import score_panels
from papers.lib.reports import Table
from snnk_cli.tables import grid, mean_and_error, mean_in_words

# Task -> the metric of the paper's tables.
METRICS = {"rte": "accuracy", "mrpc": "f1", "stsb": "spearmanr", "cola": "matthews_correlation"}
# Scores of a constant answer on the official dev sets: the most frequent class of RTE (146 of 277), the F1 of
# "paraphrase" everywhere (279 of 408), correlations of 0.
CONSTANT = {"rte": 100 * 146 / 277, "mrpc": 100 * 2 * 279 / (279 + 408), "stsb": 0.0, "cola": 0.0}
# In the paper: BERT-base, 5 to 20 epochs, five seeds, the dev set. Row -> (where, scores in the order of METRICS).
PAPER = {
    "pooler, dense (their baseline)": ("Table 1", 57.5, 81.5, 78.1, 29.4),
    "pooler, cosine features": ("Table 1", 61.36, 82.07, 78.93, 35.81),
    "pooler, tanh by brute force": ("Table 3", 52.08, 68.71, 63.49, 20.72),
    "linear probe": ("Table 5", 57.76, 81.23, 69.87, 35.41),
    "pooler and head trained bundled": ("Table 5", 60.01, 81.48, 71.84, 32.79),
    "adapter, cosine features": ("Table 4", 64.77, 85.06, 88.57, 52.12),
    "adapter, ReLU features": ("Table 1", 69.68, 91.26, 88.81, 58.21),
}
# Table 6: upper FFNs replaced -> millions of parameters, in training and for inference, as printed.
PRINTED = {0: (110, 110), 1: (107, 104), 2: (100, 97), 3: (93, 90), 4: (86, 83), 5: (79, 76), 6: (72, 69)}
BERT_BASE = (109_483_778, 768, 3072)  # parameters with a head of two classes, width, hidden units
UPTRAINED = re.compile(r"top(\d+)_(m\d+_\w+)")
FULL = "full"


def page(table: Table, out: Path) -> tuple[str, list[str]]:
    """Return the page, and the names of the figures drawn next to it."""
    panels = {task: curves(task, row) for task, row in table.items()}
    labels = ("upper FFNs replaced", "score above that of full training, points")
    score_panels(panels, out / "layers.png", "Uptraining with SNNK layers, GLUE dev sets", *labels)
    return render(table), ["layers.png"]


def percent(task: str, report: dict[str, Any]) -> float:
    """Return the paper's metric of the task, in percent."""
    return 100 * float(report["metrics"][METRICS[task]])


def in_words(values: list[float], form: str = ".1f") -> str:
    """Format mean ± standard error (number)."""
    return mean_in_words(values, form, ".1f") + (f" ({len(values)})" if len(values) > 1 else "")


def differences(task: str, row: dict[str, list[dict[str, Any]]], method: str) -> list[float]:
    """Return scores minus those of full training with the same seeds, in points."""
    full = {report["seed"]: percent(task, report) for report in row.get(FULL, [])}
    return [percent(task, r) - full[r["seed"]] for r in row.get(method, []) if r["seed"] in full]


def curves(task: str, row: dict[str, list[dict[str, Any]]]) -> dict[str, list[tuple[float, float, float]]]:
    """Return start and features -> (layers replaced, mean difference from full training, standard error)."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for method in row:
        if (match := UPTRAINED.fullmatch(method)) and (pairs := differences(task, row, method)):
            found.setdefault(match[2], [(0, 0.0, 0.0)]).append((int(match[1]), *mean_and_error(pairs)))
    return found or {FULL: [(0, 0.0, 0.0)]}


def place(method: str) -> tuple[int, int, str]:
    """Return a sort key of rows: full training, one replaced layer, two, ..., then the frozen ones."""
    match = UPTRAINED.fullmatch(method)
    return (0, 0, "") if method == FULL else (1, int(match[1]), method) if match else (2, 0, method)


def render(table: Table) -> str:
    """Render the page: scores and sizes, the cost of replacing more layers, and the paper's figures."""
    tasks = [task for task in METRICS if task in table]
    methods = sorted({method for task in tasks for method in table[task]}, key=place)
    rows = []
    for method in methods:
        cells = [[percent(task, report) for report in table[task].get(method, [])] for task in tasks]
        reports = [report for task in tasks for report in table[task].get(method, [])]
        seconds = max(report["processor_seconds_per_epoch"] * report["epochs"] for report in reports)
        rows.append([method, *(in_words(cell) if cell else "–" for cell in cells), *sizes(reports), f"{seconds:.0f}"])
    rows.append(["the same answer to all", *(f"{CONSTANT[task]:.1f}" for task in tasks), "–", "–", "–", "–"])
    every = [report for task in tasks for row in table[task].values() for report in row]
    models = ", ".join(sorted({f"`{report['config']['model']['name_or_path']}`" for report in every}))
    epochs = " or ".join(sorted({f"{report['epochs']:g}" for report in every}))
    examples = ", ".join(f"{task} {_examples(table, task)}" for task in tasks)
    devices = ", ".join(sorted({f"{r['device']} ({r['environment']['torch_threads']} threads)" for r in every}))
    names = ", ".join(f"{METRICS[task]} ({task})" for task in tasks)
    lines = [
        "# Uptraining and poolers of *Scalable Neural Network Kernels* at our scale",
        "",
        "Rendered by `study.py page uptraining` from the `.jsonl` beside this folder, which",
        "`study.py run uptraining` wrote and explains; every line holds settings and environment of its run.",
        f"Model {models}, epochs: {epochs}, {devices}; examples trained and scored: {examples}.",
        f"The paper's metrics in percent: {names}; mean ± standard error (number of seeds).",
        "Sizes in thousands of numbers: those that are trained, and those that the bundle stores, drawn matrices among",
        "them; products of an example of full length in the bundle, in millions. Seconds of the processor for the",
        "training of the slowest run.",
        "",
        *grid(["method", *tasks, "trained", "bundle", "products", "s"], rows),
        "",
        *by_layers(table, tasks),
        "![difference to full training over replaced layers](layers.png)",
        "",
        "## The paper's figures",
        "",
        "Printed in the paper, not measured here: BERT-base, 5 to 20 epochs, five seeds. Figure 12, uptraining, has no",
        "numbers.",
        "",
        *grid(
            ["", "where", *METRICS], [[name, cells[0], *(f"{x:g}" for x in cells[1:])] for name, cells in PAPER.items()]
        ),
        "",
        "Table 6, millions of numbers of BERT-base with 8 features: as printed, and as they are (ERRATA.md, A9), with",
        "the drawn matrices in the bundle.",
        "",
        *grid(
            ["upper FFNs replaced", "training, printed", "training", "inference, printed", "inference"],
            [
                [
                    str(layers),
                    str(printed[0]),
                    _millions(honest(layers)[0]),
                    str(printed[1]),
                    _millions(honest(layers)[1]),
                ]
                for layers, printed in PRINTED.items()
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def sizes(reports: list[dict[str, Any]]) -> list[str]:
    """Format trained parameters, and the bundle's stored ones and MACs; with the smallest head if tasks differ."""
    trained = f"{min(report['trainable_parameters'] for report in reports) / 1e3:,.1f}"
    costs = [report["cost"] for report in reports if "cost" in report]
    if not costs:
        return [trained, "–", "–"]
    stored = min(stored_numbers(cost) for cost in costs)
    return [trained, f"{stored / 1e3:,.1f}", f"{max(cost['bundle']['macs'] for cost in costs) / 1e6:,.0f}"]


def stored_numbers(cost: dict[str, dict[str, int]]) -> int:
    """Count parameters and drawn matrices of a bundle, without the original's buffers (positions)."""
    return cost["bundle"]["parameters"] + cost["bundle"]["buffers"] - cost["full"]["buffers"]


def by_layers(table: Table, tasks: list[str]) -> list[str]:
    """Return the lines on differences from full training, mean over tasks, by number of replaced layers."""
    means: dict[str, dict[int, tuple[float, float]]] = {}
    for method in {method for task in tasks for method in table[task]}:
        pairs = [differences(task, table[task], method) for task in tasks]
        if (match := UPTRAINED.fullmatch(method)) and all(pairs):
            found = [mean_and_error(values) for values in pairs]
            error = sum(error**2 for _, error in found) ** 0.5 / len(found)
            means.setdefault(match[2], {})[int(match[1])] = statistics.mean(mean for mean, _ in found), error
    if not means:
        return []
    starts = sorted(means, key=lambda start: (start.partition("_")[2], int(start[1:].partition("_")[0])))
    layers = sorted({layer for cells in means.values() for layer in cells})
    rows = [[str(layer), *(_difference(means[start].get(layer)) for start in starts)] for layer in layers]
    lines = [
        "## What each replaced FFN costs",
        "",
        "Points below (−) or above full training with the same seeds, mean over the tasks ± standard error from the",
        "seeds (none for one seed), of methods that ran all tasks here. A column is a start of the readout.",
        "",
        *grid(["upper FFNs replaced", *starts], rows),
        "",
    ]
    deep = layers[-1]
    ranked = sorted((cells[deep][0], start) for start, cells in means.items() if deep in cells)
    if len(ranked) > 1:
        (worst, last), (best, first) = ranked[0], ranked[-1]
        lines += [f"With {deep} replaced, `{first}` is best ({best:+.1f}) and `{last}` worst ({worst:+.1f}).", ""]
    return lines


def honest(layers: int, features: int = 8, sizes: tuple[int, int, int] = BERT_BASE) -> tuple[int, int]:
    """Count the parameters of an encoder with `layers` FFNs replaced: trained ones, and those stored in its bundle.

    Args:
        layers: FFNs whose expansion, W and b, became a readout A (hidden × features) and its bias.
        features: m.
        sizes: parameters of the original, its width, its hidden units.
    """
    full, width, hidden = sizes
    trained = full + layers * ((features + 1) * hidden - (width + 1) * hidden)
    # What remains of the block is W₂ A, a bias, and the drawn matrix.
    folded = full + layers * ((2 * features + 1) * width - (2 * width * hidden + width + hidden))
    return trained, folded


def _difference(cell: tuple[float, float] | None) -> str:
    return "–" if cell is None else f"{cell[0]:+.1f}" + (f" ± {cell[1]:.1f}" if cell[1] else "")


def _millions(number: int) -> str:
    return f"{number / 1e6:.1f}"


def _examples(table: Table, task: str) -> str:
    sizes = [report["examples"] for row in table[task].values() for report in row]
    most = max(sizes, key=lambda size: size["train"])
    return " / ".join(f"{count:,}" for count in most.values())
