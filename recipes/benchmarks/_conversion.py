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
        config: fields of SNNKConfig.
        calibrating: arguments of `calibrate`.
    """

    config: Mapping[str, Any]
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
    again: Sequence[Sequence[Mapping[str, torch.Tensor]]] = (),
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
        again: other choices of the calibration data. Accuracy and seconds are then means over all of them, with the
            lowest and the highest accuracy beside; what is timed is converted with the first.
        **calibrating: passed to `calibrate` every time.
    """
    models, fitted, scores, seconds = {"teacher": teacher}, {}, {"teacher": [accuracy(teacher)]}, {"teacher": [0.0]}
    for name, conversion in conversions.items():
        reports = []
        for data in (calibration, *again):
            start = time.perf_counter()
            patched = get_snnk_model(copy.deepcopy(teacher), SNNKConfig(**conversion.config, modules_to_save=[]))
            reports.append(calibrate(patched, data, **calibrating, **conversion.calibrating).to_dict())
            converted = bundle(patched).eval()
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            models.setdefault(name, converted)
            scores.setdefault(name, []).append(accuracy(converted))
        fitted[name] = reports if again else reports[0]

    def forward(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.inference_mode():
                model(**inputs)

        return run

    latency = alternate({name: forward(model) for name, model in models.items()}, arguments.repetitions)
    rows = [
        {
            "model": name,
            "accuracy": statistics.mean(scores[name]),
            **({"lowest": min(scores[name]), "highest": max(scores[name])} if again else {}),
            "speed-up": ratio(latency["teacher"], latency[name]),
            f"ms per {timed}": 1000 * statistics.median(latency[name]),
            "conversion seconds": statistics.mean(seconds[name]),
            # Rows of a bundle are buffers.
            "parameters": sum(t.numel() for t in model.state_dict().values() if t.is_floating_point()),
        }
        for name, model in models.items()
    ]
    report({"calibration": fitted, "teacher": arguments.model.name}, rows, arguments.output, title)
