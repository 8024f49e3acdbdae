"""The stages of a conversion from settings, and the record from which training after it can be resumed."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snnk_cli.convert_settings import ConvertConfig
from snnk_cli.data import ExampleSet
from snnk_cli.experiment import Data
from snnk_cli.files import read_json, write_json, writing
from snnk_peft import CalibrationReport, Plan, SNNKConfig, get_snnk_model
from snnk_peft.calibrating.answers import Answers, Pooling
from snnk_peft.converting.examples import Examples
from snnk_peft.converting.pipeline import Pipeline
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.texts import batches_by_length, drawn

RECORD = "conversion.json"
SAMPLES = 2500  # default number of a task's examples


@dataclass(frozen=True)
class Conversion:
    """A classifier whose parts were replaced and fitted.

    Args:
        model: the patched model.
        report: report of `calibrate`.
        plan: the plan that chose the parts, or None if the settings chose them.
        examples: number of examples read.
        seconds: seconds of planning and calibration.
    """

    model: Any
    report: CalibrationReport
    plan: Plan | None
    examples: int
    seconds: float

    def save(self, folder: Path) -> None:
        """Write calibration.json and plan.json with their plots, then conversion.json, which marks them complete."""
        with writing(folder):
            self.report.save(folder)
            if self.plan is not None:
                self.plan.save(folder)
        parts = self.model.peft_config["default"].to_dict()
        described = {name: parts[name] for name in ("adapter", "ffn", "attention", "pooler", "low_rank", "parts")}
        found = {"examples": self.examples, "seconds": self.seconds, "calibration": self.report.to_dict()}
        write_json(folder / RECORD, {"parts": described, **found})


def pipeline_of(config: ConvertConfig, original: Any, examples: Examples, pooling: Pooling = "mean") -> Pipeline:
    """Build the pipeline of a conversion from the settings."""
    settings = config.convert
    parts = list(settings.snnk_config(config.train.seed).named_parts().values()) if settings.given else None
    return Pipeline(
        original=original,
        examples=examples,
        answers=Answers(original, pooling),
        of=settings.of,
        parts=parts,
        recover=settings.recover,
        steps=None,
        seed=config.train.seed,
        progress=sys.stderr.isatty(),
        fit={"landmarks": settings.landmarks, "held_out": settings.held_out, "steps": settings.steps},
        cache=settings.cache,
    )


def of_task(teacher: nn.Module, data: Data, config: ConvertConfig, accelerator: Any) -> Pipeline:
    """Build the pipeline for a task's examples, with this process's share of the calibration examples.

    Raises:
        ConfigError: a budget was given with several processes, each of which would take its own timings.
    """
    settings, world = config.convert, accelerator.num_processes
    if settings.budget is not None and world > 1:
        raise ConfigError(
            f"convert.budget is {settings.budget} and there are {world} processes; expected one process for planning. "
            "Convert in one process, then give the parts in its plan.json as convert.parts to several"
        )
    shares = _shares(data, config, world)[accelerator.process_index :: world]
    batches = [data.train.batch(indices, accelerator.device) for indices in shares]
    made = pipeline_of(config, teacher, Examples(batches, [], "batches"))
    made.inputs = timed_inputs(data, config, accelerator.device)
    return made


def converted(pipeline: Pipeline, config: ConvertConfig) -> Conversion:
    """Patch a copy of the teacher, as planned or as set, and fit it."""
    fitted = pipeline.fitted(config.convert.budget)
    examples = pipeline.examples.sizes["fitted"]
    return Conversion(fitted.model, fitted.calibration, fitted.plan, examples, sum(pipeline.stages.seconds.values()))


def _shares(data: Data, config: ConvertConfig, world: int) -> list[list[int]]:
    """Return the indices of the calibration examples, in batches of similar length."""
    chosen = drawn(len(data.train), config.convert.samples or SAMPLES, config.train.seed)
    # Whole batches are held out, so use at least eight, to make one a small share, and at least one per process.
    size = min(config.convert.batch_size, max(1, len(chosen) // max(8, world)))
    return batches_by_length(data.train.lengths, chosen, size)


def restored(teacher: nn.Module, folder: Path, seed: int) -> Any:
    """Build the patched model of a resumed run without fitting it: a checkpoint will fill it."""
    described = read_json(folder / RECORD)["parts"]
    return get_snnk_model(copy.deepcopy(teacher), SNNKConfig(**described, modules_to_save=[], seed=seed))


def timed_inputs(data: Data, config: ConvertConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs for timing: the longest examples of the first split that is scored."""
    part: ExampleSet = next(iter(data.splits.values()))
    inputs = part.batch(next(iter(part.by_length(config.timing.batch_size))), device)
    del inputs["labels"]
    return inputs
