"""Run the steps of recipes/gpu.py one after the other and report their results."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lib.gpu_steps import STEPS, Plan
from snnk_cli.config import ROOT
from snnk_cli.files import FileError, check_writable, write_json
from snnk_cli.lock import alone
from snnk_cli.run_folder import environment
from snnk_cli.terminal import quiet
from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean


def perform(name: str, plan: Plan, limit: float) -> dict[str, Any]:
    """Run one step; return its entry of metrics.json: status, seconds, and figures or the reason for their absence.

    Args:
        name: name of the step.
        plan: the command-line options.
        limit: time limit in seconds.
    """
    step, started = STEPS[name], time.perf_counter()
    entry: dict[str, Any] = {"step": name}
    if (reason := out_of_reach(name, plan)) is not None:
        return {**entry, "status": "skipped", "reason": reason, "seconds": 0.0}
    log = plan.output / f"{name}.log"
    try:
        step.prepare(plan)
        command = [sys.executable, *step.command(plan)]
        entry["command"] = as_typed(command, plan.output)
        code = ended_in_time(command, log, limit)
        if code == 0:
            entry |= {"status": "passed", "figures": step.figures(plan)}
        else:
            what = f"took longer than its limit of {limit:.0f} s" if code is None else f"exit code {code}"
            entry |= {"status": "failed", "reason": f"{what}; {log} says: {verdict(log)}"}
    except (ConfigError, FileError, ImportError, OSError, ValueError, KeyError) as error:
        entry |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {**entry, "seconds": time.perf_counter() - started}


def as_typed(command: Sequence[str], output: Path) -> str:
    """Return a command as typed in the repository, without the folders of this machine."""
    shown = shlex.join(["python", *command[1:]])
    return shown.replace(f"{output}/", f"{output.name}/").replace(f"{ROOT}/", "")


def out_of_reach(name: str, plan: Plan) -> str | None:
    """Return the reason why a step cannot run on this machine, or None."""
    if STEPS[name].cards == 1 or plan.device == "cpu":
        return None
    found = torch.cuda.device_count()
    return None if found >= STEPS[name].cards else f"it needs {STEPS[name].cards} GPUs; found {found}"


def ended_in_time(command: Sequence[str], log: Path, limit: float) -> int | None:
    """Run a command, logged to `log`; return its exit code, or None if killed, with its children, at `limit`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def verdict(log: Path) -> str:
    """Return the last line of a log that reports an error, or else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    # A launcher writes further lines after the program has ended.
    errors = [line for line in lines if line.startswith(("error:", "FAILED"))]
    return (errors or lines or ["nothing"])[-1]


def card(device: str) -> dict[str, Any]:
    """Return name, driver, memory and versions of the device."""
    if device == "cpu":
        return {"name": "cpu", "count": 0, "torch": torch.__version__, "driver": None, "cuda": None}
    properties = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False) if shutil.which(asked[0]) else None
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": done.stdout.split()[0] if done is not None and done.stdout.split() else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def in_short(entry: Mapping[str, Any]) -> str:
    """Summarise an entry in one line for the table."""
    figures = entry.get("figures")
    if figures is None:
        return str(entry["reason"])
    if entry["step"] == "tests":
        return f"{figures['tests'] - figures['skipped']} tests"
    if entry["step"] == "attention":
        ends = {kind: figures[kind][-1] for kind in ("forward", "causal", "training")}
        length = ends["forward"]["length"]
        return f"at {length} tokens: " + ", ".join(f"{kind} {row['speed_up']:.2f} x" for kind, row in ends.items())
    if entry["step"] == "kernels":
        both = [row for row in figures["rows"] if {"layer_ms", "flash_ms"} <= row.keys()]
        if not both:
            return "no row with both a layer and flash"
        last = both[-1]
        return f"{last['kind']}, {last['length']} tokens: {last['layer_ms']:.2f} ms, flash {last['flash_ms']:.2f}"
    if entry["step"] == "pairs":
        best, before = ({row["pair"]: row for row in figures["pairs"]}[name] for name in ("posrf-mm", "saderf-orf"))
        shares = [best[key] / before[key] for key in ("seconds_per_step", "peak_MiB")]
        return f"posrf-mm: {shares[0]:.2f} x the time, {shares[1]:.2f} x the memory of saderf-orf"
    if entry["step"].startswith("adapter_step"):
        memory = figures["peak_memory_ratio"]
        more = "" if memory is None else f" and {memory:.2f} x the memory"
        return f"{figures['step_time_ratio']:.2f} x the time{more} of LoRA"
    return f"score {figures['score']:.3f}, {figures['seconds_per_epoch']:.2f} s per epoch on {figures['device']}"


def show(entries: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the table of results."""
    table = Table("step", "status", "seconds", "result", title=title)
    for entry in entries:
        colour = {"passed": "green", "skipped": "yellow"}.get(entry["status"], "red")
        status = f"[{colour}]{entry['status']}[/]"
        table.add_row(entry["step"], status, f"{entry['seconds']:.0f}", in_short(entry).replace("[", r"\["))
    Console(width=160).print(table)


def run(device: str, small: bool, output: Path, names: Sequence[str] | None, limit: float | None) -> int:
    """Run steps; return the exit code, 0 if everything that can run here passed.

    Args:
        device: "cuda" or "cpu".
        small: use sizes that take seconds on a CPU.
        output: folder of all results.
        names: names of the steps; None for all.
        limit: seconds per step instead of each one's own limit, or None.
    """
    if faults := [did_you_mean("step", name, list(STEPS)) for name in names or () if name not in STEPS]:
        raise ConfigError(faults)
    check_writable(output)
    with alone(output):
        return _run(Plan(device, small, output), list(STEPS) if names is None else names, limit)


def _run(plan: Plan, names: Sequence[str], limit: float | None) -> int:
    quiet()
    if plan.device == "cuda" and not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) finds no GPU"
        print(f"skipped: torch {torch.__version__} {why}; README, 'On a GPU', says what to install")
        return 0
    shutil.rmtree(plan.output / "data", ignore_errors=True)
    plan.output.mkdir(parents=True, exist_ok=True)
    found, entries, started = card(plan.device), [], time.perf_counter()
    for name in names:
        print(f"{name} ... (output in {plan.output / name}.log)", flush=True)
        entries.append(perform(name, plan, STEPS[name].limit if limit is None else limit))
        print(f"{name}: {entries[-1]['status']}, {in_short(entries[-1])}", flush=True)
        seconds = time.perf_counter() - started
        report = {"card": found, "small": plan.small, "seconds": seconds, "steps": entries}
        write_json(plan.output / "metrics.json", {**report, "environment": environment(ROOT)})
    show(entries, f"{found['name']}, driver {found['driver']}, torch {found['torch']}, {seconds:.0f} s")
    print(f"written: {plan.output / 'metrics.json'}")
    return int(any(entry["status"] == "failed" for entry in entries))
