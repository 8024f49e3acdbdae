"""Fold a fine-tuned SNNK model into a plain transformers model that anybody can load.

    python recipes/bundle.py runs/rte_adapter                                   (a run: its best checkpoint)
    python recipes/bundle.py path/to/adapter --task rte --output path/to/bundle

Writes the model, its tokenizer or image processor and its model card; prints what was folded, sizes before and after,
and how far the outputs moved (rounding only; more than that is an error).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# What imports torch is imported in the functions, so that `--help` answers at once.


def main(argv: list[str] | None = None) -> int:
    """Read the command line; returns the exit code (0 done, 2 wrong input)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="run of recipes/finetune.py, or adapter folder")
    parser.add_argument("overrides", nargs="*", metavar="data.key=value", help="labels and kind of an adapter's table")
    parser.add_argument("--task", help="the task that an adapter was trained on; a run knows its own")
    parser.add_argument("--output", type=Path, help="folder for the bundle (default: FOLDER/bundle of a run)")
    parser.add_argument("--overwrite", action="store_true", help="replace an older bundle")
    arguments = parser.parse_intermixed_args(argv)
    from lib.guard import guarded
    from lib.terminal import quiet

    quiet()

    def work() -> None:
        small, output = make_bundle(
            arguments.folder, arguments.task, arguments.output, arguments.overwrite, arguments.overrides
        )
        print(small.bundle_report)
        print(f"written to {output}")

    return guarded(work)


def make_bundle(
    folder: Path, task: str | None, output: Path | None, overwrite: bool, overrides: Sequence[str] = ()
) -> tuple[Any, Path]:
    """Load, fold, save; returns the bundle and its folder."""
    from lib.config import load_config
    from lib.files import check_writable, write_folder, writing
    from lib.lock import alone
    from lib.models import load_trained
    from lib.results import load_run
    from lib.settings import EvaluateConfig, FinetuneConfig
    from lib.task_settings import find_task

    from snnk_peft import bundle
    from snnk_peft.errors import ConfigError

    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"{folder} {what}; expected a run of recipes/finetune.py or an adapter folder")
    run = load_config(FinetuneConfig, folder / "config.yaml") if (folder / "config.yaml").is_file() else None
    if run is None and task is None:
        raise ConfigError(f"{folder} is no run, so it does not say what it was trained on; give --task")
    if run is not None and overrides:
        raise ConfigError(f"{folder} is a run, which knows its data; leave out {' '.join(overrides)}")
    if run is None and output is None:
        raise ConfigError("give --output: an adapter folder is no place for a bundle")
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
    return small, output


if __name__ == "__main__":
    sys.exit(main())
