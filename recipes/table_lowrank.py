"""Render the page of low-rank training from the runs' metrics.json files, and keep those files next to it.

    python recipes/table_lowrank.py                                  (runs/lowrank -> model_cards/lowrank)
    python recipes/table_lowrank.py --runs path/to/sweep --out path/to/folder

Copies RUNS/<task>/<method>/seed<k>/metrics.json to OUT/<task>/<method>/seed<k>.json, then writes OUT/README.md and a
figure per task, OUT/<task>.png, from all files in OUT. Without runs, the page is rendered from the stored files alone.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from _lib import tables
from _lib.tables import Table, collect, grid, read_reports, spread, standard_error

DENSE, WEIGHT, FROBENIUS = "dense", "weight decay", "Frobenius decay"
Report = dict[str, Any]
# initialisation -> (rank scale, which decay) -> one report per seed
Cells = dict[str, dict[tuple[float, str], list[Report]]]


def main(argv: list[str] | None = None) -> int:
    """Read the command line; 0 done, 2 nothing to render."""
    return tables.main(__doc__, "lowrank", write, argv)


def write(runs: Path, out: Path) -> None:
    """Copy the reports, then render page and figures."""
    from _lib.files import write_text
    from _lib.plots import score_panels

    copied = collect(runs, out)
    table = read_reports(out, "recipes/sweep_lowrank.py")
    write_text(out / "README.md", render(table))
    for task, row in table.items():
        cells = arranged(row)
        panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
        for init, by_place in cells.items():
            for (scale, decay), reports in by_place.items():
                if init != DENSE:
                    panels.setdefault(decay, {}).setdefault(init, []).append((scale, *error(reports)))
        level = error(row[DENSE]) if DENSE in row else None
        panels = panels or {"": {}}  # the dense network alone
        score_panels(panels, out / f"{task}.png", f"{task}, trained from scratch", "rank scale", "test accuracy", level)
    print(
        f"{copied} new or changed reports; wrote {out / 'README.md'} and {', '.join(f'{task}.png' for task in table)}"
    )


def arranged(row: dict[str, list[Report]]) -> Cells:
    """The reports of a task by initialisation, rank scale and decay, as their settings say."""
    found: Cells = {}
    for report in (report for reports in row.values() for report in reports):
        part = report["config"]["method"]["low_rank"]
        place = (1.0, WEIGHT) if part is None else (part["rank_scale"], decay_of(part))
        found.setdefault(DENSE if part is None else part["init"], {}).setdefault(place, []).append(report)
    return found


def decay_of(part: dict[str, Any]) -> str:
    """What the factors of these settings had."""
    return FROBENIUS if part.get("frobenius_decay") else WEIGHT


def error(reports: list[Report]) -> tuple[float, float]:
    """Mean accuracy over seeds, and its standard error (0 for a single seed)."""
    return standard_error(reports, "score")


def render(table: Table) -> str:
    """The Markdown page: a section per task."""
    lines = [
        "# Low-rank networks, trained from scratch",
        "",
        "Rendered by `recipes/table_lowrank.py` from the JSON files beside this page, each of which holds the settings",
        "and the environment of its run. Accuracy on the test pictures in percent after the last epoch: mean ±",
        "standard error over seeds. `baseline` draws the factors; the other starts come from a dense network of random",
        "weights.",
    ]
    for task, row in table.items():
        lines += ["", *section(task, row)]
    return "\n".join([*lines, ""])


def section(task: str, row: dict[str, list[Report]]) -> list[str]:
    """Of one task: what was run, and a column per rank scale and decay."""
    cells = arranged(row)
    reports = [report for found in row.values() for report in found]
    places = sorted({place for init, found in cells.items() if init != DENSE for place in found})
    header = ["initialisation", *(f"{scale:g}, {decay}" for scale, decay in places), "s to initialise"]
    body = []
    for init, found in cells.items():
        if init == DENSE:
            continue
        every = [report for cell in found.values() for report in cell]
        seconds = f"{max(report['init_seconds'] for report in every):.2g}"
        body.append([init, *(_cell(found[place]) if place in found else "" for place in places), seconds])
    counts = [
        "parameters",
        *(_parameters([found[place] for found in cells.values() if place in found]) for place in places),
        "",
    ]
    dense = row.get(DENSE)
    return [
        f"## {task}",
        "",
        *_size(reports),
        "",
        *(
            []
            if dense is None
            else [f"The dense network: {_cell(dense)} ({dense[0]['total_parameters']:,} parameters).", ""]
        ),
        *grid(header, [*body, counts]),
        "",
        f"![accuracy against rank scale]({task}.png)",
    ]


def _size(reports: list[Report]) -> list[str]:
    """How large the runs were, and what follows for a reader."""

    def values(name: str) -> str:
        found = {
            "train": lambda r: f"{r['examples']['train']:,}",
            "test": lambda r: f"{r['examples']['test']:,}",
            "epochs": lambda r: f"{r['config']['train']['epochs']}",
            "model": lambda r: f"`{r['config']['model']['name_or_path']}`",
            "device": lambda r: f"{r['device']} ({r['environment']['torch_threads']} threads)",
        }[name]
        return " / ".join(sorted({found(report) for report in reports}))

    seeds = {report["seed"] for report in reports}
    test = min(report["examples"]["test"] for report in reports)
    mean = spread(reports, "score")[0]
    few = 100 * math.sqrt(mean * (1 - mean) / test)
    return [
        f"Model {values('model')}; {values('train')} pictures to train on for {values('epochs')} epochs,",
        f"{values('test')} to test; {len(reports)} runs with {len(seeds)} seeds on {values('device')}. All runs are",
        f"scored on the same test pictures, whose choice alone moves an accuracy by {few:.1f} points (one standard",
        "error); differences below two standard errors of the seeds say nothing.",
    ]


def _cell(reports: list[Report]) -> str:
    mean, deviation = error(reports)
    return f"{100 * mean:.1f}" + (f" ± {100 * deviation:.1f} ({len(reports)})" if len(reports) > 1 else "")


def _parameters(cells: list[list[Report]]) -> str:
    return " / ".join(sorted({f"{report['total_parameters']:,}" for cell in cells for report in cell}))


if __name__ == "__main__":
    sys.exit(main())
