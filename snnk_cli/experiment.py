"""An experiment: data, model, schedule and report, the only things that differ between the recipes that train.

A recipe is one subclass and the settings it reads. `launch` reads its command line and `run` does the rest: run folder,
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
    """The data of an experiment.

    Args:
        train: examples to train on.
        splits: name -> examples; the best checkpoint is chosen by their score.
        test: name -> examples that are scored once, by the best checkpoint.
    """

    train: ExampleSet
    splits: Mapping[str, ExampleSet]
    test: Mapping[str, ExampleSet] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of examples of each split."""
        return {"train": len(self.train), **{name: len(part) for name, part in {**self.splits, **self.test}.items()}}

    def fingerprints(self) -> list[str]:
        """Return digests that are equal if and only if a run would see the same data."""
        return [part.fingerprint() for part in (self.train, *self.splits.values(), *self.test.values())]


@dataclass(frozen=True)
class Schedule:
    """The length of a run and its learning rates.

    Args:
        total: maximum number of optimizer steps; 0 scores the model without training.
        eval_every: optimizer steps between evaluations.
        rate: learning rate of the next step, given the steps done and the position in the schedule; with a time budget,
            the position may be ahead of the steps, as it follows the part of the budget already spent.
        budget_seconds: CPU time of training after which the run ends, or None for no limit.
        eval_first: also score the model before its first step, which may remain the best.
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
        evaluations_without_gain: evaluations since the best one.
        train_seconds: time spent training, without evaluations.
        cpu_seconds: CPU time of the optimizer steps, over all threads of the process.
    """

    step: int = 0
    evaluated_step: int = 0
    best: dict[str, Any] | None = None
    evaluations_without_gain: int = 0
    train_seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Finished:
    """A run whose training has ended.

    Args:
        folder: the run folder.
        model: model with the weights of the best checkpoint, in eval mode.
        data: data of the experiment.
        state: position and best evaluation.
        best: the best evaluation: score, metrics, step.
        test: metrics of `model` on `data.test`; empty if there is none.
        per_epoch: optimizer steps per epoch.
        memory_before: peak bytes before training (on a CPU: of the process with its data).
        counts: see `parameter_counts`.
        device: device of the main process.
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
        """Number of steps, and CPU and wall-clock seconds of training, in total and per step."""
        state = self.state
        return {
            "steps": state.step,
            "train_cpu_seconds": state.cpu_seconds,
            "seconds_per_step": state.train_seconds / state.step,
            "cpu_seconds_per_step": state.cpu_seconds / state.step,
        }


class Experiment(ABC, Generic[Config]):
    """A recipe's own part of a run; `run` calls the methods in the order in which they are defined here.

    Args:
        config: the checked settings, with `config.train` (a StepSettings) and `config.output.dir`.

    Attributes:
        settings: the dataclass of the settings.
        program: the recipe's file in recipes/.
        advice: what to try when training diverged.
        paths: (section, key) of settings that are paths, besides those of the data; metrics.json omits them.
        leaves: names of files it writes into the run folder, besides those of `CONTENT` in run_folder.py.
        records: those of these files that a resumed run reads, which are written before the first checkpoint.
        task: computes the metrics; an experiment without one replaces `score`.
        fit_seconds: seconds that `model` spent fitting, without training.
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
        """Short name of the method."""

    @property
    def title(self) -> str:
        """Title of the log and the learning curve."""
        return f"{self.config.task}, {self.method}"

    @abstractmethod
    def data(self, accelerator: Any) -> Data:
        """Read, check and tokenise the data; nothing has been written yet."""

    @abstractmethod
    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build the model, with requires_grad set on what is trained; torch's generator is already seeded.

        Args:
            data: data to fit on before training.
            accelerator: accelerator of this process.
            resumed: a checkpoint will be loaded into the model, so it need not be fitted.
        """

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Create the optimizer: AdamW by default, with `train.beta2` where the settings have it."""
        given = {"beta2": self.config.train.beta2} if hasattr(self.config.train, "beta2") else {}
        return make_optimizer(model, self.config.train, **given)

    @abstractmethod
    def schedule(self, per_epoch: int) -> Schedule:
        """Return steps and learning rates; an epoch has `per_epoch` optimizer steps."""

    def score(
        self,
        model: torch.nn.Module,
        splits: Mapping[str, ExampleSet],
        accelerator: Any,
        stopped: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Return metrics, including "score" (higher is better); None if `stopped()` became true meanwhile."""
        return score(model, self.task, splits, self.config.train.eval_batch_size, accelerator, stopped)

    def settle(
        self, model: torch.nn.Module, data: Data, accelerator: Any, stopped: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """Set what is determined after training, such as a threshold, in the chosen model.

        Return entries of metrics.json, or None if `stopped()` became true meanwhile.
        """
        return {}

    @abstractmethod
    def report(self, done: Finished) -> dict[str, Any]:
        """Write the results of the run; return the entries of metrics.json besides those that every run has."""

    def curve(self, rows: list[dict[str, Any]], file: Path) -> None:
        """Draw the learning curve from the rows of log.jsonl."""
        learning_curve(rows, file, self.title)

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        """Return the last lines for the terminal; `figures` come from `report`."""
        return f"best score {done.best['score']:.4f} at step {done.best['step']}; everything is in {done.folder}"


def make_optimizer(model: torch.nn.Module, train: StepSettings, beta2: float = 0.999) -> torch.optim.AdamW:
    """Create AdamW over the trained parameters; vectors (biases, norms, gates) are not decayed.

    The task head may have its own learning rate (`train.head_learning_rate`).
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


RATE = "share_of_rate"  # key of a parameter group: its learning rate over that of the schedule

# train.schedule of a budget of steps -> its name in transformers
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine", "rsqrt": "inverse_sqrt"}


def learning_rate(name: str, peak: float, warmup: int, total: int, **options: float) -> Callable[[int, float], float]:
    """Return a function from the steps done and the position (see `Schedule`) to the rate of the next step.

    Args:
        name: name as in `transformers.get_scheduler`.
        peak: the rate after the warm-up.
        warmup: optimizer steps in which the rate rises linearly.
        total: optimizer steps of the whole run.
        options: options of this schedule.
    """
    # The scheduler needs an optimizer; only its function of the step is used.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    # The decay begins after the warm-up, even if the run is too short to reach it.
    factor = get_scheduler(name, optimizer, warmup, max(total, warmup + 1), options or None).lr_lambdas[0]

    def rate(step: int, position: float) -> float:
        # In transformers, the first step has rate 0. Here the first step learns, and the last one of the warm-up has
        # the full rate; the inverse root counts from 1 throughout, as in Long Range Arena.
        return peak * factor(step + 1 if step < warmup or name == "inverse_sqrt" else position)

    return rate


def of_epochs(train: Any, per_epoch: int) -> Schedule:
    """Return the schedule of a TrainSection: whole epochs of `per_epoch` steps; the warm-up is a share of all steps."""
    total = train.epochs * per_epoch
    named = {"epoch": per_epoch, "end": max(1, total)}
    return Schedule(
        total=total,
        eval_every=named.get(train.eval_every, train.eval_every),
        rate=learning_rate(train.schedule, train.learning_rate, math.ceil(train.warmup_ratio * total), total),
    )


def of_steps(train: Any) -> Schedule:
    """Return a schedule of `train.steps` optimizer steps without warm-up."""
    rate = learning_rate(train.schedule, train.learning_rate, 0, train.steps)
    return Schedule(total=train.steps, eval_every=train.eval_every, rate=rate)


def of_budget(train: Any) -> Schedule:
    """Return a schedule of `train.steps` steps or `train.max_cpu_minutes` of CPU time, whichever ends first."""
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
