"""The training loop: steps, evaluations, checkpoints, stops. Model and data come from the experiment."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from snnk_cli.checkpoint import prune, save_checkpoint
from snnk_cli.config import dump_yaml
from snnk_cli.data import share
from snnk_cli.evaluation import DivergedError
from snnk_cli.experiment import RATE, Data, Experiment, RunState, Schedule
from snnk_cli.files import sha256
from snnk_cli.processes import clip_gradients
from snnk_cli.run_folder import StopSignal, choose_checkpoint
from snnk_cli.settings import StepSettings
from snnk_cli.terminal import Tracker
from snnk_peft.feature_map import advance
from snnk_peft.tasks.base import IGNORED

_CAUSAL = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


@dataclass
class Training:
    """A training run; `run()` trains from `state` to the end.

    Args:
        experiment: provides settings and scores.
        folder: the run folder.
        accelerator: accelerator of this process.
        model: model prepared by the accelerator.
        bare: the unwrapped model.
        optimizer: optimizer prepared by the accelerator.
        plain_optimizer: the unwrapped optimizer.
        data: examples to train and to evaluate on.
        identity: what a resumed run must match (data, examples per forward pass over all processes).
        per_epoch: optimizer steps per epoch.
        schedule: steps and learning rates.
        state: current state of the run.
        tracker: log and terminal output.
        stop: whether SIGTERM or Ctrl-C was received.
        command: the command that continues this run; shown when it is stopped.
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
        """Return the position in the schedule: the steps done, or further if more of a time budget is spent."""
        step, total, budget = self.state.step, self.schedule.total, self.schedule.budget_seconds
        return step if budget is None else min(total, max(step, self.state.cpu_seconds / budget * total))

    def over(self) -> bool:
        """Return True if all steps are done or the budget is spent."""
        return self.position() >= self.schedule.total

    def run(self) -> int:
        """Train to the end; return 0 done, 1 diverged, 130 or 143 stopped by Ctrl-C or SIGTERM (and saved)."""
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
        # With nothing to train, the initial model is the result.
        start_counts = self.schedule.total == 0 or (state.step == 0 and self.schedule.eval_first)
        if start_counts and state.best is None and not self._evaluate():
            return self._stopped()
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
        """Return True if the best score has reached `train.stop_at_score`."""
        wanted, best = self.train.stop_at_score, self.state.best
        return wanted is not None and best is not None and best["score"] >= wanted

    def _due(self) -> bool:
        return self.state.step % self.schedule.eval_every == 0 or self.over()

    def _score(self) -> dict[str, float] | None:
        return self.experiment.score(self.model, self.data.splits, self.accelerator, self.stop.received)

    def _evaluate(self) -> bool:
        """Score the model and keep the checkpoint; return False if stopped first."""
        state = self.state
        metrics = self._score()
        if metrics is None:
            return False
        if not math.isfinite(metrics["score"]):
            raise DivergedError(f"the score is {metrics['score']} at step {state.step}")
        state.evaluated_step = state.step
        state.evaluations_without_gain += 1
        # The first of equal scores wins.
        if state.best is None or metrics["score"] > state.best["score"]:
            state.best = {"score": metrics["score"], "step": state.step, "metrics": metrics}
            state.evaluations_without_gain = 0
        seconds = 0 if state.step else self.experiment.fit_seconds
        start = {"fit_seconds": seconds} if seconds else {}
        self.tracker.log(state.step, {"epoch": state.step / self.per_epoch, **metrics, **start})
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


def train_step(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: Any,
    feed: Iterator[dict[str, torch.Tensor]],
    batches: Sequence[Sequence[int]],
    rate: float,
    max_grad_norm: float | None,
) -> torch.Tensor:
    """Run one optimizer step over `batches`, each split among processes; return [loss, gradient norm] on the device.

    `feed` yields the inputs of this process's `share` of each.

    The loss is the mean over everything labelled in the whole step, whatever the batch sizes and the number of
    processes: over examples or, if words have labels, over these words.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    shares = [share(batch, rank, world)[1] for batch in batches]
    inputs = [next(feed) for _ in batches]
    counts = torch.tensor(shares, device=accelerator.device)
    total: Any = sum(map(len, batches))
    # The batches of all processes have the same kind of labels, so either all take part in this or none.
    if found := [terms for values in inputs if (terms := loss_terms(model, values)) is not None]:
        counts = torch.stack(found) * counts.sign()
        total = accelerator.reduce(counts.sum(), "sum").clamp_min(1)
    weights = (counts * world).double() / total  # the factor, because gradients are averaged over the processes
    loss_sum = torch.zeros((), device=accelerator.device)
    for number, (values, weight) in enumerate(zip(inputs, weights, strict=True)):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            loss = mean_loss(model, values)
            # The mean over no labels is NaN.
            weighted = torch.where(weight > 0, loss, 0.0) * weight.to(loss.dtype)
            accelerator.backward(weighted)
        loss_sum += weighted.detach()
    trained = [value for group in optimizer.param_groups for value in group["params"]]
    norm = clip_gradients(accelerator, trained, math.inf if max_grad_norm is None else max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    advance(model)  # random matrices with redraw_every count steps
    return torch.stack([loss_sum, norm.detach().to(loss_sum)])


def loss_terms(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Count the terms that a batch's loss averages, on its device; None if these are its examples.

    A causal language model does not predict the first token of a sequence.
    """
    labels = inputs.get("labels")
    if labels is None or labels.is_floating_point():
        return None
    if labels.dim() > 1 and any(parent.__name__ in _CAUSAL for m in model.modules() for parent in type(m).__mro__):
        labels = labels[..., 1:]
    return (labels != IGNORED).sum()


def mean_loss(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the model's own loss, or, for examples with soft_labels (batch, classes), the cross-entropy with these."""
    if "soft_labels" not in inputs:
        loss: torch.Tensor = model(**inputs).loss
        return loss
    logits = model(**{name: values for name, values in inputs.items() if name != "soft_labels"}).logits
    return torch.nn.functional.cross_entropy(logits.float(), inputs["soft_labels"])


class FiniteWatch:
    """A buffer of [loss, norm] pairs that is read rarely, because reading synchronises with the GPU.

    Args:
        accelerator: accelerator that averages over processes.
        allow_infinite_norm: accept infinite norms, because fp16 skips such steps by itself.
    """

    def __init__(self, accelerator: Any, allow_infinite_norm: bool):
        self._accelerator, self._allow = accelerator, allow_infinite_norm
        self._pending: list[tuple[int, float, torch.Tensor]] = []
        self._losses: list[float] = []
        self.norm = 0.0

    def add(self, step: int, rate: float, values: torch.Tensor) -> None:
        """Record the result of `train_step` for step number `step` (from 1)."""
        self._pending.append((step, rate, values))
        if self._accelerator.device.type == "cpu" and self._accelerator.num_processes == 1:
            self.check()

    def check(self) -> None:
        """Raise DivergedError naming the first step whose loss or gradient was not finite."""
        if not self._pending:
            return
        table = self._accelerator.reduce(torch.stack([values for _, _, values in self._pending]), "mean").tolist()
        for (step, rate, _), (loss, norm) in zip(self._pending, table, strict=True):
            if not math.isfinite(loss) or not (self._allow or math.isfinite(norm)):
                what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
                raise DivergedError(f"{what} at step {step} (learning rate {rate:.3g})")
            self._losses.append(loss)
            self.norm = norm if math.isfinite(norm) else 0.0  # fp16 skipped this step
        self._pending.clear()

    def mean_loss(self) -> float:
        """Return the mean loss since the last call."""
        self.check()
        mean = sum(self._losses) / max(1, len(self._losses))
        self._losses.clear()
        return mean
