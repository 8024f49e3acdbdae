"""Train a small Transformer from scratch on a Long Range Arena task: softmax or any linear attention, same recipe.

    python recipes/train_lra.py recipes/configs/lra/listops.yaml
    python recipes/train_lra.py recipes/configs/lra/text.yaml data.dir=path/to/imdb method.attention=softmax
    python recipes/train_lra.py recipes/configs/lra/listops.yaml train.max_cpu_minutes=15 train.schedule=constant

Settings are `section.key=value`; `--help` lists them. The checkpoint with the best validation score is the one whose
test accuracy is reported. A run killed at any moment continues with `--resume` and ends with the same weights, bit for
bit, as one that was never interrupted (on the same number of threads). SIGTERM and Ctrl-C save first (exit codes 143,
130) and tell the command that continues.
"""

from __future__ import annotations

import sys

from _lib.checkpoint import load_model
from _lib.data import steps_per_epoch
from _lib.evaluation import score
from _lib.launch import ROOT, Request, launch, open_run
from _lib.loop import make_optimizer
from _lib.lra_model import build_classifier
from _lib.lra_results import parameter_counts, write_report
from _lib.lra_settings import LongRangeConfig, learning_rate
from _lib.run_folder import StopSignal, peak_memory
from _lib.sequences import SequenceExamples
from _lib.tracking import Tracker
from _lib.training import Training
from accelerate.utils import set_seed

from snnk_peft.tasks import LONG_RANGE_TASKS


def main(argv: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch("train_lra.py", __doc__, LongRangeConfig, train_lra, argv)


def train_lra(request: Request[LongRangeConfig]) -> int:
    """The whole run; returns the exit code."""
    stop = StopSignal()
    run = open_run(request)
    if run.finished:
        return 0
    config, accelerator, folder, start = request.config, run.accelerator, run.folder, run.start
    train, task, world = config.train, LONG_RANGE_TASKS[config.task], accelerator.num_processes

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
    state = run.restore(bare, plain_optimizer, identity)
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
        command=request.command,
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
        print(f"{stop.name}: training is done, the test is not; continue with:\n  {request.command}")
        return stop.exit_code
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
