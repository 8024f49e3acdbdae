"""Scoring of the model in a folder: a run, an adapter, a bundle or a model."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from snnk_cli.config import ROOT, load_config
from snnk_cli.draws import draw_figures, resamplable
from snnk_cli.evaluation import DivergedError, evaluation_splits, repeat_notes, score
from snnk_cli.files import check_writable, read_json, write_json, writing
from snnk_cli.lock import alone
from snnk_cli.modality import modality_of
from snnk_cli.models import load_trained
from snnk_cli.processes import launcher_faults
from snnk_cli.results import load_run
from snnk_cli.run_folder import environment, settings_of
from snnk_cli.settings import EvaluateConfig, FinetuneConfig
from snnk_cli.task_settings import find_task, is_sequence_run
from snnk_cli.terminal import quiet
from snnk_peft.errors import ConfigError


class Subject(NamedTuple):
    """The model to score, with its task and data.

    Args:
        config: an EvaluateConfig, or a config like it.
        task: task of the examples.
        model: the trained model.
        max_length: maximum number of tokens per example.
        read: returns the splits, name -> examples; called after the model has been checked.
    """

    config: Any
    task: Any
    model: Any
    max_length: int
    read: Callable[[], dict[str, Any]]


Preparer = Callable[[Path, Mapping[str, Any] | None, list[str]], Subject]
"""Reads a folder, with the settings of the run that it is or None, and with those of the command line."""


def score_folder(
    folder: Path,
    overrides: list[str],
    output: Path | None,
    draws: int | None = None,
    draws_seed: int = 0,
    of_sequences: Preparer | None = None,
    results: list[dict[str, Any]] | None = None,
) -> int:
    """Load, score and write; return the exit code (0 done, 1 predictions not finite).

    Args:
        folder: folder of the model or run.
        overrides: settings from the command line.
        output: file of the result, or None for none.
        draws: number of fresh draws of attention's features to also score, or None.
        draws_seed: seed of these draws.
        of_sequences: reads a run whose examples are long sequences; only available in a clone.
        results: list that the result is appended to.
    """
    quiet()
    if draws is not None and draws < 2:
        raise ConfigError(f"--draws is {draws}; expected 2 or more, for a standard deviation")
    check_is_folder(folder)
    run = settings_of(folder)
    if output is not None:
        check_writable(output.parent)
    with alone(output) if output is not None and int(os.environ.get("RANK", "0")) == 0 else nullcontext():
        prepare = of_examples if of_sequences is None or run is None or not is_sequence_run(run) else of_sequences
        subject = prepare(folder, run, overrides)
        try:
            found = _score(output, folder, subject, draws, draws_seed)
        except DivergedError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if results is not None:
            results.append(found)
    return 0


def result_of(folder: Path) -> Path:
    """Return the file of the scores in a folder."""
    return folder / ("evaluation.json" if (folder / "config.yaml").is_file() else "metrics.json")


def check_is_folder(folder: Path) -> None:
    """Raise a ConfigError if `folder` is not a folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; expected a run, an adapter, a bundle or a model")


def _score(output: Path | None, folder: Path, subject: Subject, draws: int | None, draws_seed: int) -> dict[str, Any]:
    config, task, model, max_length, read = subject
    if draws is not None:
        resamplable(model)
        if task.problem_type != "single_label_classification":
            raise ConfigError(f"--draws: task {config.task} has no class label per example; leave --draws out")
    splits = read()

    # --- score -------------------------------------------------------------------------------------------------------
    cpu = config.device == "cpu" or not torch.cuda.is_available()
    if cpu and config.mixed_precision == "fp16":
        raise ConfigError("mixed_precision is fp16, which needs a CUDA device; set mixed_precision=no")
    if faults := launcher_faults(config.device, cpu, "device"):
        raise ConfigError(faults)
    accelerator = Accelerator(cpu=cpu, mixed_precision=config.mixed_precision)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    started = time.perf_counter()
    metrics = score(model, task, splits, config.batch_size, accelerator)
    seconds = time.perf_counter() - started
    assert metrics is not None
    count = sum(len(part) for part in splits.values())
    result = {
        "task": config.task,
        "folder": folder.name,
        "score": metrics["score"],
        "metrics": metrics,
        "examples": {name: len(part) for name, part in splits.items()},
        "max_length": max_length,
        "seconds": seconds,
        "examples_per_second": count / seconds,
        "parameters": sum(value.numel() for value in model.parameters()),
        "device": str(accelerator.device),
        "environment": environment(ROOT),
    }
    if draws is not None:
        result["draws"] = draw_figures(model, task, splits, config.batch_size, accelerator, draws, draws_seed)
    if output is not None and accelerator.is_main_process:
        with writing(output.parent):
            output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, result)
    text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    kept = "" if output is None else f"; written to {output}"
    accelerator.print(f"{config.task}, {folder}: {text}  ({count} examples in {seconds:.1f} s{kept})")
    return result


def of_examples(folder: Path, given: Mapping[str, Any] | None, overrides: list[str]) -> Subject:
    """Prepare a classifier of texts or images (see `Preparer`); a run has its own task and data."""
    run = None if given is None else load_config(FinetuneConfig, given)
    config = load_config(EvaluateConfig, known_of(run), overrides)
    task, model, read = load_classifier(folder, run, config)

    def read_with_notes() -> dict[str, Any]:
        rows, examples = read()
        for note in [] if run is None else _known_rows(run, task, rows):
            print(f"note: {note}")
        return examples

    return Subject(config, task, model, config.data.max_length, read_with_notes)


def load_classifier(
    folder: Path, run: FinetuneConfig | None, config: EvaluateConfig
) -> tuple[Any, Any, Callable[[], tuple[dict[str, Any], dict[str, Any]]]]:
    """Return the task, the model, and a function that reads the dev set as rows and as examples, by split.

    Args:
        folder: the model, or its run.
        run: settings of the run, or None for a model.
        config: task and data.
    """
    described = folder / "config.json"  # the model's config names its labels
    task = find_task(config, read_json(described) if described.is_file() else None)
    model, reader = load_trained(folder, task) if run is None else load_run(folder, run)
    modality = modality_of(task)
    modality.check(model, reader, config.data)

    def read() -> tuple[dict[str, Any], dict[str, Any]]:
        # One of two validation sets may be missing; the task accepts this only without `splits`.
        wanted = task.validation_splits if len(task.validation_splits) == 1 else None
        rows = evaluation_splits(task, task.load(config.data.dir, splits=wanted), config.data.max_eval_samples)
        return rows, {name: modality.examples(part, reader, config.data, task) for name, part in rows.items()}

    return task, model, read


def _known_rows(run: FinetuneConfig, task: Any, splits: Mapping[str, Any]) -> list[str]:
    """Return notes about scored examples that the run was trained on."""
    limits = {"train": run.data.max_train_samples}
    try:
        own = find_task(run)
        train = own.load(run.data.dir, max_samples=limits, seed=run.train.seed)["train"]
    except ConfigError as error:
        return [
            "whether the model was trained on these rows is not known; its training data cannot be read: "
            f"{error.faults[0]}"
        ]
    return repeat_notes(task, train, splits, labelled=False)


def known_of(run: Any) -> dict[str, Any]:
    """Return the settings that an evaluation takes from those of a run; empty without a run."""
    if run is None:
        return {}
    return {
        "task": run.task,
        "data": dataclasses.asdict(run.data),
        "batch_size": run.train.eval_batch_size,
        "device": run.train.device,
        "mixed_precision": run.train.mixed_precision,
    }
