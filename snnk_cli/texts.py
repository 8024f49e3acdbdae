"""The texts without labels of the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset

from snnk_cli.convert_settings import ConvertData
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.texts import drawn
from snnk_peft.tasks.texts import read_texts as texts_of


def read_texts(data: ConvertData) -> Any:
    """The texts of `data.texts` as `Examples` reads them; every label is 0.

    Raises:
        ConfigError: as `snnk_peft.tasks.texts.read_texts`.
    """
    names = [data.text or "text", *([data.text_pair] if data.text_pair is not None else [])]
    found = texts_of(Path(str(data.texts)).expanduser(), names, "data.texts")
    columns = {f"sentence{place}": found[name] for place, name in enumerate(names, start=1)}
    return Dataset.from_dict({**columns, "label": [0] * len(columns["sentence1"])})


def held_back(rows: Any, share: float, seed: int) -> tuple[Any, Any]:
    """(rows to calibrate with, rows to compare predictions on); `share` of them are the latter, at least one."""
    if len(rows) < 2:
        raise ConfigError(f"data.texts holds {len(rows)} text; expected at least two, one of them to be held back")
    order = drawn(len(rows), len(rows), seed)
    size = min(max(1, round(share * len(rows))), len(rows) - 1)
    return rows.select(order[size:]), rows.select(order[:size])
