"""Statistics over seeds, and tables in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any


def spread(reports: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """Compute mean and standard deviation (n - 1; 0 for one seed) over seeds."""
    values = [report[key] for report in reports]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def standard_error(reports: list[dict[str, Any]], key: str) -> tuple[float, float]:
    """Compute the mean and its standard error (0 for one seed) over seeds."""
    return mean_and_error([report[key] for report in reports])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Compute the mean and its standard error (0 for a single value)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.mean(values), error


def mean_in_words(values: Sequence[float], form: str = ".1f", error_form: str = "") -> str:
    """Format the mean and, for several values, its standard error, in the same format or its own."""
    mean, error = mean_and_error(values)
    return f"{mean:{form}}" + (f" ± {error:{error_form or form}}" if len(values) > 1 else "")


def grid(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table; all columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
