"""Fine-tuning: the experiment of recipes/finetune.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lib.results import cost_of, save_models
from lib.training_rows import (
    WeightedExamples,
    balanced_weights,
    calibration_batches,
    held_back_rows,
    matched_threshold,
)
from lib.trunk import StoredExamples, Trunk
from snnk_cli.baselines import head_with_bias, move_threshold, start_at_prior
from snnk_cli.evaluation import evaluation_splits, predict, repeat_notes
from snnk_cli.experiment import Data, Experiment, Finished, Schedule, of_epochs
from snnk_cli.modality import modality_of
from snnk_cli.models import (
    build_model,
    dropout_settings,
    load_pretrained,
    resolve_model,
    trained_on_means,
    with_wide_head,
)
from snnk_cli.settings import FinetuneConfig, PoolingSection
from snnk_cli.task_settings import completed, find_task
from snnk_cli.terminal import read_log
from snnk_peft import fit_closed_form
from snnk_peft.errors import ConfigError


class Finetuning(Experiment[FinetuneConfig]):
    """A pretrained encoder with a fresh classifier on a `TextTask` or an `ImageTask` of `data.TASKS`."""

    settings, program = FinetuneConfig, "finetune.py"
    stored: StoredExamples | None = None  # set in runs with method.cut, as is `trunk`
    trunk: Trunk | None = None

    def __init__(self, config: FinetuneConfig):
        self.task = find_task(config)
        super().__init__(with_pooling(completed(config, self.task), self.task))

    @property
    def method(self) -> str:
        """The name of the method, SNNK or a baseline."""
        return self.config.method.name

    @property
    def choose_share(self) -> float | None:
        """Share of the training examples to hold back for choosing the epoch, or None."""
        share: float | None = self.config.train.choose_share
        return share

    @property
    def cut(self) -> int | None:
        """Number of layers that run only once, or None."""
        found: int | None = getattr(self.config.method, "cut", None)  # not every program has it
        return found

    def data(self, accelerator: Any) -> Data:
        """Load the task's examples, preprocessed for the model."""
        config, task = self.config, self.task
        self.pretrained = resolve_model(config.model.name_or_path)
        self.modality = modality = modality_of(task)
        self.reader = reader = modality.reader(self.pretrained, task)
        for note in task.notes:
            accelerator.print(f"note: {note}")
        if getattr(config.method, "pooling", None) == "mean":
            accelerator.print("note: the pooler reads the mean over the tokens; method.pooling=first: the first token")
        limits = {"train": config.data.max_train_samples}
        data = task.load(config.data.dir, max_samples=limits, seed=config.train.seed)
        rows, choosing = data["train"], {}
        if self.choose_share is not None:
            rows, choosing["held back"] = held_back_rows(rows, self.choose_share)
        scored = {**evaluation_splits(task, data, config.data.max_eval_samples), **choosing}
        for note in repeat_notes(task, rows, scored):
            accelerator.print(f"note: {note}")
        seed = config.train.seed
        examples = modality.training_examples(rows, reader, config.data, task, config.augment, seed)
        self.stored = None if self.cut is None else StoredExamples(examples)
        examples = self.stored or examples
        if getattr(config.train, "class_weights", "none") != "none":
            if task.problem_type != "single_label_classification":
                raise ConfigError(
                    f"train.class_weights is balanced, but task {task.name} has {_has(task)}; expected a class per "
                    "example: leave it out"
                )
            examples = WeightedExamples(examples, balanced_weights(examples.labels, task.num_labels))
        evaluated, chosen_on = (
            {name: modality.examples(part, reader, config.data, task) for name, part in parts.items()}
            for parts in (evaluation_splits(task, data, config.data.max_eval_samples), choosing)
        )
        return Data(examples, chosen_on, evaluated) if chosen_on else Data(examples, evaluated)

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Load the pretrained model and prepare it for the method, with calibration if requested."""
        config, device = self.config, accelerator.device
        quiet = dropout_settings(self.pretrained, config.train.dropout)
        base, fresh = load_pretrained(self.pretrained, self.task, config.model.pretrained, **quiet)
        self.modality.check(base, self.reader, config.data)
        wide = config.method.head == "wide"
        if wide:
            base, fresh = with_wide_head(base, self.task), ["snnk_head.linear.bias"]
        random = [name for name in fresh if "pooler." in name and config.method.pooler == "frozen"]
        if random and config.method.name != "full":
            accelerator.print(f"note: {self.pretrained} has no pooler weights; the frozen pooler is random: {random}")
        wanted = config.method.head_bias
        if wanted == "auto":
            wanted = "zero" if head_with_bias(base, fresh) is None else "prior"
        if wanted == "prior" and not resumed:
            start_at_prior(base, data.train.labels)
        if config.train.choose_threshold:
            self.check_threshold(base, accelerator)
        if self.cut is not None and accelerator.distributed_type.value == "FSDP":
            raise ConfigError(
                f"method.cut is {self.cut}, but the model is sharded across processes (FSDP); leave it out"
            )
        calibration, base = None, base.to(device)
        started = time.perf_counter()
        if (config.method.calibrate or config.method.calibrate_adapters or config.method.fit_head) and not resumed:
            rank, world = accelerator.process_index, accelerator.num_processes
            calibration = calibration_batches(data.train, config, device, rank, world)
        if config.method.fit_head and head_with_bias(base, fresh) is None:
            accelerator.print("note: method.fit_head fits new heads with a bias; this model's stays as it is")
        elif config.method.fit_head and calibration is not None:
            read = calibration
            if wide:
                read = calibration_batches(
                    data.train, config, device, rank, world, config.method.head_samples, by_length=True
                )
            fit = fit_closed_form(base, read, as_logits=True)
            self.fit_seconds = time.perf_counter() - started
            accelerator.print(fit)
        head = head_with_bias(base, fresh)
        if isinstance(data.train, WeightedExamples) and head is not None and (wanted == "prior" or self.fit_seconds):
            with torch.no_grad():  # the weighted class shares are equal
                head.bias.add_(data.train.weights.log().to(head.bias))
        model: torch.nn.Module = build_model(base, config.method, config.train.seed, calibration)
        if self.stored is not None:
            self.trunk = Trunk(model.to(device), config.method.cut)
            self.stored.fill(self.trunk, config.train.eval_batch_size, device, Path(config.output.dir))
        return model

    def schedule(self, per_epoch: int) -> Schedule:
        """Return a schedule of whole epochs; a closed-form head is also scored before the first step."""
        fitted = getattr(self.config.method, "fit_head", False)  # not every program has it
        first = fitted and self.config.train.eval_every != "end"
        return replace(of_epochs(self.config.train, per_epoch), eval_first=first)

    def check_threshold(self, model: Any, accelerator: Any) -> None:
        """Reject train.choose_threshold if there is no threshold to choose, or it could not be stored."""
        labels, sharded = self.task.num_labels, accelerator.distributed_type.value == "FSDP"
        if self.task.problem_type == "single_label_classification" and labels == 2 and not sharded:
            if head_with_bias(model) is not None:
                return
            found = f"the head of {type(model).__name__} has no bias to shift"
        elif sharded:
            found = "the model is sharded across processes (FSDP)"
        else:
            found = f"task {self.task.name} has {_has(self.task)}; expected two classes"
        raise ConfigError(f"train.choose_threshold is true, but {found}; leave it out")

    def settle(
        self, model: torch.nn.Module, data: Data, accelerator: Any, stopped: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """Set the threshold between two classes, if requested."""
        if self.trunk is not None:
            self.trunk.remove()
        if not getattr(self.config.train, "choose_threshold", False):  # not every program has it
            return {}
        (held,) = data.splits.values()
        size = self.config.train.eval_batch_size
        found = predict(model, held, size, accelerator, stopped)
        if found is None:
            return None
        threshold = matched_threshold(*found)
        move_threshold(model, threshold)
        return {"threshold": threshold}

    def report(self, done: Finished) -> dict[str, Any]:
        """Write adapter/, bundle/ or model/; return the score of the best checkpoint, and the cost of the bundle."""
        state, best = done.state, done.best
        metrics = done.test or best["metrics"]
        if self.config.output.save_model:
            self.save(done, metrics)
        chosen = {"score_held_back": best["score"]} if done.test else {}
        first = read_log(done.folder / "log.jsonl")[0]
        start: dict[str, Any] = {}
        if first["step"] == 0:
            start["before_training"] = {"score": first["score"], "seconds": first.get("fit_seconds", 0.0)}
        if self.stored is not None:
            start["cut"] = {"seconds": self.stored.seconds, "stored_bytes": self.stored.stored}
        cost = {"cost": self.cost()} if self.config.output.cost and self.config.method.name == "snnk" else {}
        return {
            "score": metrics["score"],
            "metrics": metrics,
            **chosen,
            **start,
            **cost,
            "best_epoch": best["step"] / done.per_epoch,
            "trainable_parameters_without_classifier": done.counts["trainable_without_classifier"],
            "seconds_per_epoch": state.train_seconds / max(1, state.step) * done.per_epoch,
            "processor_seconds_per_epoch": state.cpu_seconds / max(1, state.step) * done.per_epoch,
        }

    def cost(self) -> dict[str, dict[str, int]]:
        """Return `cost_of` this run."""
        return cost_of(self.config, self.pretrained)

    def save(self, done: Finished, metrics: Mapping[str, float]) -> None:
        """Write the trained model; `metrics` go into its card."""
        save_models(done.model, self.reader, self.config, done.folder, metrics, done.data.sizes)

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        """Return the score, and that on the examples held back to choose the checkpoint, if any."""
        start = figures.get("before_training")
        before = "" if start is None else f"before training {start['score']:.4f}, fitted in {start['seconds']:.0f} s; "
        if not done.test:
            return before + super().summary(done, figures)
        return (
            f"{before}score {figures['score']:.4f}, {done.best['score']:.4f} on the held-back examples, at step "
            f"{done.best['step']}; everything is in {done.folder}"
        )


def _has(task: Any) -> str:
    """Describe the labels of a task, for messages."""
    if task.tokens:
        return "tagged words"
    if task.label_names is None:
        return "numbers"
    several = task.problem_type == "multi_label_classification"
    return f"{task.num_labels} labels, any number of them per example" if several else f"{task.num_labels} classes"


def with_pooling(config: Any, task: Any) -> Any:
    """Return the settings with `method.pooling` resolved, for the record of the run.

    Args:
        config: settings with the sections model and method.
        task: the task; images have no tokens to average.
    """
    method = config.method
    is_asked = isinstance(method, PoolingSection) and method.pooling == "auto" and method.moves_pooler
    if not is_asked or task.modality != "text":
        return config
    means = trained_on_means(resolve_model(config.model.name_or_path))
    return replace(config, method=replace(method, pooling="mean" if means else "first"))
