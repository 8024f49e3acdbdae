"""The command line of a study."""

from __future__ import annotations

import argparse
from pathlib import Path

from papers.lib.reports import read_runs
from papers.lib.study import PRETRAINING, Study
from papers.lib.sweep import Run

SHAPE = argparse.RawDescriptionHelpFormatter


def run_parser(study: Study) -> argparse.ArgumentParser:
    """The options that every study has."""
    out, tasks = Path("runs") / study.name, [task for task in study.tasks if task != PRETRAINING]
    methods = dict.fromkeys(method for task in study.tasks.values() for method in task.methods if method)
    parser = argparse.ArgumentParser(
        prog=f"study.py run {study.name}", description=study.about, formatter_class=SHAPE, allow_abbrev=False
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for every run")
    parser.add_argument("--out", type=Path, default=out, help="folder of all runs (%(default)s)")
    parser.add_argument(
        *("--tasks",), nargs="*", default=study.chosen, choices=tasks, metavar="TASK", help=f"of {' '.join(tasks)}"
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help=f"of a task; default: all ({' '.join(methods)})")
    seeds = " ".join(map(str, study.seeds))
    parser.add_argument("--seeds", nargs="+", type=int, default=study.seeds, help=f"default: {seeds}")
    parser.add_argument("--stored", type=Path, help="also skip runs whose reports this .jsonl has")
    return parser


def several(text: str) -> int:
    """A number of draws."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{number}; expected 2 or more, of which there is a majority")
    return number


def stored_runs(arguments: argparse.Namespace) -> frozenset[Run]:
    """What `--stored` counts as finished."""
    return frozenset() if arguments.stored is None else frozenset(Run(*each) for each in read_runs(arguments.stored))


def read_settings(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the settings (the parser's `overrides`), which may stand anywhere between them."""
    arguments, rest = parser.parse_known_args(argv)
    # argparse cannot mix options that take lists with positionals; settings are recognised by their "=".
    if misplaced := [text for text in rest if "=" not in text or text.startswith("-")]:
        parser.error(f"unknown arguments {misplaced}; settings are written section.key=value")
    return arguments, [*arguments.overrides, *rest]
