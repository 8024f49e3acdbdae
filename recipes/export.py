"""Write a trained model as one file that runs without its code, and score the file beside the model.

    python recipes/export.py runs/rte_adapter data.dir=path/to/glue                 (a run: its best checkpoint)
    python recipes/export.py path/to/bundle --task rte data.dir=path/to/glue --int8
    python recipes/export.py path/to/bundle --format torch                          (no data: random inputs, no score)

The folder may be a run of recipes/finetune.py, a PEFT adapter, a bundle or any transformers model. The file is checked
on shapes that it was not made from and on the first, the last and six other batches of the task's dev set before it
gets its name; then model and file are scored on all of it. The figures go beside the file, into NAME.metrics.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from lib.config import describe, load_config
from lib.settings import EvaluateConfig, FinetuneConfig
from lib.task_settings import find_task

# What imports torch is imported in the functions, so that `--help` answers at once.
ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
CHECKED = 8  # batches


def main(argv: list[str] | None = None) -> int:
    """Read the command line; returns the exit code (0 done, 2 wrong input or a file that would differ)."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="settings (default):\n" + "\n".join(describe(EvaluateConfig)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="run, adapter, bundle or model folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings of task and data")
    parser.add_argument("--task", help="short for task=NAME")
    parser.add_argument("--format", default="onnx", choices=sorted(SUFFIXES), help="onnx (default) or torch")
    parser.add_argument("--output", type=Path, help="the file (default: FOLDER/model.onnx or FOLDER/model.pt2)")
    parser.add_argument("--int8", action="store_true", help="eight-bit Linears (onnx)")
    parser.add_argument("--overwrite", action="store_true", help="replace an older file")
    arguments = parser.parse_intermixed_args(argv)
    from lib.guard import guarded
    from lib.terminal import quiet

    quiet()

    def work() -> int:
        try:
            return export_folder(arguments)
        except ImportError as error:  # of the optional packages, with what to install
            print(f"error: {error}", file=sys.stderr)
            return 2

    return guarded(work)


def export_folder(arguments: argparse.Namespace) -> int:
    """Load, export, score, write."""
    from lib.files import check_writable
    from lib.lock import alone

    from snnk_peft.errors import ConfigError

    folder: Path = arguments.folder
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; expected a run, an adapter, a bundle or a model")
    target: Path = arguments.output or folder / f"model{SUFFIXES[arguments.format]}"
    check_writable(target.parent)
    with alone(target):
        return export_to(target, arguments)


def export_to(target: Path, arguments: argparse.Namespace) -> int:
    """`export_folder`, with a file that nobody else writes."""
    from lib.files import read_json, write_json
    from lib.models import load_by_class
    from lib.run_folder import environment

    from snnk_peft import export
    from snnk_peft.errors import ConfigError

    folder: Path = arguments.folder

    # --- model and data ----------------------------------------------------------------------------------------------
    run = load_config(FinetuneConfig, folder / "config.yaml") if (folder / "config.yaml").is_file() else None
    known: dict[str, Any] = {} if run is None else {"task": run.task, "data": dataclasses.asdict(run.data)}
    overrides = [*([f"task={arguments.task}"] if arguments.task else []), *arguments.overrides]
    task = splits = None
    if run is None and not overrides:
        model = load_by_class(folder)
    else:
        config = load_config(EvaluateConfig, known, overrides)
        described = folder / "config.json"
        task = find_task(config, read_json(described) if described.is_file() else None)
        model, splits = load_with_data(folder, run, task, config)

    # --- export ------------------------------------------------------------------------------------------------------
    batches = None if splits is None else some_batches(splits, config.batch_size)
    try:
        report = export(
            model,
            arguments.format,
            target,
            batches=batches,
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
    return 0


def load_with_data(folder: Path, run: Any, task: Any, config: Any) -> tuple[Any, dict[str, Any]]:
    """The model and the examples of the task's dev set."""
    from lib.evaluation import evaluation_splits
    from lib.modality import modality_of
    from lib.models import load_trained
    from lib.results import load_run

    model, reader = load_trained(folder, task) if run is None else load_run(folder, run)
    modality = modality_of(task)
    modality.check(model, reader, config.data)
    rows = evaluation_splits(task, task.load(config.data.dir), config.data.max_eval_samples)
    return model.eval(), {name: modality.examples(part, reader, config.data, task) for name, part in rows.items()}


def some_batches(splits: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Batches at equal distances: of short texts, of long ones, and between."""
    import torch

    examples = next(iter(splits.values()))
    plan = sorted(examples.by_length(size), key=lambda indices: max(examples.lengths[index] for index in indices))
    chosen = sorted({i * (len(plan) - 1) // (CHECKED - 1) for i in range(CHECKED)})
    return list(examples.batches([plan[i] for i in chosen], torch.device("cpu")))


def scores(model: Any, file: Path, task: Any, splits: dict[str, Any], size: int) -> dict[str, dict[str, float]]:
    """All metrics and the seconds of scoring, of the model and of the file; prints a table."""
    from accelerate import Accelerator
    from lib.evaluation import score
    from lib.exported import ExportedFile
    from lib.terminal import show_table

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


if __name__ == "__main__":
    sys.exit(main())
