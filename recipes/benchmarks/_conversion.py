"""Converting a fine-tuned model without labels: convert, bundle, time and score, the teacher beside, in one run."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _bench import alternate, ratio, report
from torch import nn

from snnk_peft import FFNPart, SNNKConfig, bundle, calibrate, get_snnk_model


def compare_conversions(
    teacher: nn.Module,
    conversions: Mapping[str, Mapping[str, Any]],
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
        conversions: options of FFNPart by what the conversion is called.
        calibration: batches without labels.
        accuracy: the share of test examples that a model labels correctly.
        inputs: what a forward pass is timed on.
        arguments: of the command line: repetitions, output, model.
        title: of the table.
        timed: what `inputs` is called in it.
        **calibrating: passed to `calibrate`.
    """
    models, fitted, seconds = {"teacher": teacher}, {}, {"teacher": 0.0}
    for name, part in conversions.items():
        start = time.perf_counter()
        patched = get_snnk_model(copy.deepcopy(teacher), SNNKConfig(ffn=FFNPart(**part), modules_to_save=[]))
        fitted[name] = calibrate(patched, calibration, **calibrating).to_dict()
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
