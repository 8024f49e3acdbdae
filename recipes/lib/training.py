"""The loop of a training run: steps, evaluations, checkpoints, stops. Model and data are the experiment's."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib.checkpoint import prune, save_checkpoint
from lib.config import dump_yaml
from lib.data import share
from lib.evaluation import DivergedError
from lib.experiment import Data, Experiment, Schedule
from lib.files import sha256
from lib.loop import FiniteWatch, RunState, train_step
from lib.run_folder import StopSignal, choose_checkpoint
from lib.settings import StepSettings
from lib.tracking import Tracker


@dataclass
class Training:
    """One run; `run()` trains from `state` to the end.

    Args:
        experiment: its settings and scores.
        folder: the run folder.
        accelerator: of this process.
        model: as prepared by the accelerator.
        bare: the same, unwrapped.
        optimizer: as prepared by the accelerator.
        plain_optimizer: the same, unwrapped.
        data: examples to train and to evaluate on.
        identity: what a continuation must agree in (data, examples of a forward pass over all processes).
        per_epoch: optimizer steps per epoch.
        schedule: steps and learning rates.
        state: where the run is.
        tracker: log and terminal.
        stop: whether SIGTERM or Ctrl-C was received.
        command: continues this run; shown when it is stopped.
    """

    experiment: Experiment[Any]
    folder: Path
    accelerator: Any
    model: torch.nn.Module
    bare: torch.nn.Module
    optimizer: Any
    plain_optimizer: torch.optim.Optimizer
    data: Data
    identity: Mapping[str, Any]
    per_epoch: int
    schedule: Schedule
    state: RunState
    tracker: Tracker
    stop: StopSignal
    command: str

    def __post_init__(self) -> None:
        self.train: StepSettings = self.experiment.config.train
        self._watch = FiniteWatch(self.accelerator, allow_infinite_norm=self.train.mixed_precision == "fp16")

    def position(self) -> float:
        """Steps done as far as the schedule is concerned: of a budget, the spent part may be further."""
        step, total, budget = self.state.step, self.schedule.total, self.schedule.budget_seconds
        return step if budget is None else min(total, max(step, self.state.cpu_seconds / budget * total))

    def over(self) -> bool:
        """Whether all steps are done or the budget is spent."""
        return self.position() >= self.schedule.total

    def run(self) -> int:
        """Train to the end; returns 0 done, 1 diverged, 130 or 143 stopped by Ctrl-C or SIGTERM (and saved)."""
        try:
            with self.tracker:
                return self._run()
        except DivergedError as error:
            last = choose_checkpoint(self.folder / "checkpoints", None)
            kept = "no checkpoint had been written yet" if last is None else f"the last good checkpoint is kept: {last}"
            print(f"error: training diverged: {error}; {kept}. {self.experiment.advice}", file=sys.stderr)
            return 1

    def _run(self) -> int:
        train, state, world = self.train, self.state, self.accelerator.num_processes
        patience = train.early_stop_patience or float("inf")
        examples, batch_size = self.data.train, train.batch_size * world
        plan: list[list[list[int]]] = []
        feed: Iterator[dict[str, torch.Tensor]] = iter(())
        if self.schedule.total == 0 and state.best is None:  # nothing to train: the start is the result
            return 0 if self._evaluate() else self._stopped()
        if state.step == 0 and self.schedule.eval_first:
            metrics = self._score()
            if metrics is None:
                return self._stopped()
            self.tracker.log(0, {"epoch": 0.0, **metrics})
        if state.step and self._due() and state.evaluated_step < state.step and not self._evaluate():
            return self._stopped()
        while not self.over() and state.evaluations_without_gain < patience and not self._reached():
            started, cpu_started = time.perf_counter(), time.process_time()
            epoch, position = divmod(state.step, self.per_epoch)
            if not plan or position == 0:
                plan = examples.plan(batch_size, train, epoch)
                rank = self.accelerator.process_index
                mine = [share(batch, rank, world)[0] for step in plan[position:] for batch in step]
                feed = iter(examples.batches(mine, self.accelerator.device, epoch))
            rate = self.schedule.rate(state.step, self.position())
            values = train_step(
                self.accelerator, self.model, self.optimizer, feed, plan[position], rate, train.max_grad_norm
            )
            state.step += 1
            state.cpu_seconds += time.process_time() - cpu_started
            self._watch.add(state.step, rate, values)
            if state.step % train.log_every == 0 or self._due():
                loss = self._watch.mean_loss()
                row = {"epoch": state.step / self.per_epoch, "loss": loss, "learning_rate": rate}
                self.tracker.log(state.step, {**row, "grad_norm": self._watch.norm})
                expected = state.step / self.position() * self.schedule.total
                self.tracker.progress(state.step, f"loss {loss:.4f}", expected)
            state.train_seconds += time.perf_counter() - started
            at_check = world == 1 or state.step % train.log_every == 0
            if at_check and self.stop.agreed(self.accelerator):
                return self._stopped()
            if self._due():
                if not self._evaluate():
                    return self._stopped()
            elif train.save_every_steps and state.step % train.save_every_steps == 0:
                self._save()
                self._prune()
        return 0

    def _reached(self) -> bool:
        """Whether the best score is as good as wanted."""
        wanted, best = self.train.stop_at_score, self.state.best
        return wanted is not None and best is not None and best["score"] >= wanted

    def _due(self) -> bool:
        return self.state.step % self.schedule.eval_every == 0 or self.over()

    def _score(self) -> dict[str, float] | None:
        return self.experiment.score(self.model, self.data.splits, self.accelerator, self.stop.received)

    def _evaluate(self) -> bool:
        """Score the model and keep the checkpoint; False if a stop came first."""
        state = self.state
        metrics = self._score()
        if metrics is None:
            return False
        state.evaluated_step = state.step
        state.evaluations_without_gain += 1
        # The first of equal scores wins.
        if state.best is None or metrics["score"] > state.best["score"]:
            state.best = {"score": metrics["score"], "step": state.step, "metrics": metrics}
            state.evaluations_without_gain = 0
        self.tracker.log(state.step, {"epoch": state.step / self.per_epoch, **metrics})
        values = "  ".join(f"{key} {value:.4f}" for key, value in metrics.items())
        self.tracker.say(f"step {state.step}/{self.schedule.total}  {values}")
        self._save()
        self._prune()
        return True

    def _save(self) -> Path:
        self._watch.check()
        scaler = self.accelerator.scaler
        records = self.experiment.records if self.accelerator.is_main_process else ()
        saved = {
            "step": self.state.step,
            "identity": dict(self.identity),
            "settings": dump_yaml(self.experiment.config),
            "records": {name: sha256(self.folder / name) for name in records},
            "processes": self.accelerator.num_processes,
            "torch_threads": torch.get_num_threads(),
            "device": self.accelerator.device.type,
            "run": dataclasses.asdict(self.state),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        return save_checkpoint(self.folder / "checkpoints", self.bare, self.plain_optimizer, saved, self.accelerator)

    def _prune(self) -> None:
        if self.accelerator.is_main_process:
            best = None if self.state.best is None else f"step-{self.state.best['step']:07d}"
            prune(self.folder / "checkpoints", self.train.keep_checkpoints, best)

    def _stopped(self) -> int:
        where = self._save()
        self.tracker.say(f"{self.stop.name}: saved {where.name}; continue with:\n  {self.command}")
        return self.stop.exit_code
