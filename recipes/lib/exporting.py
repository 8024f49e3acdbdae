"""Exporting what a folder holds to one file, and scoring the file beside the model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator

from lib.config import ROOT, load_config
from lib.evaluation import score
from lib.files import check_writable, write_json
from lib.lock import alone
from lib.models import load_by_class
from lib.run_folder import environment
from lib.scoring import check_is_folder, load_classifier
from lib.settings import EvaluateConfig, FinetuneConfig
from lib.terminal import quiet, show_table
from snnk_peft import export
from snnk_peft.errors import ConfigError

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
CHECKED = 8  # batches


def export_folder(arguments: argparse.Namespace) -> int:
    """Load, export, score, write; returns the exit code.

    Args:
        arguments: of the command line of recipes/export.py.
    """
    quiet()
    check_is_folder(arguments.folder)
    target: Path = arguments.output or arguments.folder / f"model{SUFFIXES[arguments.format]}"
    check_writable(target.parent)
    with alone(target):
        try:
            _export_to(target, arguments)
        except ImportError as error:  # of the optional packages, with what to install
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def _export_to(target: Path, arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder

    # --- model and data ----------------------------------------------------------------------------------------------
    run = load_config(FinetuneConfig, folder / "config.yaml") if (folder / "config.yaml").is_file() else None
    known: dict[str, Any] = {} if run is None else {"task": run.task, "data": dataclasses.asdict(run.data)}
    overrides = [*([f"task={arguments.task}"] if arguments.task else []), *arguments.overrides]
    splits = None
    if run is None and not overrides:
        model = load_by_class(folder)
    else:
        config = load_config(EvaluateConfig, known, overrides)
        task, model, read = load_classifier(folder, run, config)
        splits = read()[1]

    # --- export ------------------------------------------------------------------------------------------------------
    try:
        report = export(
            model.eval(),
            arguments.format,
            target,
            batches=None if splits is None else some_batches(splits, config.batch_size),
            int8=arguments.int8,
            overwrite=arguments.overwrite,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(report)
    result: dict[str, Any] = {"folder": folder.name, **report.to_dict(), "environment": environment(ROOT)}
    result["files"] = {Path(path).name: size for path, size in report.files.items()}
    if splits is not None:
        result["task"], result["scores"] = config.task, scores(model, target, task, splits, config.batch_size)
    write_json(target.with_suffix(".metrics.json"), result)


def some_batches(splits: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Batches at equal distances: of short texts, of long ones, and between."""
    examples = next(iter(splits.values()))
    plan = sorted(examples.by_length(size), key=lambda indices: max(examples.lengths[index] for index in indices))
    chosen = sorted({i * (len(plan) - 1) // (CHECKED - 1) for i in range(CHECKED)})
    return list(examples.batches([plan[i] for i in chosen], torch.device("cpu")))


def scores(model: Any, file: Path, task: Any, splits: dict[str, Any], size: int) -> dict[str, dict[str, float]]:
    """All metrics and the seconds of scoring, of the model and of the file; prints a table."""
    accelerator, found = Accelerator(cpu=True), {}
    for name, candidate in (("model", model.to("cpu")), (file.name, ExportedFile(file))):
        start = time.perf_counter()
        metrics = score(candidate, task, splits, size, accelerator)
        assert metrics is not None
        found[name] = {**metrics, "seconds": time.perf_counter() - start}
    title = f"{task.title}, {sum(len(part) for part in splits.values())} examples"
    lines = [[name, *(f"{value:.4g}" for value in row.values())] for name, row in found.items()]
    show_table(title, ["", *found["model"]], lines)
    return found


class ExportedFile(torch.nn.Module):
    """A file of `snnk_peft.export`, run by ONNX Runtime (.onnx, on the processor) or by torch.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        if path.suffix == ".onnx":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            names = [entry.name for entry in session.get_inputs()]
            outputs = [entry.name for entry in session.get_outputs()]

            def run(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
                found = session.run(None, {name: batch[name].cpu().numpy() for name in names})
                return {name: torch.from_numpy(value) for name, value in zip(outputs, found, strict=True)}
        else:
            program = torch.export.load(path).module()

            def run(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
                with torch.no_grad():
                    return dict(program(**batch))

        self.run = run

    def forward(self, **batch: torch.Tensor) -> SimpleNamespace:
        """The outputs by name."""
        return SimpleNamespace(**self.run(batch))
