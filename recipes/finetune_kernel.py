"""Fine-tune what recipes/pretrain_mlm.py left, all weights of it: the learned kernel of attention goes on learning.

    python recipes/finetune_kernel.py recipes/configs/kernels/rte.yaml data.dir=path/to/glue \\
        model.name_or_path=runs/kernels/pretraining/posrf_gmm/seed0/model

recipes/finetune.py with method.name=full, and the linear attention in model.name_or_path/attention, if there is one,
put into the model: its rows and what they are learned from are those of the pretraining. Settings, `--resume` and
metrics.json are as there; instead of model/ a run leaves bundle/, which loads with the Auto classes.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _lib.experiment import Data, Finished
from _lib.launch import launch
from _lib.lra_settings import SOFTMAX
from _lib.settings import FinetuneConfig
from finetune import Finetuning

if TYPE_CHECKING:
    import torch


class FinetuneKernel(Finetuning):
    """A classifier over a pretrained encoder with the attention that it was pretrained with."""

    program = "finetune_kernel.py"
    paths = (("model", "name_or_path"),)  # the report says instead what was pretrained there

    def __init__(self, config: FinetuneConfig):
        from snnk_peft.errors import ConfigError

        if config.method.name != "full":
            raise ConfigError(
                f"method.name is {config.method.name}; expected full: all weights are trained, and attention is that "
                "of the pretraining. Others: recipes/finetune.py"
            )
        super().__init__(config)

    def model(self, data: Data, accelerator: Any, resumed: bool) -> torch.nn.Module:
        """The pretrained encoder with a fresh classifier, and its attention."""
        from _lib.masked_model import attention_of, with_attention

        model = with_attention(super().model(data, accelerator, resumed), Path(self.pretrained))
        accelerator.print(f"attention of the pretraining: {attention_of(model)}")
        return model

    def report(self, done: Finished) -> dict[str, Any]:
        """As finetune.py; an SNNK model is folded, because an adapter would lack the weights that it was put into."""
        from _lib.files import write_folder
        from _lib.masked_model import attention_of

        output, attention = self.config.output, attention_of(done.model)
        if attention == SOFTMAX:
            return {**super().report(done), "attention": attention}
        self.config.output = dataclasses.replace(output, save_model=False)
        figures = super().report(done)
        self.config.output = output
        if output.save_model:
            from snnk_peft import bundle

            small = bundle(done.model)

            def fill(folder: Path) -> None:
                small.save_pretrained(str(folder))
                self.reader.save_pretrained(str(folder))

            write_folder(done.folder / "bundle", fill)
        return {**figures, "attention": attention}


def main(argv: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    return launch(FinetuneKernel, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
