"""Do two papers cite each other? Byte-level ACL Anthology pairs, 4000 bytes each ("Retrieval" of LRA).

Files: new_aan_pairs.{train,eval,test}.tsv without a header; columns label (0 or 1, possibly 0.0 or 1.0), id1, id2,
text1, text2. A token is a byte of the UTF-8 text plus 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from data import TASKS, Sequences, SequenceTask, TsvLayout
from data._tsv import read_tsv
from data.base_sequence import byte_tokens
from snnk_peft.errors import ConfigError

FILES = {split: f"new_aan_pairs.{name}.tsv" for split, name in (("train",) * 2, ("validation", "eval"), ("test",) * 2)}
MAX_LENGTH = 4000


class _Layout(TsvLayout):
    """Labels are numbers, of which two are valid."""

    def parse_label(self, cell: str) -> int:
        """0 or 1."""
        number = super().parse_label(cell)
        if number not in (0, 1):
            raise ConfigError(f"label is {cell}; expected 0 or 1")
        return int(number)


_LAYOUT = _Layout(
    text=("text1", "text2"), label="label", label_range=(0.0, 1.0), header=("label", "id1", "id2", "text1", "text2")
)


def read_pairs(path: Path | None, wanted: Mapping[str, int | None]) -> dict[str, Sequences]:
    """The splits of the official files."""
    assert path is not None
    missing = [str(path / FILES[split]) for split in wanted if not (path / FILES[split]).is_file()]
    if missing:
        raise ConfigError([f"{file} does not exist; expected {', '.join(FILES.values())}" for file in missing])
    return {split: _read(path / FILES[split]) for split in wanted}


def _read(file: Path) -> Sequences:
    rows = read_tsv(file, _LAYOUT)
    first, second = ([byte_tokens(text.encode(), MAX_LENGTH) for text in column] for column in rows.texts)
    return Sequences((first, second), np.array(rows.labels).astype(int))


LRA_RETRIEVAL = SequenceTask(
    name="lra_retrieval",
    read=read_pairs,
    vocab_size=257,
    max_length=MAX_LENGTH,
    label_names=("unrelated", "citing"),
    documents=2,
)
TASKS.register(LRA_RETRIEVAL.name, LRA_RETRIEVAL)
