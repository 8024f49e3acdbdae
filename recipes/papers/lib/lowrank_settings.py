"""The settings of recipes/papers/programs/train_lowrank.py, section by section."""

# `option` returns a dataclasses.field, which is a valid dataclass default.
# ruff: noqa: RUF009

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

from data import TASKS

from papers.lib.lra_settings import faults_of
from snnk_cli.config import option
from snnk_cli.settings import AugmentSection, DataSection, RunOutput, TrainSection
from snnk_cli.task_settings import task_faults
from snnk_peft import SNNKConfig

# Networks of papers/lib/cifar_resnet.py -> number of layers.
CIFAR_RESNETS = {"resnet20": 20, "resnet32": 32, "resnet56": 56}


@dataclass
class LowRankModel:
    """The network to make low-rank."""

    name_or_path: str = option(
        "resnet20",
        f"{', '.join(CIFAR_RESNETS)} (for 32 x 32 images), or a folder or Hub name of an image classifier of "
        "transformers, such as those in recipes/models",
    )
    weights: str | None = option(
        None, "null: random; of a ResNet for 32 x 32 images a safetensors file; 'pretrained': those of name_or_path"
    )

    def check(self) -> list[str]:
        own = self.name_or_path in CIFAR_RESNETS
        if own and self.weights == "pretrained":
            return [f"weights is 'pretrained', but {self.name_or_path} has none; expected a safetensors file"]
        if not own and self.weights not in (None, "pretrained"):
            return [f"weights is {self.weights!r}; expected null or 'pretrained', the weights of {self.name_or_path}"]
        return []


@dataclass
class LowRankMethod:
    """The layers that become low-rank, and how their factors are initialised."""

    low_rank: dict[str, Any] | None = option(
        None, "fields of snnk_peft.LowRankPart, frobenius_decay among them; null trains the dense model"
    )

    def check(self) -> list[str]:
        return [] if self.low_rank is None else faults_of(lambda: self.snnk_config(seed=0))

    @property
    def frobenius_decay(self) -> float:
        """The strength of the Frobenius decay, 0 for none."""
        return float((self.low_rank or {}).get("frobenius_decay", 0.0))

    def label(self) -> str:
        """Return a short name for titles and tables: dense, or init-rank and its decay, if any."""
        if self.low_rank is None:
            return "dense"
        (part,) = self.snnk_config(seed=0).parts
        sizes = {name: getattr(part, name) for name in ("rank", "energy", "rank_scale")}
        name, size = next(((name, size) for name, size in sizes.items() if size is not None), ("rank_scale", "default"))
        label = f"{part.init}-{name}-{size}"
        return f"{label}-frobenius" if self.frobenius_decay else label

    def snnk_config(self, seed: int, **changes: Any) -> SNNKConfig:
        """Return the SNNKConfig with the part described here; `changes` replace some of its fields."""
        part = {"part": "low_rank", **(self.low_rank or {}), **changes}
        return SNNKConfig(parts=[part], modules_to_save=[], seed=seed)  # type: ignore[list-item]


@dataclass
class LowRankTrain(TrainSection):
    """The optimisation. In the paper: SGD with momentum, linear warm-up, then a cosine to 0."""

    optimizer: str = option("sgd", "sgd (with momentum) or adamw", choices=("sgd", "adamw"))
    momentum: float = option(0.9, "of sgd", low=0, high=0.999)
    learning_rate: float = option(0.1, "peak learning rate", above=0, high=10)
    weight_decay: float = option(
        1e-4,
        "of matrices and kernels (vectors have none): with sgd a term of the gradient, with adamw decoupled; the "
        "factors of low-rank layers have none where low_rank.frobenius_decay is above 0, which is decoupled",
        low=0,
        high=10,
    )
    schedule: str = option("cosine", "the rate after warm-up", choices=("constant_with_warmup", "linear", "cosine"))


@dataclass
class LowRankConfig:
    """All settings of recipes/papers/programs/train_lowrank.py."""

    output: RunOutput
    task: str = option(MISSING, "a data set (recipes/data) whose examples are images")
    model: LowRankModel = field(default_factory=LowRankModel)
    data: DataSection = field(default_factory=DataSection)
    augment: AugmentSection = field(default_factory=AugmentSection)
    method: LowRankMethod = field(default_factory=LowRankMethod)
    train: LowRankTrain = field(default_factory=LowRankTrain)

    def check(self) -> list[str]:
        faults = task_faults(self.task, self.data)
        if not faults and TASKS[self.task].modality != "image":
            known = ", ".join(name for name in TASKS if TASKS[name].modality == "image")
            faults = [f"task is {self.task}, whose examples are not images; expected one of {known}"]
        return faults
