"""Shared code of the benchmark programs: alternating timings, one process per memory measurement, metrics.json.

Figures are medians over repetitions that run the candidates in turn, so that drift in machine speed affects all of
them alike; ratios are medians of the ratios within one repetition.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from snnk_cli.files import write_json
from snnk_cli.lock import hold
from snnk_cli.run_folder import environment, peak_memory
from snnk_cli.terminal import bar as bar
from snnk_cli.terminal import show_table
from snnk_cli.timing import alternate as alternate  # how all programs take timings
from snnk_cli.timing import ratio as ratio

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """Create a parser with the options common to all benchmarks."""
    made = _Options(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--repetitions", type=int, default=9, help="timed repetitions, candidates in turn (default 9)")
    made.add_argument("--output", type=Path, default=RESULTS / name / "metrics.json", help="file of the figures")
    return made


class _Options(argparse.ArgumentParser):
    """Parser that locks the output file, because some benchmarks read it and add to it."""

    def parse_args(self, *given: Any) -> Any:
        """Parse as usual and lock the output file; a program without a default output locks it itself."""
        found = super().parse_args(*given)
        if found.output is not None:
            hold(found.output)
        return found


def add_device(options: argparse.ArgumentParser, help: str) -> None:
    """Add `--device`, rejecting devices that this machine does not have."""

    def available(name: str) -> str:
        if name != "cpu" and not (name.startswith("cuda") and torch.cuda.is_available()):
            raise argparse.ArgumentTypeError(
                f"{name!r}, with torch {torch.__version__} and {torch.cuda.device_count()} GPUs that it can use; "
                "expected cpu, or cuda where torch is built for it and finds a GPU (nvidia-smi)"
            )
        return name

    options.add_argument("--device", default="cpu", type=available, help=help)


def peak_growth(work: Callable[..., Any], *arguments: Any) -> int:
    """Return the growth in bytes of a fresh process's peak memory during the second half of `prepare() -> run`.

    `work(*arguments)` prepares (imports, loads the model) and returns a function; the growth of the process's peak
    resident memory while that function runs is the result.
    """
    return peak_of_process(work, *arguments)[1]


def peak_of_process(work: Callable[..., Any], *arguments: Any) -> tuple[int, int]:
    """Return the bytes resident before the second half of `peak_growth`, and their growth while it runs."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_measure, args=(queue, work, arguments))
    process.start()
    while True:
        try:
            before, grown = queue.get(timeout=1)
            break
        except Empty:
            if process.exitcode:
                raise SystemExit(f"the measured process ended with exit code {process.exitcode}") from None
    process.join()
    return int(before), int(grown)


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its work; does nothing on a CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def allocated_growth(run: Callable[[], object], device: str) -> int | None:
    """Return the peak bytes of tensors on a GPU during one call, beyond those before it; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _measure(queue: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    run = work(*arguments)
    before = resident()
    grown = peak_bytes(run)
    queue.put((before, peak_memory(torch.device("cpu")) - before if grown is None else grown))


def peak_bytes(run: Callable[[], object]) -> int | None:
    """Return the growth of resident memory during one call; None where the system does not report it (not Linux)."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        run()
        return None
    reset.write_text("5")  # reset the peak, which may have been higher during the imports
    before = resident()
    run()
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return max(0, int(line.split()[1]) * 1024 - before)


def resident() -> int:
    """Return the bytes resident now (Linux), or else the peak so far."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def report(figures: Mapping[str, Any], rows: list[Mapping[str, Any]], output: Path, title: str) -> None:
    """Print a table and write metrics.json with the environment."""
    keep({**figures, "rows": rows}, output)
    show(rows, title)
    print(f"written: {output}")


def keep(figures: Mapping[str, Any], output: Path) -> None:
    """Write metrics.json with the environment."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, {**figures, "environment": environment(ROOT)})


def show(rows: list[Mapping[str, Any]], title: str) -> None:
    """Print a table."""
    lines = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    show_table(title, list(rows[0]), lines)
