"""A classification head without backpropagation: closed form against a trained head, on the same frozen features.

    python recipes/closed_form.py recipes/configs/closed_form.yaml task=stsb data.dir=path/to/glue output.dir=runs/stsb
    python recipes/closed_form.py recipes/configs/closed_form.yaml task=mrpc data.dir=path/to/glue output.dir=runs/mrpc

The pooler becomes Φ(x)A with random features and is bundled with the classifier, so the head is one matrix W̄ that reads
Φ of the frozen encoder's [CLS] vector or, where the checkpoint was trained with it, of the mean over the tokens
(`method.pooling`). `fit_closed_form` finds it in one pass (ridge regression, one-hot targets for classes; the ridge by
generalised cross-validation). For comparison, the same head is trained with AdamW on cached features, in the same loop
as all recipes, and scikit-learn's Ridge is fitted to them as an independent check.

Settings are `section.key=value`; `--help` lists them. `--resume` continues a run that was stopped.
"""

from __future__ import annotations

import sys

from lib.head_settings import ClosedFormConfig

from snnk_cli.config import read_command_line


def main(argv: list[str] | None = None) -> int:
    """Fit as the command line says; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    request = read_command_line("closed_form.py", ClosedFormConfig, __doc__, argv)
    from lib import head_comparison

    from snnk_cli import launch  # with torch, for which `--help` need not wait

    return launch.train(head_comparison.ClosedForm, request)


if __name__ == "__main__":
    sys.exit(main())
