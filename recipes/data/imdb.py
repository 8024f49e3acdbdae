"""IMDb: is a film review positive? 25,000 reviews to train on, 25,000 to test on (Maas et al. 2011).

Files: aclImdb/{train,test}/{neg,pos}/<number>_<stars>.txt, in a folder or in the archive aclImdb*.tar.*. HTML line
breaks become spaces. The files are sorted by class, so the first rows of a split would all be negative; here, the rows
of a split are in the order of the SHA-256 of their texts, the same everywhere. There is no official validation split:
the last tenth of train in that order is used as one. Nothing is selected on "test".
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data import TASKS
from data._folders import read_files
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import TextTask
from snnk_peft.tasks._files import MAX_FAULTS, require
from snnk_peft.tasks.base import Request

if TYPE_CHECKING:
    import datasets

CLASSES = ("neg", "pos")
HUB = "stanfordnlp/imdb"
HELD_OUT = 10  # one in ten training reviews is for validation
Review = tuple[str, int]


@dataclass(frozen=True)
class Imdb(TextTask):
    """Whole reviews as texts; a model with 512 positions reads nine in ten of them in full."""

    name: str = "imdb"
    label_names: tuple[str, ...] | None = ("negative", "positive")
    metrics: tuple[str, ...] = ("accuracy",)
    primary: tuple[str, ...] | None = None
    splits: tuple[str, ...] = ("train", "validation", "test")

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The text columns: ("sentence1",)."""
        return ("sentence1",)

    @property
    def validation_splits(self) -> tuple[str, ...]:
        """The validation split alone, on which checkpoints are chosen."""
        return ("validation",)

    @property
    def hub_path(self) -> str:
        """The data set on the Hub."""
        return HUB

    @property
    def source(self) -> str:
        """Description of the data set, for model cards."""
        return f"IMDb ({HUB}), with a tenth of its training reviews for validation"

    def _read(self, request: Request) -> datasets.DatasetDict:
        wanted = request.splits or self.splits
        parts = sorted({"test" if split == "test" else "train" for split in wanted})
        reviews = _of_hub(parts, request.cache_dir) if request.path is None else _of_files(request.path, parts)
        found: dict[str, list[Review]] = {"test": _shuffled(reviews.get("test", ()))}
        train = _shuffled(reviews.get("train", ()))
        held_out = len(train) // HELD_OUT
        if "validation" in wanted and not held_out:
            raise ConfigError(
                f"{request.path or HUB} has {len(train)} training reviews, one in {HELD_OUT} of them for validation; "
                f"expected at least {HELD_OUT}"
            )
        found |= {"train": train[: len(train) - held_out], "validation": train[len(train) - held_out :]}
        columns = {split: tuple(zip(*found[split], strict=True)) or ((), ()) for split in wanted}
        return require("datasets").DatasetDict(
            {split: self._dataset([texts], labels, range(len(texts))) for split, (texts, labels) in columns.items()}
        )


def _shuffled(reviews: Iterable[Review]) -> list[Review]:
    """Return the reviews in the order of their texts' SHA-256."""
    return sorted(reviews, key=lambda review: hashlib.sha256(review[0].encode()).digest())


def _plain(text: str) -> str:
    """Replace line breaks and runs of spaces by single spaces."""
    return " ".join(text.replace("<br />", " ").split())


def _of_files(path: Path, parts: Collection[str]) -> Mapping[str, list[Review]]:
    """Read the reviews of these parts from the official files."""
    if not path.exists():
        raise ConfigError(f"data_dir {path} does not exist; expected the official files, aclImdb or its archive")
    reviews, missing = data_files(path, parts)
    found: dict[str, list[Review]] = {part: [] for part in parts}
    faults = []
    for part, label, name, content in reviews:
        if text := _plain(content.decode("utf-8", errors="replace")):
            found[part].append((text, label))
        else:
            faults.append(f"{path}: {name} is empty; expected a review")
    if faults := faults + missing:
        raise ConfigError(faults[:MAX_FAULTS])
    return found


def data_files(path: Path, parts: Collection[str]) -> tuple[list[tuple[str, int, str, bytes]], list[str]]:
    """Return (part, class id, name, content) of each review of these parts, and a list of what is missing.

    Args:
        path: the folder aclImdb, or its archive, which is unpacked once, in memory.
        parts: "train", "test", or both.
    """
    pattern = r"(?P<part>train|test)/(?P<kind>neg|pos)/\d+_\d+\.txt"
    files = read_files(path, pattern, "aclImdb/{train,test}/{neg,pos}/*.txt")
    seen = {(match["part"], match["kind"]) for match, _ in files}
    missing = [
        f"{path} has no review {part}/{kind}/*.txt; expected the official folder aclImdb"
        for part in sorted(parts)
        for kind in CLASSES
        if (part, kind) not in seen
    ]
    reviews = [
        (match["part"], CLASSES.index(match["kind"]), match[0], content)
        for match, content in files
        if match["part"] in parts
    ]
    return reviews, missing


def _of_hub(parts: Iterable[str], cache_dir: str | None) -> Mapping[str, list[Review]]:
    """Load the reviews of these parts from the Hub, or its local cache."""
    hf = require("datasets")
    try:
        raw = hf.load_dataset(HUB, cache_dir=cache_dir)
    except (ConnectionError, hf.exceptions.DatasetNotFoundError) as error:
        raise ConfigError(
            f"task 'imdb' could not be loaded from the Hub ({HUB}): {error}. To work offline, give data.dir "
            "(data_dir=...): the folder aclImdb of the official files, or their archive"
        ) from error
    return {part: [(_plain(row["text"]), int(row["label"])) for row in raw[part]] for part in parts}


TASKS.register(Imdb.name, Imdb())
