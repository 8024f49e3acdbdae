"""Run the smaller experiments of the SNNK paper, each beside its peers, one after another.

    python recipes/sweep_snnk.py --seeds 0 1 2                                           (those that need no files)
    python recipes/sweep_snnk.py --data path/to/data --seeds 0 1 2
    python recipes/sweep_snnk.py train.steps=500 --tasks two_bodies --methods dense snnk

`--data` holds folders of official files: mnist, covtype, higgs, hepmass; what is absent is left out. Each run goes to
OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed: start it again to
continue. Settings given as section.key=value apply to every run. table_snnk.py makes a page of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _lib.sweep import RECIPES, Run, Sweep, sweep


class Task(NamedTuple):
    """One experiment.

    Args:
        program: the recipe's file in recipes/.
        config: its settings below recipes/configs.
        methods: settings of each method.
        folder: of its files, below `--data`; None if it needs none.
    """

    program: str
    config: str
    methods: dict[str, list[str]]
    folder: str | None = None


DENSE = ["method.snnk=null"]
PERCEPTRONS = {
    "dense": ["method.kind=dense"],
    **{f"snnk_{features}": [f"method.snnk.num_features={features}"] for features in (8, 32, 128)},
    **{
        f"low_rank_{features}": ["method.kind=low_rank", f"method.snnk.num_features={features}"]
        for features in (8, 32, 128)
    },
}
# A rate at which both kinds of network are done with their 500 steps.
SIREN = {
    "dense": [*DENSE, "train.learning_rate=1e-3"],
    "snnk": ["train.learning_rate=1e-3"],
    "snnk_cos": ["method.snnk.component=cos", "train.learning_rate=1e-3"],
    "snnk_learned_rows": ["method.snnk.projection=free", "train.learning_rate=1e-3"],
}
# Of three hidden layers, as SIREN has for pictures, the one in the middle.
DEEP = {name: [*settings, "model.hidden=3", "method.layers=[1]"] for name, settings in SIREN.items()}
TASKS = {
    "siren": Task("fit_picture.py", "pictures/siren.yaml", SIREN),
    "siren_three": Task("fit_picture.py", "pictures/siren.yaml", DEEP),
    "two_bodies": Task(
        "fit_potential.py",
        "potential/two_bodies.yaml",
        {"dense": DENSE, "snnk": [], "snnk_sin": ["method.snnk.component=sin"]},
    ),
    "covertype": Task("train_mlp.py", "mlp/covertype.yaml", PERCEPTRONS, "covtype"),
    "higgs": Task("train_mlp.py", "mlp/higgs.yaml", PERCEPTRONS, "higgs"),
    "hepmass": Task("train_mlp.py", "mlp/hepmass.yaml", PERCEPTRONS, "hepmass"),
    "mnist": Task("train_mlp.py", "mlp/mnist.yaml", PERCEPTRONS, "mnist"),
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 2 wrong input, 130 or 143 stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for every run")
    parser.add_argument("--data", type=Path, help="folder of mnist, covtype, higgs, hepmass")
    parser.add_argument("--out", type=Path, default=Path("runs/snnk"), help="folder of all runs (%(default)s)")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, metavar="TASK", help=" ".join(TASKS))
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="those of a task that are named; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    parser.add_argument("--stored", type=Path, help="also skip runs whose reports were stored here")
    arguments, rest = parser.parse_known_args(argv)
    if misplaced := [text for text in rest if "=" not in text or text.startswith("-")]:
        parser.error(f"unknown arguments {misplaced}; settings are written section.key=value")
    known = dict.fromkeys(method for name in arguments.tasks for method in TASKS[name].methods)
    if absent := [method for method in arguments.methods or [] if method not in known]:
        parser.error(f"unknown methods {absent}; the tasks have {', '.join(known)}")
    from _lib.guard import guarded

    overrides = [*arguments.overrides, *rest]
    return guarded(lambda: every(arguments, overrides))


def every(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """One seed of all tasks after the other; stops where a run was asked to stop."""
    failed = 0
    for seed in arguments.seeds:
        for name in arguments.tasks:
            task, given = TASKS[name], list(overrides)
            if task.folder is not None:
                folder = None if arguments.data is None else arguments.data / task.folder
                if folder is None or not folder.is_dir():
                    print(f"note: {name} is left out: --data has no folder {task.folder}", flush=True)
                    continue
                given.append(f"data.dir={folder}")
            chosen = [method for method in task.methods if not arguments.methods or method in arguments.methods]
            grid = Sweep(
                task.program, task.config, task.methods, given, RECIPES / "configs", arguments.out, arguments.stored
            )
            code = sweep(grid, [Run(name, method, seed) for method in chosen])
            if code > 1:
                return code
            failed += code
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
