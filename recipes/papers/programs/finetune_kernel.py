"""Fine-tune all weights of a model from pretrain_mlm.py: the learned kernel of attention is trained further.

    python recipes/papers/programs/finetune_kernel.py recipes/papers/configs/kernels.yaml data.dir=path/to/glue \\
        model.name_or_path=runs/kernels/pretraining/posrf_gmm/seed0/model

This is recipes/finetune.py with method.name=full, and with the linear attention in model.name_or_path/attention, if
any, put into the model: its rows and their parameters are those of the pretraining. Settings, `--resume` and
metrics.json are the same; instead of model/ a run writes bundle/, which loads with the Auto classes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from lib.finetuning import Finetuning

from papers.lib.lra_settings import SOFTMAX
from papers.lib.masked_model import attention_of, with_attention
from snnk_cli.experiment import Data, Finished
from snnk_cli.files import write_folder
from snnk_cli.launch import launch
from snnk_cli.settings import FinetuneConfig
from snnk_peft import bundle
from snnk_peft.errors import ConfigError


class FinetuneKernel(Finetuning):
    """A classifier over a pretrained encoder, with the attention from its pretraining."""

    program = "papers/programs/finetune_kernel.py"
    paths = (("model", "name_or_path"),)  # the report names the pretrained attention instead

    def __init__(self, config: FinetuneConfig):
        if config.method.name != "full":
            raise ConfigError(
                f"method.name is {config.method.name}; expected full: all weights are trained, with the attention of "
                "the pretraining. For other methods use recipes/finetune.py"
            )
        super().__init__(config)

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """Build the pretrained encoder with a fresh classifier and its attention."""
        model = with_attention(super().model(data, accelerator, resumed), Path(self.pretrained))
        accelerator.print(f"attention of the pretraining: {attention_of(model)}")
        return model

    def report(self, done: Finished) -> dict[str, Any]:
        return {**super().report(done), "attention": attention_of(done.model)}

    def save(self, done: Finished, metrics: Mapping[str, float]) -> None:
        """Save model/ with softmax, otherwise bundle/: an adapter would lack the weights around it."""
        if attention_of(done.model) == SOFTMAX:
            super().save(done, metrics)
            return

        small = bundle(done.model)

        def fill(folder: Path) -> None:
            small.save_pretrained(str(folder))
            self.reader.save_pretrained(str(folder))

        write_folder(done.folder / "bundle", fill)


def main(argv: list[str] | None = None) -> int:
    """Fine-tune the model; return the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(FinetuneKernel, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
