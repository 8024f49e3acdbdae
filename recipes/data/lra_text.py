"""Byte-level IMDb reviews, cut to 4000 bytes: is a review positive? (Maas et al. 2011; "Text" of LRA).

Files: aclImdb/{train,test}/{neg,pos}/<number>_<stars>.txt, in a folder or in the archive aclImdb*.tar.*. A token is a
byte of the UTF-8 text plus 1. There is no official validation split: every tenth review of each class is held out of
train (2500 of 25000).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from data import TASKS, Sequences, SequenceTask
from data._folders import read_files
from data.base_sequence import byte_tokens, with_validation
from snnk_peft.errors import ConfigError
from snnk_peft.tasks._files import MAX_FAULTS

CLASSES = ("neg", "pos")
MAX_LENGTH = 4000
HELD_OUT_EVERY = 10


def read_imdb(path: Path | None, wanted: Mapping[str, int | None]) -> dict[str, Sequences]:
    """The splits of the official files; the archive is unpacked once, in memory."""
    assert path is not None
    pattern = r"(?P<part>train|test)/(?P<kind>neg|pos)/\d+_\d+\.txt"
    files = read_files(path, pattern, "aclImdb/{train,test}/{neg,pos}/*.txt")
    seen = {(match["part"], match["kind"]) for match, _ in files}
    faults = [f"{path}: {match[0]} is empty; expected a review" for match, text in files if not text]
    examples = ((match["part"], CLASSES.index(match["kind"]), byte_tokens(text, MAX_LENGTH)) for match, text in files)
    found = with_validation(examples, HELD_OUT_EVERY)
    needed = {split: "train" if split == "validation" else split for split in wanted}
    faults += [
        f"{path} has no review {part}/{kind}/*.txt; expected the official folder aclImdb"
        for part in sorted(set(needed.values()))
        for kind in CLASSES
        if (part, kind) not in seen
    ]
    if "validation" in wanted and not faults and not len(found["validation"]):
        faults.append(f"{path}: fewer than {HELD_OUT_EVERY} training reviews per class leave none for validation")
    if faults:
        raise ConfigError(faults[:MAX_FAULTS])
    return {split: found[split] for split in wanted}


LRA_TEXT = SequenceTask(
    name="lra_text", read=read_imdb, vocab_size=257, max_length=MAX_LENGTH, label_names=("negative", "positive")
)
TASKS.register(LRA_TEXT.name, LRA_TEXT)
