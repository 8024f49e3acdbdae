"""Train a small decoder from scratch to copy a word of random symbols: softmax or any linear attention, same recipe.

    python recipes/papers/programs/train_copy.py recipes/papers/configs/copy/copy.yaml  (70 s on one core)
    python recipes/papers/programs/train_copy.py \\
        recipes/papers/configs/copy/copy.yaml method.attention=softmax data.length=256
    python recipes/papers/programs/train_copy.py recipes/papers/configs/copy/copy.yaml \\
        "method.attention={component: elu, projection: identity, near_field: 64, sum_of: [{projection: orf}]}"
    python recipes/papers/programs/train_copy.py recipes/papers/configs/copy/pieces.yaml model.layout=gpt_neox

The task of the papers on linear attention (Katharopoulos et al. 2020; FMMformer, Nguyen et al. 2021): "0 w 0 w",
generated (papers/lib/copies.py); the loss is that of the second copy. The score is the share of its tokens that are
right, on unseen sequences. A near field that is wider than the distance between the copies sees the answer; linear
attention must find it by position with its features alone. With data.piece the second half is made of pieces of the
first in any order, which must be found by their first tokens.

Settings are `section.key=value`; `--help` lists them. output.dir receives metrics.json, learning_curve.png, checkpoints
and, for softmax attention, model/. A run killed at any moment continues with `--resume` and ends with the same weights,
bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from papers.lib.copies import KNOWN, SPLITS, Copies, Pieces, copy_scores
from papers.lib.lra_model import with_linear_attention
from papers.lib.lra_settings import SCHEDULES, AttentionMethod, LongRangeTrain, ModelSizes
from papers.lib.training import Metrics, Splits, Stopped, Training
from snnk_cli.config import option
from snnk_cli.experiment import Data, Finished
from snnk_cli.files import write_folder
from snnk_cli.launch import launch
from snnk_cli.settings import RunOutput

WIDTHS = ("n_inner", "intermediate_size")  # names of the feed-forward blocks' width
# By the name in transformers: the width of the feed-forward blocks, and the settings that must be 0.
LAYOUTS = {
    "gpt2": ("n_inner", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("intermediate_size",),
    "gpt_neox": ("intermediate_size",),
}


@dataclass
class CopyData:
    """The sequences."""

    length: int = option(128, "tokens of a sequence, both copies and both marks; even", low=4)
    symbols: int = option(10, "different symbols, besides the mark", low=1)
    train_examples: int = option(50000, "sequences to train on; a run of fewer steps sees none twice", low=1)
    validation_examples: int = option(200, "sequences on which the checkpoint is chosen", low=1)
    test_examples: int = option(500, "sequences that are scored once, with that checkpoint", low=1)

    piece: int | None = option(
        None, "tokens of the pieces of the first half of which the second is made; null: it is the first", low=KNOWN + 1
    )

    def check(self) -> list[str]:
        if self.length % 2:
            return [f"length is {self.length}; expected an even number: two words and two marks"]
        if self.piece is not None and (self.length // 2) % self.piece:
            return [f"piece is {self.piece}, which does not divide half of the length, {self.length // 2}"]
        return []


@dataclass
class CopyModel(ModelSizes):
    """The decoder, trained from scratch, without dropout."""

    layout: str = option("gpt2", "gpt2 has learned positions, llama and gpt_neox rotary ones", choices=tuple(LAYOUTS))
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


def copies(data: CopyData, seed: int, split: str) -> Copies:
    """Return the sequences of a split."""
    given = (getattr(data, f"{split}_examples"), data.length, data.symbols, seed, split)
    return Copies(*given) if data.piece is None else Pieces(*given, data.piece)


class TrainCopy(Training[CopyConfig]):
    """Experiment that trains one decoder with one attention."""

    settings, program = CopyConfig, "papers/programs/train_copy.py"

    def data(self, accelerator: Any) -> Data:
        data, seed = self.config.data, self.config.train.seed
        train, validation, test = (copies(data, seed, split) for split in SPLITS)
        return Data(train, {"validation": validation}, {"test": test})

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build a freshly initialised decoder whose attention is replaced at once; all of it is trained."""
        config, sizes = self.config, self.config.model
        layout = AutoConfig.for_model(
            sizes.layout,
            vocab_size=config.data.symbols + 1,
            max_position_embeddings=config.data.length,
            hidden_size=sizes.dim,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            bos_token_id=None,
            eos_token_id=None,
            **{name: sizes.hidden_dim if name in WIDTHS else 0.0 for name in LAYOUTS[sizes.layout]},
        )
        return with_linear_attention(AutoModelForCausalLM.from_config(layout), config.method, config.train.seed)

    def score(self, model: torch.nn.Module, splits: Splits, accelerator: Any, stopped: Stopped) -> Metrics:
        """Return the shares of correct tokens in the second copy, and of flawless second copies."""
        return copy_scores(model, splits, self.config.train.eval_batch_size, accelerator, stopped)

    def report(self, done: Finished) -> dict[str, Any]:
        """Write model/; return scores of the checkpoint best on validation, and the cost of a step."""
        if isinstance(done.model, PreTrainedModel):
            write_folder(done.folder / "model", done.model.save_pretrained)
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
    """Train the decoder; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(TrainCopy, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
