"""Time and peak memory of every feature map on inputs the size of an attention layer's, and where fast transforms win.

    python recipes/benchmarks/feature_maps.py
    python recipes/benchmarks/feature_maps.py --components posrf relu --features 128

Inputs are (8, 12, 1024, 64): batch, heads, tokens, head dimension. For every component and every projection that fits,
phi alone and phi with the gradient of its input are timed in turn with the dense gaussian matrix of the same component;
`ratio` and `gradient_ratio` are the medians of the ratios within one repetition. A pair that looks slower than its
limit is timed again with more repetitions, against the dense one. Stored matrices without biases or unequal weights
run the same code whatever they were drawn from, so the figures of the first one (`timed_as`) stand for all. oprf and
saderf, whose parameter comes from all tokens, are also timed with posrf. Peak memory is the growth of the resident
memory during one call. The second table times structured matrices, fast against dense, over sizes. Takes about half an
hour; with OMP_NUM_THREADS=1 a process on another core hardly disturbs it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Hashable
from typing import Any

import torch
from _bench import alternate, bar, keep, parser, peak_bytes, ratio, report, show
from torch import nn

from snnk_peft import COMPONENTS, PROJECTIONS, build_feature_map
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMap, FeatureMapSpec
from snnk_peft.feature_map.describe import partners
from snnk_peft.projections.base import Projection
from snnk_peft.projections.base_learned import Learned
from snnk_peft.projections.base_structured import Structured

STRUCTURED = ("sorf", "rom", "fastfood", "scrf", "pmodel")
SIZES = (64, 128, 256, 512, 768, 1024, 2048)
LIMIT, COSTLIER = 1.1, {"oprf": 1.3, "saderf": 1.3}  # these cost more: a parameter computed from all tokens
AGAIN = 5  # repetitions for a pair that looks slow


def build(component: str, projection: str, dim: int, num_features: int) -> FeatureMap:
    """Build the map with about `num_features` features."""
    cls = PROJECTIONS[projection]
    size = cls.nearest_size(dim, max(num_features, COMPONENTS[component]().fewest_rows()))
    # Inputs of unit length, as attention is scaled in a real layer.
    params = {"x_norm": 1.0, "w_norm": 0.5} if component == "urf" else {}
    layer = None
    if cls.needs_layer:
        layer = nn.Linear(dim, 4 * size, bias=False)
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    return FeatureMapSpec(component, projection, size, params, dim=dim).build(layer)


def forward(feature_map: FeatureMap, x: torch.Tensor) -> Callable[[], object]:
    """Return a function that computes phi of x."""

    def run() -> object:
        with torch.no_grad():
            return feature_map.phi(x, feature_map.component.statistics(x, x))

    return run


def backward(feature_map: FeatureMap, x: torch.Tensor) -> Callable[[], object]:
    """Return a function that computes phi of x and the gradient of x."""
    leaf = x.detach().requires_grad_()

    def run() -> object:
        leaf.grad = None
        feature_map.phi(leaf, feature_map.component.statistics(x, x)).values.sum().backward()
        return None

    return run


def code_path(feature_map: FeatureMap) -> Hashable:
    """Return a key that is equal for maps that run the same code on matrices of the same size."""
    projection = feature_map.projection
    own = projection.bias is not None or not projection.uniform or projection.fast or isinstance(projection, Learned)
    if own or not (isinstance(projection, Structured) or type(projection).forward is Projection.forward):
        return type(projection)
    return feature_map.num_features


def timed(
    make: Callable[[FeatureMap, torch.Tensor], Callable[[], object]],
    maps: dict[str, FeatureMap],
    x: torch.Tensor,
    repetitions: int,
    limit: float,
) -> dict[str, tuple[float, float]]:
    """Return milliseconds and the per-feature ratio to the first map, of every map; slow ones are timed again."""
    for feature_map in maps.values():
        make(feature_map, x[:1])()
    runs = {name: make(feature_map, x) for name, feature_map in maps.items()}
    yardstick = next(iter(runs))
    seconds = alternate(runs, repetitions, warmup=0)
    found = {}
    for name, feature_map in maps.items():
        # Per feature, because some designs cannot have the requested size.
        share = maps[yardstick].num_features / feature_map.num_features
        own, dense = seconds[name], seconds[yardstick]
        if share * ratio(own, dense) > limit:
            again = alternate({"it": runs[name], "dense": runs[yardstick]}, AGAIN, warmup=1)
            own, dense = again["it"], again["dense"]
        found[name] = (1e3 * statistics.median(own), share * ratio(own, dense))
    return found


def measure(
    component: str, num_features: int, shape: list[int], repetitions: int, projections: list[str]
) -> list[dict[str, Any]]:
    """Return one row per projection of a component; the first one is the reference."""
    # The dense matrix comes first: the others are compared with it.
    fitting = sorted(partners(component), key=lambda name: (name != "gaussian", name))
    names = [name for name in fitting if name in projections or name == fitting[0]]
    found: dict[str, FeatureMap] = {}
    for name in names:
        try:
            found[name] = build(component, name, shape[-1], num_features)
        except ConfigError as error:
            print(f"{component} over {name}: {error}")
    first: dict[Hashable, str] = {}
    timed_as = {name: first.setdefault(code_path(feature_map), name) for name, feature_map in found.items()}
    maps = {name: feature_map for name, feature_map in found.items() if timed_as[name] == name}
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x / x.norm(dim=-1, keepdim=True)
    limit = COSTLIER.get(component, LIMIT)
    plain, graded = (timed(make, maps, x, repetitions, limit) for make in (forward, backward))
    peaks = {
        name: [(peak_bytes(make(feature_map, x)) or 0) / 2**20 for make in (forward, backward)]
        for name, feature_map in maps.items()
    }
    return [
        {
            "component": component,
            "projection": name,
            "wanted": num_features,
            "timed_as": timed_as[name],
            "features": feature_map.num_features,
            "ms": plain[timed_as[name]][0],
            "ratio": plain[timed_as[name]][1],
            "gradient_ms": graded[timed_as[name]][0],
            "gradient_ratio": graded[timed_as[name]][1],
            "peak_MiB": peaks[timed_as[name]][0],
            "gradient_peak_MiB": peaks[timed_as[name]][1],
        }
        for name, feature_map in found.items()
    ]


def adapting(counts: list[int], shape: list[int]) -> list[dict[str, Any]]:
    """Time the components with a parameter from all tokens against posrf, all over the gaussian matrix."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x / x.norm(dim=-1, keepdim=True)
    rows = []
    for count in counts:
        maps = {name: build(name, "gaussian", shape[-1], count) for name in ("posrf", *COSTLIER)}
        row: dict[str, Any] = {"features": count}
        for kind, make in (("", forward), ("gradient_", backward)):
            seconds = alternate({name: make(feature_map, x) for name, feature_map in maps.items()}, AGAIN, warmup=1)
            row |= {f"{kind}{name}": ratio(seconds[name], seconds["posrf"]) for name in COSTLIER}
        rows.append(row)
    return rows


def crossover(repetitions: int) -> list[dict[str, Any]]:
    """Time fast against dense products of structured square matrices with 4096 vectors."""
    rows = []
    for dim in bar(SIZES, "crossover"):
        x = torch.randn(4096, dim, generator=torch.Generator().manual_seed(0))
        row: dict[str, Any] = {"dim": dim}
        for name in STRUCTURED:
            pair = {
                str(fast): forward(build_feature_map("relu", name, dim, dim, projection_params={"fast": fast}), x)
                for fast in (True, False)
            }
            times = alternate(pair, repetitions, warmup=1)
            row[name] = ratio(times["True"], times["False"])
        learned = build_feature_map("relu", "fastfood_learned", dim, dim)
        dense = build_feature_map("relu", "gaussian", dim, dim)
        times = alternate({"it": forward(learned, x), "dense": forward(dense, x)}, repetitions, warmup=1)
        row["fastfood_learned"] = ratio(times["it"], times["dense"])
        numbers = sum(t.numel() * t.element_size() for t in [*learned.parameters(), *learned.buffers()])
        row["fastfood_learned_bytes"] = numbers / (4 * dim * dim)
        rows.append(row)
    return rows


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "feature_maps")
    options.add_argument("--components", nargs="+", default=COMPONENTS.names(), choices=COMPONENTS.names())
    options.add_argument("--projections", nargs="+", default=PROJECTIONS.names(), choices=PROJECTIONS.names())
    options.add_argument("--features", nargs="+", type=int, default=[64, 128, 256])
    options.add_argument("--shape", nargs=4, type=int, default=[8, 12, 1024, 64], help="batch, heads, tokens, dim")
    arguments = options.parse_args()
    # Other pairs and sizes of an earlier run are kept, and each component is stored when it is done.
    earlier = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"rows": []}
    jobs = [(component, count) for component in arguments.components for count in arguments.features]
    rows = list(earlier["rows"])
    for component, count in bar(jobs, "pairs"):
        new = measure(component, count, arguments.shape, arguments.repetitions, arguments.projections)
        done = {(row["component"], row["projection"], row["wanted"]) for row in new}
        rows = [row for row in rows if (row["component"], row["projection"], row["wanted"]) not in done] + new
        keep({"unfinished": True, "rows": rows}, arguments.output)
    against_posrf = adapting(arguments.features, arguments.shape)
    sizes = crossover(arguments.repetitions)
    slow = {
        what: sorted(
            f"{row['component']}-{row['projection']} {row['features']}: {row[what]:.2f}"
            for row in rows
            if row["timed_as"] == row["projection"] and row[what] > COSTLIER.get(row["component"], LIMIT)
        )
        for what in ("ratio", "gradient_ratio")
    }
    figures = {
        "pairs": len(rows),
        "timed": sum(row["timed_as"] == row["projection"] for row in rows),
        "slower_than_limit": slow,
        "crossover": sizes,
        "against_posrf": against_posrf,
        "shape": arguments.shape,
    }
    show(against_posrf, "time / time of posrf")
    show(sizes, "fast time / dense time, 4096 vectors")
    report(figures, rows, arguments.output, "feature maps against the dense gaussian of the same component")


if __name__ == "__main__":
    main()
