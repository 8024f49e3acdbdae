"""Errors of one output of a layer estimated by random features: Fig. 2 (g, h) of "Scalable Neural Network Kernels".

python recipes/papers/programs/pointwise.py

One output of a layer with d = 2000 inputs, entries of w and x from Unif(0, 1)/√d: (g) a sine layer sin(w·x + 0.5), by
universal random features (`urf`); (h) the arc-cosine layer ½ K₁(w, x), by ReLU features. Each feature map is drawn 500
times. Writes metrics.json and error.png: the mean relative error of one draw and its standard deviation over the number
of random projections, and the error of the mean of all draws, by which to judge an unbiased estimate.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from papers.lib.measured_page import too_small, write_figures
from snnk_cli.lock import hold
from snnk_cli.plots import error_curves
from snnk_cli.terminal import bar, show_table
from snnk_peft import build_feature_map
from snnk_peft.errors import ConfigError

RESULTS = Path(__file__).resolve().parent / "results" / "pointwise"
SINE, ARC_COSINE = "sine layer, urf", "arc-cosine layer, relu"
BIAS = 0.5
NORM = 3**-0.5  # norm of a vector with entries from Unif(0, 1)/√d, for large d
# Component, its arguments, and those of its second tower. The sine is one atom of frequency 1, without a fit.
LAYERS: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    SINE: (
        "urf",
        {"activation": "sin", "radius": 2 * torch.pi / 3, "atoms": 1, "x_norm": NORM, "w_norm": NORM},
        {"bias": torch.tensor(BIAS)},
    ),
    ARC_COSINE: ("relu", {}, {}),
}


def options() -> argparse.ArgumentParser:
    """Create the parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--inputs", type=int, default=2000, help="d (default 2000)")
    counts = [8, 16, 32, 64, 128, 256, 512]
    made.add_argument("--projections", type=int, nargs="+", default=counts, help=f"numbers p (default {counts})")
    made.add_argument("--draws", type=int, default=500, help="of each feature map (default 500)")
    made.add_argument("--seed", type=int, default=0, help="of w and x (default 0)")
    made.add_argument("--output", type=Path, default=RESULTS, help="folder of metrics.json and error.png")
    return made


def main(argv: list[str] | None = None) -> None:
    """Run all draws and write the results."""
    arguments = options().parse_args(argv)
    hold(arguments.output)
    if faults := too_small(arguments, projections=1, inputs=1, draws=2):
        raise SystemExit(f"error: {ConfigError(faults)}")
    generator = torch.Generator().manual_seed(arguments.seed)
    w, x = torch.rand(2, arguments.inputs, generator=generator, dtype=torch.float64) / arguments.inputs**0.5
    sizes = [(layer, p) for layer in LAYERS for p in arguments.projections]
    rows = [
        row(layer, p, relative_errors(layer, w, x, p, arguments.draws)) for layer, p in bar(sizes, "layers and sizes")
    ]
    settings = {key: value for key, value in vars(arguments).items() if key != "output"}
    write_figures(arguments.output, {"settings": settings, "rows": rows})
    curves = {
        layer: [(r["projections"], r["error"], r["deviation"]) for r in rows if r["layer"] == layer] for layer in LAYERS
    }
    title = f"one output of a layer with {arguments.inputs} inputs, {arguments.draws} draws"
    labels = ("random projections", "relative error of one draw (mean, deviation)")
    error_curves(curves, arguments.output / "error.png", title, labels, bottom=1e-3)
    lines = [[f"{value:.3%}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    show_table(title, list(rows[0]), lines)
    print(f"written: {arguments.output}")


def truth(layer: str, w: torch.Tensor, x: torch.Tensor) -> float:
    """Return the output to be estimated."""
    if layer == SINE:
        return float(torch.sin(w @ x + BIAS))
    cosine = (w @ x / (w.norm() * x.norm())).clamp(-1, 1)
    angle = cosine.acos()
    return float(w.norm() * x.norm() * (angle.sin() + (torch.pi - angle) * cosine) / (2 * torch.pi))


def relative_errors(layer: str, w: torch.Tensor, x: torch.Tensor, projections: int, draws: int) -> torch.Tensor:
    """Return relative errors of Φ(x)·Ψ(w), (draws,); every draw has its own seed."""
    component, arguments, told = LAYERS[layer]
    found = []
    for seed in range(draws):
        made = build_feature_map(
            component, "gaussian", len(w), projections, seed=seed, component_params=arguments
        ).double()
        found.append((made.phi(x).dense() * made.psi(w, told).dense()).sum())
    return torch.stack(found) / truth(layer, w, x) - 1


def row(layer: str, projections: int, errors: torch.Tensor) -> dict[str, Any]:
    """Return the figures of all draws of one size."""
    return {
        "layer": layer,
        "projections": projections,
        "error": float(errors.abs().mean()),
        "deviation": float(errors.abs().std()),
        "error of the mean": float(errors.mean().abs()),
        "standard error of the mean": float(errors.std() / len(errors) ** 0.5),
    }


if __name__ == "__main__":
    main()
