"""Many runs of one recipe, one after another: finished ones are skipped, interrupted ones resumed, the rest timed."""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from lib.tables import read_runs

# What imports torch is imported in the functions, so that `--help` answers at once.

PAPERS = Path(__file__).resolve().parents[1]
RECIPES = PAPERS.parent
# Exit codes of a run that was asked to stop: it saved itself, or had not got as far as that.
STOPPED = {143: 143, 130: 130, -signal.SIGTERM: 143, -signal.SIGINT: 130}
FAILED_THEN_STOPPED = 3  # of a sweep: who started it must not take it for one that was only stopped


def program_file(name: str) -> Path:
    """A program of the papers, or else one of recipes/."""
    own = PAPERS / "programs" / name
    return own if own.is_file() else RECIPES / name


def settings_file(name: str) -> Path:
    """A settings file, or a folder of them, of the papers, or else one in recipes/configs."""
    own = PAPERS / "configs" / name
    return own if own.exists() and name != "." else RECIPES / "configs" / name


class Run(NamedTuple):
    """One point of the grid."""

    task: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Folder below OUT."""
        return f"{self.task}/{self.method}/seed{self.seed}"


class Sweep(NamedTuple):
    """What is swept.

    Args:
        program: its name, as in `program_file`.
        config: its settings file for a task, with `{task}`.
        methods: settings of each method.
        overrides: settings of every run.
        configs: folder of the settings files.
        out: folder of all runs.
        stored: further runs that count as finished.
    """

    program: str
    config: str
    methods: Mapping[str, Sequence[str]]
    overrides: Sequence[str]
    configs: Path
    out: Path
    stored: Container[Run] = ()

    def finished(self, run: Run) -> bool:
        """Whether its report is there."""
        return run in self.stored or (self.out / run.name / "metrics.json").is_file()


def main(
    description: str | None,
    program: str,
    config: str,
    folder: str,
    tasks: Sequence[str],
    methods: Mapping[str, Sequence[str]],
    argv: list[str] | None,
    configs_in: str | None = None,
    seeds: Sequence[int] = (0,),
) -> int:
    """Read the command line of a sweep and run what is missing.

    Args:
        description: the text of `--help`.
        program: as in Sweep.
        config: as in Sweep.
        folder: of the settings files, as in `settings_file`; and, if `--out` does not say otherwise, below runs.
        tasks: run unless `--tasks` says otherwise.
        methods: settings of each method.
        argv: the arguments, or None for those of this process.
        configs_in: the folder of the settings files, where it is not `folder`.
        seeds: run unless `--seeds` says otherwise.

    Returns:
        0 if everything is finished, 1 if something failed, 130 or 143 if stopped (Ctrl-C, SIGTERM), 3 if stopped after
        something had failed.
    """
    configs, out = settings_file(folder if configs_in is None else configs_in), Path("runs") / folder
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for every run")
    parser.add_argument("--out", type=Path, default=out, help=f"folder of all runs ({out})")
    parser.add_argument("--configs", type=Path, default=configs, help=f"folder of {config.format(task='<task>')}")
    parser.add_argument("--tasks", nargs="+", default=tasks, metavar="TASK", help=f"default: {' '.join(tasks)}")
    parser.add_argument(
        "--methods", nargs="+", default=list(methods), choices=methods, metavar="METHOD", help=" ".join(methods)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=seeds, help=f"default: {' '.join(map(str, seeds))}")
    parser.add_argument(
        "--stored", type=Path, help="also skip runs whose reports were stored here (as in model_cards/glue.jsonl)"
    )
    arguments, overrides = read_settings(parser, argv)
    files = [arguments.configs / config.format(task=task) for task in arguments.tasks]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        parser.error(f"no settings file {missing[0]}; see --configs")
    # Seeds outermost: the first pass already fills every cell of the table.
    runs = [
        Run(task, method, seed)
        for seed, task, method in itertools.product(arguments.seeds, arguments.tasks, arguments.methods)
    ]
    from lib.guard import guarded

    def work() -> int:
        stored = stored_runs(arguments)
        return sweep(Sweep(program, config, methods, overrides, arguments.configs, arguments.out, stored), runs)

    return guarded(work)


def stored_runs(arguments: argparse.Namespace) -> Container[Run]:
    """What `--stored` counts as finished."""
    return frozenset() if arguments.stored is None else read_runs(arguments.stored).keys()


def read_settings(parser: argparse.ArgumentParser, argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the settings (the parser's `overrides`), which may stand anywhere between them."""
    arguments, rest = parser.parse_known_args(argv)
    # argparse cannot mix options that take lists with positionals; settings are recognised by their "=".
    if misplaced := [text for text in rest if "=" not in text or text.startswith("-")]:
        parser.error(f"unknown arguments {misplaced}; settings are written section.key=value")
    return arguments, [*arguments.overrides, *rest]


class Task(NamedTuple):
    """One experiment of a sweep over several recipes.

    Args:
        program: its name, as in `program_file`.
        config: its settings, as in `settings_file`.
        methods: settings of each method.
        folder: of its files, below `--data`; None if it needs none.
    """

    program: str
    config: str
    methods: Mapping[str, Sequence[str]]
    folder: str | None = None


def task_parser(description: str | None, folder: str, tasks: Mapping[str, Task]) -> argparse.ArgumentParser:
    """The options of a sweep over several recipes.

    Args:
        description: the text of `--help`.
        folder: the name below runs, if `--out` does not say otherwise.
        tasks: that `--tasks` may name.
    """
    out = Path("runs") / folder
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings for every run")
    parser.add_argument("--out", type=Path, default=out, help="folder of all runs (%(default)s)")
    parser.add_argument("--tasks", nargs="+", default=list(tasks), choices=tasks, metavar="TASK", help=" ".join(tasks))
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="those of a task that are named; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    parser.add_argument("--stored", type=Path, help="also skip runs whose reports this .jsonl has")
    return parser


def run_tasks(
    parser: argparse.ArgumentParser,
    tasks: Mapping[str, Task],
    settings: Callable[[str, argparse.Namespace], list[str] | None],
    argv: list[str] | None,
    after: Callable[[list[Path], argparse.Namespace], int] | None = None,
) -> int:
    """Read the command line and run what is missing, one seed of all tasks after the other.

    Args:
        parser: made by `task_parser`.
        tasks: all there are.
        settings: further settings of a task, from its name and the options; None leaves it out.
        argv: the arguments, or None for those of this process.
        after: what is done with the finished runs of a task and seed, from their folders and the options; its exit code
            is one of these.

    Returns:
        0 if everything is finished, 1 if something failed, 2 for wrong input, 130 or 143 if stopped, 3 if stopped after
        something had failed.
    """
    arguments, overrides = read_settings(parser, argv)
    known = dict.fromkeys(method for name in arguments.tasks for method in tasks[name].methods)
    if absent := [method for method in arguments.methods or [] if method not in known]:
        parser.error(f"unknown methods {absent}; the tasks have {', '.join(known)}")
    from lib.guard import guarded

    def every() -> int:
        failed, stored = 0, stored_runs(arguments)
        for seed in arguments.seeds:
            for name in arguments.tasks:
                task, further = tasks[name], settings(name, arguments)
                if further is None:
                    continue
                chosen = [method for method in task.methods if not arguments.methods or method in arguments.methods]
                given = [*overrides, *further]
                file = settings_file(task.config)
                grid = Sweep(task.program, file.name, task.methods, given, file.parent, arguments.out, stored)
                runs = [Run(name, method, seed) for method in chosen]
                code = sweep(grid, runs)
                if after is not None and code < 2:
                    folders = [arguments.out / run.name for run in runs]
                    done = [folder for folder in folders if (folder / "metrics.json").is_file()]
                    code = max(code, after(done, arguments))
                if code > 1:
                    return FAILED_THEN_STOPPED if failed else code
                failed += code
        return min(failed, 1)

    return guarded(every)


def sweep(grid: Sweep, runs: Sequence[Run]) -> int:
    """Run all that has no metrics.json; returns 1 if something failed, 130 or 143 if it was stopped, 3 if both."""
    from lib.files import read_json, write_json, writing

    with writing(grid.out):
        grid.out.mkdir(parents=True, exist_ok=True)
    record = grid.out / "seconds.json"
    seconds: dict[str, float] = read_json(record) if record.is_file() else {}
    pending = [run for run in runs if not grid.finished(run)]
    print(f"{len(runs)} runs, {len(runs) - len(pending)} finished; {time_left(pending, seconds)}", flush=True)
    failed: list[str] = []
    for number, run in enumerate(pending):
        folder = grid.out / run.name
        resume = ["--resume"] if (folder / "config.yaml").is_file() else []
        print(f"[{number + 1}/{len(pending)}] {run.name}{' (resumed)' if resume else ''}", flush=True)
        command = [
            *(sys.executable, str(program_file(grid.program)), str(grid.configs / grid.config.format(task=run.task))),
            *(*grid.methods[run.method], f"train.seed={run.seed}", *grid.overrides, f"output.dir={folder}", *resume),
        ]
        started = time.monotonic()
        code, stopped_by = execute(command)
        if stopped_by is not None or code in STOPPED:
            print("stopped; start the same command again to continue")
            if failed:
                print("failed before: " + ", ".join(failed), file=sys.stderr)
                return FAILED_THEN_STOPPED
            return STOPPED.get(code, 143) if stopped_by is None else 128 + stopped_by
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
    """How a process ended, in words."""
    if code == -signal.SIGKILL:
        return "killed, as systems do when memory is short"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def execute(command: list[str]) -> tuple[int, int | None]:
    """Run a command to its end; returns its exit code, and the signal that asked this process to stop, or None.

    SIGTERM and SIGINT (Ctrl-C) are passed on as SIGTERM, so that the run saves itself.
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
