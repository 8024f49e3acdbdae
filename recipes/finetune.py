"""Fine-tune a pretrained Transformer on a task: SNNK parts, or a baseline (LoRA, BOFT, ...) under the same recipe.

    python recipes/finetune.py recipes/configs/glue/rte_adapter.yaml data.dir=path/to/glue
    python recipes/finetune.py recipes/configs/glue/rte_adapter.yaml method.name=lora output.dir=runs/rte_lora
    torchrun --nproc_per_node 2 recipes/finetune.py ...          (two processes; on GPUs also `accelerate launch`)

Settings are `section.key=value`; `--help` lists them. A run killed at any moment continues with `--resume` and ends
with the same weights, bit for bit, as one that was never interrupted (with the same number of threads; a different
number sums in a different order). SIGTERM and Ctrl-C save first (exit codes 143, 130) and print the command that
continues.
"""

from __future__ import annotations

import sys

from snnk_cli.config import read_command_line
from snnk_cli.settings import FinetuneConfig


def main(argv: list[str] | None = None) -> int:
    """Fine-tune a model; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    request = read_command_line("finetune.py", FinetuneConfig, __doc__, argv)
    from lib import finetuning

    from snnk_cli import launch  # with torch, for which `--help` need not wait

    return launch.train(finetuning.Finetuning, request)


if __name__ == "__main__":
    sys.exit(main())
