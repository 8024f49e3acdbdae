"""Unlabelled texts: reading from a file, sampling, and tokenisation into batches of similar length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._rows import Rows, read_table

if TYPE_CHECKING:
    import torch

Columns = dict[str, list[str]]


def read_texts(path: Path, names: Sequence[str], asked_by: str = "data") -> Columns:
    """Read the texts of a file, one column per name.

    Args:
        path: a .txt file with one text per line, or a table (.csv, .tsv, .jsonl, .parquet).
        names: names of the columns: one, or two for pairs.
        asked_by: the argument or setting that gave the path, for messages.

    Raises:
        ConfigError: no such file, no column of that name, no texts, or rows without a text, with their lines.
    """
    if path.suffix.lower() != ".txt":
        return checked_texts(read_table(path, names))
    if len(names) > 1:
        raise ConfigError(
            f"{asked_by} is {path}, which has no columns {', '.join(names)}; give a table, or one text per line alone"
        )
    return {names[0]: _lines(path, asked_by)}


def checked_texts(rows: Rows) -> Columns:
    """Return the columns of a table; ConfigError with the lines of cells that are not texts."""
    wrong = [
        (number, f"column {name!r} is {value!r}; expected a text")
        for name, values in rows.columns.items()
        for number, value in zip(rows.numbers, values, strict=True)
        if not isinstance(value, str) or not value.strip()
    ]
    if faults := rows.messages(wrong):
        raise ConfigError(faults)
    return rows.columns


def _lines(path: Path, asked_by: str) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{asked_by} is {path}, which cannot be read ({error}); expected UTF-8 text") from error
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"{asked_by} is {path}, which holds no text; expected one per line")
    return found


def drawn(count: int, size: int, seed: int) -> list[int]:
    """Draw `size` distinct integers below `count` with `seed`, in random order; all if there are fewer."""
    import torch  # here, so that finding tasks does not need it

    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].tolist()


def batches_by_length(lengths: Sequence[int], chosen: Sequence[int], size: int) -> list[list[int]]:
    """Split `chosen` into batches of up to `size` examples of similar length."""
    order = sorted(chosen, key=lambda index: lengths[index])
    return [order[start : start + size] for start in range(0, len(order), size)]


def padded(values: Sequence[np.ndarray], filler: int = 0, left: bool = False) -> torch.Tensor:
    """Pad arrays (length,) to (examples, longest) int64, on the right or, with `left`, on the left."""
    longest = max(map(len, values))
    filled = np.full((len(values), longest), filler, dtype=np.int64)
    for row, ids in zip(filled, values, strict=True):
        row[longest - len(ids) if left else 0 :][: len(ids)] = ids
    import torch

    return torch.from_numpy(filled)


class Tokens:
    """Tokenised texts, padded per batch.

    Args:
        encoded: output of a tokenizer for texts, without padding or attention mask.
        tokenizer: the tokenizer.

    Attributes:
        columns: input_ids and similar, an array (length,) per example.
        lengths: number of tokens of each example.
    """

    def __init__(self, encoded: Mapping[str, Any], tokenizer: Any):
        self.columns = {name: [np.asarray(ids, dtype=np.int64) for ids in values] for name, values in encoded.items()}
        self.lengths = [len(ids) for ids in self.columns["input_ids"]]
        self.fillers = {"input_ids": tokenizer.pad_token_id or 0, "token_type_ids": tokenizer.pad_token_type_id}
        self._left = tokenizer.padding_side == "left"

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return input_ids, attention_mask, ... of the chosen examples, (batch, longest) each."""
        chosen = {name: [values[index] for index in indices] for name, values in self.columns.items()}
        chosen["attention_mask"] = [np.ones_like(ids) for ids in chosen["input_ids"]]
        return {name: padded(values, self.fillers.get(name, 0), self._left) for name, values in chosen.items()}
