"""The settings of recipes/papers/programs/train_lra.py, section by section.

recipes/score.py shows them in its `--help`, so the package, and with it torch, is imported only where it is needed.
"""

# `option` returns a dataclasses.field, which is a valid dataclass default.
# ruff: noqa: RUF009

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any

from snnk_cli.config import option
from snnk_cli.settings import EvaluateConfig, RunOutput, StepSettings
from snnk_cli.task_settings import RECIPE_OF, modality_fault
from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean

if TYPE_CHECKING:
    from data import SequenceTask

    from snnk_peft import SNNKConfig

SOFTMAX, PERFORMER = "softmax", "performer_pytorch"
SCHEDULES = ("constant", "linear", "cosine", "rsqrt")
NAMED = [SOFTMAX, PERFORMER]  # kinds other than AttentionPart


def faults_of(made: Callable[[], object]) -> list[str]:
    """Return the faults of a ConfigError raised by `made`, if any."""
    try:
        made()
    except ConfigError as error:
        return error.faults
    return []


@dataclass
class LongRangeData:
    """The data to read, and how much of it."""

    dir: str | None = option(None, "folder with the official files; null generates the data (listops only)")
    max_length: int | None = option(
        None,
        "tokens per document, longer ones are cut (sparsity: so many pairs are made); null: the task's own",
        low=4,
    )
    max_train_samples: int | None = option(None, "train on a subset drawn with train.seed", low=1)
    max_validation_samples: int | None = option(None, "choose the checkpoint on a fixed random subset", low=1)
    max_test_samples: int | None = option(None, "report accuracy on a fixed random subset", low=1)


@dataclass
class ModelSizes:
    """A Transformer trained from scratch. The default sizes are those of Spectraformer, Table 5."""

    dim: int = option(64, "width of the residual stream", low=1)
    hidden_dim: int = option(128, "width of the feed-forward blocks and of the head's hidden layer", low=1)
    heads: int = option(2, "attention heads; must divide dim", low=1)
    layers: int = option(2, "layers", low=1)

    def check(self) -> list[str]:
        return [f"heads is {self.heads}, which does not divide dim {self.dim}"] if self.dim % self.heads else []


@dataclass
class LongRangeModel(ModelSizes):
    """The encoder of a classifier."""

    dropout: float = option(0.1, "on embeddings, blocks and the pooled vector", low=0, high=0.9)
    attention_dropout: float = option(
        0.1,
        "on softmax weights (linear attention has none); on a CPU anything above 0 keeps torch from its fused kernel, "
        "and memory grows with the square of the length",
        low=0,
        high=0.9,
    )
    pooling: str = option(
        "mean", "over unpadded tokens, or the output at a token put in front", choices=("mean", "cls")
    )
    positions: str = option("learned", "position embedding", choices=("learned", "sinusoidal"))


@dataclass
class PerformerSection:
    """The library performer-pytorch, a baseline (see papers/lib/performer_peer.py)."""

    nb_features: int = option(128, "rows of its random matrix, per layer", low=1)
    feature_redraw_interval: int | None = option(
        1000, "forward passes of training after which it draws new random features; null: never", low=1
    )


@dataclass
class AttentionMethod:
    """The kind of attention."""

    attention: dict[str, Any] | str = option(
        SOFTMAX,
        "softmax (exact, torch's scaled_dot_product_attention), the fields of snnk_peft.AttentionPart, or "
        "performer_pytorch (that library's FastAttention: pip install performer-pytorch)",
    )
    performer: PerformerSection = field(default_factory=PerformerSection)

    def check(self) -> list[str]:
        if not isinstance(self.attention, str) or self.attention in NAMED:
            return faults_of(lambda: self.snnk_config(seed=0))
        hint = did_you_mean("value", self.attention, NAMED)
        return [f"attention: {hint}, or the fields of an AttentionPart, such as {{component: posrf}}"]

    def label(self) -> str:
        """Return a short name for titles and tables: softmax, performer_pytorch, or component-projection."""
        if isinstance(self.attention, str):
            return self.attention
        part: Any = self.snnk_config(seed=0).named_parts()["attention"]  # type: ignore[union-attr]
        return f"{part.component}-{part.projection}"

    def snnk_config(self, seed: int) -> SNNKConfig | None:
        """Return the SNNKConfig described here, or None for softmax and the baseline library."""
        if isinstance(self.attention, str):
            return None
        from snnk_peft import SNNKConfig

        return SNNKConfig(attention=self.attention, modules_to_save=[], seed=seed)  # type: ignore[arg-type]


@dataclass
class LongRangeTrain(StepSettings):
    """The optimisation, counted in optimizer steps."""

    steps: int = option(50000, "optimizer steps, at most", low=1)
    max_cpu_minutes: float | None = option(
        None,
        "end after so much processor time of training steps, over all threads; evaluations are not counted",
        above=0,
    )
    warmup_steps: int = option(1000, "steps in which the rate rises linearly", low=0)
    schedule: str = option(
        "linear",
        "the rate after warm-up: constant; linear or cosine fall to 0 at the end of the run (with max_cpu_minutes the "
        "rate then follows the processor time, so that two runs are not alike bit for bit); rsqrt is "
        "learning_rate / sqrt(max(step, warmup_steps)) throughout, as in Long Range Arena",
        choices=SCHEDULES,
    )
    beta2: float = option(0.999, "decay of AdamW's second moment", above=0, high=0.99999)
    eval_every: int = option(500, "optimizer steps between evaluations", low=1)


@dataclass
class LongRangeConfig:
    """All settings of recipes/papers/programs/train_lra.py."""

    output: RunOutput
    task: str = option(MISSING, "a data set (recipes/data): listops or lra_...")
    data: LongRangeData = field(default_factory=LongRangeData)
    model: LongRangeModel = field(default_factory=LongRangeModel)
    method: AttentionMethod = field(default_factory=AttentionMethod)
    train: LongRangeTrain = field(default_factory=LongRangeTrain)

    def check(self) -> list[str]:
        return _sequence_faults(self.task) or faults_of(self.read_task)

    def read_task(self) -> tuple[SequenceTask, int]:
        """Return the task, and the number of tokens to read per document."""
        from data import TASKS

        task = TASKS[self.task].of_length(self.data.max_length)
        return task, self.data.max_length or task.max_length


@dataclass
class LongRangeTest:
    """The part of a run's task to score."""

    dir: str | None = option(None, "folder with the official files; null generates the data, or is that of the run")
    max_test_samples: int | None = option(None, "score a fixed random subset", low=1)


@dataclass
class LongRangeEvaluation(EvaluateConfig):
    """All settings of recipes/score.py for a run of recipes/papers/programs/train_lra.py."""

    data: LongRangeTest = field(default_factory=LongRangeTest)  # type: ignore[assignment]

    def check(self) -> list[str]:
        return _sequence_faults(self.task)


def _sequence_faults(task: str) -> list[str]:
    fault = modality_fault(task, RECIPE_OF["sequence"])
    return [] if fault is None else [fault]
