"""Train a small Transformer from scratch on a Long Range Arena task: softmax or any linear attention, same recipe.

    python recipes/train_lra.py recipes/configs/lra/listops.yaml
    python recipes/train_lra.py recipes/configs/lra/text.yaml data.dir=path/to/imdb method.attention=softmax
    python recipes/train_lra.py recipes/configs/lra/listops.yaml train.max_cpu_minutes=15 train.schedule=constant

Settings are `section.key=value`; `--help` lists them. The checkpoint with the best validation score is the one whose
test accuracy is reported. A run killed at any moment continues with `--resume` and ends with the same weights, bit for
bit, as one that was never interrupted. SIGTERM saves first (exit code 143).
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

import torch
from _lib.checkpoint import discard_newer, load_checkpoint, load_model
from _lib.config import describe, dump_yaml, load_config
from _lib.data import steps_per_epoch
from _lib.evaluation import score
from _lib.loop import RunState, make_optimizer
from _lib.lra_model import build_classifier
from _lib.lra_results import parameter_counts, write_report
from _lib.lra_settings import LongRangeConfig, learning_rate
from _lib.run_folder import SIGTERM_EXIT, StopSignal, check_folder, choose_checkpoint, claim_folder, peak_memory
from _lib.sequences import SequenceExamples
from _lib.terminal import quiet
from _lib.tracking import Tracker
from _lib.training import Training
from accelerate import Accelerator
from accelerate.utils import set_seed

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.tasks import LONG_RANGE_TASKS

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Read the command line; returns the exit code (0 done, 1 diverged, 2 wrong input, 143 stopped by SIGTERM)."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="settings (default):\n" + "\n".join(describe(LongRangeConfig)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="a YAML file, see recipes/configs/lra")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--resume", action="store_true", help="continue the run in output.dir")
    parser.add_argument("--checkpoint", metavar="NAME", help="with --resume: this checkpoint instead of the newest")
    parser.add_argument("--overwrite", action="store_true", help="delete the run in output.dir first")
    arguments = parser.parse_intermixed_args(argv)
    quiet()
    try:
        config = load_config(LongRangeConfig, arguments.config, arguments.overrides)
        if arguments.checkpoint and not arguments.resume:
            raise ConfigError("--checkpoint needs --resume")
        command = shlex.join(["python", "recipes/train_lra.py", arguments.config, *arguments.overrides, "--resume"])
        return train_lra(config, command, arguments.resume, arguments.checkpoint, arguments.overwrite)
    except (ConfigError, UnsupportedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def train_lra(config: LongRangeConfig, command: str, resume: bool, checkpoint: str | None, overwrite: bool) -> int:
    """The whole run; returns the exit code."""
    stop = StopSignal()
    train, folder, task = config.train, Path(config.output.dir), LONG_RANGE_TASKS[config.task]
    cpu = train.device == "cpu" or not torch.cuda.is_available()
    if cpu and train.mixed_precision == "fp16":
        raise ConfigError("train.mixed_precision is fp16, which needs a CUDA device; use bf16 or no")
    accelerator = Accelerator(cpu=cpu, mixed_precision=train.mixed_precision)
    world = accelerator.num_processes

    # --- the run folder: refused before any work is done, claimed once data and model are known to be good ----------
    if accelerator.is_main_process:
        check_folder(folder, dataclasses.asdict(config), resume, overwrite)
    accelerator.wait_for_everyone()
    if resume and (folder / "metrics.json").is_file() and checkpoint is None:
        accelerator.print(f"{folder} is finished; its results are in {folder / 'metrics.json'}")
        return 0
    start = choose_checkpoint(folder / "checkpoints", checkpoint) if resume else None

    # --- data -------------------------------------------------------------------------------------------------------
    data = config.data
    limits = {"train": data.max_train_samples, "validation": data.max_validation_samples, "test": data.max_test_samples}
    rows = task.load(data.dir, max_length=data.max_length, max_samples=limits, seed=train.seed)
    splits = {name: SequenceExamples(part) for name, part in rows.items()}
    examples = splits.pop("train")
    test = {"test": splits.pop("test")}
    sizes = {"train": len(examples), **{name: len(part) for name, part in {**splits, **test}.items()}}
    identity = {
        "data": [part.fingerprint() for part in (examples, *splits.values(), *test.values())],
        "processes": world,
    }

    # --- model and optimizer ----------------------------------------------------------------------------------------
    set_seed(train.seed)
    max_length = task.max_length if data.max_length is None else data.max_length
    bare = build_classifier(task, config.model, config.method, max_length, train.seed).to(accelerator.device)
    bare.train()
    counts = parameter_counts(bare)
    plain_optimizer = make_optimizer(bare, train, train.beta2)
    model, optimizer = accelerator.prepare(bare, plain_optimizer)
    # From here on only dropout draws random numbers, differently in every process.
    set_seed(train.seed + 1 + accelerator.process_index)

    # --- where we are -----------------------------------------------------------------------------------------------
    per_epoch = steps_per_epoch(len(examples), train.batch_size * world, train.gradient_accumulation)
    state = RunState()
    if start is not None:
        saved = load_checkpoint(start, bare, plain_optimizer, identity, accelerator.process_index)
        state = RunState(**saved["run"])
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(saved["scaler"])
    accelerator.wait_for_everyone()  # all processes have read it
    if accelerator.is_main_process:
        claim_folder(folder, dump_yaml(config), ROOT, resume)
        for name in discard_newer(start) if start is not None else []:
            print(f"discarded {name}, which is newer than {start.name}")
    tracker = Tracker(folder, train.steps, state.step, config.output.tensorboard, accelerator.is_main_process)
    tracker.say(
        f"{config.task}, {config.method.label()}: {sizes['train']} examples of up to {max(examples.lengths)} tokens, "
        f"{per_epoch} steps per epoch, at most {train.steps} in all; {counts['total']:,} parameters"
        + (f"; continuing after step {state.step}" if start is not None else "")
    )

    # --- training ---------------------------------------------------------------------------------------------------
    memory_before = peak_memory(accelerator.device)
    training = Training(
        train=train,
        task=task,
        folder=folder,
        accelerator=accelerator,
        model=model,
        bare=bare,
        optimizer=optimizer,
        plain_optimizer=plain_optimizer,
        examples=examples,
        splits=splits,
        identity=identity,
        per_epoch=per_epoch,
        total=train.steps,
        eval_every=train.eval_every,
        rate=lambda now: learning_rate(train, now.step, training.fraction()),
        state=state,
        tracker=tracker,
        stop=stop,
        command=command,
        budget_seconds=None if train.max_cpu_minutes is None else 60 * train.max_cpu_minutes,
    )
    code = training.run()
    if code != 0:
        return code
    memory = {"before_training": memory_before, "peak": peak_memory(accelerator.device)}

    # --- results: the checkpoint that is best on validation, scored on test ------------------------------------------
    assert state.best is not None
    load_model(folder / "checkpoints" / f"step-{state.best['step']:07d}", bare)
    metrics = score(model, task, test, train.eval_batch_size, accelerator, stop.received)
    if metrics is None:
        print(f"SIGTERM: training is done, the test is not; continue with:\n  {command}")
        return SIGTERM_EXIT
    if accelerator.is_main_process:
        write_report(folder, config, state, metrics, per_epoch, counts, sizes, memory, max(examples.lengths), ROOT)
        print(
            f"test accuracy {metrics['accuracy']:.4f}, validation {state.best['score']:.4f} at step "
            f"{state.best['step']}; everything is in {folder}"
        )
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
