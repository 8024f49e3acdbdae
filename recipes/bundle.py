"""Fold a fine-tuned SNNK model into a plain transformers model that anybody can load.

    python recipes/bundle.py runs/rte_adapter                                   (a run: its best checkpoint)
    python recipes/bundle.py path/to/adapter --task rte --output path/to/bundle

Writes the model, its tokenizer or image processor and its model card. Prints what was folded, sizes before and after,
and how far the outputs moved (rounding only; more than that is an error).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lib  # noqa: F401 - with the data sets of a clone

from snnk_cli.files import guarded


def main(argv: list[str] | None = None) -> int:
    """Read the command line; returns the exit code (0 done, 2 wrong input)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="run of recipes/finetune.py, or adapter folder")
    parser.add_argument("overrides", nargs="*", metavar="data.key=value", help="labels and kind of an adapter's table")
    parser.add_argument("--task", help="the task that an adapter was trained on; not needed for a run")
    parser.add_argument("--output", type=Path, help="folder for the bundle (default for a run: FOLDER/bundle)")
    parser.add_argument("--overwrite", action="store_true", help="replace an older bundle")
    arguments = parser.parse_intermixed_args(argv)
    from lib import bundling  # with torch, for which `--help` need not wait

    given = arguments.folder, arguments.task, arguments.output, arguments.overwrite, arguments.overrides
    return guarded(lambda: bundling.bundle_folder(*given))


if __name__ == "__main__":
    sys.exit(main())
