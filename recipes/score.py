"""Score a trained classifier on a task's dev set.

    python recipes/score.py runs/rte_adapter data.dir=path/to/glue              (a run: its best checkpoint)
    python recipes/score.py runs/rte_adapter/bundle --task rte data.dir=path/to/glue
    python recipes/score.py path/to/adapter --task rte data.dir=path/to/glue
    python recipes/score.py runs/lra/text/posrf_gmm/seed0 --draws 100                        (a run of train_lra.py)

The folder may be a run of recipes/finetune.py, a PEFT adapter, a bundle or any transformers classifier of texts or
pictures; or a run of train_lra.py, whose test split is scored. The result goes into the folder as metrics.json
(into a run as evaluation.json, beside the metrics.json of its training), or to `--output`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from lib.config import describe, load_config, read_yaml
from lib.settings import EvaluateConfig, FinetuneConfig
from lib.task_settings import find_task
from papers.lib.lra_settings import LongRangeConfig, LongRangeEvaluation

# What imports torch is imported in the functions, so that `--help` answers at once.
ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Read the command line; returns the exit code (0 done, 1 predictions not finite, 2 wrong input)."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(
            [
                *("settings (default):", *describe(EvaluateConfig)),
                *("", "settings for a run of train_lra.py:", *describe(LongRangeEvaluation)),
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="run, adapter, bundle or model folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")
    parser.add_argument("--task", help="short for task=NAME")
    parser.add_argument("--output", type=Path, help="file for the result")
    parser.add_argument("--draws", type=int, help="also score so many fresh draws of attention's features, 2 or more")
    parser.add_argument("--draws-seed", type=int, default=0, help="of these draws (default 0)")
    arguments = parser.parse_intermixed_args(argv)
    from lib.evaluation import DivergedError
    from lib.guard import guarded
    from lib.terminal import quiet

    quiet()
    overrides = [*([f"task={arguments.task}"] if arguments.task else []), *arguments.overrides]

    def work() -> int:
        try:
            evaluate(arguments.folder, overrides, arguments.output, arguments.draws, arguments.draws_seed)
        except DivergedError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0

    return guarded(work)


class Subject(NamedTuple):
    """What is scored.

    Args:
        config: EvaluateConfig or LongRangeEvaluation.
        task: of the examples.
        model: that was trained.
        max_length: tokens of an example that it reads.
        read: gives the splits, name -> examples; called once the model is known to do.
    """

    config: Any
    task: Any
    model: Any
    max_length: int
    read: Callable[[], dict[str, Any]]


def evaluate(
    folder: Path, overrides: list[str], output: Path | None, draws: int | None = None, draws_seed: int = 0
) -> dict[str, Any]:
    """Load, score, write; returns what was written."""
    from lib.files import check_writable
    from lib.lock import alone

    from snnk_peft.errors import ConfigError

    if draws is not None and draws < 2:
        raise ConfigError(f"--draws is {draws}; expected 2 or more, of which there is a deviation")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; expected a run, an adapter, a bundle or a model")

    run = read_yaml(folder / "config.yaml") if (folder / "config.yaml").is_file() else None
    if output is None:
        output = folder / ("metrics.json" if run is None else "evaluation.json")
    check_writable(output.parent)
    with alone(output) if int(os.environ.get("RANK", "0")) == 0 else nullcontext():
        return score_into(output, folder, run, overrides, draws, draws_seed)


def score_into(
    output: Path, folder: Path, run: dict[str, Any] | None, overrides: list[str], draws: int | None, draws_seed: int
) -> dict[str, Any]:
    """`evaluate`, with a file that nobody else writes; `run` is its config.yaml, if the folder has one."""
    import torch
    from accelerate import Accelerator
    from lib.evaluation import score
    from lib.files import write_json, writing
    from lib.processes import launcher_faults
    from lib.run_folder import environment
    from lib.task_settings import is_sequence_run

    from snnk_peft.errors import ConfigError

    prepare = of_sequences if run is not None and is_sequence_run(run) else of_examples
    config, task, model, max_length, read = prepare(folder, run, overrides)
    if draws is not None:
        from lib.draws import draw_figures, resamplable

        resamplable(model)
        if task.label_names is None or getattr(task, "tokens", False):
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
    if accelerator.is_main_process:
        with writing(output.parent):
            output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, result)
    text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    accelerator.print(f"{config.task}, {folder}: {text}  ({count} examples in {seconds:.1f} s; written to {output})")
    return result


def of_examples(folder: Path, given: Mapping[str, Any] | None, overrides: list[str]) -> Subject:
    """A classifier of texts or pictures.

    Args:
        folder: the model, or its run.
        given: settings of the run, which brings its own task and data; None for a model.
        overrides: settings of the command line.
    """
    from lib.evaluation import evaluation_splits
    from lib.files import read_json
    from lib.modality import modality_of
    from lib.models import load_trained
    from lib.results import load_run

    run = None if given is None else load_config(FinetuneConfig, given)
    config = load_config(EvaluateConfig, known_of(run), overrides)
    described = folder / "config.json"  # a model says which labels it has
    task = find_task(config, read_json(described) if described.is_file() else None)
    model, reader = load_trained(folder, task) if run is None else load_run(folder, run)
    modality = modality_of(task)
    modality.check(model, reader, config.data)

    def read() -> dict[str, Any]:
        # Of two validation sets one may be absent; only without `splits` does the task allow that.
        wanted = task.validation_splits if len(task.validation_splits) == 1 else None
        rows = evaluation_splits(task, task.load(config.data.dir, splits=wanted), config.data.max_eval_samples)
        for note in [] if run is None else known_rows(run, task, rows):
            print(f"note: {note}")
        return {name: modality.examples(part, reader, config.data, task) for name, part in rows.items()}

    return Subject(config, task, model, config.data.max_length, read)


def known_rows(run: FinetuneConfig, task: Any, splits: Mapping[str, Any]) -> list[str]:
    """What is to be said about scored examples on which the run was trained."""
    from lib.repeated import repeat_notes

    from snnk_peft.errors import ConfigError

    limits = {"train": run.data.max_train_samples}
    try:
        own = find_task(run)
        train = own.load(run.data.dir, max_samples=limits, seed=run.train.seed)["train"]
    except ConfigError as error:
        return [f"whether the model was trained on these rows is not known, its own cannot be read: {error.faults[0]}"]
    return repeat_notes(task, train, splits, labelled=False)


def of_sequences(folder: Path, given: Mapping[str, Any] | None, overrides: list[str]) -> Subject:
    """The classifier of a run of train_lra.py, and its test split; arguments as above."""
    from papers.lib.runs import load_long_range
    from papers.lib.sequences import SequenceExamples

    from snnk_peft.errors import ConfigError

    run = load_config(LongRangeConfig, given)
    known = known_of(run)
    known["data"] = {field: known["data"][field] for field in ("dir", "max_test_samples")}
    config = load_config(LongRangeEvaluation, known, overrides)
    if config.task != run.task:
        raise ConfigError(f"task is {config.task}; {folder} was trained on {run.task}: leave the setting out")
    task, length = run.read_task()

    def read() -> dict[str, Any]:
        limits = {"test": config.data.max_test_samples}
        rows = task.load(config.data.dir, splits=["test"], max_samples=limits)
        return {name: SequenceExamples(part, length) for name, part in rows.items()}

    return Subject(config, task, load_long_range(folder, run), length, read)


def known_of(run: Any) -> dict[str, Any]:
    """The settings that an evaluation takes from those of a run; none without one."""
    if run is None:
        return {}
    return {
        "task": run.task,
        "data": dataclasses.asdict(run.data),
        "batch_size": run.train.eval_batch_size,
        "device": run.train.device,
        "mixed_precision": run.train.mixed_precision,
    }


if __name__ == "__main__":
    sys.exit(main())
