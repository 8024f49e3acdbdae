"""An experiment: data, model, schedule and report, which is all that differs between the recipes that train.

A recipe is one subclass and the settings it reads; `launch` reads its command line and `run` does the rest: run folder,
seeds, checkpoints, stops, the loop and metrics.json.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from transformers import get_scheduler

from snnk_cli.data import ExampleSet
from snnk_cli.evaluation import score
from snnk_cli.models import is_of_head
from snnk_cli.plots import learning_curve
from snnk_cli.settings import StepSettings

Config = TypeVar("Config")


@dataclass(frozen=True)
class Data:
    """What an experiment reads.

    Args:
        train: examples to train on.
        splits: name -> examples; the best checkpoint is chosen by their score.
        test: name -> examples that are scored once, with the best checkpoint.
    """

    train: ExampleSet
    splits: Mapping[str, ExampleSet]
    test: Mapping[str, ExampleSet] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of examples by name."""
        return {"train": len(self.train), **{name: len(part) for name, part in {**self.splits, **self.test}.items()}}

    def fingerprints(self) -> list[str]:
        """Digests that are equal if and only if a run would see the same data."""
        return [part.fingerprint() for part in (self.train, *self.splits.values(), *self.test.values())]


@dataclass(frozen=True)
class Schedule:
    """How long a run is, and how fast it learns.

    Args:
        total: optimizer steps of the whole run, at most; with 0 the model is scored as it is.
        eval_every: optimizer steps between evaluations.
        rate: learning rate of the step that comes next, from the steps done and from the position, the steps done as
            far as the schedule is concerned: with a budget, the part of it that is spent may be further.
        budget_seconds: processor time of training after which the run ends, or None for no limit.
        eval_first: also score the model before its first step; where no step makes it better, it is the best.
    """

    total: int
    eval_every: int
    rate: Callable[[int, float], float]
    budget_seconds: float | None = None
    eval_first: bool = False


@dataclass
class RunState:
    """Position and results of a run; saved in every checkpoint.

    Args:
        step: optimizer steps done.
        evaluated_step: the last step after which the model was evaluated.
        best: score, metrics, step and epoch of the best evaluation.
        evaluations_without_gain: since the best one.
        train_seconds: time spent training, without evaluations.
        cpu_seconds: processor time of the optimizer steps, over all threads of the process.
    """

    step: int = 0
    evaluated_step: int = 0
    best: dict[str, Any] | None = None
    evaluations_without_gain: int = 0
    train_seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Finished:
    """A run whose training is done.

    Args:
        folder: the run folder.
        model: with the weights of the best checkpoint, in eval mode.
        data: as the experiment read it.
        state: position and best evaluation.
        best: that evaluation: score, metrics, step.
        test: metrics of `model` on `data.test`; empty if there is none.
        per_epoch: optimizer steps per epoch.
        memory_before: peak bytes before the training (on a CPU: of the process with its data).
        counts: see `parameter_counts`.
        device: of the main process.
    """

    folder: Path
    model: torch.nn.Module
    data: Data
    state: RunState
    best: Mapping[str, Any]
    test: Mapping[str, float]
    per_epoch: int
    memory_before: int
    counts: Mapping[str, int]
    device: torch.device

    @property
    def costs(self) -> dict[str, float]:
        """Steps, and the seconds of training: of all processor threads, of the clock, per step."""
        state = self.state
        return {
            "steps": state.step,
            "train_cpu_seconds": state.cpu_seconds,
            "seconds_per_step": state.train_seconds / state.step,
            "cpu_seconds_per_step": state.cpu_seconds / state.step,
        }


class Experiment(ABC, Generic[Config]):
    """What a recipe says about itself; `run` calls the methods in the order in which they stand here.

    Args:
        config: the checked settings, with `config.train` (a StepSettings) and `config.output.dir`.

    Attributes:
        settings: the dataclass of the settings.
        program: the recipe's file in recipes/.
        advice: what to try when training diverged.
        paths: (section, key) of settings that are paths, besides those of the data: metrics.json does without.
        leaves: names of what it writes into the run folder, besides what many runs write (`CONTENT` of run_folder.py).
        records: those among them that a continuation reads, which are written before the first checkpoint.
        task: computes the metrics; an experiment without one replaces `score`.
        fit_seconds: that `model` spent on what is computed instead of trained.
    """

    settings: type[Config]
    program: str
    advice = "Try a lower train.learning_rate."
    task: Any = None
    fit_seconds: float = 0.0
    paths: tuple[tuple[str, str], ...] = ()
    leaves: tuple[str, ...] = ()
    records: tuple[str, ...] = ()

    def __init__(self, config: Config):
        self.config: Any = config

    @property
    @abstractmethod
    def method(self) -> str:
        """What is compared, in a word."""

    @property
    def title(self) -> str:
        """Heads the log and the learning curve."""
        return f"{self.config.task}, {self.method}"

    @abstractmethod
    def data(self, accelerator: Any) -> Data:
        """Read, check and tokenise; nothing has been written yet."""

    @abstractmethod
    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """The model, with requires_grad where it is trained; torch's generator has been seeded.

        Args:
            data: for what is fitted before the training.
            accelerator: of this process.
            resumed: a checkpoint will be put into the model, so that fitting it would be in vain.
        """

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """AdamW, unless the experiment says otherwise; `train.beta2` where its settings have that."""
        given = {"beta2": self.config.train.beta2} if hasattr(self.config.train, "beta2") else {}
        return make_optimizer(model, self.config.train, **given)

    @abstractmethod
    def schedule(self, per_epoch: int) -> Schedule:
        """Steps and learning rates; an epoch has `per_epoch` optimizer steps."""

    def score(
        self,
        model: torch.nn.Module,
        splits: Mapping[str, ExampleSet],
        accelerator: Any,
        stopped: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Metrics, among them "score", of which more is better; None if `stopped()` became true on the way."""
        return score(model, self.task, splits, self.config.train.eval_batch_size, accelerator, stopped)

    def settle(
        self, model: torch.nn.Module, data: Data, accelerator: Any, stopped: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """Decide what is decided behind the training, and put it into the model that was chosen.

        Returns entries of metrics.json, or None if `stopped()` became true on the way.
        """
        return {}

    @abstractmethod
    def report(self, done: Finished) -> dict[str, Any]:
        """Write what the run leaves; returns entries of metrics.json beside those that every run has."""

    def curve(self, rows: list[dict[str, Any]], file: Path) -> None:
        """Draw the learning curve from the rows of log.jsonl."""
        learning_curve(rows, file, self.title)

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        """The last lines on the terminal; `figures` are what `report` returned."""
        return f"best score {done.best['score']:.4f} at step {done.best['step']}; everything is in {done.folder}"


def make_optimizer(model: torch.nn.Module, train: StepSettings, beta2: float = 0.999) -> torch.optim.AdamW:
    """AdamW over the trained parameters; vectors (biases, norms, gates) are not decayed.

    The task head may have a rate of its own (`train.head_learning_rate`).
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    own = getattr(train, "head_learning_rate", None)
    heads = {name for name in trained if own is not None and is_of_head(name)}
    groups = [
        {
            "params": [v for n, v in trained.items() if (n in heads) == of_head and (v.dim() >= 2) == matrices],
            "weight_decay": train.weight_decay if matrices else 0.0,
            **({RATE: own / train.learning_rate} if of_head and own is not None else {}),
        }
        for of_head in (False, True)
        for matrices in (True, False)
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=train.learning_rate, betas=(0.9, beta2))


RATE = "share_of_rate"  # of a group of parameters: its learning rate over that of the schedule

# train.schedule of a budget of steps -> transformers' name of it
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine", "rsqrt": "inverse_sqrt"}


def learning_rate(name: str, peak: float, warmup: int, total: int, **options: float) -> Callable[[int, float], float]:
    """The rate of the step that comes next, from the steps done and the position in the schedule (see `Schedule`).

    Args:
        name: as in `transformers.get_scheduler`.
        peak: the rate behind the warm-up.
        warmup: optimizer steps in which the rate rises linearly.
        total: optimizer steps of the whole run.
        options: of this schedule.
    """
    # A scheduler wants an optimizer; of this one nothing is asked but the function of the step.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    # The fall begins behind the warm-up, also where the run is too short to get there.
    factor = get_scheduler(name, optimizer, warmup, max(total, warmup + 1), options or None).lr_lambdas[0]

    def rate(step: int, position: float) -> float:
        # transformers' first step has rate 0. Here the first step learns, and the last one of the warm-up has the full
        # rate; the inverse root counts from 1 throughout, as in Long Range Arena.
        return peak * factor(step + 1 if step < warmup or name == "inverse_sqrt" else position)

    return rate


def of_epochs(train: Any, per_epoch: int) -> Schedule:
    """Whole epochs, of so many optimizer steps, as a TrainSection says; the warm-up is a part of all steps."""
    total = train.epochs * per_epoch
    named = {"epoch": per_epoch, "end": total}
    return Schedule(
        total=total,
        eval_every=named.get(train.eval_every, train.eval_every),
        rate=learning_rate(train.schedule, train.learning_rate, math.ceil(train.warmup_ratio * total), total),
    )


def of_steps(train: Any) -> Schedule:
    """`train.steps` optimizer steps without warm-up."""
    rate = learning_rate(train.schedule, train.learning_rate, 0, train.steps)
    return Schedule(total=train.steps, eval_every=train.eval_every, rate=rate)


def of_budget(train: Any) -> Schedule:
    """`train.steps` optimizer steps or `train.max_cpu_minutes` of processor time, whichever ends first."""
    peak, warmup = train.learning_rate, train.warmup_steps
    if train.schedule == "rsqrt":  # Long Range Arena: learning_rate is the rate of a single step of warm-up
        warmup = max(1, warmup)
        peak /= math.sqrt(warmup)
    return Schedule(
        total=train.steps,
        eval_every=train.eval_every,
        rate=learning_rate(SCHEDULES[train.schedule], peak, warmup, train.steps),
        budget_seconds=None if train.max_cpu_minutes is None else 60 * train.max_cpu_minutes,
    )
