"""All pairs of Spectraformer's Table 2 on short ListOps and Text at equal processor time, half a minute or six a run.

    python recipes/papers/sweep_pairs.py --data path/to/data --seeds 0 1 2  (imdb in it; without it, ListOps alone)
    python recipes/papers/sweep_pairs.py --tasks listops --methods posrf_mm saderf_orf train.max_cpu_minutes=15

18 pairs of component and weight matrix beside softmax, and performer-pytorch where it is installed. ListOps has whole
expressions of 50 to 250 tokens, which are written to OUT/listops_files: half a minute reaches the plateau (a third
right), where long expressions take minutes, and does not leave it. Text has the first 1,000 characters of a review and
six minutes: about 700 steps pass before anything is better than chance, and shorter texts say less.
Each run goes to OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed.
Settings given as section.key=value apply to every run. table_lra.py --runs OUT makes a page of them.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers import sweep_lra
from papers.lib import short_listops
from papers.lib.sweep import Task, run_tasks, task_parser

SHARED = ["train.schedule=constant", "train.warmup_steps=50", "train.learning_rate=1e-3"]
SHARED += ["train.batch_size=16", "train.eval_every=250", "data.max_validation_samples=500"]
SHARED += ["data.max_test_samples=2000", "model.attention_dropout=0"]
SIZES = {"listops": (short_listops.BOUNDS["max_length"], 0.5), "text": (1000, 6)}  # tokens, CPU minutes
# The same estimator as posrf_orf by another library, where that is installed.
PEERS = [name for name in ("performer_pytorch",) if find_spec(name)]
METHODS = {name: sweep_lra.METHODS[name] for name in ("softmax", *sweep_lra.PAIRS, *PEERS)}
TASKS = {
    task: Task(
        "train_lra.py",
        f"lra/{task}.yaml",
        {
            name: [*SHARED, f"data.max_length={length}", f"train.max_cpu_minutes={minutes}", *own]
            for name, own in METHODS.items()
        },
    )
    for task, (length, minutes) in SIZES.items()
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 2 wrong input, 130 or 143 stopped, 3 both."""
    parser = task_parser(__doc__, "spectraformer", TASKS)
    parser.add_argument("--data", type=Path, help="folder of the folder imdb")
    return run_tasks(parser, TASKS, files, argv)


def files(name: str, arguments: argparse.Namespace) -> list[str] | None:
    """Where the data of a task are; None where they are absent."""
    if name == "listops":
        return [short_listops.written(arguments.out)]
    if arguments.data is None or not (arguments.data / "imdb").is_dir():
        print("note: text is left out: --data has no folder imdb", flush=True)
        return None
    return [f"data.dir={arguments.data / 'imdb'}"]


if __name__ == "__main__":
    sys.exit(main())
