"""Run the smaller experiments of the SNNK paper, each beside its peers, one after another.

    python recipes/papers/sweep_snnk.py --seeds 0 1 2  (those that need no files)
    python recipes/papers/sweep_snnk.py --data path/to/data --seeds 0 1 2
    python recipes/papers/sweep_snnk.py train.steps=500 --tasks two_bodies --methods dense snnk

`--data` holds folders of official files: mnist, covtype, higgs, hepmass; and photographs, of which the first by path is
fitted, or failing that the first one of imagenet. What is absent is left out and named. Each run goes to
OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed: start it again to
continue. Settings given as section.key=value apply to every run. table_snnk.py makes a page of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib.sweep import Task, run_tasks, task_parser

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
    "low_rank": ["method.kind=low_rank", "train.learning_rate=1e-3"],
}
# Of three hidden layers, as SIREN has for pictures, the one in the middle.
PHOTOGRAPH = "siren_photograph"
PHOTOGRAPHS = ("photographs", "imagenet")  # folders below --data
DEEP = {name: [*settings, "model.hidden=3", "method.layers=[1]"] for name, settings in SIREN.items()}
TASKS = {
    "siren": Task("fit_picture.py", "pictures/siren.yaml", SIREN),
    "siren_three": Task("fit_picture.py", "pictures/siren.yaml", DEEP),
    PHOTOGRAPH: Task("fit_picture.py", "pictures/siren.yaml", SIREN, PHOTOGRAPHS[0]),
    "two_bodies": Task(
        "fit_potential.py",
        "potential/two_bodies.yaml",
        {"dense": DENSE, "snnk": [], "snnk_sin": ["method.snnk.component=sin"], "low_rank": ["method.kind=low_rank"]},
    ),
    "covertype": Task("train_mlp.py", "mlp/covertype.yaml", PERCEPTRONS, "covtype"),
    "higgs": Task("train_mlp.py", "mlp/higgs.yaml", PERCEPTRONS, "higgs"),
    "hepmass": Task("train_mlp.py", "mlp/hepmass.yaml", PERCEPTRONS, "hepmass"),
    "mnist": Task("train_mlp.py", "mlp/mnist.yaml", PERCEPTRONS, "mnist"),
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 2 wrong input, 130 or 143 stopped, 3 both."""
    parser = task_parser(__doc__, "snnk", TASKS)
    parser.add_argument("--data", type=Path, help="folder of mnist, covtype, higgs, hepmass, photographs")
    return run_tasks(parser, TASKS, files, argv)


def files(name: str, arguments: argparse.Namespace) -> list[str] | None:
    """Where the files of a task are; None if they are wanted and absent."""
    wanted = TASKS[name].folder
    if wanted is None:
        return []
    if name == PHOTOGRAPH:
        return photograph(arguments.data)
    folder = None if arguments.data is None else arguments.data / wanted
    if folder is None or not folder.is_dir():
        print(f"note: {name} is left out: --data has no folder {wanted}", flush=True)
        return None
    return [f"data.dir={folder}"]


def photograph(data: Path | None) -> list[str] | None:
    """The first picture by path of the first folder that has one; None if there is none."""
    from snnk_peft.tasks._class_folders import SUFFIXES

    for folder in [] if data is None else [data / name for name in PHOTOGRAPHS]:
        for place, below, names in os.walk(folder):  # which ends at the first one: ImageNet has a million
            below.sort()
            for name in sorted(names):
                if name.lower().rpartition(".")[2] in SUFFIXES:
                    return [f"data.file={json.dumps(str(Path(place, name)))}"]  # quoted: a setting is YAML
    print(f"note: {PHOTOGRAPH} is left out: --data has no picture in {' or '.join(PHOTOGRAPHS)}", flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main())
