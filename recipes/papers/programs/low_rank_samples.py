"""Samples needed to learn a shallow low-rank ReLU network: Algorithm 2 of the paper, and methods that beat it.

python recipes/papers/programs/low_rank_samples.py

Teachers ReLU(Wx) with He-normal W, x ~ N(0, I), no noise. Each method sees n samples and gives a network of rank r,
whose relative risk against the true W is computed exactly. Algorithm 2 as printed estimates the kernel by the samples
and projects on its eigenvectors; "kernel of the recovered W" replaces the estimate by its closed form (which the paper
rules out in Remark 8.17); the others compress the recovered W and need no kernel. W is recovered by gradient descent as
printed, in the last one by least squares, which rejects too few samples. Writes metrics.json and risk.png: the risk of
each above that of `function` applied to the true W, with the same teachers and samples for all.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from papers.lib.measured_page import too_small, write_figures
from papers.lib.shallow_network import recover_weight
from snnk_cli.lock import hold
from snnk_cli.plots import error_curves
from snnk_cli.terminal import bar, show_table
from snnk_peft.errors import ConfigError
from snnk_peft.low_rank import factorize, kernel_projection, risk

RESULTS = Path(__file__).resolve().parent / "results" / "low_rank_samples"
EXACT = "function, least squares"
METHODS = ("Algorithm 2", "kernel of the recovered W", "spectral", "function", EXACT)


def options() -> argparse.ArgumentParser:
    """Create the parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--inputs", type=int, default=32, help="inputs of the teacher (default 32)")
    made.add_argument("--outputs", type=int, default=64, help="its units (default 64)")
    made.add_argument("--rank", type=int, default=8, help="rank of the learned network (default 8)")
    counts = [64, 80, 96, 128, 192, 256, 512, 1024, 4096, 16384]
    made.add_argument("--samples", type=int, nargs="+", default=counts, help=f"numbers n (default {counts})")
    made.add_argument("--teachers", type=int, default=5, help="draws of W and of the samples (default 5)")
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of metrics.json and risk.png")
    return made


def main(argv: list[str] | None = None) -> None:
    """Run all methods and write the results."""
    arguments = options().parse_args(argv)
    hold(arguments.output)
    if faults := _faults(arguments):
        raise SystemExit(f"error: {ConfigError(faults)}")
    runs, best = [], []  # risks of all methods on all samples, and of the best factors of the true W
    for seed in bar(range(arguments.teachers), "teachers"):
        generator = torch.Generator().manual_seed(seed)
        shape = (arguments.outputs, arguments.inputs)
        weight = torch.randn(shape, generator=generator, dtype=torch.float64) * (2 / arguments.inputs) ** 0.5
        best.append(factorize(weight, arguments.rank, "function", activation="relu").relative_risk)
        for count in arguments.samples:
            x = torch.randn(count, arguments.inputs, generator=generator, dtype=torch.float64)
            runs += [{"samples": count, "least": best[-1], **row} for row in learned(x, weight, arguments.rank)]
    rows = [_summary(runs, method, count) for method in METHODS for count in arguments.samples]
    rows = [row for row in rows if row["teachers"]]
    limit = statistics.mean(best)
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    write_figures(arguments.output, {"settings": settings, "function_of_true_weight": limit, "rows": rows})
    curves = {
        method: [(row["samples"], row["excess"], row["standard_error"]) for row in rows if row["method"] == method]
        for method in dict.fromkeys(row["method"] for row in rows)
    }
    title = f"ReLU({arguments.outputs} × {arguments.inputs}) at rank {arguments.rank}, {arguments.teachers} teachers"
    labels = ("samples", f"relative risk above the least found ({limit:.3f})")
    error_curves(curves, arguments.output / "risk.png", title, labels, bottom=1e-4)
    _show(rows, limit)
    print(f"written: {arguments.output}")


def learned(x: torch.Tensor, weight: torch.Tensor, rank: int) -> list[dict[str, Any]]:
    """Return the relative risk of each method on the same samples, and the relative error of its recovered weight."""
    y = torch.relu(x @ weight.T)
    found = recover_weight(x, y, recovery="gradient_descent")
    methods = {
        "Algorithm 2": (found, *kernel_projection(found, rank, kernel=y.T @ y / len(y))),
        "kernel of the recovered W": (found, *kernel_projection(found, rank)),
        "spectral": (found, *compressed(found, rank, "spectral")),
        "function": (found, *compressed(found, rank, "function")),
    }
    with contextlib.suppress(ConfigError):  # units that are active in too few samples
        exact = recover_weight(x, y)
        methods[EXACT] = (exact, *compressed(exact, rank, "function"))
    return [
        {
            "method": method,
            "risk": risk(weight, U, V, "relu", relative=True),
            "weight_error": float((own - weight).norm() / weight.norm()),
        }
        for method, (own, U, V) in methods.items()
    ]


def compressed(weight: torch.Tensor, rank: int, init: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return U and V of an initialisation of `factorize`."""
    factors = factorize(weight, rank, init, activation="relu")
    return factors.U, factors.V


def _faults(arguments: argparse.Namespace) -> list[str]:
    full = min(arguments.inputs, arguments.outputs)
    faults = [] if 1 <= arguments.rank <= full else [f"--rank is {arguments.rank}; expected 1 to {full}, full rank"]
    return faults + too_small(arguments, samples=1, teachers=1)


def _summary(runs: list[dict[str, Any]], method: str, count: int) -> dict[str, Any]:
    """Average over the teachers; the standard error is that of the excess, which is free of the teachers' noise."""
    mine = [run for run in runs if (run["method"], run["samples"]) == (method, count)]
    if not mine:
        return {"method": method, "samples": count, "teachers": 0}
    excess = [run["risk"] - run["least"] for run in mine]
    return {
        "method": method,
        "samples": count,
        "teachers": len(mine),
        "risk": statistics.mean(run["risk"] for run in mine),
        "excess": statistics.mean(excess),
        "standard_error": statistics.stdev(excess) / len(mine) ** 0.5 if len(mine) > 1 else 0.0,
        "weight_error": statistics.mean(run["weight_error"] for run in mine),
    }


def _show(rows: list[dict[str, Any]], limit: float) -> None:
    lines = []
    for count in dict.fromkeys(row["samples"] for row in rows):
        mine = {row["method"]: row for row in rows if row["samples"] == count}
        cells = [f"{mine[m]['risk']:.4f} ± {mine[m]['standard_error']:.4f}" if m in mine else "-" for m in METHODS]
        lines.append([str(count), f"{mine[METHODS[0]]['weight_error']:.1e}", *cells])
    title = f"Relative risk (± standard error of its excess); `function` of the true W: {limit:.4f}"
    show_table(title, ["samples", "‖Ŵ − W‖/‖W‖", *METHODS], lines)


if __name__ == "__main__":
    main()
