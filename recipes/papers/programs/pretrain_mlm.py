"""Pretrain a small BERT from scratch by masked language modelling, with softmax or any linear attention.

    python recipes/papers/programs/pretrain_mlm.py recipes/papers/configs/pretrain_mlm.yaml
    python recipes/papers/programs/pretrain_mlm.py \\
        recipes/papers/configs/pretrain_mlm.yaml task=imdb data.dir=path/to/imdb \\
        train.max_cpu_minutes=8 "method.attention={component: posrf, projection: gmm, per_head: true}"
    python recipes/papers/programs/finetune_kernel.py recipes/papers/configs/kernels.yaml data.dir=path/to/glue \\
        model.name_or_path=runs/kernels/pretraining/posrf_gmm/seed0/model

Learning the Transformer Kernel, section 3.3: the learned kernel of attention is kept for fine-tuning. The text is
WikiText-103 in its official layout (task=wikitext), IMDb, film reviews, or, without any files, docstrings of Python's
standard library; a WordPiece vocabulary is built from it. The run writes model/: the encoder as transformers saves it,
with its tokenizer, and in it attention/, which finetune_kernel.py puts back.

Settings are `section.key=value`; `--help` lists them. A run killed at any moment continues with `--resume` and ends
with the same weights, bit for bit, as one that was never interrupted (on the same number of threads; with a decaying
schedule and train.max_cpu_minutes, the rate follows the CPU time). SIGTERM and Ctrl-C save first (exit codes 143, 130)
and print the command that continues.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from papers.lib.masked_model import build_masked, masked_scores
from papers.lib.masked_text import MaskedWindows, read_texts, train_tokenizer
from papers.lib.mlm_settings import MaskedConfig
from papers.lib.training import Metrics, Splits, Stopped, Training
from snnk_cli.experiment import Data, Finished
from snnk_cli.files import write_folder
from snnk_cli.launch import launch


class PretrainMasked(Training[MaskedConfig]):
    """Experiment that pretrains a small BERT on one text."""

    settings, program = MaskedConfig, "papers/programs/pretrain_mlm.py"

    def data(self, accelerator: Any) -> Data:
        """Build a vocabulary from the training text, and windows of this text and of the held-out one."""
        data, seed = self.config.data, self.config.train.seed
        train, held_out = read_texts(self.config.task, data.dir)
        self.tokenizer = tokenizer = train_tokenizer(train, data.vocabulary, data.positions)
        shape = (tokenizer, data.max_length, data.share, seed)
        return Data(
            MaskedWindows(train, *shape), {"held out": MaskedWindows(held_out, *shape, count=data.max_eval_windows)}
        )

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build a freshly initialised model; all of it is trained except sinusoidal positions."""
        config, vocabulary = self.config, len(self.tokenizer)
        return build_masked(config.model, config.method, vocabulary, config.data.positions, config.train.seed)

    def score(self, model: torch.nn.Module, splits: Splits, accelerator: Any, stopped: Stopped) -> Metrics:
        """Return the held-out loss in nats per masked piece (lower is better), and the masked accuracy."""
        size = self.config.train.eval_batch_size
        return masked_scores(model, splits["held out"], size, accelerator.device, stopped)

    def report(self, done: Finished) -> dict[str, Any]:
        """Write model/; return its scores, and the cost of a step."""
        model: Any = done.model
        metrics = done.best["metrics"]
        texts: Any = {"train": done.data.train, **done.data.splits}

        def fill(folder: Path) -> None:
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(str(folder))

        write_folder(done.folder / "model", fill)
        return {
            "masked_accuracy": metrics["masked_accuracy"],
            "loss": metrics["loss"],
            "loss_without_context": texts["train"].loss_without_context(texts["held out"]),
            "vocabulary": len(self.tokenizer),
            "tokens": {name: part.ids.numel() for name, part in texts.items()},
            **done.costs,
        }

    def summary(self, done: Finished, figures: Mapping[str, Any]) -> str:
        return (
            f"held out: loss {figures['loss']:.4f}, {figures['masked_accuracy']:.2%} of the hidden pieces guessed, "
            f"step {done.best['step']} of {figures['steps']}; everything is in {done.folder}"
        )


def main(argv: list[str] | None = None) -> int:
    """Pretrain a model; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(PretrainMasked, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
