"""An experiment's options and folder: metrics.json with the measurements, and a page rendered from it alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snnk_cli.files import check_writable, read_json, write_json, write_text
from snnk_cli.lock import alone
from snnk_cli.run_folder import environment
from snnk_cli.terminal import quiet

ROOT = Path(__file__).resolve().parents[3]
Figures = dict[str, Any]


def page_options(description: str | None, results: Path | None, *pictures: str) -> argparse.ArgumentParser:
    """Create a parser with the common options `--output` and `--render`, to which each experiment adds its own.

    Args:
        description: the program's docstring.
        results: default output folder; None if it must be given.
        pictures: names of the plots next to the page.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    written = ", ".join(["metrics.json", "README.md", *pictures])
    made.add_argument("--output", type=Path, default=results, required=results is None, help=f"folder of {written}")
    made.add_argument("--render", action="store_true", help="what is made of metrics.json again, without measuring")
    return made


def too_small(given: argparse.Namespace, **least: int) -> list[str]:
    """List the options, or the items of those that are lists, whose values are below the least ones, by name."""
    faults = []
    for name, low in least.items():
        value, option = getattr(given, name), f"--{name.replace('_', '-')}"
        told = [f"{option} has {each}" for each in value if each < low] if isinstance(value, list) else []
        if not isinstance(value, list) and value < low:
            told = [f"{option} is {value}"]
        faults += [f"{each}; expected at least {low}" for each in told]
    return faults


def write_figures(folder: Path, figures: Figures) -> None:
    """Write metrics.json with the environment into a folder, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "metrics.json", {**figures, "environment": environment(ROOT)})


def measured_page(folder: Path, again: bool, measure: Callable[[], Figures], page: Callable[[Figures], str]) -> Figures:
    """Measure, unless only the page is wanted, and write; return the content of metrics.json.

    Args:
        folder: folder of metrics.json and README.md; created if missing.
        again: only render from the existing metrics.json (`--render`).
        measure: checks the arguments, then measures.
        page: renders the figures as Markdown.
    """
    check_writable(folder)
    with alone(folder):
        if not again:
            quiet()
            write_figures(folder, measure())
        figures = read_json(folder / "metrics.json")
        write_text(folder / "README.md", page(figures))
    return figures
