"""The sentences of the quickstart: film reviews, or, where these cannot be fetched, docstrings of Python itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data import film_reviews

from snnk_peft.tasks import stdlib_docs


@dataclass(frozen=True)
class Example:
    """A sentence and its label, an index into the labels of its `Corpus`."""

    text: str
    label: int


@dataclass(frozen=True)
class Corpus:
    """What the quickstart learns.

    Attributes:
        task: name in `data.TASKS`.
        title: what is asked about a sentence, for the picture and the model card.
        labels: names of the classes.
        unseen: what tells the test half from the training half.
        train: examples to learn from.
        test: examples to be judged by.
        new: sentences that are in no data set, for the finished model.
    """

    task: str
    title: str
    labels: tuple[str, ...]
    unseen: str
    train: list[Example]
    test: list[Example]
    new: tuple[Example, ...]


class Rows:
    """Sentences as `Examples` reads them. The library `datasets` is not among what the quickstart installs."""

    column_names = ("sentence1", "label")

    def __init__(self, sentences: Sequence[Example]):
        self._sentences = sentences

    def __len__(self) -> int:
        return len(self._sentences)

    def __getitem__(self, column: str) -> list[Any]:
        return [sentence.text if column == "sentence1" else sentence.label for sentence in self._sentences]


def load_corpus(say: Callable[[str], object]) -> Corpus:
    """Film reviews; the docstring task if they cannot be fetched, which `say` is then told with the reason."""
    try:
        return film_corpus()
    except film_reviews.DownloadError as error:
        say(
            f"No film reviews: {error}.\nThe quickstart goes on with another task, sentences of Python's own "
            "docstrings in six areas. It is harder: its accuracies do not compare with those of the film reviews."
        )
        return docstring_corpus()


def film_corpus() -> Corpus:
    """Is a sentence of a film review positive or negative?"""
    train, test = ([Example(s.text, s.label) for s in half] for half in film_reviews.load_sentences())
    return Corpus(
        task="film_reviews",
        title="is a sentence of a film review positive or negative?",
        labels=film_reviews.LABELS,
        unseen="unseen sentences",
        train=train,
        test=test,
        new=(
            Example("A warm, clever comedy that I could happily watch again tomorrow.", 1),
            Example("The plot makes no sense, and after an hour I only wanted to go home.", 0),
            Example("It starts slowly, but the last half hour is worth every minute of the wait.", 1),
        ),
    )


def docstring_corpus() -> Corpus:
    """Which area of the standard library does a sentence of a docstring describe?"""
    train, test = ([Example(s.text, s.area) for s in half] for half in stdlib_docs.load_sentences())
    area = stdlib_docs.AREAS.index
    return Corpus(
        task="stdlib_docs",
        title="which area of Python's standard library does a sentence of a docstring describe?",
        labels=stdlib_docs.AREAS,
        unseen="unseen modules",
        train=train,
        test=test,
        new=(
            Example("Decode the compressed bytes and return the characters of the document.", area("text and formats")),
            Example("Wait until every worker has released its lock, then start the next one.", area("concurrency")),
            Example("Send the request to the server and read the headers of its reply.", area("internet")),
        ),
    )
