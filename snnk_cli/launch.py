"""One run of an experiment: its folder, the state of a stopped run, the training loop, the results, and errors."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from snnk_cli.checkpoint import MisfitError, discard_newer, load_checkpoint, load_model
from snnk_cli.config import ROOT, Request, dump_yaml, load_config, read_command_line
from snnk_cli.data import steps_per_epoch
from snnk_cli.experiment import Experiment, Finished, RunState
from snnk_cli.files import FileError, check_writable, guarded, write_json
from snnk_cli.lock import alone
from snnk_cli.models import parameter_counts
from snnk_cli.processes import (
    in_main,
    is_sharded,
    lost_process,
    make_accelerator,
    prepare,
    seed_continuation,
    unwrapped,
)
from snnk_cli.run_folder import (
    REPORT,
    StopSignal,
    check_checkpoint,
    check_finished,
    check_folder,
    choose_checkpoint,
    claim_folder,
    environment,
    peak_memory,
    refusal,
    reported_settings,
)
from snnk_cli.terminal import Tracker, quiet, read_log
from snnk_cli.training import Training
from snnk_peft.errors import ConfigError


def launch(recipe: type[Experiment[Any]], description: str | None, argv: list[str] | None) -> int:
    """Read settings from the command line and run; return the exit code of `perform`.

    Args:
        recipe: the experiment.
        description: the text of `--help`.
        argv: the arguments, or None for those of this process.
    """
    return train(recipe, read_command_line(recipe.program, recipe.settings, description, argv))


def train(recipe: type[Experiment[Any]], request: Request) -> int:
    """Run an experiment with the settings named on the command line; return the exit code of `perform`."""
    return perform(lambda: recipe(load_config(recipe.settings, request.file, request.overrides)), request)


def perform(prepare: Callable[[], Experiment[Any]], request: Request) -> int:
    """Run an experiment; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped).

    Args:
        prepare: creates the experiment; raises a ConfigError if the settings are wrong.
        request: the request from the command line.
    """
    quiet()

    def work() -> int:
        experiment = prepare()
        if request.checkpoint and not request.resume:
            raise ConfigError("--checkpoint needs --resume")
        checkpoints = Path(experiment.config.output.dir) / "checkpoints"
        try:
            return run(experiment, request)
        except RuntimeError as error:
            if (cause := lost_process(error)) is None:
                raise
            last = choose_checkpoint(checkpoints, None)
            kept = "no checkpoint had been written yet" if last is None else f"{last.name} is complete"
            print(f"error: {cause}. {kept}; continue with:\n  {request.command}", file=sys.stderr, flush=True)
            return 1
        except FileError as error:
            last = choose_checkpoint(checkpoints, None)
            if last is None:
                raise
            raise FileError(f"{error}. {last.name} is complete; continue from it with:\n  {request.command}") from error

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return guarded(work)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run(experiment: Experiment[Any], request: Request) -> int:
    """Train, evaluate and report; return the exit code (0 done, 1 diverged, 130 or 143 stopped and saved).

    Raises:
        ConfigError: the run folder is in use or does not fit the settings, the data or the model; nothing was changed.
    """
    stop = StopSignal()
    config, folder = experiment.config, Path(experiment.config.output.dir)
    accelerator = make_accelerator(config.train)
    with contextlib.ExitStack() as held:

        def check() -> None:
            check_writable(folder)
            held.enter_context(alone(folder, "output.dir"))
            check_folder(folder, config, request.resume, request.overwrite, experiment.leaves)

        in_main(accelerator, check)
        return _run(experiment, request, accelerator, stop)


def _run(experiment: Experiment[Any], request: Request, accelerator: Accelerator, stop: StopSignal) -> int:
    """Do the work of `run` in a folder that this run holds exclusively."""
    config, folder = experiment.config, Path(experiment.config.output.dir)
    train = config.train
    start = choose_checkpoint(folder / "checkpoints", request.checkpoint) if request.resume else None
    if request.resume and request.checkpoint is None and (folder / REPORT).is_file():
        check_finished(folder, _identity(experiment))
        accelerator.print(f"{folder} is finished; its results are in {folder / REPORT}")
        return 0
    if start is not None:
        check_checkpoint(start, config, experiment.records)

    # --- data, model and optimizer -----------------------------------------------------------------------------------
    data, world = experiment.data(accelerator), accelerator.num_processes
    identity = {"data": data.fingerprints(), "batch": train.batch_size * world}
    set_seed(train.seed)
    bare = experiment.model(data, accelerator, resumed=start is not None).to(accelerator.device)
    bare.train()
    counts = parameter_counts(bare)
    plain_optimizer = experiment.optimizer(bare)
    model, optimizer = prepare(accelerator, bare, plain_optimizer)
    # From here on, only dropout draws random numbers, differently in each process.
    set_seed(train.seed + 1 + accelerator.process_index)

    # --- position ----------------------------------------------------------------------------------------------------
    per_epoch = steps_per_epoch(len(data.train), train.batch_size * world, train.gradient_accumulation)
    schedule = experiment.schedule(per_epoch)
    state = RunState() if start is None else _restore(start, bare, plain_optimizer, identity, accelerator, train)
    accelerator.wait_for_everyone()  # all processes have read it
    if accelerator.is_main_process:
        claim_folder(folder, dump_yaml(config), ROOT, request.resume)
        (folder / REPORT).unlink(missing_ok=True)  # left by a finished run that is resumed from an earlier checkpoint
        if start is not None:
            for name in discard_newer(start):
                print(f"discarded {name}, which is newer than {start.name}")
    first_step = None if start is None else state.step
    tracker = Tracker(folder, schedule.total, first_step, config.output.tensorboard, accelerator.is_main_process)
    plan = (
        f"{per_epoch} steps per epoch, at most {schedule.total} in all; {counts['trainable']:,} of "
        f"{counts['total']:,} parameters trained"
    )
    tracker.say(
        f"{experiment.title}: {data.train.describe()}, {plan if schedule.total else 'no training'}"
        + (f"; continuing after step {state.step}" if start is not None else "")
    )

    # --- training ----------------------------------------------------------------------------------------------------
    memory_before = peak_memory(accelerator.device)
    training = Training(
        experiment=experiment,
        folder=folder,
        accelerator=accelerator,
        model=model,
        bare=bare,
        optimizer=optimizer,
        plain_optimizer=plain_optimizer,
        data=data,
        identity=identity,
        per_epoch=per_epoch,
        schedule=schedule,
        state=state,
        tracker=tracker,
        stop=stop,
        command=request.command,
    )
    code = training.run()
    if code != 0:
        return code

    # --- results: the best checkpoint, not the last ------------------------------------------------------------------
    assert state.best is not None
    memory = peak_memory(accelerator.device)
    load_model(folder / "checkpoints" / f"step-{state.best['step']:07d}", bare)
    settled = experiment.settle(bare, data, accelerator, stop.received)
    test: dict[str, float] | None = {}
    if settled is None:
        test = None
    elif data.test:
        test = experiment.score(model, data.test, accelerator, stop.received)
    if settled is None or test is None:
        print(f"{stop.name}: training is done, the test is not; continue with:\n  {request.command}")
        return stop.exit_code
    if is_sharded(bare):  # saving and folding need full tensors: build the model again, unsharded
        set_seed(train.seed)
        best = experiment.model(data, accelerator, resumed=True).to(accelerator.device).eval()
        load_model(folder / "checkpoints" / f"step-{state.best['step']:07d}", best)
    else:
        best = unwrapped(accelerator, model).eval()
    if accelerator.is_main_process:
        done = Finished(
            folder, best, data, state, state.best, test, per_epoch, memory_before, counts, accelerator.device
        )
        figures = experiment.report(done)
        experiment.curve(read_log(folder / "log.jsonl"), folder / "learning_curve.png")
        # The presence of metrics.json marks the run as complete.
        common = _common_figures(experiment, done, schedule.total, memory)
        write_json(folder / REPORT, {**common, **figures, **settled, "environment": environment(ROOT)})
        print(experiment.summary(done, figures))
    accelerator.end_training()
    return 0


def _restore(
    start: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Mapping[str, Any],
    accelerator: Accelerator,
    train: Any,
) -> RunState:
    """Restore model, optimizer and generators; a ConfigError if the checkpoint is damaged or belongs to other data."""
    try:
        saved = load_checkpoint(start, model, optimizer, identity, accelerator.process_index, accelerator.num_processes)
    except MisfitError as error:
        raise refusal(start.parent.parent, error.faults) from error
    strange = saved["run"].keys() - {entry.name for entry in dataclasses.fields(RunState)}
    if strange:
        raise refusal(start.parent.parent, [f"{start / 'state.json'}: unknown entries {sorted(strange)}"])
    state = RunState(**saved["run"])
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(saved["scaler"])
    place = accelerator.device.type
    if saved.get("device", place) != place:
        accelerator.print(
            f"note: saved on {saved['device']}, continued on {place}: dropout draws different numbers there and sums "
            "are rounded differently, so the weights will not be those of an uninterrupted run"
        )
    processes = saved["processes"]
    if processes != accelerator.num_processes:
        seed_continuation(train.seed, state.step, accelerator.process_index)
        accelerator.print(
            f"note: saved with {processes} processes, continued with {accelerator.num_processes}: the batches are the "
            "same, but their sums are taken in a different order, and dropout is reseeded from train.seed, step and "
            f"process; only {processes} processes give the weights of an uninterrupted run bit for bit"
        )
    before, now = saved.get("torch_threads"), torch.get_num_threads()
    if place == saved.get("device", place) == "cpu" and before != now:
        accelerator.print(
            f"note: saved with {before} threads, continued with {now}: sums are taken in a different order, so the "
            f"weights will equal those of an uninterrupted run up to rounding; OMP_NUM_THREADS={before} "
            "makes them equal bit for bit"
        )
    return state


def _common_figures(experiment: Experiment[Any], done: Finished, total: int, memory: int) -> dict[str, Any]:
    """Return the entries of metrics.json that every run has."""
    return {
        **_identity(experiment),
        "best_step": done.best["step"],
        "epochs": done.state.step / done.per_epoch,
        "stopped_early": done.state.step < total,
        "device": str(done.device),
        "train_seconds": done.state.train_seconds,
        "peak_memory_bytes": memory,
        "trainable_parameters": done.counts["trainable"],
        "total_parameters": done.counts["total"],
        "examples": done.data.sizes,
    }


def _identity(experiment: Experiment[Any]) -> dict[str, Any]:
    """Return the entries of metrics.json that identify the run."""
    config = experiment.config
    return {
        "task": config.task,
        "method": experiment.method,
        "seed": config.train.seed,
        "config": reported_settings(config, experiment.paths),
    }
