"""Terminal output of a recipe: libraries are silenced, and long work gets a progress bar with an estimate.

`Tracker` also writes the measurements of a run to log.jsonl and TensorBoard.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import transformers
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)
from rich.table import Table

from snnk_cli.files import FileError, write_text, writing

Item = TypeVar("Item")


def quiet() -> None:
    """Show only the recipe's own lines: no weight-loading bars, no table of newly initialised tensors."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if importlib.util.find_spec("datasets") is not None:  # not needed by the quickstart
        import datasets

        datasets.disable_progress_bars()
    # PEFT reads an attribute that transformers has renamed.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


def show_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[str] = ()) -> None:
    """Print a table.

    Args:
        title: title above the table.
        header: titles of the columns.
        rows: cells of each row.
        text: columns of text, which are left-aligned.
    """
    table = Table(title=title)
    for column in header:
        table.add_column(column, justify="left" if column in text else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def bar(items: Sequence[Item], title: str) -> Iterable[Item]:
    """Iterate over the items with a progress bar; nothing is drawn without a terminal."""
    return track(items, title, console=Console(stderr=True), disable=not sys.stderr.isatty())


class Tracker:
    """The log of a run. Only the main process has an active one.

    Args:
        folder: the run folder.
        total_steps: optimizer steps of the whole run.
        first_step: steps already done, or None for a new run; later rows of an earlier attempt are dropped.
        tensorboard: also write event files.
        active: False makes every method do nothing.
    """

    def __init__(self, folder: Path, total_steps: int, first_step: int | None, tensorboard: bool, active: bool):
        self._active = active
        self._total, self._first, self._done = total_steps, first_step or 0, first_step or 0
        self._started = self._printed = time.monotonic()
        self._file = folder / "log.jsonl"
        self._events: Any = None
        self._bar: Any = None
        self._folder = folder / "tensorboard" if tensorboard and active else None
        if not active:
            return
        known = [] if first_step is None else read_log(self._file)
        rows = [row for row in known if row["step"] <= self._first]
        write_text(self._file, "".join(json.dumps(row) + "\n" for row in rows))
        if sys.stdout.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn())
            self._task = self._bar.add_task("training", total=total_steps, completed=self._first)

    def __enter__(self) -> Tracker:
        if self._folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._hook, threading.excepthook = threading.excepthook, self._in_thread
            try:
                with writing(self._folder):
                    self._events = SummaryWriter(str(self._folder), purge_step=self._first + 1)
            except FileError:
                threading.excepthook = self._hook
                raise
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._folder is None:
            return
        try:
            with writing(self._folder):
                if self._events is not None:
                    self._events.flush()
                    self._events.close()
        except FileError:
            if error is None:
                raise
        finally:
            threading.excepthook = self._hook

    def _in_thread(self, given: threading.ExceptHookArgs) -> None:
        """Silence a full disk in the writer's thread, which keeps the error; the next call raises it again."""
        if not isinstance(given.exc_value, OSError):
            self._hook(given)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._active:
            (self._bar.console.print if self._bar is not None else print)(text)
            sys.stdout.flush()

    def log(self, step: int, row: dict[str, Any]) -> None:
        """Append a row to log.jsonl and its numbers to TensorBoard."""
        if not self._active:
            return
        with writing(self._file), self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **row}) + "\n")
        if self._events is not None and self._folder is not None:
            with writing(self._folder):
                for name, value in row.items():
                    self._events.add_scalar(name, value, step)

    def progress(self, step: int, text: str, total: float | None = None) -> None:
        """Advance to `step`. Without a terminal, print a line every 20 seconds.

        Args:
            step: optimizer steps done.
            text: text next to the bar, such as the latest loss.
            total: a new estimate of the steps of the whole run.
        """
        if not self._active:
            return
        self._done = step
        if total is not None:
            self._total = round(total)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=self._total, description=text)
            return
        now = time.monotonic()
        if now - self._printed >= 20:
            self._printed = now
            left = (now - self._started) / max(1, step - self._first) * (self._total - step)
            self.say(f"step {step}/{self._total}  {text}  {left / 60:.1f} min left")


def read_log(file: Path) -> list[dict[str, Any]]:
    """Return the rows of log.jsonl; a last line left unfinished by a killed process is ignored."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")
    # Complete lines end with a newline, so only a fragment or nothing follows the last one.
    return [json.loads(line) for line in lines[:-1]]
