"""Describe a feature map: `python -m snnk_peft.feature_map describe posrf mm --dim 32`.

Also the table of all members for the README: `python -m snnk_peft.feature_map table`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from snnk_peft.components import COMPONENTS
from snnk_peft.components.base import Component
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMap, build_feature_map
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection

_PAIRS = 64


def partners(component: str) -> list[str]:
    """List the projections that a component can use."""
    return [name for name in PROJECTIONS.names() if COMPONENTS[component].fits(PROJECTIONS[name])]


def estimates_a_kernel(component: Component | type[Component], projection: Projection | type[Projection]) -> bool:
    """Return whether products of the features estimate a known kernel, or average over a distribution of rows."""
    return component.has_kernel() and (component.exact or projection.distribution != "none")


@torch.no_grad()
def measured_error(
    component: str,
    projection: str,
    dim: int,
    num_features: int,
    *,
    length: float = 1.0,
    draws: int = 20,
    component_params: dict[str, Any] | None = None,
    projection_params: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Measure bias and variance of the kernel estimate over seeds, on random pairs of vectors of a given norm.

    Further arguments as in `build_feature_map`.

    Raises:
        ConfigError: the pair estimates no kernel.

    Returns:
        "kernel": root mean square of the exact kernel; "variance": mean over pairs of the variance over seeds; "bias":
        root mean square over pairs of the mean error; "relative_error": root mean square error over "kernel".
    """
    if not estimates_a_kernel(COMPONENTS[component], PROJECTIONS[projection]):
        raise ConfigError(f"{component!r} over {projection!r} estimates no kernel: there is no error to measure")
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, _PAIRS, dim, generator=generator, dtype=torch.float64)
    x, y = vectors / vectors.norm(dim=-1, keepdim=True) * length
    estimates = []
    for seed in range(draws):
        feature_map = build_feature_map(
            component,
            projection,
            dim,
            num_features,
            seed=seed,
            component_params=component_params,
            projection_params=projection_params,
        ).double()
        statistics = feature_map.component.statistics(x, y)
        phi, psi = feature_map.phi(x, statistics).dense(), feature_map.psi(y, statistics).dense()
        estimates.append((phi * psi).sum(-1))
    exact = feature_map.kernel(x, y)
    error = torch.stack(estimates) - exact
    size = exact.square().mean().sqrt()
    return {
        "kernel": size.item(),
        "variance": error.var(0, correction=0).mean().item(),
        "bias": error.mean(0).square().mean().sqrt().item(),
        "relative_error": (error.square().mean().sqrt() / size).item(),
    }


def describe(component: str, projection: str, dim: int, num_features: int, *, length: float = 1.0) -> str:
    """Render a page about one pair: formulas, kernel, sizes, costs and measurements."""
    feature_map = build_feature_map(component, projection, dim, num_features)
    f, w = feature_map.component, feature_map.projection
    lines = [
        f"{component} over {projection}: dim {dim}, {num_features} rows, {feature_map.feature_dim} features",
        "",
        f"component   {f.formula}   ({f.source})",
        f"kernel      {f.kernel_formula}",
        f"projection  {w.formula}   ({w.source})",
        f"cost        {w.cost} for W x; {f.cost} for the features",
        f"memory      {stored_numbers(feature_map):,} values stored; a dense W has {dim * num_features:,}",
        f"properties  {', '.join(properties(feature_map))}",
        "",
        *_measured_lines(component, projection, dim, num_features, length),
    ]
    return "\n".join(lines)


def _measured_lines(component: str, projection: str, dim: int, num_features: int, length: float) -> list[str]:
    if not estimates_a_kernel(COMPONENTS[component], PROJECTIONS[projection]):
        return ["there is no kernel to measure against: the map means what training makes of it"]
    measured = measured_error(component, projection, dim, num_features, length=length)
    return [
        f"measured on {_PAIRS} random pairs of length {length:g}, 20 draws:",
        f"            kernel {measured['kernel']:.4g} (root mean square), variance {measured['variance']:.3g}, "
        f"mean error {measured['bias']:.3g}, relative error {100 * measured['relative_error']:.2f} %",
    ]


def stored_numbers(feature_map: FeatureMap) -> int:
    """Count the entries of all parameters and buffers."""
    return sum(t.numel() for t in [*feature_map.parameters(), *feature_map.buffers()])


def properties(feature_map: FeatureMap) -> list[str]:
    """List the properties of the pair, a word or two each."""
    f, w = feature_map.component, feature_map.projection
    return [
        _bias(f, w),
        "positive features" if f.positive and w.uniform else "signed features",
        *(["adapts to the data"] if f.adapts else []),
        *(["A = 0 (e^{A‖ω‖²} integrated beforehand)"] if f.tilted and not w.sampled_lengths else []),
        *(["trainable"] if w.trainable or any(True for _ in f.parameters()) else []),
        *([] if w.uniform else ["unequal feature weights"]),
        *(["fast transform"] if w.fast else []),
    ]


def _bias(component: Component, projection: Projection) -> str:
    if not estimates_a_kernel(component, projection):
        return "estimates no kernel"
    if component.exact:
        return "exact"
    if projection.unbiased:
        return "unbiased"
    return "not unbiased (deterministic, or rows only nearly of the right distribution)"


def component_table() -> str:
    """Render all components as a Markdown table."""
    rows = [
        "| component | formula | kernel | source | positive | adapts | rows from |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in COMPONENTS:
        member = COMPONENTS[name]
        flags = " | ".join("yes" if flag else "" for flag in (member.positive, member.adapts))
        rows.append(
            f"| `{name}` | {_cell(member.formula)} | {_cell(member.kernel_formula)} | {member.source} | {flags} | "
            f"{member.distribution} |"
        )
    return "\n".join(rows)


def projection_table() -> str:
    """Render all projections as a Markdown table."""
    rows = [
        "| projection | rows | source | cost per vector | unbiased | trainable | distribution |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in PROJECTIONS:
        member = PROJECTIONS[name]
        flags = " | ".join("yes" if flag else "" for flag in (member.unbiased, member.trainable))
        rows.append(
            f"| `{name}` | {_cell(member.formula)} | {member.source} | {member.cost} | {flags} | "
            f"{member.distribution}{'' if member.sampled_lengths else ' (A = 0)'} |"
        )
    return "\n".join(rows)


def _cell(text: str) -> str:
    # A vertical bar would end the cell.
    return text.replace("|", "\\|")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 2 if the arguments define no valid feature map."""
    parser = argparse.ArgumentParser(prog="python -m snnk_peft.feature_map", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    page = commands.add_parser("describe", help="one pair in words and numbers")
    page.add_argument("component")
    page.add_argument("projection")
    page.add_argument("--dim", type=int, default=64, help="length of the vectors (64)")
    page.add_argument("--num-features", type=int, default=128, help="rows of W (128)")
    page.add_argument("--length", type=float, default=1.0, help="Euclidean length of the measured vectors (1)")
    commands.add_parser("table", help="all members as Markdown tables")
    arguments = parser.parse_args(argv)
    if arguments.command == "table":
        print(component_table(), projection_table(), sep="\n\n")
        return 0
    try:
        print(describe(*_pair(arguments), length=arguments.length))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _pair(arguments: argparse.Namespace) -> tuple[str, str, int, int]:
    return arguments.component, arguments.projection, arguments.dim, arguments.num_features
