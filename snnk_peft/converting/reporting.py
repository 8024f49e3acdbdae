"""The report of a conversion, measured at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from snnk_peft.converting.compared import compared, seconds, size
from snnk_peft.converting.int8 import bytes_of, exported, runner
from snnk_peft.converting.pipeline import Pipeline, Result
from snnk_peft.converting.report import ConversionReport, warnings_of
from snnk_peft.planning.full_heads import recall


def report_of(pipeline: Pipeline, result: Result, folder: Path | None, settings: Mapping[str, Any]) -> ConversionReport:
    """Report the original and its conversion side by side.

    Args:
        pipeline: the original and the held-out examples.
        result: the conversion.
        folder: folder for int8 files of both, which are then compared as well; None for none.
        settings: the arguments.
    """
    original, held_out = pipeline.original, pipeline.examples.held_out
    runs: dict[str, Callable[..., Any]] = {"original": original, "converted": result.model}
    rows: dict[str, dict[str, float]] = {
        name: dict(size(model, pipeline.stored))  # type: ignore[arg-type]
        for name, model in runs.items()
    }
    rows["converted"] |= result.figures
    if folder is not None:
        for name, model in list(runs.items()):
            file = exported(model, folder / name, pipeline.examples.fitted)
            runs[f"{name}, int8"] = run = runner(file)
            figures = compared(original, run, held_out, pipeline.answers)[0]
            rows[f"{name}, int8"] = {"parameters": rows[name]["parameters"], "bytes": bytes_of(file), **figures}
    if pipeline.answers.causal:
        for name, model in (("original", original), ("converted", result.model)):
            if (found := recall(model, [*held_out, *pipeline.examples.fitted], pipeline.seed)) is not None:
                rows[name]["recall"] = found
    for name, took in seconds(runs, original, pipeline.inputs).items():
        rows[name]["milliseconds"] = 1000 * took
    return ConversionReport(
        models=rows,
        examples=pipeline.examples.sizes,
        timed=" x ".join(map(str, next(iter((pipeline.inputs).values())).shape)),
        layers=result.layers,
        seconds=pipeline.stages.seconds,
        recovery={} if result.recovery is None else dataclasses.asdict(result.recovery),
        plan=result.plan,
        calibration=result.calibration,
        warnings=warnings_of(rows["converted"], result.layers, rows["original"]),
        settings=settings,
    )
