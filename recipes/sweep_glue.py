"""Run recipes/finetune.py over tasks, methods and seeds, one after another; continue a sweep by starting it again.

    python recipes/sweep_glue.py data.dir=path/to/glue
    python recipes/sweep_glue.py data.dir=path/to/glue --tasks rte mrpc --methods snnk_relu16 lora_r8 --seeds 0 1 2

Each run goes to OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed. The
last line of each run tells how long the rest will take. Settings given as section.key=value apply to every run.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from _lib.files import read_json, write_json

RECIPES = Path(__file__).resolve().parent
TASKS = ("rte", "mrpc", "stsb", "cola", "sst2")
# A linear probe's model/ would be the whole pretrained model once more; its run folder evaluates without it.
METHODS = {
    "snnk_relu16": ["method.adapter={component: relu, num_features: 16}"],
    "snnk_cos16": ["method.adapter={component: cos, num_features: 16}"],
    # As many numbers as the Houlsby adapters and LoRA train, in half as many places.
    "snnk_relu32_parallel": ["method.adapter={component: relu, num_features: 32, placement: parallel}"],
    # The same number again with a learned projection: half the features, and W is trained with A.
    "snnk_relu8_free": ["method.adapter={component: relu, num_features: 8, projection: free}"],
    "lora_r8": ["method.name=lora", "method.lora.r=8", "method.lora.alpha=16"],
    "linear_probe": ["method.name=linear_probe", "output.save_model=false"],
    "pooler_cos": ["method.adapter=null", "method.pooler={component: cos}"],
    "pooler_dense": ["method.name=linear_probe", "method.pooler=dense", "output.save_model=false"],
}


class Run(NamedTuple):
    """One point of the grid."""

    task: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Folder below OUT."""
        return f"{self.task}/{self.method}/seed{self.seed}"


def main(argv: list[str] | None = None) -> int:
    """Read the command line and run what is missing; 0 if everything is finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for every run")
    parser.add_argument("--out", type=Path, default=Path("runs/glue"), help="folder of all runs (runs/glue)")
    parser.add_argument("--configs", type=Path, default=RECIPES / "configs/glue", help="folder of <task>_adapter.yaml")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help=f"default: {' '.join(TASKS)}")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    arguments, rest = parser.parse_known_args(argv)
    # argparse cannot mix options that take lists with positionals; settings are recognised by their "=".
    misplaced = [text for text in rest if "=" not in text or text.startswith("-")]
    if misplaced:
        parser.error(f"unknown arguments {misplaced}; settings are written section.key=value")
    overrides = [*arguments.overrides, *rest]
    missing = [task for task in arguments.tasks if not (arguments.configs / f"{task}_adapter.yaml").is_file()]
    if missing:
        parser.error(f"no settings file {arguments.configs}/{missing[0]}_adapter.yaml; see --configs")
    # Seeds outermost: the first pass already fills every cell of the table.
    runs = [
        Run(task, method, seed)
        for seed, task, method in itertools.product(arguments.seeds, arguments.tasks, arguments.methods)
    ]
    return sweep(runs, arguments.out, arguments.configs, overrides)


def sweep(runs: list[Run], out: Path, configs: Path, overrides: list[str]) -> int:
    """Run everything that has no metrics.json; returns 1 if something failed, 143 if stopped by SIGTERM."""
    out.mkdir(parents=True, exist_ok=True)
    record = out / "seconds.json"
    seconds: dict[str, float] = read_json(record) if record.is_file() else {}
    pending = [run for run in runs if not (out / run.name / "metrics.json").is_file()]
    print(f"{len(runs)} runs, {len(runs) - len(pending)} finished; {time_left(pending, seconds)}", flush=True)
    failed: list[str] = []
    for number, run in enumerate(pending):
        folder = out / run.name
        resume = ["--resume"] if (folder / "config.yaml").is_file() else []
        print(f"[{number + 1}/{len(pending)}] {run.name}{' (resumed)' if resume else ''}", flush=True)
        command = [
            *(sys.executable, str(RECIPES / "finetune.py"), str(configs / f"{run.task}_adapter.yaml")),
            *(*METHODS[run.method], f"train.seed={run.seed}", *overrides, f"output.dir={folder}", *resume),
        ]
        started = time.monotonic()
        code = execute(command)
        if code in (143, -signal.SIGTERM):
            print("stopped; start the same command again to continue")
            return 143
        if code != 0:
            failed.append(f"{run.name} (exit code {code})")
            continue
        seconds[run.name] = round(seconds.get(run.name, 0.0) + time.monotonic() - started, 1)
        write_json(record, seconds)
        print(time_left(pending[number + 1 :], seconds), flush=True)
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def execute(command: list[str]) -> int:
    """Run a command to its end; a SIGTERM to this process is passed on, so that the run saves itself."""
    process = subprocess.Popen(command)

    def forward(number: int, frame: FrameType | None) -> None:
        process.terminate()

    before = signal.signal(signal.SIGTERM, forward)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def time_left(pending: list[Run], seconds: dict[str, float]) -> str:
    """An estimate from finished runs of the same task and method, or else of the same task."""
    total, unknown = 0.0, 0
    for run in pending:
        same = [value for name, value in seconds.items() if name.startswith(f"{run.task}/{run.method}/")]
        near = same or [value for name, value in seconds.items() if name.startswith(f"{run.task}/")]
        if near:
            total += statistics.mean(near)
        else:
            unknown += 1
    text = f"{len(pending)} runs left, about {total / 60:.0f} min"
    return text + (f" and {unknown} runs of tasks that have not been timed yet" if unknown else "")


if __name__ == "__main__":
    sys.exit(main())
