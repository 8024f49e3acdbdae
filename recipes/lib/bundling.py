"""Bundling the model in a run or adapter folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from snnk_cli.config import load_config
from snnk_cli.files import check_writable, write_folder, writing
from snnk_cli.lock import alone
from snnk_cli.models import load_trained
from snnk_cli.results import load_run
from snnk_cli.run_folder import settings_of
from snnk_cli.settings import EvaluateConfig, FinetuneConfig
from snnk_cli.task_settings import find_task
from snnk_cli.terminal import quiet
from snnk_peft import bundle
from snnk_peft.errors import ConfigError


def bundle_folder(
    folder: Path, task: str | None, output: Path | None, overwrite: bool, overrides: Sequence[str] = ()
) -> None:
    """Load the model, bundle it and save it; print what was folded."""
    quiet()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}; expected a run of recipes/finetune.py or an adapter folder")
    started = settings_of(folder)
    run = None if started is None else load_config(FinetuneConfig, started)
    if run is None and task is None:
        raise ConfigError(f"{folder} is not a run, so it does not record what it was trained on; give --task")
    if run is not None and overrides:
        raise ConfigError(f"{folder} is a run, which records its data; leave out {' '.join(overrides)}")
    if run is None and output is None:
        raise ConfigError("--output is missing; expected one, because a bundle does not belong in an adapter folder")
    output = output or folder / "bundle"
    check_writable(output.parent)
    # A run writes its own bundle at its end.
    of_run = alone(folder) if run is not None and output.resolve().parent == folder.resolve() else nullcontext()
    with of_run, alone(output):
        if output.exists() and not overwrite:
            raise ConfigError(f"{output} exists; replace it with --overwrite or choose another --output")
        if overwrite and output.is_dir() and any(output.iterdir()) and not (output / "config.json").is_file():
            raise ConfigError(f"--overwrite would delete {output}, which holds no model")
        if run is None:
            model, reader = load_trained(folder, find_task(load_config(EvaluateConfig, {"task": task}, overrides)))
        else:
            model, reader = load_run(folder, run)
        small = bundle(model)

        def fill(target: Path) -> None:
            small.save_pretrained(str(target))
            reader.save_pretrained(str(target))

        with writing(output.parent):
            output.parent.mkdir(parents=True, exist_ok=True)
        write_folder(output, fill)
    print(small.bundle_report)
    print(f"written to {output}")
