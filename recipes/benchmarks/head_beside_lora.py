"""Closed-form heads against LoRA: score and time of both, run in turn on one machine.

    python recipes/benchmarks/head_beside_lora.py --data path/to/glue
    python recipes/benchmarks/head_beside_lora.py --data path/to/glue --tasks rte --seeds 0 1 2

For each task and seed, this runs recipes/finetune.py as the study glue runs LoRA, then recipes/fit_head.py on the same
number of examples. LoRA's time is that of its training steps; a head's is that of one pass over the examples and one
fit, for an eighth of the examples, a quarter, ... Runs go to RUNS/<task>/<method>/seed<k>; finished ones are not
repeated, stopped ones are continued.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from _bench import parser, report
from papers.lib.study import load, program_file, settings_file
from papers.lib.sweep import Run, Sweep, sweep

from snnk_cli.files import read_json

LORA, HEAD = "lora_r8", "head"
MEAN = "mean"


def run_both(task: str, seed: int, runs: Path, overrides: list[str]) -> int:
    """Run both methods on one task and seed, except finished runs; returns the exit code."""
    study = load("glue").tasks[task]
    beside = runs / Run(task, LORA, seed).name
    behind = [f"train.seed={seed}", *overrides]
    words = [str(study.program), str(study.config), *study.methods[LORA], *behind]
    if code := sweep(Sweep(lambda run: words, runs), [Run(task, LORA, seed)]):
        return code
    read = read_json(beside / "metrics.json")["config"]["data"]
    given = {name: "null" if read[name] is None else read[name] for name in ("max_train_samples", "max_length")}
    same = [f"data.{name}={value}" for name, value in given.items()]
    program, file = str(program_file("fit_head.py")), str(settings_file("head.yaml"))
    head = [program, file, f"task={task}", f"method.beside=[{beside}]", *same, *behind]
    return sweep(Sweep(lambda run: head, runs), [Run(task, HEAD, seed)])


def compared(head: dict[str, Any], lora: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each share of the examples, from both reports."""
    return [
        {
            "task": head["task"],
            "seed": head["seed"],
            "share of examples": round(point["examples"] / head["examples"]["train"], 3),
            "score": point["score"],
            "LoRA's score": lora["score"],
            "seconds": point["seconds"],
            "LoRA's seconds": lora["train_seconds"],
        }
        for point in head["points"]
    ]


def with_ratios(row: dict[str, Any]) -> dict[str, Any]:
    """Add the head's score and time relative to LoRA's."""
    score, seconds = row["score"] / row["LoRA's score"], row["seconds"] / row["LoRA's seconds"]
    return {**row, "score / LoRA's": round(score, 4), "seconds / LoRA's": round(seconds, 4)}


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Average over tasks and seeds, for each share that all have."""
    runs = {(row["task"], row["seed"]) for row in rows}
    found = []
    for share in sorted({row["share of examples"] for row in rows}):
        alike = [row for row in rows if row["share of examples"] == share]
        if len(alike) == len(runs):
            numbers = ("score", "LoRA's score", "seconds", "LoRA's seconds")
            mean = {name: statistics.mean(row[name] for row in alike) for name in numbers}
            found.append({"task": MEAN, "seed": None, "share of examples": share, **mean})
    return found


def main() -> int:
    """Run, compare and write; return 0 if done, otherwise the exit code of a run."""
    options = parser(__doc__ or "", "head_beside_lora")
    options.add_argument("--data", type=Path, required=True, help="GLUE folder")
    options.add_argument("--tasks", nargs="+", default=["mrpc", "stsb", "sst2"], help="(default mrpc stsb sst2)")
    options.add_argument("--seeds", nargs="+", type=int, default=[0], help="(default 0)")
    options.add_argument("--runs", type=Path, default=Path("runs/head_beside_lora"), help="(default %(default)s)")
    options.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="settings for every run")
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        for task in arguments.tasks:
            overrides = [f"data.dir={arguments.data}", *arguments.set]
            if code := run_both(task, seed, arguments.runs, overrides):
                return code
            head, lora = (
                read_json(arguments.runs / Run(task, method, seed).name / "metrics.json") for method in (HEAD, LORA)
            )
            rows += compared(head, lora)
    rows = [with_ratios(row) for row in [*rows, *means(rows)]]
    settings = {"tasks": arguments.tasks, "seeds": arguments.seeds, "settings": arguments.set}
    report(settings, rows, arguments.output, "Heads in closed form beside LoRA")
    return 0


if __name__ == "__main__":
    sys.exit(main())
