"""The kernels that attention learned: eigenvalues of learned covariances ("Learning the Transformer Kernel").

    python recipes/papers/programs/spectra.py runs/draws/sparsity_50/*_gmm/seed* --output spectra
    python recipes/papers/programs/spectra.py runs/kernels/pretraining/posrf_gmm/seed* --output spectra
    python recipes/papers/programs/spectra.py --render --output spectra

For each layer and head, the eigenvalues of the covariance of the rows ω (`lib/spectra.py` defines it by projection), as
in the paper's Tables 4 and 9 to 12, and for each spectrum the effective rank exp(−Σ p log p), p = λ/Σλ, and the
condition number. Rows that are not learned are N(0, I): eigenvalues 1, rank d, condition 1.
Runs that differ only in the seed are one model on the page, with the spectra of all.

Folders are runs of train_lra.py (their best checkpoint), pretrain_mlm.py, finetune.py and finetune_kernel.py, the
model/ or bundle/ of one, or other folders of transformers. Writes metrics.json, README.md and eigenvalues.png, which
`--render` makes again from metrics.json alone. Cost: loading; for projections without a formula (generative, inn, bbq)
2048 rows per dimension are drawn of every learned matrix, as it is and as it was at the start, a second or two each.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from papers.lib.measured_page import measured_page, page_options
from papers.lib.plots import eigenvalue_panels
from papers.lib.reports import by_model
from papers.lib.runs import load_folder
from papers.lib.spectra import ROWS_PER_DIMENSION, effective_rank, learned_sites, spectra
from snnk_cli.files import guarded
from snnk_cli.tables import grid
from snnk_cli.terminal import bar, show_table
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMapSpec

EXACT = 1e-12  # eigenvalues below this share of the largest are rounding errors


def options() -> argparse.ArgumentParser:
    """Create the parser of the options."""
    made = page_options(__doc__, None, "eigenvalues.png")
    made.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="runs or models")
    return made


def main(argv: list[str] | None = None) -> int:
    """Measure and write; return 0 if done, 2 for wrong input."""
    arguments = options().parse_args(argv)
    return guarded(lambda: work(arguments))


def work(arguments: argparse.Namespace) -> None:
    """Measure, unless only the page is wanted, and write."""
    figures = measured_page(arguments.output, arguments.render, lambda: measure(arguments.folders), render)
    draw(figures, arguments.output / "eigenvalues.png")
    show(figures)
    print(f"written: {arguments.output}")


def measure(folders: Sequence[Path]) -> dict[str, Any]:
    """Compute all figures."""
    faults = [f"{folder} is not a folder; expected a run or a model" for folder in folders if not folder.is_dir()]
    if not folders:
        faults = ["no folder was given; expected runs or models, or --render for what is already in --output"]
    if faults:
        raise ConfigError(faults)
    named = dict(zip(names(folders), folders, strict=True))
    return {
        "models": [{"model": name, "layers": layers(folder)} for name, folder in bar(list(named.items()), "models")],
        "rows_per_dimension": ROWS_PER_DIMENSION,
    }


def names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest distinct endings of the paths; the same folder must not be given twice."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise ConfigError("a folder was given twice; expected different ones")
    count = next(n for n in range(1, max(map(len, parts)) + 1) if len({own[-n:] for own in parts}) == len(parts))
    return ["/".join(own[-count:]) for own in parts]


def layers(folder: Path) -> list[dict[str, Any]]:
    """Return the learned maps of a model by layer, in its order."""
    sites = learned_sites(load_folder(folder))
    places = {site: place(site) for site in sites}
    if len(set(places.values())) < len(places):
        places = {site: site for site in sites}  # several stacks of layers, or adapters
    return [
        {
            "site": site,
            "layer": places[site],
            "map": f"{spec.component}-{spec.projection}",
            "rows": spec.num_features,
            "dimension": spec.dim,
            # The same draws before learning: rows N(0, I).
            "identity": [figures_of(found) for found in spectra([FeatureMapSpec.of(each).build() for each in maps])],
            "heads": [figures_of(found) for found in spectra(maps)],
        }
        for site, maps in sites.items()
        for spec in [FeatureMapSpec.of(maps[0])]
    ]


def place(site: str) -> str:
    """Return "layer 2" for a module name with the first number 1, as papers count, and any distinguishing suffix."""
    number = next((int(part) + 1 for part in site.split(".") if part.isdecimal()), 1)
    end = re.search(r"(?:\.terms\.(\d+))?(\.key_maps)?$", site)
    assert end is not None  # it matches the empty end
    term = "" if end[1] is None else f", term {int(end[1]) + 1}"
    return f"layer {number}{term}{', keys' if end[2] else ''}"


def figures_of(head: torch.Tensor) -> dict[str, Any]:
    """Return all figures of the spectra ([components,] d) of a head."""
    found = head.reshape(-1, head.shape[-1])
    found = torch.where(found > EXACT * found[:, :1], found, 0)
    return {
        "eigenvalues": found.tolist(),
        "minimum": float(found.min()),
        "maximum": float(found.max()),
        "mean": float(found.mean()),
        "effective_rank": effective_rank(found).tolist(),
        # None means infinite, for a singular matrix.
        "condition": [None if low == 0 else high / low for high, low in found[:, [0, -1]].tolist()],
    }


def seeds_of(figures: dict[str, Any]) -> dict[str, list[list[dict[str, Any]]]]:
    """Return the layers of each model, once per seed."""
    return by_model({model["model"]: model["layers"] for model in figures["models"]})


def draw(figures: dict[str, Any], file: Path) -> None:
    """Plot all spectra, one panel per layer."""
    rows: dict[str, dict[str, list[list[float]]]] = {}
    for name, models in seeds_of(figures).items():
        rows[name] = {}
        for layer in (layer for layers in models for layer in layers):
            found = [values for head in layer["heads"] for values in head["eigenvalues"]]
            rows[name].setdefault(layer["layer"], []).extend(found)
    eigenvalue_panels(rows, file, "eigenvalues of learned covariances, by layer and head (dashed: nothing learned)")


def line(heads: Sequence[dict[str, Any]]) -> list[str]:
    """Format minimum, maximum, mean, effective rank (mean) and condition (median) over heads and components."""
    means = [head["mean"] for head in heads]
    ranks = [rank for head in heads for rank in head["effective_rank"]]
    conditions = sorted(math.inf if value is None else value for head in heads for value in head["condition"])
    condition = statistics.median_high(conditions)
    return [
        f"{min(head['minimum'] for head in heads):.3g}",
        f"{max(head['maximum'] for head in heads):.3g}",
        f"{statistics.mean(means):.3g}",
        f"{statistics.mean(ranks):.1f}",
        "∞" if math.isinf(condition) else f"{condition:,.1f}",
    ]


COLUMNS = ["minimum", "maximum", "mean", "effective rank", "condition"]


def summary(figures: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines: each model over all layers and heads, and the same draws before training."""
    lines = []
    for name, models in seeds_of(figures).items():
        layers = [layer for one in models for layer in one]
        maps = ", ".join(dict.fromkeys(layer["map"] for layer in layers))
        sizes = "/".join(map(str, sorted({layer["dimension"] for layer in layers})))
        for learned, key in (("learned", "heads"), ("as drawn", "identity")):
            found = [head for layer in layers for head in layer[key]]
            lines.append([name, str(len(models)), maps, sizes, learned, *line(found)])
    lines.append(["N(0, I)", "", "", "d", "", "1", "1", "1", "d", "1.0"])
    return ["model", "seeds", "map", "d", "rows", *COLUMNS], lines


def render(figures: dict[str, Any]) -> str:
    """Render the Markdown page."""
    error = 2 / figures["rows_per_dimension"] ** 0.5
    lines = [
        "# Eigenvalues of learned covariances",
        "",
        "Rendered by `papers/programs/spectra.py` from metrics.json beside this page; its docstring says what is",
        "measured. Over seeds, heads and components of mixtures: the extremes and the mean of the eigenvalues, the",
        "mean of the effective ranks, the median of the condition numbers. “as drawn” are the same matrices before",
        f"they learned. Where a projection has no formula, rows are drawn, by which eigenvalues of N(0, I) spread by "
        f"±{error:.0%};",
        "those of free rows are of the rows as they are, about (1 ± √(d/m))² at the start.",
        "",
        *grid(*summary(figures)),
        "",
        "![eigenvalues by layer](eigenvalues.png)",
    ]
    for name, (layers, *others) in seeds_of(figures).items():
        rows = [
            [layer["layer"], "all" if len(layer["heads"]) == 1 else str(number), *line([head])]
            for layer in layers
            for number, head in enumerate(layer["heads"], start=1)
        ]
        lines += ["", f"## {name}", ""]
        if others:
            lines += ["Of the first seed; metrics.json has all.", ""]
        lines += grid(["layer", "head", *COLUMNS], rows)
    return "\n".join([*lines, ""])


def show(figures: dict[str, Any]) -> None:
    """Print the summary."""
    show_table("eigenvalues of learned covariances", *summary(figures), text=["model", "map", "rows"])


if __name__ == "__main__":
    sys.exit(main())
