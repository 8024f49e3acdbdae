"""ListOps: the value, 0 to 9, of a nested expression such as [MAX 4 [SM 9 3 ] 1 ] (Nangia & Bowman 2018; LRA).

Without a folder, the data are generated, always the same: 2000 test, 2000 validation and 96000 training expressions of
more than 500 and fewer than 2000 tokens, all different (`_listops_trees.py` defines the distribution and the tokens).
With a folder, the official files basic_{train,val,test}.tsv are read: columns Source and Target, with or without the
parentheses, which have no meaning. `write_listops` writes such files, also with other sizes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from data import TASKS, Sequences, SequenceTask, TsvLayout
from data._listops_trees import WORDS, draw_expressions
from data._tsv import read_tsv
from snnk_peft.errors import ConfigError

FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
SIZES = {"test": 2000, "validation": 2000, "train": 96000}
# Trees drawn at a time; the data depend on it.
BATCH = 8192
# Batches without a new expression after which the bounds are assumed to be impossible.
PATIENCE = 20
_IDS = {word: index for index, word in enumerate(WORDS) if index}


def expressions(
    seed: int = 0, *, min_length: int = 501, max_length: int = 1999, max_depth: int = 10, max_args: int = 10
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield distinct expressions endlessly, determined by the arguments: (tokens, value), see `draw_expressions`.

    Args:
        seed: seed of the stream.
        min_length: minimum number of tokens. The official program requires more than 500 and fewer than 2000.
        max_length: maximum number of tokens.
        max_depth: nodes on the longest path from the root to a digit.
        max_args: maximum number of arguments of an operator, at least 2.

    Raises:
        ConfigError: the bounds contradict each other, or no tree in twenty batches meets them.
    """
    if not (1 <= min_length <= max_length and max_depth >= 1 and max_args >= 2 and seed >= 0):
        raise ConfigError(
            f"ListOps with seed={seed}, min_length={min_length}, max_length={max_length}, max_depth={max_depth}, "
            f"max_args={max_args}; expected 0 <= seed, 1 <= min_length <= max_length, max_depth >= 1, max_args >= 2"
        )
    rng = np.random.default_rng(seed)
    seen: set[bytes] = set()
    fruitless = 0
    while fruitless < PATIENCE:
        fruitless += 1
        for tokens, value in draw_expressions(rng, BATCH, min_length, max_length, max_depth, max_args):
            key = tokens.tobytes()
            if key not in seen:
                seen.add(key)
                fruitless = 0
                yield tokens, value
    raise ConfigError(
        f"{len(seen)} different ListOps expressions of {min_length} to {max_length} tokens (max_depth={max_depth}, "
        f"max_args={max_args}) were found, and no further one in {PATIENCE * BATCH} trees; widen the bounds"
    )


def write_listops(folder: str | Path, sizes: dict[str, int] | None = None, seed: int = 0, **bounds: int) -> None:
    """Write basic_{train,val,test}.tsv with the official columns.

    Args:
        folder: created if missing; files of the same names are replaced.
        sizes: split -> number of expressions; None for 96000, 2000 and 2000.
        seed: see `expressions`.
        **bounds: see `expressions`.
    """
    sizes = SIZES if sizes is None else sizes
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stream = expressions(seed, **bounds)
    for split in SIZES:  # in this order, whatever the order of `sizes`
        target = folder / FILES[split]
        temporary = target.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write("Source\tTarget\n")
            for tokens, value in itertools.islice(stream, sizes.get(split, 0)):
                file.write(f"{' '.join(WORDS[token] for token in tokens)}\t{value}\n")
        os.replace(temporary, target)


def read_listops(path: Path | None, wanted: Mapping[str, int | None]) -> dict[str, Sequences]:
    """Read the splits from files, or generate them; only as much training data as requested is generated."""
    return generated(wanted) if path is None else {split: read_file(path / FILES[split]) for split in wanted}


def generated(wanted: Mapping[str, int | None]) -> dict[str, Sequences]:
    """Generate test, validation and training expressions from one stream; fewer training ones are a prefix."""
    stream, result = expressions(), {}
    for split, size in SIZES.items():
        limit = wanted.get(split)
        if split == "train":
            size = 0 if split not in wanted else size if limit is None else min(limit, size)
        rows = list(itertools.islice(stream, size))
        result[split] = Sequences(([tokens for tokens, _ in rows],), np.array([value for _, value in rows], int))
    return {split: result[split] for split in wanted}


def read_file(file: Path) -> Sequences:
    """Read one official file; a ConfigError names the lines that are not ListOps."""
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; expected {', '.join(FILES.values())} (see write_listops)")
    rows = read_tsv(file, _LAYOUT)
    tokens = [np.array([_IDS[word] for word in _words(source)], np.uint8) for source in rows.texts[0]]
    return Sequences((tokens,), np.array(rows.labels))


def _words(source: str) -> list[str]:
    """Split into words, without the parentheses that the official program puts around every step."""
    return source.replace("(", " ").replace(")", " ").split()


def _fault(column: str, source: str) -> str | None:
    words = _words(source)
    unknown = [word for word in words if word not in _IDS]
    if words and not unknown:
        return None
    what = f"unknown word {unknown[0]!r}" if unknown else f"{column} is empty"
    return f"{what}; expected words of {' '.join(_IDS)}"


_LAYOUT = TsvLayout(text=("Source",), label="Target", labels=tuple(map(str, range(10))), text_fault=_fault)


LISTOPS = SequenceTask(
    name="listops",
    read=read_listops,
    vocab_size=len(WORDS),
    max_length=2000,
    label_names=tuple(map(str, range(10))),
    generated=True,
)
TASKS.register(LISTOPS.name, LISTOPS)
