"""A study whose models are pretrained first: a pretraining and what is fine-tuned from it, one method after another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lib.guard import guarded

from papers.lib.mlm_settings import FILES, TEXTS
from papers.lib.study import PRETRAINING, Study
from papers.lib.study_options import read_settings, run_parser, stored_runs
from papers.lib.sweep import FAILED_THEN_STOPPED, Run, Sweep, sweep

BEHIND = "finetune."


def run_behind(study: Study, argv: list[str]) -> int:
    """Run what is missing; exit codes as of `study.run`."""
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
    """A pretraining and what is fine-tuned from it, one method after the other; stops where a run was asked to."""
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
        # A stored report of a pretraining is no model to go on from.
        kept = stored if all(map(grid.finished, behind_it)) else frozenset()
        code = sweep(Sweep(pretrain, out, kept), before_it)
        if code == 0:
            code = sweep(grid, behind_it)
        if code > 1:
            return FAILED_THEN_STOPPED if failed else code
        failed += code
    return min(failed, 1)
