"""Reader of the official GLUE files: one example per line, cells separated by tabs, no quoting, UTF-8.

Columns are found by the names in the first line (CoLA has none: its layout supplies them). A file is split only at
line feeds, because texts may contain other characters that Python treats as line endings. Every fault is reported with
its line number, so that one message is enough to repair the file.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks._files import capped, decode, empty_text, listed


@dataclass(frozen=True)
class TsvLayout:
    """The columns of texts and labels in a task's official files.

    Args:
        text: names of the one or two text columns, in the order sentence1, sentence2.
        label: name of the label column.
        labels: the label cells in the order of the integer ids, e.g. `("0", "1")`; None if the label is a number.
        label_range: smallest and largest valid number; only if `labels` is None.
        header: column names of files without a header line; None if the first line names the columns.
        text_fault: (column name, cell) -> fault of a text, or None.
        broken_row_rate: rows with too few cells or a faulty text, up to this share, are left out with a warning
            instead of being rejected. Above 0 only if the official file itself is known to have such rows.
    """

    text: tuple[str, ...]
    label: str
    labels: tuple[str, ...] | None = None
    label_range: tuple[float, float] | None = None
    header: tuple[str, ...] | None = None
    text_fault: Callable[[str, str], str | None] = empty_text
    broken_row_rate: float = 0.0

    def parse_label(self, cell: str) -> int | float:
        """Return the label id or number in a cell; a ConfigError names the valid ones."""
        cell = cell.strip()
        if self.labels is not None:
            if cell not in self.labels:
                raise ConfigError(did_you_mean("label", cell, list(self.labels)))
            return self.labels.index(cell)
        low, high = self.label_range or (-math.inf, math.inf)
        expected = f"expected a number from {low:g} to {high:g}"
        try:
            number = float(cell)
        except ValueError:
            raise ConfigError(f"{self.label} is {cell!r}; {expected}") from None
        if not low <= number <= high:  # also true for NaN
            raise ConfigError(f"{self.label} is {cell}; {expected}")
        return number


@dataclass(frozen=True)
class TsvRows:
    """Contents of one file.

    Args:
        texts: one list per text column, each as long as the file has examples.
        labels: ids (int) or numbers (float), one per example.
        idx: position of each example in the file, from 0, counting rows that were left out.
    """

    texts: list[list[str]]
    labels: list[int | float]
    idx: list[int]


def read_tsv(path: Path, layout: TsvLayout) -> TsvRows:
    """Read one file.

    Args:
        path: the file; a byte-order mark and carriage returns before line feeds are accepted.
        layout: the columns to read and the format of the label.

    Returns:
        All examples in file order.

    Raises:
        ConfigError: missing columns, rows with too few or too many cells or an empty text, unknown labels, numbers out
            of range, bytes that are not UTF-8, a file without examples. Up to ten faults, each with file and line.
    """
    lines, faults = decode(path)
    if faults:
        raise ConfigError(capped(faults, path))
    if not lines:
        raise ConfigError(f"{path}: the file is empty; expected {_expected(layout)}")
    header = list(layout.header) if layout.header else [name.strip() for name in lines[0].split("\t")]
    first = 0 if layout.header else 1
    if faults := _header_faults(path, header, layout):
        raise ConfigError(capped(faults, path))
    if len(lines) == first:
        raise ConfigError(f"{path}: there is a header but no example after line 1; expected {_expected(layout)}")
    return _read_rows(path, lines[first:], first + 1, header, layout)


def _read_rows(path: Path, lines: list[str], first_line: int, header: list[str], layout: TsvLayout) -> TsvRows:
    text_at = [header.index(name) for name in layout.text]
    label_at = header.index(layout.label)
    rows = TsvRows([[] for _ in text_at], [], [])
    faults: list[tuple[int, str]] = []
    broken: list[tuple[int, str]] = []
    for idx, line in enumerate(lines):
        cells = line.split("\t")
        number = first_line + idx
        if len(cells) < len(header):
            broken.append((number, f"{len(cells)} cells; expected {len(header)} ({listed(header)})"))
            continue
        if any(cells[len(header) :]):  # empty cells at the end of a line do no harm
            faults.append((number, f"{len(cells)} cells; expected {len(header)} ({listed(header)})"))
            continue
        try:
            label = layout.parse_label(cells[label_at])
        except ConfigError as error:
            faults.append((number, str(error)))
            continue
        texts = zip(layout.text, text_at, strict=True)
        wrong = [fault for name, at in texts if (fault := layout.text_fault(name, cells[at])) is not None]
        if wrong:
            broken.append((number, "; ".join(wrong)))
            continue
        for column, at in zip(rows.texts, text_at, strict=True):
            column.append(cells[at])
        rows.labels.append(label)
        rows.idx.append(idx)
    if broken and len(broken) <= layout.broken_row_rate * len(lines):
        warnings.warn(
            f"{path}: left out {len(broken)} of {len(lines)} lines, which have too few cells or an empty text (the "
            f"official file is known to have such rows): lines {listed([str(number) for number, _ in broken])}",
            stacklevel=2,
        )
    else:
        faults = sorted(faults + broken)
    if faults:
        raise ConfigError(capped([f"{path}, line {number}: {text}" for number, text in faults], path))
    return rows


def _header_faults(path: Path, header: list[str], layout: TsvLayout) -> list[str]:
    faults = []
    by_lower_case = {name.lower(): name for name in header}
    for name in dict.fromkeys((*layout.text, layout.label)):
        count = Counter(header)[name]
        if count == 0:
            close = difflib.get_close_matches(name.lower(), list(by_lower_case), n=1, cutoff=0.5)
            hint = f"; did you mean {by_lower_case[close[0]]!r}?" if close else "."
            faults.append(f"{path}, line 1: no column {name!r}{hint} Found: {listed(header)}")
        elif count > 1:
            faults.append(f"{path}, line 1: column {name!r} occurs {count} times; expected once")
    return faults


def _expected(layout: TsvLayout) -> str:
    names = layout.header or (*layout.text, layout.label)
    return f"{'no header and ' if layout.header else ''}tab-separated columns {listed(names)}"
