"""Convert a fine-tuned classifier without labels: a smaller, faster, plain model, scored against the original.

    python recipes/convert.py recipes/configs/convert/sst2.yaml model.name_or_path=path/to/model data.dir=path/to/glue
    python recipes/convert.py recipes/configs/convert/texts.yaml model.name_or_path=path/to/model data.texts=reviews.txt

Feed-forward blocks, attention and pooler become feature maps, as set in the section `convert`, or as `plan` chooses for
a budget (convert.budget=2x). `calibrate` fits them to the original on unlabelled texts, `bundle` multiplies them out,
and convert.recover seconds of training bring the whole model closer to the original. If the task has labels, both
models are scored on them. With texts alone this is `snnk_peft.convert`, for any text model, and 15% of the texts are
used to measure how close the answers of both models are. output.dir receives bundle/ (the model with its tokenizer and
card, which loads like any other), metrics.json, and what was planned and fitted: plan.json, calibration.json and plots.

With a task, train.epochs=1 trains the conversion for an epoch to predict what the original predicts (train.logits,
train.layers), and what the labels say (train.labels). Ctrl-C and SIGTERM save first; `--resume` continues.

Settings are `section.key=value`; `--help` lists them.
"""

from __future__ import annotations

import sys

import lib  # noqa: F401 - with the data sets of a clone

from snnk_cli.config import read_command_line
from snnk_cli.convert_settings import ConvertConfig


def main(argv: list[str] | None = None) -> int:
    """Convert as requested; returns the exit code (0 done, 1 diverged, 2 wrong input, 130 or 143 stopped)."""
    request = read_command_line("convert.py", ConvertConfig, __doc__, argv)
    from snnk_cli import converting  # with torch, for which `--help` need not wait

    return converting.convert(request)


if __name__ == "__main__":
    sys.exit(main())
