"""Initialisations of a low-rank layer: relative risk and time of each, on random and real weights.

    python recipes/benchmarks/lowrank_init.py
    python recipes/benchmarks/lowrank_init.py --quick
    python recipes/benchmarks/lowrank_init.py --shapes 384x1536 --restarts 0 --resume

A layer f(Wx + b) with d inputs and m outputs ("d x m") becomes f(UVᵀx + b). Relative risk is
E‖f(UVᵀx + b) − f(Wx + b)‖² / E‖f(Wx + b)‖² for x ~ N(0, I), without samples. W is He-normal without a bias or, where
the shape is MiniLM's (384 x 1536), also the expansion of FFN `--layer` of its six, with its bias. There `data` is
fitted to 2,048 of its input tokens, and `held_out` is the relative risk of all initialisations on 2,048 others, from
other modules' docstrings.

`function` runs twice, which must give the same bits, and is compared with the best of `--restarts` runs of the same
optimizer from random subspaces; spectral and spectral_gnorm are timed in turn. Results are written as they come, and
`--resume` does not repeat those in the file. `--quick` uses the two small shapes at two rank scales.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _bench import bar, keep, parser, ratio, show
from torch import nn
from transformers import AutoModel, AutoTokenizer

from snnk_cli.files import read_json
from snnk_cli.models import resolve_model
from snnk_peft.low_rank import LOW_RANK_INITS, Factors, factorize
from snnk_peft.low_rank.inits.function import search
from snnk_peft.low_rank.problem import Problem, Solution
from snnk_peft.tasks.stdlib_docs import load_sentences

SHAPES = ((64, 256), (128, 128), (384, 1536), (768, 3072))
SCALES = (0.05, 0.1, 0.2, 0.5)
ACTIVATIONS = {"relu": nn.functional.relu, "gelu": nn.functional.gelu}
MINILM, TOKENS = (384, 1536), 2048
TIMED, GNORM = ("spectral", "spectral_gnorm"), "gnorm_over_spectral"
INITS, RESTART = LOW_RANK_INITS.names(), "function_from_random"
Layer = dict[str, torch.Tensor | None]


@LOW_RANK_INITS.register(RESTART)
def from_random(problem: Problem) -> Solution:
    """Run `function` from a random subspace."""
    generator = torch.Generator().manual_seed(problem.seed)
    start = torch.randn(problem.weight.shape[1], problem.rank, generator=generator)
    return search(problem, start.to(problem.weight))


@functools.cache
def he_normal(inputs: int, outputs: int) -> Layer:
    """Draw W (outputs, inputs) with variance 2 / inputs."""
    weight = torch.empty(outputs, inputs)
    nn.init.kaiming_normal_(weight, generator=torch.Generator().manual_seed(0))
    return {"weight": weight, "bias": None, "inputs": None, "held out": None}


@functools.cache
@torch.no_grad()
def minilm(layer: int) -> Layer:
    """Return the expansion of an FFN of MiniLM, and two sets of (TOKENS, 384) real inputs."""
    folder = resolve_model("minilm")
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    expansion = model.encoder.layer[layer].intermediate.dense
    found = []
    for sentences in load_sentences():
        seen: list[torch.Tensor] = []
        hook = expansion.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        for start in range(0, len(sentences), 32):
            texts = [sentence.text for sentence in sentences[start : start + 32]]
            batch = tokenizer(texts, truncation=True, max_length=64, padding=True, return_tensors="pt")
            model(**batch)
            seen[-1] = seen[-1][batch["attention_mask"].bool()]
            if sum(map(len, seen)) >= TOKENS:
                break
        hook.remove()
        found.append(torch.cat(seen)[:TOKENS])
    return {"weight": expansion.weight, "bias": expansion.bias, "inputs": found[0], "held out": found[1]}


@torch.no_grad()
def empirical(factors: Factors, layer: Layer, activation: str) -> float:
    """Compute the relative risk on the held-out inputs."""
    function, x = ACTIVATIONS[activation], layer["held out"]
    wanted = function(nn.functional.linear(x, layer["weight"], layer["bias"]))
    found = function(nn.functional.linear(x, factors.weight(), factors.bias))
    return float((found - wanted).square().sum() / wanted.square().sum())


def measure(
    row: dict[str, Any], layer: Layer, inits: list[str], restarts: int, repetitions: int, keep: Callable[[], None]
) -> None:
    """Add the missing entries of `row`: relative risks, risks on held-out inputs, seconds, restarts.

    Args:
        row: row of one layer at one rank, see `new_row`.
        layer: weights and inputs.
        inits: names of initialisations.
        restarts: number of runs from random subspaces.
        repetitions: number of timings of spectral and spectral_gnorm.
        keep: called after each measurement.
    """
    given = {"activation": row["activation"], "bias": layer["bias"]}

    def run(init: str) -> Factors:
        inputs = layer["inputs"] if init == "data" else None
        return factorize(layer["weight"], row["rank"], init, inputs=inputs, **given)

    for init in inits:
        if init in row["seconds"] or (init == "data" and layer["inputs"] is None):
            continue
        found = run(init)
        row["seconds"][init] = found.seconds
        if init != "data":  # the risk of `data` refers to its inputs
            row["relative_risk"][init] = found.relative_risk
        if layer["held out"] is not None:
            row["held_out"][init] = empirical(found, layer, row["activation"])
        if init == "function":
            again = run(init)
            row["deterministic"] = bool(torch.equal(found.U, again.U) and torch.equal(found.V, again.V))
            row["seconds"][init] = statistics.mean([found.seconds, again.seconds])
        keep()
    while len(row["restarts"]) < restarts:
        seed = len(row["restarts"])
        found = factorize(layer["weight"], row["rank"], RESTART, seed=seed, **given)
        row["restarts"].append(found.relative_risk)
        keep()
    if repetitions and GNORM not in row and set(TIMED) <= row["seconds"].keys():
        seconds: dict[str, list[float]] = {name: [] for name in TIMED}
        for repetition in range(repetitions):
            for name in TIMED if repetition % 2 else reversed(TIMED):
                seconds[name].append(run(name).seconds)
        row["seconds"] |= {name: statistics.median(found) for name, found in seconds.items()}
        row[GNORM] = ratio(seconds["spectral_gnorm"], seconds["spectral"])
        keep()


def new_row(weights: str, shape: tuple[int, int], activation: str, scale: float) -> dict[str, Any]:
    """Return an empty row for a layer at a rank."""
    inputs, outputs = shape
    rank = max(1, round(scale * min(shape)))
    point = {"weights": weights, "inputs": inputs, "outputs": outputs, "activation": activation, "rank_scale": scale}
    return {**point, "rank": rank, "relative_risk": {}, "held_out": {}, "seconds": {}, "restarts": []}


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the entries that identify a row."""
    return tuple(row[name] for name in ("weights", "inputs", "outputs", "activation", "rank_scale"))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the comparisons of `function` over all rows; None where nothing was compared."""
    risks = [row["relative_risk"] for row in rows if "function" in row["relative_risk"]]
    excess = [risk["function"] - other for risk in risks for name, other in risk.items() if name != "function"]
    compared = [row for row in rows if row["restarts"] and "function" in row["relative_risk"]]
    restarts = [row["relative_risk"]["function"] - min(row["restarts"]) for row in compared]
    shares = [
        row["seconds"]["function"] / row["seconds"]["ws_nkp"]
        for row in rows
        if row["seconds"].keys() >= {"function", "ws_nkp"}
    ]
    found = {
        "largest_excess_over_another_init": excess,
        "largest_excess_over_restarts": restarts,
        "largest_share_of_ws_nkp_time": shares,
    }
    timed: dict[str, list[float]] = {}
    for row in rows:
        if GNORM in row:
            timed.setdefault(f"{row['inputs']}x{row['outputs']}", []).append(row[GNORM])
    return {name: max(values, default=None) for name, values in found.items()} | {
        "deterministic": all(row["deterministic"] for row in rows if "deterministic" in row),
        "gnorm_over_spectral_time": {name: statistics.median(values) for name, values in timed.items()},
    }


def table(rows: list[dict[str, Any]], of: str) -> list[dict[str, Any]]:
    """Return the rows with one column per initialisation."""
    names = list(dict.fromkeys(name for row in rows for name in row[of]))
    point = ("weights", "inputs", "outputs", "activation", "rank")
    return [{name: row[name] for name in point} | {name: row[of].get(name, "") for name in names} for row in rows]


def shape(text: str) -> tuple[int, int]:
    """Parse "384x1536" into inputs and outputs."""
    inputs, outputs = map(int, text.split("x"))
    return inputs, outputs


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "lowrank_init")
    options.add_argument("--shapes", nargs="+", type=shape, help="inputs x outputs", default=list(SHAPES))
    options.add_argument("--rank-scales", nargs="+", type=float, default=list(SCALES))
    options.add_argument("--activations", nargs="+", default=list(ACTIVATIONS), choices=list(ACTIVATIONS))
    options.add_argument("--inits", nargs="+", default=INITS, choices=INITS)
    options.add_argument("--layer", type=int, default=3, help="layer of MiniLM, 0 to 5 (default 3)")
    options.add_argument("--restarts", type=int, default=10, help="runs from random subspaces (default 10)")
    options.add_argument("--resume", action="store_true", help="keep existing results in --output")
    options.add_argument("--quick", action="store_true", help="64x256 and 128x128, rank scales 0.1 and 0.5")
    arguments = options.parse_args()
    shapes, scales = arguments.shapes, arguments.rank_scales
    if arguments.quick:
        shapes, scales = SHAPES[:2], (0.1, 0.5)

    file: Path = arguments.output
    known = read_json(file)["rows"] if arguments.resume and file.exists() else []
    rows = {key(row): row for row in known}

    def keep_all() -> None:
        found = list(rows.values())
        keep({"summary": summary(found), "rows": found}, file)

    layers: dict[tuple[str, tuple[int, int]], Callable[[], Layer]] = {}
    for size in shapes:
        layers["he_normal", size] = functools.partial(he_normal, *size)
        if size == MINILM:
            layers[f"minilm layer {arguments.layer}", size] = functools.partial(minilm, arguments.layer)
    work = list(itertools.product(layers, arguments.activations, scales))
    for (weights, size), activation, scale in bar(work, "measuring"):
        row = new_row(weights, size, activation, scale)
        row = rows.setdefault(key(row), row)
        layer = layers[weights, size]()
        measure(row, layer, arguments.inits, arguments.restarts, arguments.repetitions, keep_all)
    found = list(rows.values())
    for of in ("relative_risk", "held_out", "seconds"):
        if any(row[of] for row in found):
            show(table([row for row in found if row[of]], of), of.replace("_", " "))
    for name, value in summary(found).items():
        print(f"{name}: {value}")
    print(f"written: {file}")


if __name__ == "__main__":
    main()
