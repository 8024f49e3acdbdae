"""Reading the unlabelled texts that the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset

from snnk_cli.convert_settings import ConvertData
from snnk_peft.tasks.texts import read_texts as texts_of


def read_texts(data: ConvertData) -> Any:
    """Read the texts of `data.texts` in the format of `Examples`; every label is 0.

    Raises:
        ConfigError: see `snnk_peft.tasks.texts.read_texts`.
    """
    names = [data.text or "text", *([data.text_pair] if data.text_pair is not None else [])]
    found = texts_of(Path(str(data.texts)).expanduser(), names, "data.texts")
    columns = {f"sentence{place}": found[name] for place, name in enumerate(names, start=1)}
    return Dataset.from_dict({**columns, "label": [0] * len(columns["sentence1"])})
