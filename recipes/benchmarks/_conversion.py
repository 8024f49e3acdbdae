"""Converting a fine-tuned model without labels: convert, bundle, time and score, the teacher beside, in one run."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from _bench import alternate, ratio, report
from torch import nn

from snnk_peft import FFNPart, SNNKConfig, bundle, calibrate, get_snnk_model


class Conversion(NamedTuple):
    """What is replaced, and how it is fitted.

    Args:
        config: fields of SNNKConfig, or a function of the teacher that finds them.
        calibrating: arguments of `calibrate`.
    """

    config: Mapping[str, Any] | Callable[[nn.Module], Mapping[str, Any]]
    calibrating: Mapping[str, Any] = {}


def of_ffn(**options: Any) -> Conversion:
    """FFN blocks alone, with these options of FFNPart."""
    return Conversion({"ffn": FFNPart(**options)})


def compare_conversions(
    teacher: nn.Module,
    conversions: Mapping[str, Conversion],
    calibration: Sequence[Mapping[str, torch.Tensor]],
    accuracy: Callable[[nn.Module], float],
    inputs: Mapping[str, torch.Tensor],
    arguments: argparse.Namespace,
    *,
    title: str,
    timed: str,
    **calibrating: Any,
) -> None:
    """Measure the teacher and its conversions, and write the report.

    Args:
        teacher: the fine-tuned classifier.
        conversions: by what they are called.
        calibration: batches without labels.
        accuracy: the share of test examples that a model labels correctly.
        inputs: what a forward pass is timed on.
        arguments: of the command line: repetitions, output, model.
        title: of the table.
        timed: what `inputs` is called in it.
        **calibrating: passed to `calibrate` every time.
    """
    models, fitted, seconds = {"teacher": teacher}, {}, {"teacher": 0.0}
    for name, conversion in conversions.items():
        start = time.perf_counter()
        fields = conversion.config(teacher) if callable(conversion.config) else conversion.config
        patched = get_snnk_model(copy.deepcopy(teacher), SNNKConfig(**fields, modules_to_save=[]))
        fitted[name] = calibrate(patched, calibration, **calibrating, **conversion.calibrating).to_dict()
        models[name] = bundle(patched).eval()
        seconds[name] = time.perf_counter() - start

    def forward(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.inference_mode():
                model(**inputs)

        return run

    latency = alternate({name: forward(model) for name, model in models.items()}, arguments.repetitions)
    rows = [
        {
            "model": name,
            "accuracy": accuracy(model),
            "speed-up": ratio(latency["teacher"], latency[name]),
            f"ms per {timed}": 1000 * statistics.median(latency[name]),
            "conversion seconds": seconds[name],
            # Rows of a bundle are buffers.
            "parameters": sum(t.numel() for t in model.state_dict().values() if t.is_floating_point()),
        }
        for name, model in models.items()
    ]
    report({"calibration": fitted, "teacher": arguments.model.name}, rows, arguments.output, title)
