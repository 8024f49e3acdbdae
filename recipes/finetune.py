"""Fine-tune a pretrained Transformer on a task: SNNK parts, or a peer (LoRA, BOFT, full, ...) under the same recipe.

    python recipes/finetune.py recipes/configs/glue/rte_adapter.yaml data.dir=path/to/glue
    python recipes/finetune.py recipes/configs/glue/rte_adapter.yaml method.name=lora output.dir=runs/rte_lora
    torchrun --nproc_per_node 2 recipes/finetune.py ...          (two processes; on GPUs also `accelerate launch`)

Settings are `section.key=value`; `--help` lists them. A run killed at any moment continues with `--resume` and ends
with the same weights, bit for bit, as one that was never interrupted (on the same number of threads: another one takes
sums in another order). SIGTERM and Ctrl-C save first (exit codes 143, 130) and tell the command that
continues.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lib.experiment import Data, Experiment, Finished, Schedule
from lib.launch import launch
from lib.settings import FinetuneConfig
from lib.task_settings import completed, find_task, with_pooling

if TYPE_CHECKING:
    import torch


class Finetuning(Experiment[FinetuneConfig]):
    """A pretrained encoder with a fresh classifier on a `TextTask` or an `ImageTask` of `data.TASKS`."""

    settings, program = FinetuneConfig, "finetune.py"

    def __init__(self, config: FinetuneConfig):
        self.task = find_task(config)
        super().__init__(with_pooling(completed(config, self.task), self.task))

    @property
    def method(self) -> str:
        """SNNK or its peer."""
        return self.config.method.name

    @property
    def choose_share(self) -> float | None:
        """Share of the training examples that chooses the epoch, None for none."""
        share: float | None = self.config.train.choose_share
        return share

    def data(self, accelerator: Any) -> Data:
        """The task's examples, as the model reads them."""
        from lib.evaluation import evaluation_splits, held_back_rows
        from lib.modality import modality_of
        from lib.models import resolve_model
        from lib.repeated import repeat_notes

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
        evaluated, chosen_on = (
            {name: modality.examples(part, reader, config.data, task) for name, part in parts.items()}
            for parts in (evaluation_splits(task, data, config.data.max_eval_samples), choosing)
        )
        return Data(examples, chosen_on, evaluated) if chosen_on else Data(examples, evaluated)

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """The pretrained model, prepared by the method; calibrated, if that is asked for."""
        from lib.data import calibration_batches
        from lib.models import build_model, dropout_settings, load_pretrained
        from lib.peers import head_with_bias, start_at_prior

        config, device = self.config, accelerator.device
        quiet = dropout_settings(self.pretrained, config.train.dropout)
        base, fresh = load_pretrained(self.pretrained, self.task, config.model.pretrained, **quiet)
        self.modality.check(base, self.reader, config.data)
        random = [name for name in fresh if "pooler." in name and config.method.pooler == "frozen"]
        if random and config.method.name != "full":
            accelerator.print(f"note: {self.pretrained} has no pooler weights; the frozen pooler is random: {random}")
        wanted = config.method.head_bias
        if wanted == "auto":
            wanted = "zero" if head_with_bias(base, fresh) is None else "prior"
        if wanted == "prior" and not resumed:
            start_at_prior(base, data.train.labels)
        calibration, base = None, base.to(device)
        if (config.method.calibrate or config.method.calibrate_adapters or config.method.fit_head) and not resumed:
            rank, world = accelerator.process_index, accelerator.num_processes
            calibration = calibration_batches(data.train, config, device, rank, world)
        if config.method.fit_head and head_with_bias(base, fresh) is None:
            accelerator.print("note: method.fit_head fits new heads with a bias; this model's stays as it is")
        elif config.method.fit_head and calibration is not None:
            from snnk_peft import fit_closed_form

            fit = fit_closed_form(base, calibration, as_logits=True)
            accelerator.print(
                f"head {fit.head} fitted to {fit.examples} examples, relative error {fit.relative_error:.3f}"
            )
        return build_model(base, config.method, config.train.seed, calibration)

    def schedule(self, per_epoch: int) -> Schedule:
        """Whole epochs; the warm-up is a part of all steps."""
        from lib.schedule import of_epochs

        return of_epochs(self.config.train, per_epoch)

    def report(self, done: Finished) -> dict[str, Any]:
        """adapter/, bundle/ or model/; the score of the best checkpoint, and what the bundle costs."""
        state, best = done.state, done.best
        metrics = done.test or best["metrics"]
        if self.config.output.save_model:
            self.save(done, metrics)
        chosen = {"score_held_back": best["score"]} if done.test else {}
        cost = {"cost": self.cost()} if self.config.output.cost and self.config.method.name == "snnk" else {}
        return {
            "score": metrics["score"],
            "metrics": metrics,
            **chosen,
            **cost,
            "best_epoch": best["step"] / done.per_epoch,
            "trainable_parameters_without_classifier": done.counts["trainable_without_classifier"],
            "seconds_per_epoch": state.train_seconds / state.step * done.per_epoch,
            "processor_seconds_per_epoch": state.cpu_seconds / state.step * done.per_epoch,
        }

    def cost(self) -> dict[str, dict[str, int]]:
        """See `cost_of`."""
        from lib.results import cost_of  # not above: peers with another transformers cannot import it

        return cost_of(self.config, self.pretrained)

    def save(self, done: Finished, metrics: Mapping[str, float]) -> None:
        """Write the trained model; `metrics` are for its card."""
        from lib.results import save_models

        save_models(done.model, self.reader, self.config, done.folder, metrics, done.data.sizes)

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        """The score, and that of the examples that chose the checkpoint, if they are others."""
        if not done.test:
            return super().summary(done, figures)
        return (
            f"score {figures['score']:.4f}, {done.best['score']:.4f} on the examples held back, at step "
            f"{done.best['step']}; everything is in {done.folder}"
        )


def main(argv: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(Finetuning, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
