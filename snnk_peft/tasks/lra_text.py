"""Byte-level IMDb reviews, cut to 4000 bytes: is a review positive? (Maas et al. 2011; "Text" of LRA).

Files: aclImdb/{train,test}/{neg,pos}/<number>_<stars>.txt, in a folder or in the archive aclImdb*.tar.*. A token is a
byte of the UTF-8 text plus 1. There is no official validation split: every tenth review of each class is held out of
train (2500 of 25000).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from snnk_peft.errors import ConfigError
from snnk_peft.tasks import LONG_RANGE_TASKS, Sequences, SequenceTask
from snnk_peft.tasks._folders import read_files

CLASSES = ("neg", "pos")
MAX_LENGTH = 4000
HELD_OUT_EVERY = 10


def byte_tokens(text: bytes, max_length: int) -> np.ndarray:
    """(length,) uint16: the first `max_length` bytes, each plus 1, because 0 is padding."""
    return np.frombuffer(text[:max_length], np.uint8).astype(np.uint16) + 1


def read_imdb(path: Path | None, split: str, wanted: int | None) -> Sequences:
    """One split of the official files."""
    assert path is not None
    part = "test" if split == "test" else "train"
    tokens, labels, faults = [], [], []
    seen = [0, 0]
    for name, label, text in _reviews(path):
        if not name.startswith(part):
            continue
        seen[label] += 1
        if not text:
            faults.append(f"{path}: {name} is empty; expected a review")
        if split == "test" or (seen[label] % HELD_OUT_EVERY == 0) == (split == "validation"):
            tokens.append(byte_tokens(text, MAX_LENGTH))
            labels.append(label)
    faults += [
        f"{path} has no review {part}/{kind}/*.txt; expected the official folder aclImdb"
        for kind, count in zip(CLASSES, seen, strict=True)
        if not count
    ]
    if not faults and not labels:
        faults.append(f"{path}: {sum(seen)} reviews leave none for the {split} split; expected at least 10 per class")
    if faults:
        raise ConfigError(faults[:10])
    return Sequences((tokens,), np.array(labels))


@lru_cache(maxsize=1)
def _reviews(path: Path) -> list[tuple[str, int, bytes]]:
    """All labelled reviews (name, label, text): an archive is unpacked once for its three splits."""
    files = read_files(
        path, r"(?P<name>(?:train|test)/(?P<kind>neg|pos)/\d+_\d+\.txt)", "aclImdb/{train,test}/{neg,pos}/*.txt"
    )
    return [(match["name"], CLASSES.index(match["kind"]), text) for match, text in files]


LRA_TEXT = SequenceTask(
    name="lra_text", read=read_imdb, vocab_size=257, max_length=MAX_LENGTH, label_names=("negative", "positive")
)
LONG_RANGE_TASKS.register(LRA_TEXT.name, LRA_TEXT)
