"""Train a small decoder from scratch to copy a word of random symbols: softmax or any linear attention, same recipe.

    python recipes/papers/programs/train_copy.py recipes/papers/configs/copy/copy.yaml  (70 s on one core)
    python recipes/papers/programs/train_copy.py \\
        recipes/papers/configs/copy/copy.yaml method.attention=softmax data.length=256
    python recipes/papers/programs/train_copy.py recipes/papers/configs/copy/copy.yaml \\
        "method.attention={component: elu, projection: identity, near_field: 64, sum_of: [{projection: orf}]}"

The task of the papers on linear attention (Katharopoulos et al. 2020; FMMformer, Nguyen et al. 2021): "0 w 0 w",
generated (papers/lib/copies.py); the loss is that of the second copy. The score is the share of its tokens that are
right, on unseen sequences. A near field that is wider than the distance between the copies sees the answer; linear
attention must find it by position with its features alone.

Settings are `section.key=value`; `--help` lists them. output.dir receives metrics.json, learning_curve.png and
checkpoints. A run killed at any moment continues with `--resume` and ends with the same weights, bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from papers.lib.copies import SPLITS, Copies, copy_scores
from papers.lib.lra_model import with_linear_attention
from papers.lib.lra_settings import SCHEDULES, AttentionMethod, LongRangeTrain, ModelSizes
from papers.lib.training import Training
from snnk_cli.config import option
from snnk_cli.data import ExampleSet
from snnk_cli.experiment import Data, Finished
from snnk_cli.launch import launch
from snnk_cli.settings import RunOutput


@dataclass
class CopyData:
    """The sequences."""

    length: int = option(128, "tokens of a sequence, both copies and both marks; even", low=4)
    symbols: int = option(10, "different symbols, besides the mark", low=1)
    train_examples: int = option(50000, "sequences to train on; a run of fewer steps sees none twice", low=1)
    validation_examples: int = option(200, "sequences on which the checkpoint is chosen", low=1)
    test_examples: int = option(500, "sequences that are scored once, with that checkpoint", low=1)

    def check(self) -> list[str]:
        return [f"length is {self.length}; expected an even number, two words and two marks"] if self.length % 2 else []


@dataclass
class CopyModel(ModelSizes):
    """The decoder, trained from scratch: GPT-2's layout, with learned positions and no dropout."""

    hidden_dim: int = option(256, "width of the feed-forward blocks", low=1)


@dataclass
class CopyTrain(LongRangeTrain):
    """The optimisation, counted in optimizer steps."""

    learning_rate: float = option(1e-3, "peak learning rate of AdamW", above=0, high=10)
    weight_decay: float = option(0.0, "decoupled weight decay of matrices", low=0, high=10)
    steps: int = option(750, "optimizer steps, at most", low=1)
    warmup_steps: int = option(100, "steps in which the rate rises linearly", low=0)
    schedule: str = option("cosine", "the rate after warm-up, see train_lra.py", choices=SCHEDULES)
    beta2: float = option(0.98, "decay of AdamW's second moment", above=0, high=0.99999)
    eval_every: int = option(100, "optimizer steps between evaluations", low=1)


@dataclass
class CopyConfig:
    """All settings of this recipe."""

    output: RunOutput
    task: str = option("copy", "what is learned", choices=("copy",))
    data: CopyData = field(default_factory=CopyData)
    model: CopyModel = field(default_factory=CopyModel)
    method: AttentionMethod = field(default_factory=AttentionMethod)
    train: CopyTrain = field(default_factory=CopyTrain)


class TrainCopy(Training[CopyConfig]):
    """Experiment that trains one decoder with one attention."""

    settings, program = CopyConfig, "papers/programs/train_copy.py"

    def data(self, accelerator: Any) -> Data:
        data, seed = self.config.data, self.config.train.seed
        train, validation, test = (
            Copies(getattr(data, f"{split}_examples"), data.length, data.symbols, seed, split) for split in SPLITS
        )
        return Data(train, {"validation": validation}, {"test": test})

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build a freshly initialised decoder whose attention is replaced at once; all of it is trained."""
        config, sizes = self.config, self.config.model
        layout = GPT2Config(
            vocab_size=config.data.symbols + 1,
            n_positions=config.data.length,
            n_embd=sizes.dim,
            n_inner=sizes.hidden_dim,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
        return with_linear_attention(GPT2LMHeadModel(layout), config.method, config.train.seed)

    def score(
        self,
        model: torch.nn.Module,
        splits: Mapping[str, ExampleSet],
        accelerator: Any,
        stopped: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Return the shares of right tokens of the second copy, and of flawless second copies."""
        return copy_scores(model, splits, self.config.train.eval_batch_size, accelerator, stopped)

    def report(self, done: Finished) -> dict[str, Any]:
        """Return scores of the checkpoint that is best on validation, and the cost of a step."""
        return {
            "accuracy": done.test["accuracy"],
            "whole_sequences": done.test["whole"],
            "validation_accuracy": done.best["metrics"]["accuracy"],
            "distance": done.data.train.distance,  # type: ignore[attr-defined]
            **done.costs,
            "peak_memory_bytes_before_training": done.memory_before,
        }

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        return (
            f"right: {figures['accuracy']:.4f} of the tokens of the second copy, {figures['whole_sequences']:.4f} of "
            f"the sequences, at step {done.best['step']}; everything is in {done.folder}"
        )


def main(argv: list[str] | None = None) -> int:
    """Train the decoder; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(TrainCopy, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
