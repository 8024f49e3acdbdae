"""Texts without labels, from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from snnk_cli.convert_settings import ConvertData
from snnk_peft.errors import ConfigError
from snnk_peft.tasks._rows import read_table


def read_texts(data: ConvertData) -> Any:
    """The texts of `data.texts` as `Examples` reads them; every label is 0.

    Raises:
        ConfigError: no such file, no column of that name, no text, or rows without a text, with their lines.
    """
    path = Path(str(data.texts)).expanduser()
    if path.suffix.lower() == ".txt":
        if data.text_pair is not None:
            raise ConfigError(
                f"data.text_pair is {data.text_pair}, but {path} has no columns; give a table, or leave it"
            )
        columns = {"sentence1": _lines(path)}
    else:
        names = [data.text or "text", *([data.text_pair] if data.text_pair is not None else [])]
        rows = read_table(path, names)
        wrong = [
            (number, f"column {name!r} is {value!r}; expected a text")
            for name in names
            for number, value in zip(rows.numbers, rows.columns[name], strict=True)
            if not isinstance(value, str) or not value.strip()
        ]
        if faults := rows.messages(wrong):
            raise ConfigError(faults)
        columns = {f"sentence{place}": rows.columns[name] for place, name in enumerate(names, start=1)}
    return Dataset.from_dict({**columns, "label": [0] * len(columns["sentence1"])})


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.texts is {path}, which cannot be read ({error}); expected UTF-8 text") from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"data.texts is {path}, which holds no text; expected one per line")
    return found


def drawn(count: int, size: int, seed: int) -> list[int]:
    """`size` of the numbers below `count`, all different, in the order of a draw by `seed`; all if there are fewer."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].tolist()


def held_back(rows: Any, share: float, seed: int) -> tuple[Any, Any]:
    """(rows to calibrate with, rows to compare predictions on); `share` of them are the latter, at least one."""
    if len(rows) < 2:
        raise ConfigError(f"data.texts holds {len(rows)} text; expected at least two, one of them to be held back")
    order = drawn(len(rows), len(rows), seed)
    size = min(max(1, round(share * len(rows))), len(rows) - 1)
    return rows.select(order[size:]), rows.select(order[:size])


def batches_by_length(lengths: Sequence[int], chosen: Sequence[int], size: int) -> list[list[int]]:
    """`chosen` in batches of up to `size`, examples of similar length together."""
    order = sorted(chosen, key=lambda index: lengths[index])
    return [order[start : start + size] for start in range(0, len(order), size)]
