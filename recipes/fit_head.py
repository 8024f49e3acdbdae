"""A classification head without backpropagation: one forward pass over the training examples, and one solve.

    python recipes/fit_head.py recipes/configs/head.yaml task=sst2 data.dir=path/to/glue output.dir=runs/head
    python recipes/fit_head.py recipes/configs/head.yaml task=stsb data.dir=path/to/glue output.dir=runs/head_stsb
    torchrun --nproc_per_node 2 recipes/fit_head.py ...        (each process reads its share; the head is the same)

The head reads hidden states of several layers, pooled over the tokens (method.views), and is ridge regression on them,
its ridge chosen by generalised cross-validation. output.dir receives bundle/ (the model with its tokenizer and card,
which loads like any other), statistics.safetensors (for `ClosedFormHead.merge` and `remove`), metrics.json, and
score_over_seconds.png: the score after an eighth, a quarter, ... of the examples, next to the finetune.py runs named in
method.beside. The time of each point is that of reading its examples and of one fit.

Settings are `section.key=value`; `--help` lists them.
"""

from __future__ import annotations

import sys

from lib.head_settings import FitHeadConfig

from snnk_cli.config import read_command_line


def main(argv: list[str] | None = None) -> int:
    """Fit the head; returns the exit code (0 done, 2 wrong input, 130 or 143 stopped)."""
    request = read_command_line("fit_head.py", FitHeadConfig, __doc__, argv)
    from lib import head_fitting

    from snnk_cli import launch  # with torch, for which `--help` need not wait

    return launch.train(head_fitting.FitHead, request)


if __name__ == "__main__":
    sys.exit(main())
