"""Run recipes/train_lra.py over tasks, attention methods and seeds; continue a sweep by starting it again.

    python recipes/sweep_lra.py --tasks listops train.max_cpu_minutes=15 train.schedule=constant train.warmup_steps=50
    python recipes/sweep_lra.py --tasks text data.dir=path/to/imdb --methods softmax posrf_orf --seeds 0 1 2

Each run goes to OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed.
Settings given as section.key=value apply to every run: tasks with different data folders are one command each.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from pathlib import Path

from sweep_glue import execute

RECIPES = Path(__file__).resolve().parent
TASKS = ("listops", "text", "retrieval", "image")
_LEARNED = "num_features: 128, per_head: true"
METHODS = {
    "softmax": "softmax",
    "posrf_orf": "{component: posrf, projection: orf, num_features: 128}",
    "posrf_mm": "{component: posrf, projection: mm, num_features: 128}",
    "saderf_orf": "{component: saderf, projection: orf, num_features: 128}",
    "posrf_gmm": f"{{component: posrf, projection: gmm, {_LEARNED}}}",
    "posrf_fastfood_learned": f"{{component: posrf, projection: fastfood_learned, {_LEARNED}}}",
    # As many features as random ones in the papers; the classical form has W = I.
    "elu": "{component: elu, projection: orf, num_features: 128}",
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 143 stopped by SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for every run")
    parser.add_argument("--out", type=Path, default=Path("runs/lra"), help="folder of all runs (runs/lra)")
    parser.add_argument("--configs", type=Path, default=RECIPES / "configs/lra", help="folder of <task>.yaml")
    parser.add_argument("--tasks", nargs="+", default=["listops"], metavar="TASK", help=f"default: listops; {TASKS}")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    arguments, rest = parser.parse_known_args(argv)
    # argparse cannot mix options that take lists with positionals; settings are recognised by their "=".
    misplaced = [text for text in rest if "=" not in text or text.startswith("-")]
    if misplaced:
        parser.error(f"unknown arguments {misplaced}; settings are written section.key=value")
    missing = [task for task in arguments.tasks if not (arguments.configs / f"{task}.yaml").is_file()]
    if missing:
        parser.error(f"no settings file {arguments.configs}/{missing[0]}.yaml; see --configs")
    failed = []
    for seed, task, method in itertools.product(arguments.seeds, arguments.tasks, arguments.methods):
        folder = arguments.out / task / method / f"seed{seed}"
        if (folder / "metrics.json").is_file():
            print(f"{folder} is finished")
            continue
        command = [
            *(sys.executable, str(RECIPES / "train_lra.py"), str(arguments.configs / f"{task}.yaml")),
            *(f"method.attention={METHODS[method]}", f"train.seed={seed}", *arguments.overrides, *rest),
            f"output.dir={folder}",
            *(["--resume"] if (folder / "config.yaml").is_file() else []),
        ]
        print(f"--- {folder}", flush=True)
        code = execute(command)
        if code in (143, -signal.SIGTERM):
            print("stopped; start the same command again to continue")
            return 143
        if code != 0:
            failed.append(f"{folder} (exit code {code})")
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
