"""Score a trained classifier on a task's dev set.

    python recipes/score.py runs/rte_adapter data.dir=path/to/glue              (a run: its best checkpoint)
    python recipes/score.py runs/rte_adapter/bundle --task rte data.dir=path/to/glue
    python recipes/score.py path/to/adapter --task rte data.dir=path/to/glue
    python recipes/score.py runs/lra/text/posrf_gmm/seed0 --draws 100                        (a run of train_lra.py)

The folder may be a run of recipes/finetune.py, a PEFT adapter, a bundle or any transformers classifier of texts or
images; or a run of train_lra.py, which is scored on the test split. The result goes into the folder as metrics.json
(in a run as evaluation.json, next to the metrics.json of its training), or to `--output`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import lib  # noqa: F401 - with the data sets of a clone
from papers.lib.lra_settings import LongRangeEvaluation

from snnk_cli.config import describe
from snnk_cli.files import guarded
from snnk_cli.settings import EvaluateConfig


def main(argv: list[str] | None = None) -> int:
    """Read the command line; returns the exit code (0 done, 1 predictions not finite, 2 wrong input)."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(
            [
                *("settings (default):", *describe(EvaluateConfig)),
                *("", "settings for a run of train_lra.py:", *describe(LongRangeEvaluation)),
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="run, adapter, bundle or model folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings")
    parser.add_argument("--task", help="short for task=NAME")
    parser.add_argument("--output", type=Path, help="file for the result")
    parser.add_argument("--draws", type=int, help="also score this many fresh draws of attention's features, >= 2")
    parser.add_argument("--draws-seed", type=int, default=0, help="seed of these draws (default 0)")
    arguments = parser.parse_intermixed_args(argv)
    overrides = [*([f"task={arguments.task}"] if arguments.task else []), *arguments.overrides]
    from papers.lib.runs import of_sequences

    from snnk_cli import scoring  # with torch, for which `--help` need not wait

    output = arguments.output or scoring.result_of(arguments.folder)
    given = arguments.folder, overrides, output, arguments.draws, arguments.draws_seed
    return guarded(lambda: scoring.score_folder(*given, of_sequences))


if __name__ == "__main__":
    sys.exit(main())
