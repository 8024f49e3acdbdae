"""Write a trained model as one file that runs without its code, and score the file against the model.

    python recipes/export.py runs/rte_adapter data.dir=path/to/glue                 (a run: its best checkpoint)
    python recipes/export.py path/to/bundle --task rte data.dir=path/to/glue --int8
    python recipes/export.py path/to/bundle --format torch                    (no data: sentences of Python, no score)

The folder may be a run of recipes/finetune.py, a PEFT adapter, a bundle or any transformers model. Before the file gets
its name, it is checked on shapes that it was not made from and on the first, the last and six other batches of the
task's dev set. Then model and file are scored on the whole set. The figures go next to the file, in NAME.metrics.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lib  # noqa: F401 - with the data sets of a clone

from snnk_cli.config import describe
from snnk_cli.files import guarded
from snnk_cli.settings import EvaluateConfig


def main(argv: list[str] | None = None) -> int:
    """Read the command line; returns the exit code (0 done, 2 wrong input or a file that would differ)."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="settings (default):\n" + "\n".join(describe(EvaluateConfig)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="run, adapter, bundle or model folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="task and data settings")
    parser.add_argument("--task", help="short for task=NAME")
    parser.add_argument("--format", default="onnx", choices=("onnx", "torch"), help="onnx (default) or torch")
    parser.add_argument("--output", type=Path, help="output file (default: FOLDER/model.onnx or FOLDER/model.pt2)")
    parser.add_argument("--int8", action="store_true", help="int8 Linears (onnx)")
    parser.add_argument("--cache", action="store_true", help="a converted decoder with its state, token by token")
    parser.add_argument("--overwrite", action="store_true", help="replace an older file")
    arguments = parser.parse_intermixed_args(argv)
    from snnk_cli import exporting  # with torch, for which `--help` need not wait

    overrides = [*([f"task={arguments.task}"] if arguments.task else []), *arguments.overrides]
    given = arguments.folder, overrides, arguments.format, arguments.output, []
    options = {name: vars(arguments)[name] for name in ("int8", "cache", "overwrite")}
    return guarded(lambda: exporting.export_model(*given, **options))


if __name__ == "__main__":
    sys.exit(main())
