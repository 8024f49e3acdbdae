"""The page on GLUE dev scores.

The reports of the study glue_rates are stored in glue_rates.jsonl next to OUT; the page shows the rates tried.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from papers.lib.plots import score_rows
from papers.lib.reports import Rates, Table, collect
from papers.lib.reports import rates as tried_rates
from snnk_cli.tables import grid, mean_in_words, spread

ROOT = Path(__file__).resolve().parents[3]
# Scores of a constant answer on the official dev sets: the most frequent class (RTE 146 of 277, MRPC 279 of 408 with
# its F1, SST-2 444 of 872), or a correlation of 0.
CONSTANT = {"rte": 0.5271, "mrpc": 0.7480, "stsb": 0.0, "cola": 0.0, "sst2": 0.5092}
# A run is on the plateau if it covered at most this share of the distance from there to the best run of its task.
NEAR = 0.25
# The baseline that the others are compared with.
PEER = "lora_r8"
# Descriptions of the methods of the study glue and of recipes/papers/peers, in the order of the table.
NAMES = {
    "rows7_query_value_norms": "learned rows beside queries and values, and norms",
    "rows7_informed_norms": "learned rows that one labelled pass made, and norms",
    "rows6_informed_norms": "six learned rows that one labelled pass made, and norms",
    "rows6_fitted_head": "six such rows and norms behind a head that was fitted in closed form",
    "rows6_wide_head": "six learned rows and norms behind a head over all layers that was fitted in closed form",
    "wide_head": "that head alone, without a step of training",
    "rows12_wide_head_cut3": "twelve such rows in the upper half of the layers, behind such a head; the rest runs once",
    "rows8_upper_norms": "learned rows and norms in all layers but the first",
    "rows8_upper_informed_norms": "learned rows that one labelled pass made, and norms, in all layers but the first",
    "rows8_upper_fitted_head": "learned rows and norms in all layers but the first, behind such a head",
    "rows16_parallel": "learned rows beside the FFN",
    "snnk_relu16": "random features behind attention and FFN",
    "snnk_informed16": "the same, rows from one labelled pass",
    "lora_r8": "LoRA",
    "lora_r8_fitted_head": "LoRA behind a head that was fitted in closed form",
    "lora_r8_wide_head": "LoRA behind a head over all layers that was fitted in closed form",
    "lora_r8_norms": "LoRA and norms",
    "dora_r8": "DoRA",
    "ia3": "(IA)³",
    "vera_r256": "VeRA",
    "boft_b16": "BOFT with one butterfly factor (orthogonal blocks of 16)",
    "adapters_seq_bn": "AdapterHub's bottleneck behind the FFN (recipes/papers/peers/adapters_glue.py)",
    "adapters_double_seq_bn": "AdapterHub's bottlenecks behind attention and FFN (the same program)",
    "norms_biases": "norms and biases alone",
    "full": "all weights",
    "linear_probe": "linear probe",
    "pooler_cos": "random-feature pooler over the mean",
    "pooler_dense": "trained pooler over the mean",
    "pooler_cos_first": "random-feature pooler over [CLS]",
    "pooler_dense_first": "trained pooler over [CLS]",
}


FURTHER = {"rates": (ROOT / "runs/glue_rates", "folder of the study glue_rates")}


def store(out: Path, rates: Path) -> None:
    """Store the reports of the learning rates tried."""
    collect(rates, tuned(out))


def tuned(out: Path) -> Path:
    """Return the study of the rates shown here."""
    return out.resolve().parent / "glue_rates"


def page(table: Table, out: Path, rates: Path) -> tuple[str, list[str]]:
    """Return the page, and the names of the figures drawn next to it."""
    table = in_order(table)
    scores = {
        task: {method: spread(reports, "score") for method, reports in row.items()} for task, row in table.items()
    }
    score_rows(scores, out / "scores.png", "GLUE dev scores")
    return render(table, tried_rates(tuned(out))), ["scores.png"]


def in_order(table: Table) -> Table:
    """Return tasks and methods in a fixed order."""
    tasks = sorted(table, key=lambda task: max(r["examples"]["train"] for rs in table[task].values() for r in rs))
    return {task: {method: table[task][method] for method in sorted(table[task], key=rank)} for task in tasks}


def on_plateau(task: str, score: float, row: Mapping[str, list[dict[str, Any]]]) -> bool:
    """Return True if a run stayed at or near the score of a constant answer."""
    if task not in CONSTANT:
        return False
    best = max(report["score"] for cell in row.values() for report in cell)
    return score - CONSTANT[task] <= NEAR * (best - CONSTANT[task])


def seeds(table: Table) -> list[list[str]]:
    """Return a row per method and task: the score of every seed, with "*" for those on the plateau."""
    rows = []
    for method in sorted({method for row in table.values() for method in row}, key=rank):
        cells = []
        for task, row in table.items():
            scores = [report["score"] for report in row.get(method, [])]
            texts = [f"{100 * score:.1f}{'*' if on_plateau(task, score, row) else ''}" for score in scores]
            cells.append(", ".join(texts) or "–")
        rows.append([method, *cells])
    return rows


def rank(method: str) -> tuple[int, str]:
    """Return a sort key: known methods first, in the order of NAMES."""
    names = list(NAMES)
    return (names.index(method) if method in NAMES else len(names), method)


def differences(table: Table) -> list[list[str]]:
    """Return a row per method other than LoRA: mean difference to LoRA with the same seed, ± standard error."""
    rows = []
    for method in sorted({method for row in table.values() for method in row} - {PEER}, key=rank):
        pairs = [_pairs(row, method) for row in table.values()]
        if not any(pairs):
            continue
        average = f"{100 * statistics.mean(map(statistics.mean, pairs)):+.1f}" if all(pairs) else "–"
        rows.append([method, *(with_error(found, "+.1f") if found else "–" for found in pairs), average])
    return rows


def _pairs(row: Mapping[str, list[dict[str, Any]]], method: str) -> list[float]:
    """Return score minus LoRA's, for all seeds that both have."""
    mine, peer = ({report["seed"]: report["score"] for report in row.get(name, [])} for name in (method, PEER))
    return [mine[seed] - peer[seed] for seed in sorted(mine.keys() & peer.keys())]


def with_error(values: list[float], form: str = ".1f") -> str:
    """Format mean ± standard error (number) of `values`, in percent."""
    told = mean_in_words([100 * value for value in values], form, ".1f")
    return told + (f" ({len(values)})" if len(values) > 1 else "")


def tuning(tried: Rates) -> list[list[str]]:
    """Return a row per method: its rates with the mean scores on held-back rows, the best in bold."""
    rows = []
    for method in sorted(tried, key=rank):
        means = {rate: statistics.mean(scores.values()) for rate, scores in sorted(tried[method].items())}
        best = max(means, key=lambda rate: means[rate])
        texts = [f"{rate:g}: {100 * mean:.1f}" for rate, mean in means.items()]
        marked = [f"**{text}**" if rate == best else text for rate, text in zip(means, texts, strict=True)]
        rows.append([method, ", ".join(marked)])
    return rows


def render(table: Table, tried: Rates) -> str:
    """Render the Markdown page."""
    tasks = list(table)
    methods = sorted({method for row in table.values() for method in row}, key=rank)
    reports = [report for row in table.values() for cell in row.values() for report in cell]
    models = ", ".join(sorted({report["config"]["model"]["name_or_path"] for report in reports}))

    def cell(task: str, method: str) -> str:
        found = table[task].get(method)
        return with_error([report["score"] for report in found]) if found else "–"

    # Averages over different tasks are not comparable, so only methods that ran all tasks have one.
    def average(method: str) -> str:
        if any(method not in row for row in table.values()):
            return "–"
        return f"{100 * statistics.mean(spread(row[method], 'score')[0] for row in table.values()):.1f}"

    def size(method: str) -> str:
        counts = {report["trainable_parameters"] for row in table.values() for report in row.get(method, [])}
        return f"{min(counts):,}" + (f" to {max(counts):,}" if len(counts) > 1 else "")

    def pace(task: str, method: str) -> str:
        found = table[task].get(method)
        return f"{min(report['processor_seconds_per_epoch'] for report in found):.0f}" if found else "–"

    rows = [[method, *(cell(task, method) for task in tasks), average(method), size(method)] for method in methods]
    times = [[method, *(pace(task, method) for task in tasks)] for method in methods]
    sizes = ["training examples", *(f"{_train(table[task]):,}" for task in tasks), "", ""]
    constants = ", ".join(f"{task} {100 * CONSTANT[task]:.1f}" for task in tasks if task in CONSTANT)
    devices = ", ".join(
        sorted(
            {
                f"{r['environment'].get('gpu') or r['device']} ({r['environment']['torch_threads']} threads)"
                for r in reports
            }
        )
    )
    lines = [
        f"# GLUE dev scores ({models})",
        "",
        "Rendered by `study.py page` from the `.jsonl` beside this folder; every line holds the settings",
        "and the environment of its run. Scores in percent: accuracy (RTE, SST-2), mean of accuracy and F1 (MRPC),",
        "mean of Pearson and Spearman (STS-B), Matthews (CoLA). The epoch is chosen on a tenth of the training rows,",
        "which is held back; the dev set is scored once. Mean ± standard error (number of seeds). The average is",
        "that of methods that ran all tasks here.",
        "",
        *grid(["method", *tasks, "average", "trained parameters"], [*rows, sizes]),
        "",
        *(f"- {method}: {NAMES[method]}" for method in methods if method in NAMES),
        "",
        "Every seed. A star says that the run stayed on the plateau where it began: from the score of a constant",
        f"answer ({constants}) it has gone at most {NEAR:.0%} of the way",
        "to the best run of the task.",
        "",
        *grid(["method", *tasks], seeds(table)),
        "",
        "Differences to LoRA with the same seed, mean ± standard error (number of pairs):",
        "",
        *grid(["method", *tasks, "average"], differences(table)),
        "",
        f"Processor seconds per epoch of training on {devices}, the quickest seed; steps are compared side by side",
        "by `recipes/benchmarks/adapter_step.py`:",
        "",
        *grid(["method", *tasks], times),
        "",
    ]
    if tried:
        tuned = sorted({task for scores in tried.values() for found in scores.values() for task in found})
        lines += [
            f"Learning rates (`study.py run glue_rates` on {' and '.join(tuned)}, a seed of its own; mean scores on",
            "held-back training rows). Methods that are not listed have the rate of the settings files:",
            "",
            *grid(["method", "rate: score"], tuning(tried)),
            "",
        ]
    return "\n".join([*lines, "![scores](scores.png)", ""])


def _train(row: dict[str, list[dict[str, Any]]]) -> int:
    return max(report["examples"]["train"] for cell in row.values() for report in cell)
