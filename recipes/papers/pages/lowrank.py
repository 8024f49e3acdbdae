"""The page on low-rank training.

Initialisation errors come from the reports or, for older ones, from programs/low_rank_errors.py; without either, the
page has none.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from papers.lib.plots import scatter_panels, score_panels
from papers.lib.reports import Table
from papers.lib.start_errors import AXES, correlations_of, in_words, row_of
from papers.lib.start_errors import panels as error_panels
from papers.lib.verdicts import interval
from snnk_cli.files import read_json
from snnk_cli.tables import grid, mean_and_error, spread, standard_error

ROOT = Path(__file__).resolve().parents[3]
ERRORS = ROOT / "recipes/papers/programs/results/low_rank_errors/metrics.json"
DENSE, WEIGHT, FROBENIUS = "dense", "weight decay", "Frobenius decay"
Report = dict[str, Any]
# initialisation -> (rank scale, which decay) -> one report per seed
Cells = dict[str, dict[tuple[float, str], list[Report]]]


FURTHER = {"errors": (ERRORS, "metrics.json of programs/low_rank_errors.py")}


def page(table: Table, out: Path, errors: Path = ERRORS) -> tuple[str, list[str]]:
    """Return the page, and the names of the figures drawn next to it."""
    starts = {task: with_errors(row, errors) for task, row in table.items()}
    for task, row in table.items():
        if starts[task]:
            title = f"{task}: error of the start against accuracy"
            scatter_panels(error_panels(starts[task]), out / f"{task}_error.png", title, AXES)
        cells = arranged(row)
        panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
        for init, by_place in cells.items():
            for (scale, decay), reports in by_place.items():
                if init != DENSE:
                    panels.setdefault(decay, {}).setdefault(init, []).append((scale, *error(reports)))
        level = error(row[DENSE]) if DENSE in row else None
        panels = panels or {"": {}}  # only the dense network
        score_panels(panels, out / f"{task}.png", f"{task}, trained from scratch", "rank scale", "test accuracy", level)
    return render(table, starts), [f"{task}.png" for task in table]


def with_errors(row: dict[str, list[Report]], file: Path) -> list[dict[str, Any]]:
    """Return rows of `papers/lib/start_errors.py`: the runs of a task with a known initialisation error."""
    known = {}
    if file.is_file():
        known = {(each["task"], each["method"], each["seed"]): each["error"] for each in read_json(file)["rows"]}
    rows = []
    for method, reports in row.items():
        for report in reports:
            error = report.get("init_error", known.get((report.get("task"), method, report["seed"])))
            if error is not None:
                rows.append(row_of(report, method, error))
    return rows


def arranged(row: dict[str, list[Report]]) -> Cells:
    """Group the reports of a task by initialisation, rank scale and decay, from their settings."""
    found: Cells = {}
    for report in (report for reports in row.values() for report in reports):
        part = report["config"]["method"]["low_rank"]
        place = (1.0, WEIGHT) if part is None else (part["rank_scale"], decay_of(part))
        found.setdefault(DENSE if part is None else part["init"], {}).setdefault(place, []).append(report)
    return found


def decay_of(part: dict[str, Any]) -> str:
    """Return the kind of decay on the factors."""
    return FROBENIUS if part.get("frobenius_decay") else WEIGHT


def error(reports: list[Report]) -> tuple[float, float]:
    """Return mean accuracy over seeds, and its standard error (0 for a single seed)."""
    return standard_error(reports, "score")


def render(table: Table, starts: dict[str, list[dict[str, Any]]] | None = None) -> str:
    """Render the Markdown page, with a section per task."""
    lines = [
        "# Low-rank networks, trained from scratch",
        "",
        "Rendered by `study.py page lowrank` from the `.jsonl` beside this folder; every line has the settings",
        "and the environment of its run. Accuracy on the test pictures in percent after the last epoch: mean ±",
        "standard error over seeds. `baseline` draws the factors; the other starts come from a dense network of random",
        "weights.",
    ]
    for task, row in table.items():
        lines += ["", *section(task, row), *claims(row), *start_errors(task, (starts or {}).get(task, []))]
    return "\n".join([*lines, ""])


def section(task: str, row: dict[str, list[Report]]) -> list[str]:
    """Return the section of one task: its runs, and a row per initialisation and decay, a column per rank scale."""
    cells = arranged(row)
    reports = [report for found in row.values() for report in found]
    low_rank = {init: found for init, found in cells.items() if init != DENSE}
    scales = sorted({scale for found in low_rank.values() for scale, _ in found})
    header = ["initialisation", "decay", *(f"{scale:g}" for scale in scales), "s to initialise"]
    body = []
    for init, decay in sorted({(init, decay) for init, found in low_rank.items() for _, decay in found}):
        found = low_rank[init]
        seconds = max(report["init_seconds"] for cell in found.values() for report in cell)
        scores = [_cell(found[scale, decay]) if (scale, decay) in found else "" for scale in scales]
        body.append([init, decay, *scores, f"{seconds:.2g}"])
    counts = [
        "parameters",
        "",
        *(
            _parameters([cell for found in low_rank.values() for place, cell in found.items() if place[0] == scale])
            for scale in scales
        ),
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


def comparisons(row: dict[str, list[Report]]) -> list[tuple[str, list[float]]]:
    """Return the paper's claims, each with the differences that should be positive, one per seed, in points."""
    cells = arranged(row)
    scores = {
        (init, *place, report["seed"]): 100 * report["score"]
        for init, found in cells.items()
        for place, reports in found.items()
        for report in reports
    }
    scales = sorted({scale for init, scale, *_ in scores if init != DENSE})

    def compare(first: dict[str, Any], second: dict[str, Any]) -> list[float]:
        """Return the mean difference per seed over all places where both ran; the keys replace parts of a place."""
        by_seed: dict[int, list[float]] = {}
        for init, scale, decay, seed in scores:
            here = {"init": init, "scale": scale, "decay": decay}
            if any(here[name] != value for name, value in first.items()):
                continue
            other = {**here, **second}
            partner = (other["init"], other["scale"], other["decay"], seed)
            if partner in scores:
                by_seed.setdefault(seed, []).append(scores[init, scale, decay, seed] - scores[partner])
        return [statistics.mean(found) for _, found in sorted(by_seed.items())]

    asked = [
        (f"{init} above {other}", compare({"init": init}, {"init": other}))
        for init, other in (("ws_nkp", "spectral"), ("ws_nkp", "baseline"), ("function", "spectral"))
    ]
    if scales:
        smallest = {"decay": FROBENIUS, "scale": scales[0]}
        asked.append((f"Frobenius decay above weight decay at {scales[0]:g}", compare(smallest, {"decay": WEIGHT})))
    if len(scales) > 1:
        gains = [compare({"init": "ws_nkp", "scale": scale}, {"init": "spectral"}) for scale in (scales[0], scales[-1])]
        if len(gains[0]) == len(gains[1]):
            more = [small - large for small, large in zip(*gains, strict=True)]
            asked.append((f"ws_nkp gains more over spectral at {scales[0]:g} than at {scales[-1]:g}", more))
    return asked


def claims(row: dict[str, list[Report]]) -> list[str]:
    """Return the lines of the page on `comparisons`."""
    rows = [[claim, *verdict(found)] for claim, found in comparisons(row) if len(found) > 1]
    if not rows:
        return []
    return [
        "",
        "What the paper finds for its networks (5.2; `function` is our exact form of its objective), in points,",
        "differences of runs with one seed: mean ± standard error (seeds). Beyond the 95 % points of Student's t it",
        "holds, or the opposite does; else the runs do not tell.",
        "",
        *grid(["claim", "difference", "here"], rows),
    ]


def verdict(values: list[float]) -> tuple[str, str]:
    """Return the mean difference, and the verdict on the claim that it is positive."""
    _, low, high = interval(values)
    mean, error = mean_and_error(values)
    return (
        f"{mean:+.1f} ± {error:.1f} ({len(values)})",
        "holds" if low > 0 else "the opposite" if high < 0 else "not decided",
    )


def start_errors(task: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines on initialisation error against accuracy: the figure and Spearman's correlations."""
    if not rows:
        return []

    scales = sorted({row["rank_scale"] for row in rows})
    body = []
    for init in sorted({row["init"] for row in rows}):
        found = [[r["error"] for r in rows if (r["init"], r["rank_scale"]) == (init, scale)] for scale in scales]
        body.append([init, *(f"{statistics.mean(errors):.3f}" if errors else "" for errors in found)])
    return [
        "",
        "The paper's Fig. 2: a start that is nearer to the dense layers trains to a higher accuracy, so that the rank",
        "correlation is negative. Relative error of the start by rank scale, E‖f(UVᵀx) − f(Wx)‖² over E‖f(Wx)‖² for",
        "Gaussian patches x, mean over layers and seeds:",
        "",
        *grid(["initialisation", *(f"{scale:g}" for scale in scales)], body),
        "",
        "Spearman's correlation of error and accuracy, with a 95 % interval (bootstrap over runs):",
        "",
        *(f"- {name}: {in_words(value)}" for name, value in correlations_of(rows).items()),
        "",
        "Over all runs it also says that a higher rank is both nearer and more accurate. Runs of one initialisation",
        "share all that is particular to it, which no interval knows.",
        "",
        f"![error of the start against accuracy]({task}_error.png)",
    ]


def _size(reports: list[Report]) -> list[str]:
    """Describe the size of the runs, and its implications."""

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
