"""Positive and negative sentences from film reviews: a task whose answers a person can judge.

About 10,600 snippets of reviews, each rated from -4 (extremely negative) to 4 by some twenty people. The sign of their
mean is the label; a mean of exactly 0 has none. The file is `movieReviewSnippets_GroundTruth.txt`, published (MIT
licence) with Hutto and Gilbert, "VADER: a parsimonious rule-based model for sentiment analysis of social media text",
ICWSM 2014, inside the source distribution of the PyPI package vaderSentiment 3.3.2.

The distribution is fetched once by pip, from the index it uses, into a folder of the user's cache. pip compares it with
the SHA-256 in this file before it runs anything in it (it builds the metadata of a source distribution), and the reader
compares it each time. It is read in memory; nothing is unpacked.

SST-2 draws from the same reviews: never train on one of the two and test on the other.

Example (fetches 2.4 MB on first use)::

    from data.film_reviews import LABELS, load_sentences
    train, test = load_sentences()
    print(LABELS[train[0].label], train[0].text)
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data import TASKS, TaskSpec, TsvLayout
from data._tsv import read_tsv
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base import Request
from snnk_peft.tasks.stdlib_docs import words

if TYPE_CHECKING:
    import datasets

LABELS = ("negative", "positive")
TEST_SHARE = 0.15

REQUIREMENT = "vaderSentiment==3.3.2"
ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
TEXT = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
ROWS = TsvLayout(text=("text",), label="rating", label_range=(-4.0, 4.0), header=("id", "rating", "text"))

PATIENCE = 120  # seconds that pip may take


class DownloadError(ConfigError):
    """The archive could not be fetched; gives pip's message and another way to get it."""


@dataclass(frozen=True)
class Sentence:
    """An example.

    Attributes:
        text: the sentence as published, with single spaces.
        rating: mean rating by people, from -4 to 4, not 0.
    """

    text: str
    rating: float

    @property
    def label(self) -> int:
        """Index into `LABELS`."""
        return int(self.rating > 0)


def load_sentences(archive: str | Path | None = None) -> tuple[list[Sentence], list[Sentence]]:
    """Read the data set.

    Args:
        archive: the source distribution of vaderSentiment 3.3.2; by default the one in the cache, fetched on first use.

    Returns:
        (train, test), each in a fixed, shuffled order; no sentence is in both.

    Raises:
        DownloadError: there is no archive in the cache and it cannot be fetched.
        ConfigError: the archive is a different one or damaged; lists all faulty rows at once, with their lines.
    """
    return split(read_archive(fetch() if archive is None else Path(archive)))


def cache_folder() -> Path:
    """Return the folder of the archive: `snnk_peft/` under XDG_CACHE_HOME, or under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snnk_peft"


def fetch() -> Path:
    """Return the archive in the cache, fetched by pip on first use.

    Raises:
        DownloadError: pip is missing, has no network, gets a different file, or the cache is not writable.
    """
    archive = cache_folder() / ARCHIVE
    if archive.exists():
        return archive
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    command += ["--no-deps", "--no-binary", ":all:", "--require-hashes"]
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        # Next to its place in the cache, so that the move there is atomic.
        with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
            wanted = Path(folder, "requirements.txt")
            wanted.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n", encoding="utf-8")
            command += ["--requirement", str(wanted), "--dest", folder]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
            if done.returncode:
                said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                raise _not_fetched(next((line for line in said if line.startswith("ERROR")), said[-1]))
            os.replace(next(Path(folder).glob("*.tar.gz")), archive)
    except (OSError, StopIteration, subprocess.TimeoutExpired) as error:
        raise _not_fetched(str(error)) from error
    return archive


def _not_fetched(reason: str) -> DownloadError:
    return DownloadError(
        f"{ARCHIVE} could not be fetched ({reason}); expected pip to reach its index. Run `pip download --no-deps "
        f"--no-binary :all: {REQUIREMENT}` on a machine where it does, and put the file into {cache_folder()}"
    )


def read_archive(path: Path) -> list[Sentence]:
    """Return the rated sentences of the archive in file order, without repetitions.

    Raises:
        ConfigError: the file does not exist, its SHA-256 is not `SHA256`, a file in it is missing, or rows have faults;
            up to ten of them with their lines.
    """
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected {ARCHIVE}, the source distribution of {REQUIREMENT}")
    content = path.read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ConfigError(
            f"{path} has the SHA-256 {digest}; expected {SHA256}. It is damaged or a different file: remove it, so "
            f"that it is fetched again"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.tsv")
        file.write_bytes(_member(_member(content, INNER, path), TEXT, path))
        try:
            rows = read_tsv(file, ROWS)
        except ConfigError as error:
            raise ConfigError([fault.replace(str(file), f"{path}, {TEXT}") for fault in error.faults]) from error
    found: dict[tuple[str, ...], Sentence] = {}
    for sentence, rating in zip(rows.texts[0], rows.labels, strict=True):
        text = " ".join(sentence.split())
        if rating:
            found.setdefault(tuple(words(text)), Sentence(text, float(rating)))
    return list(found.values())


def _member(archive: bytes, name: str, path: Path) -> bytes:
    """Return one file of a tar archive in memory; `path` is the archive's name in messages."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            stream = opened.extractfile(name)  # None for a folder, KeyError for a missing name
            if stream is not None:
                return stream.read()
    except KeyError:
        pass
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"{path}: not a readable archive ({error}); expected {ARCHIVE}") from error
    raise ConfigError(f"{path} holds no file {name}; expected {ARCHIVE}, the source distribution of {REQUIREMENT}")


def split(sentences: Sequence[Sentence]) -> tuple[list[Sentence], list[Sentence]]:
    """Split into (train, test) in the order of the texts' SHA-256, the same everywhere, with `TEST_SHARE` in test."""
    ordered = sorted(sentences, key=lambda sentence: hashlib.sha256(sentence.text.encode()).digest())
    held_out = round(TEST_SHARE * len(ordered))
    return ordered[held_out:], ordered[:held_out]


class FilmReviews(TaskSpec):
    """The task; without files, sentences come from the archive."""

    @property
    def source(self) -> str:
        """Description of the data set, for model cards."""
        return (
            "sentences of film reviews whose mean rating by people is not 0 (movieReviewSnippets of Hutto and Gilbert, "
            f"ICWSM 2014; MIT licence; from the source distribution of {REQUIREMENT} on PyPI). SST-2 draws from the "
            "same reviews"
        )

    def _fetched(self, request: Request) -> dict[str, datasets.Dataset]:
        """Load the sentences with `load_sentences`, never from the Hub."""
        return self._made(request, *([(s.text, s.label) for s in half] for half in load_sentences()))


FILM_REVIEWS = FilmReviews(
    name="film_reviews",
    folder="film_reviews",
    tsv=TsvLayout(text=("sentence",), label="label", labels=LABELS),
    hub_columns=("sentence",),
    label_names=LABELS,
    metrics=("accuracy",),
    hub_path=None,
)
TASKS.register(FILM_REVIEWS.name, FILM_REVIEWS)
