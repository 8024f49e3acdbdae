"""The models of finished runs: how they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snnk_cli.baselines import move_threshold
from snnk_cli.checkpoint import load_model
from snnk_cli.files import read_json
from snnk_cli.modality import modality_of
from snnk_cli.models import build_model, load_pretrained, resolve_model, with_wide_head
from snnk_cli.run_folder import REPORT, best_checkpoint, check_checkpoint
from snnk_cli.settings import FinetuneConfig
from snnk_cli.task_settings import find_task


def load_run(folder: Path, run: FinetuneConfig) -> tuple[Any, Any]:
    """Load the model of a run's best checkpoint, in eval mode, with its reader."""
    pretrained, task = resolve_model(run.model.name_or_path), find_task(run)
    base, _ = load_pretrained(pretrained, task, run.model.pretrained)
    if run.method.head == "wide":
        base = with_wide_head(base, task)
    model = build_model(base, run.method, run.train.seed, calibration=None)
    load_model(trained_checkpoint(folder, run), model)
    if run.train.choose_threshold:
        move_threshold(model, read_json(folder / REPORT)["threshold"])
    return model.eval(), modality_of(task).reader(pretrained, task)


def trained_checkpoint(folder: Path, run: Any) -> Path:
    """Return the best checkpoint of a run, which must have these settings."""
    best = best_checkpoint(folder)
    check_checkpoint(best, run, ())
    return best
