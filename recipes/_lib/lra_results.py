"""What a finished run of recipes/train_lra.py leaves: the learning curve and metrics.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from _lib.files import write_json
from _lib.loop import RunState
from _lib.lra_settings import LongRangeConfig
from _lib.plots import learning_curve
from _lib.run_folder import environment
from _lib.tracking import read_log


def parameter_counts(model: torch.nn.Module) -> dict[str, int]:
    """All parameters, and those that are trained (fixed sinusoids are not)."""
    trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    return {"trainable": trained, "total": sum(value.numel() for value in model.parameters())}


def write_report(
    folder: Path,
    config: LongRangeConfig,
    state: RunState,
    test: Mapping[str, float],
    per_epoch: int,
    counts: Mapping[str, int],
    examples: Mapping[str, int],
    memory: Mapping[str, int],
    longest: int,
    root: Path,
) -> None:
    """learning_curve.png, then metrics.json: the presence of the latter means that the run is complete.

    Args:
        folder: the run folder.
        config: the resolved settings.
        state: of the finished run.
        test: scores of the best checkpoint on the test split.
        per_epoch: optimizer steps per epoch.
        counts: see `parameter_counts`.
        examples: split name -> number of examples.
        memory: peak bytes "before_training" (on a CPU: of the process with its data) and "peak" (training and
            validation).
        longest: tokens of the longest training document.
        root: of the source tree, for the git commit.
    """
    assert state.best is not None
    title = f"{config.task}, {config.method.label()}"
    learning_curve(read_log(folder / "log.jsonl"), folder / "learning_curve.png", title)
    # Paths of this machine are of no use to a reader of the numbers; config.yaml has them.
    settings = dataclasses.asdict(config)
    del settings["output"], settings["data"]["dir"]
    report = {
        "task": config.task,
        "method": config.method.label(),
        "seed": config.train.seed,
        "accuracy": test["accuracy"],
        "validation_accuracy": state.best["metrics"]["accuracy"],
        "best_step": state.best["step"],
        "steps": state.step,
        "epochs": state.step / per_epoch,
        "stopped_early": state.step < config.train.steps,
        "train_seconds": state.train_seconds,
        "train_cpu_seconds": state.cpu_seconds,
        "seconds_per_step": state.train_seconds / state.step,
        "cpu_seconds_per_step": state.cpu_seconds / state.step,
        "peak_memory_bytes": memory["peak"],
        "peak_memory_bytes_before_training": memory["before_training"],
        "trainable_parameters": counts["trainable"],
        "total_parameters": counts["total"],
        "longest_sequence": longest,
        "examples": dict(examples),
        "config": settings,
        "environment": environment(root),
    }
    write_json(folder / "metrics.json", report)
