"""Kill runs of recipes/finetune.py again and again, and see that nothing is lost: `python tests/kill_runs.py [KILLS]`.

Every process is ended by SIGKILL, at a random moment or while it writes a checkpoint, and the run goes on with
`--resume`; once it is finished, its weights, moments, log, report and models must be those of a run that nobody
disturbed, bit for bit, and nothing may lie around. The suite does it with three kills (tests/recipes/test_resume.py).
"""

# Imports follow the folders on sys.path.
# ruff: noqa: E402

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from recipe_world import write_settings, write_world

from tests.fresh_process import FreshProcess, close, start_python

EPOCHS = 8  # of five steps, each of which is saved


def write_run(world: Path) -> None:
    """`run.yaml` below `world`: adapters and a calibrated FFN, dropout at work, models at the end."""
    file = world / "run.yaml"
    write_settings(file, str(world / "bert"), str(world / "glue"), "unused", method="snnk")
    settings = yaml.safe_load(file.read_text())
    settings["method"] |= {"ffn": {"num_features": 8, "layers": "top-1"}, "calibrate": True}
    settings["train"] |= {"epochs": EPOCHS, "save_every_steps": 1, "log_every": 1}
    settings["output"] |= {"save_model": True}
    file.write_text(yaml.safe_dump(settings))


def start(world: Path, run: Path) -> FreshProcess:
    """A process that begins a run, or goes on with it."""
    more = ["--resume"] if (run / "config.yaml").is_file() else []
    arguments = [str(ROOT / "recipes/finetune.py"), str(world / "run.yaml"), f"output.dir={run}", *more]
    return start_python(arguments, env={**os.environ, "PYTHONPATH": str(ROOT)})


def finish(world: Path, run: Path) -> float:
    """Let a run come to its end; returns the seconds."""
    began, process = time.monotonic(), start(world, run)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return time.monotonic() - began


def kill(process: FreshProcess, run: Path, chance: random.Random, usual: float) -> str | None:
    """End it while it writes a checkpoint, or at any moment of its life; says where, or None if it was done before."""
    while_writing, end = chance.random() < 0.5, time.monotonic() + usual * chance.random()
    skipped = chance.randrange(6) if while_writing else 0
    seen: set[str] = set()
    while process.poll() is None and (while_writing or time.monotonic() < end):
        seen |= {entry.name for entry in run.glob("checkpoints/.step-*.tmp")}
        if while_writing and len(seen) > skipped:
            break
        time.sleep(0.0005)
    if process.poll() is not None:
        assert process.returncode == 0, process.communicate()[0]
        return None
    process.kill()
    process.wait()
    left = sorted(entry.name.split(".")[1] for entry in run.rglob(".*.tmp"))
    done = sorted(entry.name for entry in run.glob("checkpoints/step-*"))
    return f"behind {done[-1] if done else 'no checkpoint'}" + (f", while writing {', '.join(left)}" if left else "")


def left(run: Path) -> dict[str, Any]:
    """All that a finished run leaves, without times."""
    report = json.loads((run / "metrics.json").read_text())
    last = sorted(run.glob("checkpoints/step-*"))[-1]
    found: dict[str, Any] = {
        "files": sorted(str(file.relative_to(run)) for file in run.rglob("*")),
        "log": [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()],
        "report": {key: report[key] for key in ("metrics", "score", "best_step", "epochs", "examples", "config")},
        "leftovers": sorted(entry.name for entry in run.parent.glob(f".{run.name}*")),
    }
    for file in (*last.glob("*.safetensors"), *run.glob("*/*.safetensors")):
        found |= {f"{file.relative_to(run)} {name}": value for name, value in load_file(file).items()}
    return found


def check_equal(run: Path, wanted: dict[str, Any]) -> None:
    """Every bit."""
    found = left(run)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]
        assert same, f"{name} of {run}: {found[name]}; expected {value}"


def kill_runs(folder: Path, kills: int, seed: int) -> list[str]:
    """As many kills, of as many runs as that takes, each of which is then compared; says where each kill was."""
    world, chance, told, number = write_world(folder / "world"), random.Random(seed), [], 0
    write_run(world)
    usual, wanted = finish(world, folder / "straight"), left(folder / "straight")
    while len(told) < kills:
        run, number = folder / f"run{number}", number + 1
        while len(told) < kills:
            where = kill(start(world, run), run, chance, usual)
            if where is None:
                break
            told.append(f"{run.name}: {where}")
        if not (run / "metrics.json").is_file():
            finish(world, run)
        check_equal(run, wanted)
    return told


def main() -> None:
    """As the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", nargs="?", type=int, default=20, help="how many (20)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: another one each time")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    with tempfile.TemporaryDirectory() as folder:
        told = kill_runs(Path(folder), given.kills, seed)
    close()
    print("\n".join(told))
    runs = len({line.partition(":")[0] for line in told})
    print(f"seed {seed}: {len(told)} kills of {runs} runs; every run ended with the bits of one that nobody disturbed")


if __name__ == "__main__":
    main()
