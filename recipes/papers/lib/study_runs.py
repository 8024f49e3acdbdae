"""The runs of a study: its command line, the files of its tasks, and their execution one after another."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from data.listops import write_listops

from papers.lib.mlm_settings import FILES, TEXTS
from papers.lib.reports import read_runs
from papers.lib.study import PRETRAINING, Study
from papers.lib.sweep import FAILED_THEN_STOPPED, Run, Sweep, sweep
from snnk_cli.files import guarded, write_folder
from snnk_peft.tasks._image_folders import SUFFIXES

SHAPE = argparse.RawDescriptionHelpFormatter
BOUNDS = {"min_length": 50, "max_length": 250}  # tokens of short ListOps expressions
BEHIND = "finetune."  # prefix of settings for fine-tuning after pretraining


def run(study: Study, argv: list[str]) -> int:
    """Run the unfinished runs of a study.

    Returns:
        0 if everything is finished, 1 if something failed, 2 for wrong input, 130 or 143 if stopped (Ctrl-C, SIGTERM),
        3 if stopped after something had failed.
    """
    if PRETRAINING in study.tasks:
        return run_behind(study, argv)
    parser = run_parser(study)
    parser.add_argument("--data", type=Path, help="folder of the data folders, for tasks that look for their own")
    if study.draws is not None:
        parser.add_argument("--draws", type=several, default=study.draws, help="of each model (%(default)s)")
    arguments, overrides = read_settings(parser, argv)
    known = dict.fromkeys(method for task in arguments.tasks for method in study.tasks[task].methods)
    if absent := [method for method in arguments.methods or [] if method not in known]:
        parser.error(f"unknown methods {absent}; the tasks have {', '.join(known)}")

    def work() -> int:
        settings, runs = {}, []
        for task in arguments.tasks:
            wanted = study.tasks[task].data
            if (found := data_settings(task, wanted, arguments.data, arguments.out)) is not None:
                settings[task] = found
        # Seeds are the outermost loop, so that the first pass already fills every cell of the table.
        for seed, task in itertools.product(arguments.seeds, settings):
            methods = [each for each in study.tasks[task].methods if not arguments.methods or each in arguments.methods]
            runs += [Run(task, method, seed) for method in methods]

        def command(point: Run) -> list[str]:
            task = study.tasks[point.task]
            given = [*task.methods[point.method], f"train.seed={point.seed}", *overrides, *settings[point.task]]
            return [str(task.program), str(task.config), *given]

        draws = arguments.draws if study.draws is not None else None
        return sweep(Sweep(command, arguments.out, stored_runs(arguments), draws), runs)

    return guarded(work)


def run_parser(study: Study) -> argparse.ArgumentParser:
    """Create a parser with the options common to all studies."""
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
    """Parse a number of draws."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{number}; expected 2 or more, for a majority")
    return number


def stored_runs(arguments: argparse.Namespace) -> frozenset[Run]:
    """Return the runs that `--stored` counts as finished."""
    return frozenset() if arguments.stored is None else frozenset(Run(*each) for each in read_runs(arguments.stored))


def read_settings(parser: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options, and the settings (the parser's `overrides`), which may be anywhere among them."""
    arguments, rest = parser.parse_known_args(argv)
    # argparse cannot mix options that take lists with positionals; settings are recognised by their "=".
    if misplaced := [text for text in rest if "=" not in text or text.startswith("-")]:
        parser.error(f"unknown arguments {misplaced}; settings are written section.key=value")
    return arguments, [*arguments.overrides, *rest]


# --- files ------------------------------------------------------------------------------------------------------------


def data_settings(task: str, wanted: str | list[str] | None, data: Path | None, out: Path) -> list[str] | None:
    """Return the settings that name the files of a task; None, with a note, if they are needed and missing."""
    if wanted is None:
        return []
    if wanted == "listops_files":
        return [short_listops(out)]
    if isinstance(wanted, list):
        return photograph(task, wanted, data)
    if data is None or not (data / wanted).is_dir():
        print(f"note: {task} is left out: --data has no folder {wanted}", flush=True)
        return None
    return [f"data.dir={data / wanted}"]


def photograph(task: str, folders: Sequence[str], data: Path | None) -> list[str] | None:
    """Return the setting for the first image by path in the first folder that has one; None if there is none."""
    for folder in [] if data is None else [data / name for name in folders]:
        for place, below, names in os.walk(folder):  # stops at the first one: ImageNet has a million
            below.sort()
            for name in sorted(names):
                if name.lower().rpartition(".")[2] in SUFFIXES:
                    return [f"data.file={json.dumps(str(Path(place, name)))}"]  # quoted: a setting is YAML
    print(f"note: {task} is left out: --data has no image in {' or '.join(folders)}", flush=True)
    return None


def short_listops(out: Path) -> str:
    """Return the setting data.dir of a folder below `out`, created if missing, always with the same expressions."""
    folder = out / "listops_files"
    if not folder.is_dir():
        low, high = BOUNDS.values()
        print(f"writing expressions of {low} to {high} tokens to {folder}", flush=True)
        out.mkdir(parents=True, exist_ok=True)
        write_folder(folder, lambda place: write_listops(place, **BOUNDS))
    return f"data.dir={folder}"


# --- models that are pretrained first ---------------------------------------------------------------------------------


def run_behind(study: Study, argv: list[str]) -> int:
    """Run the unfinished pretrainings and fine-tunings; exit codes as in `run`."""
    parser = run_parser(study)
    parser.add_argument("--data", type=Path, required=True, help="folder of glue and of the text")
    parser.add_argument("--text", choices=TEXTS, help="default: imdb where --data has it, or else stdlib_docs")
    parser.add_argument("--pretraining-seeds", nargs="+", type=int, default=[0], help="default: 0")
    arguments, given = read_settings(parser, argv)
    methods = study.tasks[PRETRAINING].methods
    if absent := [method for method in arguments.methods or [] if method not in methods]:
        parser.error(f"unknown methods {absent}; the tasks have {', '.join(methods)}")
    needed = [*(["glue"] if arguments.tasks else []), *([arguments.text] if arguments.text in FILES else [])]
    if absent := [name for name in needed if not (arguments.data / name).is_dir()]:
        parser.error(f"--data {arguments.data} has no folder {' and none '.join(absent)}")

    return guarded(lambda: every(study, arguments, given))


def every(study: Study, arguments: argparse.Namespace, given: Sequence[str]) -> int:
    """Run the pretraining and the fine-tunings, method by method; stop where a run was stopped."""
    data, out, first = arguments.data, arguments.out, study.tasks[PRETRAINING]
    text = arguments.text or ("imdb" if (data / "imdb").is_dir() else "stdlib_docs")
    of_text = [f"task={text}", *([f"data.dir={data / text}"] if (data / text).is_dir() else [])]
    before = [*of_text, *(setting for setting in given if not setting.startswith(BEHIND))]
    behind = [setting.removeprefix(BEHIND) for setting in given if setting.startswith(BEHIND)]

    def pretrain(run: Run) -> list[str]:
        return [str(first.program), str(first.config), *first.methods[run.method], f"train.seed={run.seed}", *before]

    def finetune(run: Run) -> list[str]:
        task = study.tasks[run.task]
        start = out / Run(PRETRAINING, run.method, arguments.pretraining_seeds[0]).name / "model"
        (shared,) = task.methods.values()
        own = [f"model.name_or_path={start}", f"train.seed={run.seed}", *shared, f"data.dir={data / 'glue'}", *behind]
        return [str(task.program), str(task.config), *own]

    failed, stored = 0, stored_runs(arguments)
    for method in arguments.methods or first.methods:
        before_it = [Run(PRETRAINING, method, seed) for seed in arguments.pretraining_seeds]
        behind_it = [Run(task, method, seed) for seed in arguments.seeds for task in arguments.tasks]
        grid = Sweep(finetune, out, stored)
        # A stored report of a pretraining is not a model to start from.
        kept = stored if all(map(grid.finished, behind_it)) else frozenset()
        code = sweep(Sweep(pretrain, out, kept), before_it)
        if code == 0:
            code = sweep(grid, behind_it)
        if code > 1:
            return FAILED_THEN_STOPPED if failed else code
        failed += code
    return min(failed, 1)
