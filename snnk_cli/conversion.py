"""The stages of a conversion by the settings, and the record that lets the training behind it be continued."""

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


@dataclass(frozen=True)
class Conversion:
    """A classifier whose parts were replaced and fitted.

    Args:
        model: the patched model.
        report: of `calibrate`.
        plan: what decided the parts, or None if the settings did.
        examples: that were read.
        seconds: planning and calibration.
    """

    model: Any
    report: CalibrationReport
    plan: Plan | None
    examples: int
    seconds: float

    def save(self, folder: Path) -> None:
        """calibration.json, its plot, those of the plan, and conversion.json, which says that all are there."""
        with writing(folder):
            self.report.save(folder)
            if self.plan is not None:
                self.plan.save(folder)
        parts = self.model.peft_config["default"].to_dict()
        described = {name: parts[name] for name in ("adapter", "ffn", "attention", "pooler", "low_rank", "parts")}
        found = {"examples": self.examples, "seconds": self.seconds, "calibration": self.report.to_dict()}
        write_json(folder / RECORD, {"parts": described, **found})


def pipeline_of(config: ConvertConfig, original: Any, examples: Examples, pooling: Pooling = "mean") -> Pipeline:
    """The stages of a conversion, as the settings say."""
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
    """The stages for a task's examples: this process's share of those that calibrate.

    Raises:
        ConfigError: a budget and several processes, of which each would measure seconds of its own.
    """
    settings, world = config.convert, accelerator.num_processes
    if settings.budget is not None and world > 1:
        raise ConfigError(
            f"convert.budget is {settings.budget} and there are {world} processes; expected one to plan. Convert "
            "in one process, and give the parts of its plan.json as convert.parts to several"
        )
    shares = _shares(data, config, world)[accelerator.process_index :: world]
    batches = [data.train.batch(indices, accelerator.device) for indices in shares]
    made = pipeline_of(config, teacher, Examples(batches, [], "batches"))
    made.inputs = timed_inputs(data, config, accelerator.device)
    return made


def converted(pipeline: Pipeline, config: ConvertConfig) -> Conversion:
    """Patch a copy of the teacher, as planned or as the settings say, and fit it."""
    fitted = pipeline.fitted(config.convert.budget)
    examples = pipeline.examples.sizes["fitted"]
    return Conversion(fitted.model, fitted.calibration, fitted.plan, examples, sum(pipeline.stages.seconds.values()))


def _shares(data: Data, config: ConvertConfig, world: int) -> list[list[int]]:
    """The examples that calibration reads, in batches of similar length."""
    chosen = drawn(len(data.train), config.convert.samples, config.train.seed)
    # Whole batches are held out: at least eight, so that one is a small part; and every process needs one.
    size = min(config.convert.batch_size, max(1, len(chosen) // max(8, world)))
    return batches_by_length(data.train.lengths, chosen, size)


def restored(teacher: nn.Module, folder: Path, seed: int) -> Any:
    """The patched model of a run that is continued, not fitted: a checkpoint will fill it."""
    described = read_json(folder / RECORD)["parts"]
    return get_snnk_model(copy.deepcopy(teacher), SNNKConfig(**described, modules_to_save=[], seed=seed))


def timed_inputs(data: Data, config: ConvertConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Inputs on which models are timed: the longest examples of the first split that is scored."""
    part: ExampleSet = next(iter(data.splits.values()))
    inputs = part.batch(next(iter(part.by_length(config.timing.batch_size))), device)
    del inputs["labels"]
    return inputs
