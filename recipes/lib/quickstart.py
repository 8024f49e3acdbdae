"""Data, measurements and output of the quickstart.

It reads film reviews or, if these cannot be fetched, docstrings of Python itself.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import film_reviews
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table
from torch import nn

from snnk_cli.plots import make_axes, store
from snnk_cli.terminal import bar
from snnk_peft.tasks import stdlib_docs


@dataclass(frozen=True)
class Example:
    """A sentence and its label, an index into the labels of its `Corpus`."""

    text: str
    label: int


@dataclass(frozen=True)
class Corpus:
    """The sentences and labels that the quickstart trains on.

    Attributes:
        task: name in `data.TASKS`.
        title: the question about a sentence, for the figure and the model card.
        labels: names of the classes.
        unseen: description of what is new in the test half.
        train: examples to learn from.
        test: examples to test on.
        new: sentences from outside the data set, for the finished model.
    """

    task: str
    title: str
    labels: tuple[str, ...]
    unseen: str
    train: list[Example]
    test: list[Example]
    new: tuple[Example, ...]


class Rows:
    """Sentences in the format that `Examples` reads, without `datasets`, which the quickstart does not install."""

    column_names = ("sentence1", "label")

    def __init__(self, sentences: Sequence[Example]):
        self._sentences = sentences

    def __len__(self) -> int:
        return len(self._sentences)

    def __getitem__(self, column: str) -> list[Any]:
        return [sentence.text if column == "sentence1" else sentence.label for sentence in self._sentences]


def load_corpus(say: Callable[[str], object]) -> Corpus:
    """Load film reviews, or the docstring task if they cannot be fetched; `say` is then called with the reason."""
    try:
        return film_corpus()
    except film_reviews.DownloadError as error:
        say(
            f"No film reviews: {error}.\nThe quickstart continues with another task: sentences from Python's "
            "own docstrings, in six areas. It is harder; its accuracies are not comparable with those on film reviews."
        )
        return docstring_corpus()


def film_corpus() -> Corpus:
    """Load the task of telling positive from negative film review sentences."""
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
    """Load the task of telling which area of the standard library a docstring sentence describes."""
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


CUT = {"truncation": True, "max_length": 64}
BATCH_SIZE = 32

RELOAD = """
import json, sys
import snnk_peft  # lets the Auto classes and pipelines load bundled models
from transformers import pipeline
given = json.load(sys.stdin)
classify = pipeline("text-classification", model=given["folder"], top_k=None)
print(json.dumps(classify(given["texts"], **given["cut"])))
"""


@torch.no_grad()
def quicker_precision(model: nn.Module, batch: dict[str, torch.Tensor]) -> str:
    """Choose train.mixed_precision: bf16 is twice as fast as no (float32) on some CPUs, far slower on others."""
    seconds = {}
    for precision in ("no", "bf16"):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            model(**batch)  # the first pass only warms up
            start = time.perf_counter()
            model(**batch)
            seconds[precision] = time.perf_counter() - start
    return min(seconds, key=seconds.__getitem__)


@torch.no_grad()
def latencies(models: Sequence[nn.Module], shape: tuple[int, int], repetitions: int) -> list[float]:
    """Measure the median milliseconds of one batch of `shape` (batch, tokens) for each model.

    The models take turns, so a busy moment of the machine affects all of them.
    """
    ids = torch.randint(1000, 30000, shape, generator=torch.Generator().manual_seed(0))
    seconds: list[list[float]] = [[] for _ in models]
    for repetition in bar(range(repetitions + 1), "latency"):
        for model, times in zip(models, seconds, strict=True):
            start = time.perf_counter()
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
            if repetition:  # the first pass only warms up
                times.append(time.perf_counter() - start)
    return [1000 * statistics.median(times) for times in seconds]


def weight_bytes(folder: Path) -> int:
    """Return the bytes of the weight files written by `save_pretrained`."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def numbers(model: nn.Module) -> int:
    """Count parameters and floating-point buffers: frozen matrices of feature maps are buffers."""
    return sum(t.numel() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())


def reload_in_fresh_process(folder: Path, texts: list[str]) -> list[dict[str, float]]:
    """Return the class probabilities of each text from `pipeline(...)` in a new Python process."""
    given = json.dumps({"folder": str(folder), "texts": texts, "cut": CUT})
    done = subprocess.run([sys.executable, "-c", RELOAD], input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the bundle in {folder} could not be loaded in a fresh process:\n{done.stderr}")
    return [{score["label"]: score["score"] for score in scores} for scores in json.loads(done.stdout.splitlines()[-1])]


def command_to_try(folder: Path) -> str:
    """Return a shell command that classifies a sentence with the bundle in `folder`."""
    code = (
        "import snnk_peft; from transformers import pipeline; "
        f'print(pipeline("text-classification", {json.dumps(str(folder))})("Write your own sentence here."))'
    )
    python = os.path.relpath(sys.executable)
    return shlex.join([sys.executable if python.startswith("..") else python, "-c", code])


COLORS = ("#9aa5b1", "#6b9e78", "#3b82c4", "#e07a3f")


@dataclass(frozen=True)
class Row:
    """A model in the comparison.

    Attributes:
        name: name of the model.
        correct: number of correctly labelled test sentences.
        total: number of test sentences.
        trained_parameters: number of trained parameters.
        parameters: number of parameters needed to run the model, including frozen matrices.
        bytes: size of the weight files needed to run the model.
        latency_ms: median milliseconds of one batch.
    """

    name: str
    correct: int
    total: int
    trained_parameters: int
    parameters: int
    bytes: int
    latency_ms: float

    @property
    def accuracy(self) -> float:
        """Share of correct labels."""
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy (Wilson 1927)."""
        z, p, n = 1.96, self.accuracy, self.total
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return centre - half, centre + half


def comparison(rows: Sequence[Row], unseen: str) -> Table:
    """Format the rows as a terminal table, with speed-ups over the first row; `unseen` names the test set."""
    table = Table(title=f"accuracy on {unseen} (95 %), median latency of one batch", box=SIMPLE)
    for column in ("", "accuracy", "trained", "weights", "latency", "speed-up"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        low, high = row.interval
        table.add_row(
            row.name,
            f"{row.accuracy:.1%} ± {50 * (high - low):.1f}",
            f"{row.trained_parameters:,}",
            f"{row.bytes / 1e6:.1f} MB",
            f"{row.latency_ms:.0f} ms",
            f"{rows[0].latency_ms / row.latency_ms:.2f} x",
        )
    return table


def predictions(texts: Sequence[str], labels: Sequence[str], scores: Sequence[dict[str, float]]) -> Table:
    """Format text, true label and best score, one line each; a wrong label is red."""
    table = Table(
        title="pipeline('text-classification') on the bundle, in a fresh process", box=SIMPLE, show_lines=True
    )
    for column in ("new sentence", "label", "predicted"):
        table.add_column(column)
    for text, label, score in zip(texts, labels, scores, strict=True):
        best = max(score, key=score.__getitem__)
        color = "green" if best == label else "red"
        table.add_row(escape(text), label, f"[{color}]{best}[/{color}] {score[best]:.0%}")
    return table


def draw(rows: Sequence[Row], title: str, unseen: str, batch: str, chance: float, file: Path) -> None:
    """Plot accuracy, latency and size of the models side by side.

    Args:
        rows: the models, at most four.
        title: title of the figure.
        unseen: what the accuracy refers to, e.g. "unseen sentences".
        batch: what the latency refers to, e.g. "32 × 64 tokens".
        chance: accuracy of guessing.
        file: the PNG to write.
    """
    names = [row.name for row in rows]
    panels = [
        (f"accuracy on {unseen}", [100 * row.accuracy for row in rows], "{:.1f} %"),
        (f"latency of {batch}", [row.latency_ms for row in rows], "{:.0f} ms"),
        ("weights on disk", [row.bytes / 1e6 for row in rows], "{:.1f} MB"),
    ]
    figure, axes = make_axes(1, 3, size=(12, 3.6), sharey=True)
    for axis, (name, values, form) in zip(axes, panels, strict=True):
        axis.barh(names, values, color=COLORS[: len(rows)], height=0.62)
        for place, value in enumerate(values):
            axis.text(0.03 * max(values), place, form.format(value), color="white", weight="bold", va="center")
        axis.set_title(name, fontsize=11, loc="left")
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False)
    errors = [[abs(100 * (row.accuracy - bound)) for row in rows for bound in row.interval[i : i + 1]] for i in (0, 1)]
    axes[0].errorbar(panels[0][1], names, xerr=errors, fmt="none", color="#333333", capsize=4)
    axes[0].axvline(100 * chance, color="white", linestyle=":")
    axes[0].text(100 * chance, len(rows) - 0.55, "chance", ha="center", va="top", fontsize=8)
    axes[0].invert_yaxis()
    figure.suptitle(title)
    store(figure, file, dpi=150)
