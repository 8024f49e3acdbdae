"""Converting a fine-tuned model without labels: convert, bundle, time and score, the teacher beside, in one run."""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _bench import alternate, ratio, report
from torch import nn

from snnk_peft import FFNPart, SNNKConfig, bundle, calibrate, get_snnk_model, plan

Batch = Mapping[str, torch.Tensor]


class Conversion(NamedTuple):
    """What is replaced, and how it is fitted.

    Args:
        config: fields of SNNKConfig; none where `plan` decides.
        calibrating: arguments of `calibrate`.
        budget: of `plan`, for the inputs that are timed first.
        of: what the budget is of.
        texts: which data calibrates, where there is a choice.
    """

    config: Mapping[str, Any]
    calibrating: Mapping[str, Any] = {}
    budget: str | None = None
    of: str = "latency"
    texts: str = "any"


def add_conversions(options: argparse.ArgumentParser, seeds: int) -> None:
    """The options that say which conversions are compared, how often, and on which inputs they are timed."""
    options.add_argument("--seeds", type=int, default=seeds, help=f"calibrations of each kind (default {seeds})")
    options.add_argument("--features", type=int, default=64, help="of each attention head (default 64)")
    options.add_argument("--steps", type=int, default=400, help="of Adam per layer, where there are any (default 400)")
    options.add_argument(
        "--units",
        nargs="+",
        type=int,
        default=[32, 128, 192],
        help="features of the upper half of the FFNs, then of all",
    )
    options.add_argument("--budgets", nargs="*", default=["1.5x", "2.5x"], help="of plan (default 1.5x 2.5x)")
    options.add_argument("--of", default="latency", help="what the budgets are of: latency, macs or bytes")
    options.add_argument(
        "--shapes", nargs="+", default=["32x64", "4x512", "1x2048"], help="what is timed, the first for plan"
    )
    options.add_argument("--only", nargs="+", default=[], help="conversions whose names contain one of these words")


def of_ffn(steps: int = 0, **options: Any) -> Conversion:
    """FFN blocks alone, with these options of FFNPart and so many steps of `calibrate`."""
    return Conversion({"ffn": FFNPart(**options)}, {"steps": steps})


def compare_conversions(
    teacher: nn.Module,
    conversions: Mapping[str, Conversion],
    calibration: Callable[[int, Conversion], Sequence[Batch]],
    accuracy: Callable[[nn.Module], float],
    timed: Mapping[str, Batch],
    arguments: argparse.Namespace,
    *,
    title: str,
    scored: str = "accuracy",
    **calibrating: Any,
) -> None:
    """Measure the teacher and its conversions, and write the report.

    Each conversion is made once per seed, which chooses the data and the draws: accuracies are means with their least
    and greatest, seconds those of the slowest. What is timed is the first.

    Args:
        teacher: the fine-tuned classifier.
        conversions: by what they are called.
        calibration: batches without labels, for a seed and a conversion.
        accuracy: the share of test examples that a model labels correctly, or another score.
        timed: inputs of a forward pass, by what they are called; the first gives "speed-up".
        arguments: of the command line: repetitions, seeds, output, model.
        title: of the table.
        scored: the name of the score.
        **calibrating: passed to `calibrate` every time.
    """
    first, *others = timed
    models, fitted, planned = {"teacher": teacher}, {}, {}
    scores, seconds = {"teacher": [accuracy(teacher)]}, {"teacher": [0.0]}
    for name, conversion in conversions.items():
        scores[name], seconds[name] = [], []
        for seed in range(arguments.seeds):
            given, start = calibration(seed, conversion), time.perf_counter()
            config = SNNKConfig(**conversion.config, modules_to_save=[], seed=seed) if conversion.config else None
            if conversion.budget is not None:
                with tempfile.TemporaryDirectory() as folder:  # every plan measures for itself
                    own = {"timings": Path(folder) / "timings.json", "inputs": timed[first], "progress": False}
                    found = plan(teacher, given, conversion.budget, of=conversion.of, seed=seed, **own)
                planned[f"{name}, seed {seed}"], config = found.to_dict(), found.config
            patched = get_snnk_model(copy.deepcopy(teacher), config)
            settings = {**calibrating, **conversion.calibrating, "progress": False}
            fitted[f"{name}, seed {seed}"] = calibrate(patched, given, **settings).to_dict()
            model = bundle(patched).eval()
            seconds[name].append(time.perf_counter() - start)
            scores[name].append(accuracy(model))
            models.setdefault(name, model)
            print(f"{name}, seed {seed}: {scored} {scores[name][-1]:.4f} after {seconds[name][-1]:.0f} s", flush=True)

    def forward(model: nn.Module, inputs: Batch) -> Callable[[], None]:
        def run() -> None:
            with torch.inference_mode():
                model(**inputs)

        return run

    latency = {
        shape: alternate({name: forward(model, inputs) for name, model in models.items()}, arguments.repetitions)
        for shape, inputs in timed.items()
    }
    rows = [
        {
            "model": name,
            scored: statistics.mean(scores[name]),
            "least": min(scores[name]),
            "greatest": max(scores[name]),
            "speed-up": ratio(latency[first]["teacher"], latency[first][name]),
            **{f"at {shape}": ratio(latency[shape]["teacher"], latency[shape][name]) for shape in others},
            f"ms per {first}": 1000 * statistics.median(latency[first][name]),
            "conversion seconds": max(seconds[name]),
            # Rows of a bundle are buffers.
            "parameters": sum(t.numel() for t in model.state_dict().values() if t.is_floating_point()),
        }
        for name, model in models.items()
    ]
    figures = {"calibration": fitted, "plans": planned, "scores": scores, "seeds": arguments.seeds}
    report({**figures, "teacher": arguments.model.name}, rows, arguments.output, title)
