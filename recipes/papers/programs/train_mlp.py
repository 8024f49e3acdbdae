"""Train an MLP of three layers on numbers or small images, with a dense, SNNK or low-rank second layer.

    python recipes/papers/programs/train_mlp.py recipes/papers/configs/mlp/mnist.yaml data.dir=path/to/mnist
    python recipes/papers/programs/train_mlp.py \\
        recipes/papers/configs/mlp/columns.yaml data.dir=path/to/covtype method.kind=dense
    python recipes/papers/programs/train_mlp.py \\
        recipes/papers/configs/mlp/columns.yaml task=higgs data.dir=path/to/higgs

SNNK paper, sections 4.2 and G.1.3 (MNIST), F and H.5 (CoverType, HIGGS, HEPMASS). Columns are standardised by the
training rows. The epoch is chosen on the validation rows or, without any, on a tenth of the training rows, which is
held back; the test rows are scored once. A run killed at any moment continues with `--resume`.

Settings are `section.key=value`; `--help` lists them.
"""

# `option` returns a dataclasses.field, which is a valid dataclass default.
# ruff: noqa: RUF009

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from data import TASKS, Columns

from papers.lib.layer_settings import feature_faults, feature_label
from papers.lib.mlp import Perceptron, equal_rank
from papers.lib.training import Training
from snnk_cli.config import option
from snnk_cli.data import ExampleSet, check_not_empty, digest
from snnk_cli.experiment import Data, Finished
from snnk_cli.launch import launch
from snnk_cli.settings import RunOutput, TrainSection
from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks import Images
from snnk_peft.tasks._files import capped
from snnk_peft.tasks.base import held_back
from snnk_peft.tasks.base_image import UnreadableImageError, converted

KINDS = ("snnk", "dense", "low_rank")
HELD_BACK = 0.1


class ColumnRows(ExampleSet):
    """A split of a `ColumnsTask`.

    Args:
        rows: the examples.
        shift: subtracted from every column.
        scale: divisor of every column.
    """

    def __init__(self, rows: Columns, shift: np.ndarray, scale: np.ndarray):
        check_not_empty(rows)
        self.values = torch.from_numpy(((rows.values - shift) / scale).astype(np.float32))
        self.labels = torch.from_numpy(rows.labels.astype(np.int64))
        self.lengths = [1] * len(rows)

    def batch(self, indices: Sequence[int], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Return values (batch, columns) and labels (batch,)."""
        chosen = list(indices)
        return {"values": self.values[chosen].to(device), "labels": self.labels[chosen].to(device)}

    def describe(self) -> str:
        return f"{len(self):,} rows of {self.values.shape[1]} numbers"

    def fingerprint(self) -> str:
        bits = self.values.numpy().view(np.int32)
        return digest(self.labels.numpy().tobytes(), [("", list(bits))], np.int32)


def standard(rows: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of every column; 1 where a column is constant."""
    mean, spread = rows.values.mean(0, dtype=np.float64), rows.values.std(0, dtype=np.float64)
    return mean, np.where(spread > 1e-6 * np.maximum(1, np.abs(mean)), spread, 1.0)


def columns_of(rows: Any) -> Columns:
    """Convert a split of images to rows of their grey pixels, 0 to 1; rows of numbers are returned unchanged."""
    if not isinstance(rows, Images):
        return rows  # type: ignore[no-any-return]
    pixels, faults = [], []
    for index in range(len(rows)):
        try:
            pixels.append(np.asarray(converted(rows.picture(index), 1), dtype=np.float32).ravel() / 255)
        except UnreadableImageError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError(capped(faults, f"{len(faults)} of {len(rows)} images cannot be read"))
    return Columns(np.stack(pixels), rows.labels)


@dataclass
class MlpData:
    """The files."""

    dir: str | None = option(None, "folder of the official files; null: the Hub, for images that are there")
    max_train_samples: int | None = option(None, "train on a random subset", low=1)
    max_test_samples: int | None = option(None, "test on a random subset", low=1)


@dataclass
class MlpModel:
    """The dense network."""

    width: int = option(512, "of the first layer", low=1)
    second: int = option(512, "of the second layer", low=1)
    dropout: float = option(0.2, "behind both", low=0, high=0.99)


@dataclass
class MlpMethod:
    """The kind of the second layer."""

    kind: str = option("snnk", "the second layer; low_rank gets as many numbers as snnk would", choices=KINDS)
    snnk: dict[str, Any] | None = option(
        None, "component, projection, num_features and what else a feature map has, and init; null: 32 ReLU features"
    )

    @property
    def features(self) -> dict[str, Any]:
        """The fields of the feature map, with defaults."""
        return {"component": "relu", "projection": "gaussian", "num_features": 32, **(self.snnk or {})}

    def check(self) -> list[str]:
        return feature_faults(self.features)

    def label(self) -> str:
        """Return the kind or, for SNNK, the features."""
        return feature_label(self.features) if self.kind == "snnk" else self.kind


@dataclass
class MlpTrain(TrainSection):
    """The optimisation; the paper uses Adam with rate 1e-3 and batches of 32."""

    weight_decay: float = option(0.0, "decoupled, of matrices", low=0, high=10)
    epochs: int = option(25, "passes over the training data", low=1)


@dataclass
class MlpConfig:
    """All settings of this recipe."""

    output: RunOutput
    task: str = option(MISSING, "a data set (recipes/data) whose examples are rows of numbers, or small images")
    data: MlpData = field(default_factory=MlpData)
    model: MlpModel = field(default_factory=MlpModel)
    method: MlpMethod = field(default_factory=MlpMethod)
    train: MlpTrain = field(default_factory=MlpTrain)

    def check(self) -> list[str]:
        known = [name for name in TASKS if TASKS[name].modality in ("columns", "image")]
        return [] if self.task in known else [f"task: {did_you_mean('task', self.task, known)}"]


class TrainMlp(Training[MlpConfig]):
    """Experiment that trains an MLP on a `ColumnsTask`, or on an `ImageTask` pixel by pixel."""

    settings, program = MlpConfig, "papers/programs/train_mlp.py"

    def __init__(self, config: MlpConfig):
        super().__init__(config)
        self.task = TASKS[config.task]

    def data(self, accelerator: Any) -> Data:
        config = self.config
        limits = {"train": config.data.max_train_samples, "test": config.data.max_test_samples}
        loaded = self.task.load(config.data.dir, max_samples=limits, seed=config.train.seed)
        rows = {name: columns_of(part) for name, part in loaded.items()}
        if "validation" not in rows:
            held = held_back(rows["train"].labels, HELD_BACK, config.train.seed)
            kept = np.setdiff1d(np.arange(len(rows["train"])), held).tolist()
            rows["validation"], rows["train"] = rows["train"].select(held), rows["train"].select(kept)
        self.columns = rows["train"].values.shape[1]
        shift, scale = standard(rows["train"])
        parts = {name: ColumnRows(part, shift, scale) for name, part in rows.items()}
        return Data(parts["train"], {"validation": parts["validation"]}, {"test": parts["test"]})

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build a freshly initialised MLP; all of it is trained except the feature rows."""
        model, method = self.config.model, self.config.method
        given: dict[str, Any] = {"snnk": method.features} if method.kind == "snnk" else {}
        if method.kind == "low_rank":
            given = {"rank": equal_rank(model.width, model.second, method.features["num_features"])}
        sizes = (self.columns, self.task.num_labels, model.width, model.second, model.dropout)
        return Perceptron(*sizes, seed=self.config.train.seed, **given)

    def report(self, done: Finished) -> dict[str, Any]:
        """Return the test score of the best checkpoint, and the size of the bundled network."""
        network: Any = done.model
        batch = next(iter(done.data.test.values())).batch([0], done.device)
        bundled = network.bundled()
        with torch.no_grad():
            given, folded = network(batch["values"]).logits, bundled(batch["values"]).logits
        return {
            "score": done.test["score"],
            "metrics": done.test,
            "validation": done.best["metrics"],
            "best_epoch": done.best["step"] / done.per_epoch,
            "bundled_parameters": sum(value.numel() for value in bundled.parameters()),
            "bundle_difference": float((given - folded).abs().max()),
            "seconds_per_epoch": done.state.train_seconds / done.state.step * done.per_epoch,
        }

    def summary(self, done: Finished, figures: dict[str, Any]) -> str:  # type: ignore[override]
        sizes = f"{done.counts['trainable']:,} numbers trained, {figures['bundled_parameters']:,} bundled"
        return f"test {figures['score']:.4f} (epoch {figures['best_epoch']:g}); {sizes}; everything is in {done.folder}"


def main(argv: list[str] | None = None) -> int:
    """Train the MLP; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(TrainMlp, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
