"""Export of the model in a folder to one file, and scoring of the file against the model."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator

from snnk_cli.config import ROOT, load_config
from snnk_cli.evaluation import score
from snnk_cli.files import check_writable, write_json
from snnk_cli.lock import alone
from snnk_cli.modality import Texts, load_tokenizer, positions
from snnk_cli.models import load_by_class, local_folder
from snnk_cli.run_folder import environment, settings_of
from snnk_cli.scoring import check_is_folder, load_classifier
from snnk_cli.settings import EvaluateConfig, FinetuneConfig
from snnk_cli.terminal import quiet, show_table
from snnk_peft import export
from snnk_peft.converting.int8 import runner
from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks.stdlib_docs import load_sentences

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
CHECKED = 8  # batches
TOKENS = 64  # per sentence


def export_model(
    name: str,
    overrides: list[str],
    format: str,
    output: Path | None,
    written: list[Path],
    **options: bool,
) -> int:
    """Load, export, score and write; return the exit code (0 done, 2 a package is missing).

    Args:
        name: name of the folder, or of the model on the Hub.
        overrides: settings of task and data.
        format: a key of `SUFFIXES`.
        output: the file; None for one in the model's folder, or in the current one if the model is on the Hub.
        written: list that the file is appended to.
        options: `int8`, `cache` and `overwrite` of `snnk_peft.export`.
    """
    quiet()
    folder = local_folder(name)
    check_is_folder(folder)
    if format not in SUFFIXES:
        raise ConfigError(did_you_mean("format", format, list(SUFFIXES)))
    mine = folder / "model" if Path(name).expanduser().exists() else Path(name.rpartition("/")[2])
    target = output or mine.with_name(f"{mine.name}{SUFFIXES[format]}")
    written.append(target)
    check_writable(target.parent)
    if target.exists() and not options["overwrite"]:
        raise ConfigError(f"{target} exists; replace it with --overwrite, or choose another --output")
    with alone(target):
        try:
            _export_to(target, folder, overrides, format, options)
        except ImportError as error:  # from optional packages; says what to install
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def _export_to(target: Path, folder: Path, overrides: list[str], format: str, options: dict[str, Any]) -> None:
    # --- model and data ----------------------------------------------------------------------------------------------
    started = settings_of(folder)
    run = None if started is None else load_config(FinetuneConfig, started)
    known: dict[str, Any] = {} if run is None else {"task": run.task, "data": dataclasses.asdict(run.data)}
    splits = None
    if run is None and not overrides:
        model = load_by_class(folder)
        batches = sentences(model, folder)
    else:
        config = load_config(EvaluateConfig, known, overrides)
        task, model, read = load_classifier(folder, run, config)
        splits = read()[1]
        batches = some_batches(splits, config.batch_size)

    # --- export ------------------------------------------------------------------------------------------------------
    try:
        report = export(model.eval(), format, target, batches=batches, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(report)
    result: dict[str, Any] = {"folder": folder.name, **report.to_dict(), "environment": environment(ROOT)}
    result["files"] = {Path(path).name: size for path, size in report.files.items()}
    if splits is not None:
        result["task"], result["scores"] = config.task, scores(model, target, task, splits, config.batch_size)
    write_json(target.with_suffix(".metrics.json"), result)


def sentences(model: Any, folder: Path) -> list[dict[str, Any]] | None:
    """Tokenise sentences that come with every Python, so that the export sees real tokenizer output.

    Args:
        model: the model that is exported.
        folder: folder of its tokenizer; the result is None without one, and for models that do not read text.
    """
    if model.main_input_name != "input_ids" or not Texts().has_reader(folder):
        return None
    tokenizer, known = load_tokenizer(str(folder)), inspect.signature(model.forward).parameters
    texts = sorted((sentence.text for sentence in load_sentences()[1][: 8 * CHECKED]), key=len)
    padded = tokenizer.pad_token is not None
    made = [
        tokenizer(
            texts[8 * at : 8 * at + (8 if padded else 1)],
            padding=padded,
            truncation=True,
            max_length=min(positions(model) or TOKENS, TOKENS),
            return_tensors="pt",
        )
        for at in range(CHECKED)
    ]
    return [{name: value for name, value in batch.items() if name in known} for batch in made]


def some_batches(splits: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Return evenly spaced batches, from short texts to long ones."""
    examples = next(iter(splits.values()))
    plan = sorted(examples.by_length(size), key=lambda indices: max(examples.lengths[index] for index in indices))
    chosen = sorted({i * (len(plan) - 1) // (CHECKED - 1) for i in range(CHECKED)})
    return list(examples.batches([plan[i] for i in chosen], torch.device("cpu")))


def scores(model: Any, file: Path, task: Any, splits: dict[str, Any], size: int) -> dict[str, dict[str, float]]:
    """Compute all metrics and the scoring time of the model and of the file; print a table."""
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
    """A file written by `snnk_peft.export`, run by ONNX Runtime (.onnx, on the CPU) or by torch.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        if path.suffix == ".onnx":
            run: Callable[..., dict[str, Any]] = runner(path)
        else:
            program = torch.export.load(path).module()

            def run(**batch: Any) -> dict[str, Any]:
                with torch.no_grad():
                    return dict(program(**batch))

        self.run = run

    def forward(self, **batch: torch.Tensor) -> SimpleNamespace:
        """Return the outputs by name."""
        return SimpleNamespace(**self.run(**batch))
