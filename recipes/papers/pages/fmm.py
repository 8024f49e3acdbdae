"""The page on FMMformer compared with softmax and linear attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from papers.lib.plots import score_rows
from papers.lib.reports import Table
from snnk_cli.tables import grid, mean_in_words, spread, standard_error


def page(table: Table, out: Path) -> tuple[str, list[str]]:
    """Return the page, and the names of the figures drawn next to it."""
    bars = {
        task: {name: standard_error(cell, "accuracy") for name, cell in in_order(row)} for task, row in table.items()
    }
    score_rows(bars, out / "accuracy.png", "Softmax, linear attention and FMMformer", "test accuracy")
    return render(table), ["accuracy.png"]


def fields(report: dict[str, Any]) -> tuple[int, int]:
    """Return the width of the near field and the number of maps; (0, 0) for softmax."""
    attention = report["config"]["method"]["attention"]
    if isinstance(attention, str):
        return 0, 0
    return attention.get("near_field") or 0, 1 + len(attention.get("sum_of", []))


def in_order(row: dict[str, list[dict[str, Any]]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Sort methods by near field and rank, softmax first."""
    return sorted(row.items(), key=lambda item: fields(item[1][0]))


def render(table: Table) -> str:
    """Render the page, with one table per task."""
    lines = [
        "# FMMformer beside softmax and linear attention",
        "",
        "Rendered by `study.py page fmm` from the `.jsonl` beside this folder, which `study.py run fmm` wrote;",
        "every line holds settings and environment of its run. Mean ± standard error over seeds. FMMformer (Nguyen et",
        "al. 2021) adds a near field, softmax over a band of so many tokens on each side that are seen, the token",
        "itself included, to `rank` linear attentions, with learned weights. Rank 1 is elu + 1 of queries and keys",
        "themselves, each further rank elu + 1 of as many random orthogonal projections (the paper has other functions",
        "there). A near field alone is not among the methods: the part has none without a far field. Peak memory is",
        "that of the process, libraries included: with the data loaded, before training → at the end.",
    ]
    for task, row in table.items():
        copying = task.startswith("copy")
        header = ["near field", "rank", "seeds", "accuracy %", *(["whole %"] if copying else [])]
        header += ["steps", "CPU s per step", "memory MB", "parameters"]
        lines += ["", f"## {task}", "", *(about_copying(row) if copying else about_listops(row)), ""]
        lines += grid(["attention", *header], [line(name, cell, copying) for name, cell in in_order(row)])
    return "\n".join([*lines, "", "![accuracy](accuracy.png)", ""])


def about_copying(row: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Describe the task, and state that all methods take the same steps, if they do."""
    reports = [report for cell in row.values() for report in cell]
    first = reports[0]
    data, model = first["config"]["data"], first["config"]["model"]
    symbols, n = data["symbols"], first["distance"]
    return [
        f'"0 w 0 w" with w of {n} random symbols out of {symbols}: the share of the second copy\'s tokens that are',
        "right, and of the second copies without a wrong one, on sequences that were never seen. Chance is",
        f"{100 / symbols:.0f} %. What is to be copied stands {n} tokens before the place where it is predicted: a band",
        f"of more than {n} sees it at once, and bands alone reach {model['layers']} (width − 1) back through "
        f"{model['layers']} layers.",
        f"{same_steps(reports)} of {first['config']['train']['batch_size']} sequences, and one learning rate, "
        f"{first['config']['train']['learning_rate']:g}, which was not tuned for each; the checkpoint is the best on",
        f"{first['examples']['validation']} other sequences.",
    ]


def same_steps(reports: list[dict[str, Any]]) -> str:
    """State that the steps are equal, or warn that they are not."""
    steps = sorted({report["steps"] for report in reports})
    if len(steps) == 1:
        return f"All methods have equal steps, {steps[0]:,}"
    return f"**The runs differ in their steps ({' / '.join(f'{count:,}' for count in steps)}): compare with care**, all"


def about_listops(row: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Describe the expressions, and state that all methods have the same CPU time, if they do."""
    reports = [report for cell in row.values() for report in cell]
    longest = max(report["longest_sequence"] for report in reports)
    budgets = sorted({f"{report['config']['train']['max_cpu_minutes']:g}" for report in reports})
    minutes = f"All methods have equal processor time (CPU minutes of training: {budgets[0]})"
    if len(budgets) > 1:
        minutes = f"**The runs differ in their CPU minutes ({' / '.join(budgets)}): compare with care**"
    return [
        f"Whole expressions of up to {longest} tokens, shorter than the benchmark's, in ten classes. {minutes}: a",
        "method that is quicker takes more steps.",
    ]


def line(name: str, cell: list[dict[str, Any]], copying: bool) -> list[str]:
    """Return the cells of one method."""
    (near, rank), shares = fields(cell[0]), ["accuracy", *(["whole_sequences"] if copying else [])]
    before, after = (spread(cell, key)[0] / 1e6 for key in ("peak_memory_bytes_before_training", "peak_memory_bytes"))
    return [
        name,
        "all" if rank == 0 else str(near or "none"),
        str(rank or "full"),
        str(len(cell)),
        *(mean_in_words([100 * report[key] for report in cell]) for key in shares),
        f"{spread(cell, 'steps')[0]:,.0f}",
        f"{spread(cell, 'cpu_seconds_per_step')[0]:.3g}",
        f"{before:,.0f} → {after:,.0f}",
        f"{spread(cell, 'total_parameters')[0]:,.0f}",
    ]
