"""Many runs, one after another: finished ones are skipped, interrupted ones resumed, the rest timed."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from snnk_cli.files import read_json, write_json, writing

# Exit codes of a run that was asked to stop: it saved its state, or had not started yet.
STOPPED = {143: 143, 130: 130, -signal.SIGTERM: 143, -signal.SIGINT: 130}
FAILED_THEN_STOPPED = 3  # of a sweep, to distinguish it from one that was only stopped


class Run(NamedTuple):
    """A point of the grid."""

    task: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """The folder below OUT."""
        return f"{self.task}/{self.method}/seed{self.seed}"


class Sweep(NamedTuple):
    """A grid of runs.

    Args:
        command: program, settings file and settings of a run, without its folder.
        out: folder of all runs.
        stored: further runs that count as finished.
        draws: number of fresh draws of features to score each model on, or None.
    """

    command: Callable[[Run], list[str]]
    out: Path
    stored: Container[Run] = ()
    draws: int | None = None

    def left(self, run: Run) -> Iterator[list[str]]:
        """Yield the remaining commands of a run, to be consumed one by one."""
        folder = self.out / run.name
        if run in self.stored:
            return
        if not (folder / "metrics.json").is_file():
            resume = ["--resume"] if (folder / "config.yaml").is_file() else []
            yield [sys.executable, *self.command(run), f"output.dir={folder}", *resume]
        if self.draws is not None and drawn(folder) != self.draws:
            score = Path(__file__).resolve().parents[2] / "score.py"
            yield [sys.executable, str(score), str(folder), f"--draws={self.draws}"]

    def finished(self, run: Run) -> bool:
        return next(self.left(run), None) is None


def drawn(run: Path) -> int:
    """Return the number of fresh draws of a run that were scored."""
    file = run / "evaluation.json"
    return read_json(file).get("draws", {}).get("number", 0) if file.is_file() else 0


def sweep(grid: Sweep, runs: Sequence[Run]) -> int:
    """Run all unfinished runs; return 1 if something failed, 130 or 143 if stopped, 3 if both."""
    with writing(grid.out):
        grid.out.mkdir(parents=True, exist_ok=True)
    record = grid.out / "seconds.json"
    seconds: dict[str, float] = read_json(record) if record.is_file() else {}
    pending = [run for run in runs if not grid.finished(run)]
    print(f"{len(runs)} runs, {len(runs) - len(pending)} finished; {time_left(pending, seconds)}", flush=True)
    failed: list[str] = []
    for number, run in enumerate(pending):
        resumed = " (resumed)" if (grid.out / run.name / "config.yaml").is_file() else ""
        print(f"[{number + 1}/{len(pending)}] {run.name}{resumed}", flush=True)
        started = time.monotonic()
        code = 0
        for command in grid.left(run):
            code, stopped_by = execute(command)
            if stopped_by is not None or code in STOPPED:
                print("stopped; run the same command again to continue")
                if failed:
                    print("failed before: " + ", ".join(failed), file=sys.stderr)
                    return FAILED_THEN_STOPPED
                return STOPPED.get(code, 143) if stopped_by is None else 128 + stopped_by
            if code != 0:
                break
        if code != 0:
            failed.append(f"{run.name} ({ending(code)})")
            print(f"failed: {failed[-1]}", file=sys.stderr, flush=True)
            continue
        seconds[run.name] = round(seconds.get(run.name, 0.0) + time.monotonic() - started, 1)
        write_json(record, seconds)
        print(time_left(pending[number + 1 :], seconds), flush=True)
    if failed:
        print("failed: " + ", ".join(failed), file=sys.stderr)
    return 1 if failed else 0


def ending(code: int) -> str:
    """Describe how a process ended."""
    if code == -signal.SIGKILL:
        return "killed, as happens when memory runs out"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def execute(command: list[str]) -> tuple[int, int | None]:
    """Run a command to its end; return its exit code, and the signal that asked this process to stop, or None.

    SIGTERM and SIGINT (Ctrl-C) are passed on as SIGTERM, so that the run saves its state.
    """
    received: list[int] = []
    process = subprocess.Popen(command)

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        process.terminate()

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code, received[0] if received else None


def time_left(pending: Sequence[Run], seconds: Mapping[str, float]) -> str:
    """Estimate the remaining time from finished runs of the same task and method, or else the same task."""
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
