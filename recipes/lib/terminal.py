"""The terminal belongs to the recipe: what the libraries print is silenced, and waiting has a bar with an estimate."""

import importlib.util
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import TypeVar

import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

Item = TypeVar("Item")


def quiet() -> None:
    """Leave the terminal to the recipe's own lines: no weight-loading bars, no table of newly initialised tensors."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if importlib.util.find_spec("datasets") is not None:  # the quickstart does without
        import datasets

        datasets.disable_progress_bars()
    # PEFT reads an attribute that transformers has renamed.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


def show_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[str] = ()) -> None:
    """Print a table.

    Args:
        title: above it.
        header: of the columns.
        rows: as many cells each.
        text: columns that are no numbers, and flush left.
    """
    table = Table(title=title)
    for column in header:
        table.add_column(column, justify="left" if column in text else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def bar(items: Sequence[Item], title: str) -> Iterable[Item]:
    """The items, counted on a bar with the time left; nothing is drawn where nobody watches."""
    return track(items, title, console=Console(stderr=True), disable=not sys.stderr.isatty())
