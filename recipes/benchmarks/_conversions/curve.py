"""Agreement over latency: conversions and other methods from 1.2 to 6 times the speed, each in fp32 and in int8.

    python recipes/benchmarks/convert_models.py curve --model path/to/minilm-l6-sst2 --data path/to/glue
    python recipes/benchmarks/convert_models.py curve --model .. --data .. --only "plan 2x" --seeds 1
    python recipes/benchmarks/convert_models.py curve --task imdb --model runs/imdb_full/model --data path/to/aclImdb \\
        --max-length 512 --batch-size 8 --sentences 640 --score-at-most 1000 --shapes 4x512 \\
        --only plan attention --seeds 1

A point is one way to make a fine-tuned BERT smaller, at one size, calibrated on one draw of training examples (of more
than 40 characters: most rows of SST-2 are sentence fragments, unlike any user's texts):

- original: as it is, in torch and in int8.
- ffn: `convert` with the given number of features in all FFNs; ffn+: with 600 steps of recovery. plan: `convert` with a
  budget of the latency that is timed. attention: `convert` with linear attention in all layers and 192 features in all
  FFNs. No labels.
- svd: FFN matrices in low rank, whitened by the covariance of their inputs; no labels.
- fisher, modegpt: pruning by Fisher information (Kwon et al. 2022; uses labels) and MoDeGPT (Lin et al. 2025; no
  labels) to a share of the multiply-adds of heads and FFNs.
- distilled: the given number of layers, trained towards the original's answers for as long as `convert` took for 2x; no
  labels.

For each model and its file with int8 Linears (`export`, on batches of the same examples): the task's score on its
validation examples; the share of the original's answers that it keeps there, and the distance to them in nats (for
numbers, the correlation, and the error over the variance); and the speed on random tokens of each of `--shapes`, by
default 32 x 64. All are timed in turn (`speeds.py`), before, during and after scoring. Milliseconds are the original's
in its fastest pass over the speed-up, on the first shape. fp32 is timed in torch, int8 in ONNX Runtime, with the same
number of threads.

A point is written to the figures as soon as it is measured, and a further run measures only what is missing. A plot
is drawn next to them. Figures go to results/convert_curve/TASK.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import RESULTS, report, show
from _peers.blocks import Batch, model_inputs
from torch import nn

from _conversions import finetuned
from _conversions.curve_points import ORIGINAL, REFERENCE, ROUNDED, Make, Speeds, points
from _conversions.finetuned import FineTuned, timed
from snnk_cli.exporting import ExportedFile
from snnk_cli.files import read_json, write_json
from snnk_cli.lock import hold
from snnk_cli.plots import make_axes, store
from snnk_peft import export

CHECKED = 10  # one in this many batches is passed to `export`
TOLD = ("speed-up", "agreement", "distance", "score", "seconds")
WAYS = ("original", "ffn", "ffn+", "plan", "attention", "svd", "fisher", "modegpt", "distilled")


def int8_of(model: nn.Module, batches: Sequence[Batch], folder: str) -> ExportedFile:
    """Export with int8 Linears, and load the file."""
    file = Path(folder) / "model.onnx"
    export(model, "onnx", file, batches=[model_inputs(batch) for batch in batches[::CHECKED]], int8=True)
    return ExportedFile(file)


def measured(
    name: str, make: Make, seed: int, one: FineTuned, rounded: ExportedFile, known: Mapping[str, Any], given: Any
) -> list[dict[str, Any]]:
    """Return the rows of one point, in fp32 and in int8.

    Args:
        name, make, seed: of the point.
        one, rounded: the original, and its file with int8 Linears.
        known: the row of this file; empty while it is being measured.
        given: the options.
    """
    batches = one.batches(given.sentences, seed)
    start = time.perf_counter()
    model = make(one.teacher, batches, seed).eval()
    row = {"point": name, "seed": seed, "seconds": time.perf_counter() - start}
    with tempfile.TemporaryDirectory() as folder:
        both: dict[str, Any] = {"fp32": model, "int8": int8_of(model, batches, folder)}
        models = {ORIGINAL: one.teacher, ROUNDED: rounded, **both}
        taken = {shape: Speeds(models, timed(one.teacher, shape), given.repetitions) for shape in given.shapes}
        rows = []
        for kind, each in both.items():
            for speeds in taken.values():
                speeds.add_round()
            rows.append({**row, "as": kind, **one.figures(each)})
        for speeds in taken.values():
            speeds.add_round()
    for found in rows:
        for number, (shape, speeds) in enumerate(taken.items()):
            key = f"at {shape}" if number else "speed-up"
            found[key] = speeds.speed_up(found["as"], known.get(key) if found["as"] == "int8" else None)
        found["original ms"] = 1000 * taken[given.shapes[0]].original()
    return rows


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per point, over the seeds: means, and the least agreement."""
    keys = dict.fromkeys((row["point"], row["as"]) for row in rows)
    quickest = min(row["original ms"] for row in rows)
    table = []
    for point, kind in keys:
        same = [row for row in rows if (row["point"], row["as"]) == (point, kind)]
        mean = {
            name: statistics.mean(row[name] for row in same) for name in same[0] if name in TOLD or name[:3] == "at "
        }
        least = min(row["agreement"] for row in same)
        table.append({"point": point, "as": kind, "ms": quickest / mean["speed-up"], **mean, "least": least})
    return table


def at_equal_speed(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each point of a plan, the best agreement of every other method at that speed or above.

    The better of fp32 and int8, interpolated linearly between two sizes; None above the fastest.
    """
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in table:
        lines.setdefault((row["point"].split()[0], row["as"]), []).append((row["speed-up"], row["agreement"]))
    ways = [way for way in dict.fromkeys(way for way, _ in lines) if way != "plan"]
    found = []
    for row in (row for row in table if row["point"].startswith("plan")):
        speed = row["speed-up"]
        line = {"point": f"{row['point']}, {row['as']}", "speed-up": speed, "agreement": row["agreement"]}
        for way in ways:
            fast = [sorted(known) for (name, _), known in lines.items() if name == way and max(known)[0] >= speed]
            line[way] = max((float(np.interp(speed, *zip(*known, strict=True))) for known in fast), default=None)
        found.append(line)
    return found


def draw(table: Sequence[Mapping[str, Any]], shape: str, file: Path) -> None:
    """Plot agreement over latency: one colour per method, solid lines for fp32, dashed ones for int8."""
    figure, axes = make_axes(size=(9, 6))
    for number, name in enumerate(WAYS):
        for kind, style in (("fp32", "o-"), ("int8", "s--")):
            known = sorted(
                (row["ms"], row["agreement"]) for row in table if row["point"].split()[0] == name and row["as"] == kind
            )
            if known:
                axes.plot(*zip(*known, strict=True), style, color=f"C{number}", label=f"{name}, {kind}")
    axes.set(xlabel=f"ms per {shape} tokens", ylabel="share of the original's answers kept")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    store(figure, file)


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of model, data and points."""
    finetuned.add_options(options)
    options.add_argument("--shapes", nargs="+", default=["32x64"], help="shapes to time, the first for plan")
    options.add_argument("--seeds", type=int, default=3, help="draws of the examples (default 3)")
    options.add_argument("--only", nargs="+", default=[], help='points or methods, such as "plan 2x" or svd')
    options.add_argument("--again", action="store_true", help="measure these again")
    options.set_defaults(output=None)


def fault(arguments: argparse.Namespace) -> str | None:
    """Return a message if `--only` names no point."""
    if not arguments.only or len(chosen(arguments.only)) > 1 or "original" in arguments.only:
        return None
    return f"--only {' '.join(arguments.only)} names no point; expected one or more of {', '.join(points('', float))}"


def chosen(only: Sequence[str]) -> list[str]:
    """Return the points of these names or methods, after the original; all if none are given."""
    wanted = {"original", *only}
    return [name for name in points("", float) if not only or name in wanted or name.split()[0] in wanted]


def run(arguments: argparse.Namespace) -> None:
    """Measure missing points, and write after each one."""
    output, names = arguments.output or RESULTS / "convert_curve" / f"{arguments.task}.json", chosen(arguments.only)
    hold(output)
    kept = ("task", "max_length", "batch_size", "score_at_most", "sentences", "shapes")
    given = {"teacher": arguments.model.name, "threads": torch.get_num_threads()}
    given["cpu"] = torch.backends.cpu.get_cpu_capability()  # int8 is much slower without AVX-512's dot products
    given |= {name: vars(arguments)[name] for name in kept}
    rows = earlier(output, given)
    if arguments.again:
        rows = [row for row in rows if row["point"] not in names or row["seed"] >= arguments.seeds]

    def seconds(seed: int) -> float:
        found = [row["seconds"] for row in rows if (row["point"], row["seed"]) == (REFERENCE, seed)]
        if not found:
            raise SystemExit(
                f"distillation is given as long as {REFERENCE!r} took, which was not measured; add it to --only"
            )
        return float(found[0])

    from_task = (arguments.task, arguments.model, arguments.data, arguments.max_length, arguments.batch_size)
    one = FineTuned(*from_task, arguments.score_at_most)
    made = points(arguments.shapes[0], seconds)
    with tempfile.TemporaryDirectory() as folder:
        rounded = int8_of(one.teacher, one.batches(arguments.sentences, 0), folder)
        for seed, name in product(range(arguments.seeds), names):
            if any((row["point"], row["seed"]) == (name, seed) for row in rows):
                continue
            known = next((row for row in rows if row["point"] == "original" and row["as"] == "int8"), {})
            rows += measured(name, made[name], seed, one, rounded, known, arguments)
            write_json(output, {**given, "measured": rows})
            for row in rows[-2:]:
                told = ", ".join(f"{key} {row[key]:.4g}" for key in TOLD)
                print(f"{name}, {row['as']}, seed {seed}: {told}", flush=True)
    table = means(rows)
    equal = at_equal_speed(table)
    report({**given, "measured": rows, "at_equal_speed": equal}, table, output, f"{arguments.task} without labels")
    if equal:
        show(equal, "Agreement of others at this speed or above, in fp32 or int8")
    draw(table, arguments.shapes[0], output.with_suffix(".png"))


def earlier(output: Path, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that an earlier run measured.

    Raises:
        SystemExit: they are of another model, or were measured with other settings.
    """
    if not output.exists():
        return []
    found = read_json(output)
    if other := [f"{name} {found.get(name)}, now {value}" for name, value in given.items() if found.get(name) != value]:
        raise SystemExit(f"{output} was measured with {'; '.join(other)}: choose another --output, or remove it")
    rows: list[dict[str, Any]] = found["measured"]
    return rows
