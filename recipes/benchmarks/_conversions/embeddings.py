"""Convert a sentence encoder without labels: vectors, similarities and neighbours against the original's, and int8.

    python recipes/benchmarks/convert_models.py embeddings --model path/to/all-MiniLM-L6-v2 --data path/to/glue

The model is the folder of a SentenceTransformer, or of an encoder whose states are averaged. `convert` reads sentences
from the training sets of STS-B, QQP, MNLI and SST-2, without labels and without those used for evaluation. Measured are

- on the sentence pairs of STS-B's development set: the cosine of each vector to the original's, and Spearman's
  correlation of the pairs' similarities with the human scores;
- on 5,000 questions of QQP's development set and premises of MNLI's: recall, the share of the original's ten nearest
  texts that are among the ten nearest, over 500 of the questions; and found, how often the question that is marked as
  its duplicate is among the ten nearest.

int8 is ONNX Runtime's dynamic quantisation, of the original and of each conversion. Speed-ups (`speeds.py`) are over
the original in torch, on 32 x 64 tokens, timed before and after the evaluation. Each seed draws its sentences; the
table has means over the seeds, and the lowest cosine. Figures go to results/convert_embeddings after each model, and
those already there with the same settings are not measured again. embeddings.png is drawn next to them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _bench import report
from data import TASKS
from scipy.stats import spearmanr
from torch import Tensor

from _conversions.curve_points import ORIGINAL, ROUNDED, Speeds
from _conversions.finetuned import timed
from snnk_cli.files import read_json
from snnk_cli.plots import make_axes, store
from snnk_peft import convert
from snnk_peft.calibrating.answers import NEIGHBOURS, Answers
from snnk_peft.converting.door import Opened
from snnk_peft.converting.int8 import bytes_of, exported, runner
from snnk_peft.converting.opened import opened
from snnk_peft.tasks.texts import drawn

Model = Callable[..., Mapping[str, Any]]  # a torch model, or the program in a file
TIMED = "32x64"
SHORTEST = 20  # characters of a text: rows of SST-2 are phrases, many of one or two words
BATCH = 64
TOLD = ("cosine", "least cosine", "spearman", "recall", "found", "speed-up", f"ms per {TIMED} tokens", "bytes")


class Judged(NamedTuple):
    """The texts and scores that vectors are evaluated on.

    Args:
        pairs: the sentences of STS-B, all first ones before the second ones.
        scores: scores of the pairs.
        corpus: texts to search.
        queries: indices of the queries in the corpus.
        duplicates: index of each query's duplicate.
    """

    pairs: list[str]
    scores: list[float]
    corpus: list[str]
    queries: list[int]
    duplicates: list[int]


def judged(data: str, queries: int, corpus: int) -> Judged:
    """Read the development sets of STS-B, QQP and MNLI."""
    stsb, qqp = TASKS["stsb"].load(data, splits=["validation"])["validation"], TASKS["qqp"].load(data)["validation"]
    mnli = TASKS["mnli"].load(data, splits=["validation_matched"])["validation_matched"]
    marked = [
        (row["sentence1"], row["sentence2"])
        for row in qqp
        if row["label"] == 1 and row["sentence1"] != row["sentence2"]
    ][:queries]
    rest = [text for row in chain(qqp, mnli) for text in (row["sentence1"], row["sentence2"])]
    texts = list(dict.fromkeys([*chain(*marked), *rest]))[:corpus]
    place = {text: index for index, text in enumerate(texts)}
    both = [(place[one], place[other]) for one, other in marked]
    return Judged(
        [row["sentence1"] for row in stsb] + [row["sentence2"] for row in stsb],
        [float(row["label"]) for row in stsb],
        texts,
        [one for one, _ in both],
        [other for _, other in both],
    )


def unlabelled(data: str, on: Judged) -> list[str]:
    """Return the training sentences of STS-B, QQP, MNLI and SST-2 that are not used for evaluation."""
    texts, known = [], {*on.pairs, *on.corpus}
    for name in ("stsb", "qqp", "mnli", "sst2"):
        rows = TASKS[name].load(data, splits=["train"])["train"]
        for column in ("sentence1", "sentence2"):
            if column in rows.column_names:
                texts += [text for text in rows[column] if len(text) >= SHORTEST and text not in known]
    return list(dict.fromkeys(texts))


@torch.no_grad()
def vectors(model: Model, door: Opened, texts: Sequence[str]) -> Tensor:
    """Compute unit vectors, one per text."""
    answers, order = Answers(door.model, door.pooling), sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: Any = None
    for start in range(0, len(order), BATCH):
        index = order[start : start + BATCH]
        chosen = [door.prompts[0] + texts[i] for i in index]
        length = {"truncation": True, "max_length": door.max_length or 256}
        inputs = dict(door.reader(chosen, padding=True, return_tensors="pt", **length))
        rows = answers.read(model(**inputs), inputs)["embedding"]
        found = rows.new_empty(len(texts), rows.shape[1]) if found is None else found
        found[index] = rows
    return found


def near(rows: Tensor, queries: Sequence[int]) -> Tensor:
    """Return the indices of each query's ten nearest neighbours."""
    alike = rows[queries] @ rows.T
    alike[torch.arange(len(queries)), queries] = -torch.inf
    return alike.topk(min(NEIGHBOURS, len(rows) - 1)).indices


def figures_of(given: Sequence[Tensor], on: Judged, original: Sequence[Tensor]) -> dict[str, float]:
    """Evaluate the vectors of pairs and corpus against the original's."""
    pairs, corpus = given
    half = len(on.scores)
    alike = (pairs[:half] * pairs[half:]).sum(-1)
    ours, theirs = near(corpus, on.queries), near(original[1], on.queries)
    return {
        "cosine": float((pairs * original[0]).sum(-1).mean()),
        "least cosine": float((pairs * original[0]).sum(-1).min()),
        "spearman": float(spearmanr(alike.numpy(), on.scores).statistic),
        "recall": float((ours.unsqueeze(2) == theirs.unsqueeze(1)).any(2).double().mean()),
        "found": float((ours == torch.tensor(on.duplicates).unsqueeze(1)).any(1).double().mean()),
    }


def measured(name: str, model: Model, door: Opened, on: Judged, original: Any, rounded: Model, repetitions: int) -> Any:
    """Return the figures of a model; an int8 speed-up is relative to `rounded`, whose own is also given."""
    speeds = Speeds({ORIGINAL: door.model, ROUNDED: rounded, name: model}, timed(door.model, TIMED), repetitions)
    speeds.add_round()
    given = original if model is door.model else [vectors(model, door, each) for each in (on.pairs, on.corpus)]
    speeds.add_round()
    return {
        **figures_of(given, on, original),
        "speed-up": speeds.speed_up(name, 1.0 if name.endswith("int8") else None),
        "of rounded": speeds.speed_up(ROUNDED),
        "original ms": 1000 * speeds.original(),
    }


def means(measured: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per model, over the seeds; speeds are those of the machine's fastest passes."""
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for row in measured:
        by_model.setdefault(row["model"], []).append(row)
    of_rounded = max(row["of rounded"] for rows in by_model.values() for row in rows)
    quickest = min(row["original ms"] for rows in by_model.values() for row in rows)
    table = []
    for name, rows in by_model.items():
        mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0] if key in TOLD}
        mean["speed-up"] *= of_rounded if name.endswith("int8") else 1.0
        mean["least cosine"] = min(row["least cosine"] for row in rows)
        mean[f"ms per {TIMED} tokens"] = quickest / mean["speed-up"]
        table.append({"model": name} | {key: mean[key] for key in TOLD})
    return table


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Plot cosine, Spearman and recall over the speed-up, separately for models in torch and in int8."""
    figure, panels = make_axes(1, 3, size=(13, 4))
    for panel, column in zip(panels, ("cosine", "spearman", "recall"), strict=True):
        for int8, label in ((False, "torch"), (True, "ONNX, int8")):
            points = [row for row in rows if row["model"].endswith("int8") == int8]
            panel.plot([row["speed-up"] for row in points], [row[column] for row in points], "o-", label=label)
            for row in points:
                panel.annotate(row["model"].removesuffix(" int8"), (row["speed-up"], row[column]), fontsize=8)
        panel.set(xlabel="times as fast as the original in torch", ylabel=column)
        panel.margins(x=0.15, y=0.15)
    panels[0].legend(frameon=False)
    store(figure, file)


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of model and data."""
    options.add_argument("--model", type=Path, required=True, help="folder of the sentence encoder")
    options.add_argument("--data", required=True, help="folder with GLUE's STS-B, QQP, MNLI and SST-2")
    options.add_argument("--sentences", type=int, default=60_000, help="unlabelled sentences per seed (default 60000)")
    options.add_argument("--budgets", nargs="*", default=["2x"], help="budgets of convert (default 2x)")
    options.add_argument("--seeds", type=int, default=3, help="draws of the sentences (default 3)")
    options.add_argument("--steps", type=int, default=2400, help="steps of recovery (default 2400)")
    options.add_argument("--queries", type=int, default=500, help="questions to search with (default 500)")
    options.add_argument("--corpus", type=int, default=5000, help="texts to search (default 5000)")


def run(arguments: argparse.Namespace) -> None:
    """Measure and write."""
    door = opened(str(arguments.model))
    door.model.eval()
    on = judged(arguments.data, arguments.queries, arguments.corpus)
    texts = unlabelled(arguments.data, on)
    count = min(arguments.sentences, len(texts))
    settings = {
        "model": arguments.model.name,
        "sentences": count,
        "steps": arguments.steps,
        "queries": len(on.queries),
        "corpus": len(on.corpus),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    known = read_json(arguments.output) if arguments.output.exists() else {}
    known = known if known.get("settings") == settings else {}
    # Rows of earlier versions lack the speed of the original in int8, so they are measured again.
    rows = {(row["model"], row["seed"]): row for row in known.get("measured", []) if "of rounded" in row}
    made = known.get("conversions", [])
    original = [vectors(door.model, door, each) for each in (on.pairs, on.corpus)]

    def add(name: str, seed: int, model: Model, size: int) -> None:
        row = measured(name, model, door, on, original, rounded, arguments.repetitions)
        rows[name, seed] = {"model": name, "seed": seed, **row, "bytes": size}
        figures, table = {"settings": settings, "measured": [*rows.values()], "conversions": made}, means(rows.values())
        report(figures, table, arguments.output, "A sentence encoder, converted without labels")
        draw(table, arguments.output.with_name("embeddings.png"))

    def read_by(own: Sequence[str]) -> dict[str, Tensor]:
        return dict(door.reader(own[:BATCH], padding=True, truncation=True, max_length=64, return_tensors="pt"))

    with tempfile.TemporaryDirectory() as folder:
        file = exported(door.model, Path(folder) / "original", [read_by(texts)])
        rounded = runner(file)
        if (ORIGINAL, 0) not in rows:
            add(ORIGINAL, 0, door.model, sum(tensor.nbytes for tensor in door.model.state_dict().values()))
        if (ROUNDED, 0) not in rows:
            add(ROUNDED, 0, rounded, bytes_of(file))
        for seed, name in product(range(arguments.seeds), arguments.budgets):
            if {(name, seed), (f"{name} int8", seed)} <= rows.keys():
                continue
            own = [texts[index] for index in drawn(len(texts), count, seed)]
            options = {"samples": len(own), "steps": arguments.steps, "seed": seed, "progress": False}
            done = convert(str(arguments.model), own, name, inputs=timed(door.model, TIMED), **options)
            print(done.report, flush=True)
            told = done.report.to_dict()
            made = [each for each in made if (each["model"], each["seed"]) != (name, seed)]
            made.append({"model": name, "seed": seed, "seconds": told["seconds"], "recovery": told["recovery"]})
            model = _encoder(done.model)
            add(name, seed, model, sum(tensor.nbytes for tensor in model.state_dict().values()))
            file = exported(model, Path(folder) / f"{name} {seed}", [read_by(own)])
            add(f"{name} int8", seed, runner(file), bytes_of(file))


def _encoder(model: Any) -> Any:
    """Return the transformers model of a SentenceTransformer, or the model itself."""
    return model if hasattr(model, "bundle_report") else model[0].model
