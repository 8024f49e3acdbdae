"""Agreement over latency: conversions and their peers from 1.2 to 6 times the speed, each in fp32 and in int8.

    python recipes/benchmarks/convert_models.py curve --model path/to/minilm-l6-sst2 --data path/to/glue
    python recipes/benchmarks/convert_models.py curve --model .. --data .. --only "plan 2x" original --seeds 1

A point is one way to make a fine-tuned BERT smaller, at one size, calibrated on sentences of one draw (of more than 40
characters: most rows of SST-2's training set are pieces of sentences, and no user's texts are):

- original: as it is, in torch and in int8.
- ffn: `convert` with all FFNs over so many features, ffn+ with 600 steps of recovery. plan: `convert` with a budget of
  the latency that is timed. No labels.
- svd: FFN matrices in low rank, whitened by the covariance of their inputs; no labels.
- fisher, modegpt: pruning by Fisher information (Kwon et al. 2022; uses labels) and MoDeGPT (Lin et al. 2025; no
  labels) to a share of the multiply-adds of heads and FFNs.
- distilled: so many of the layers, trained towards the original's answers for as long as `convert` took for 2x; no
  labels.

Of each model and of its file with int8 Linears (`export`, on batches of the same sentences): the share of the
original's answers that it keeps, KL to them, and accuracy, on the 872 development sentences at 64 tokens; and the speed
of 32 x 64 tokens, original and point in turn in one pass, so that a busy machine slows both. Milliseconds are the
original's in its quickest pass over the speed-up. fp32 is timed in torch, int8 in ONNX Runtime, on as many threads.

A point is written to the figures as soon as it is measured, and a further run measures only what is missing. curve.png
is drawn beside them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import alternate, report, show
from _peers.blocks import Batch, model_inputs
from data import TASKS
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from _conversions.curve_points import REFERENCE, Make, points, timed
from _conversions.sst2 import SHORTEST
from snnk_cli.exporting import ExportedFile
from snnk_cli.files import read_json, write_json
from snnk_cli.plots import make_axes, store
from snnk_peft import export
from snnk_peft.calibrating.answers import Answers, Comparison

CHECKED = 10  # every so many batches are given to `export`
WAYS = ("original", "ffn", "ffn+", "plan", "svd", "fisher", "modegpt", "distilled")


class Judge:
    """Compares a model with the original, on the development sentences and in time."""

    def __init__(self, teacher: nn.Module, questions: Sequence[Batch], repetitions: int):
        self.teacher, self.questions, self.repetitions = teacher, questions, repetitions
        with torch.inference_mode():
            self.expected = [teacher(**model_inputs(batch)).logits for batch in questions]

    def figures(self, model: nn.Module) -> dict[str, float]:
        """Agreement, KL in nats, accuracy."""
        comparison, right, count = Comparison(Answers(self.teacher)), 0, 0
        for batch, expected in zip(self.questions, self.expected, strict=True):
            with torch.inference_mode():
                given = model(**model_inputs(batch)).logits
            comparison.update({"logits": expected}, {"logits": given}, batch)
            right += int((given.argmax(-1) == batch["labels"]).sum())
            count += len(given)
        found = comparison.figures()
        return {"agreement": found["agreement"], "KL": found["divergence"], "accuracy": right / count}

    def speeds(self, models: Mapping[str, nn.Module]) -> dict[str, dict[str, float]]:
        """The original's milliseconds, and its time over the model's, of the quickest pass each."""
        inputs = timed(self.teacher)

        def forward(model: nn.Module) -> Callable[[], None]:
            def run() -> None:
                with torch.inference_mode():
                    model(**inputs)

            return run

        found = {}
        for name, model in models.items():
            taken = alternate({"": forward(self.teacher), name: forward(model)}, self.repetitions)
            least, own = min(taken[""]), min(taken[name])
            found[name] = {"original ms": 1000 * least, "speed-up": least / own}
        return found


def tokenized(tokenizer: Any, sentences: Sequence[str], labels: Sequence[int], length: int = 64) -> list[Batch]:
    """Padded batches of 64 with labels, sentences of similar length together."""
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    batches = []
    for start in range(0, len(order), 64):
        index = order[start : start + 64]
        texts = [sentences[i] for i in index]
        batch = dict(tokenizer(texts, truncation=True, max_length=length, padding=True, return_tensors="pt"))
        batches.append({**batch, "labels": torch.tensor([labels[i] for i in index])})
    return batches


def measured(name: str, make: Make, seed: int, judge: Judge, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """The rows of one point, in fp32 and in int8."""
    start = time.perf_counter()
    model = make(judge.teacher, batches, seed)
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        some_of_them = [model_inputs(batch) for batch in batches[::CHECKED]]
        export(model, "onnx", file, batches=some_of_them, int8=True)
        both = {"fp32": model, "int8": ExportedFile(file)}
        speeds = judge.speeds(both)
        return [
            {"point": name, "seed": seed, "as": kind, **judge.figures(one), **speeds[kind], "seconds": seconds}
            for kind, one in both.items()
        ]


def means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per point, over the seeds: means, and the least agreement."""
    keys = dict.fromkeys((row["point"], row["as"]) for row in rows)
    quickest = min(row["original ms"] for row in rows)
    table = []
    for point, kind in keys:
        same = [row for row in rows if (row["point"], row["as"]) == (point, kind)]
        mean = {
            name: statistics.mean(row[name] for row in same)
            for name in ("speed-up", "agreement", "KL", "accuracy", "seconds")
        }
        least = min(row["agreement"] for row in same)
        table.append({"point": point, "as": kind, "ms": quickest / mean["speed-up"], **mean, "least": least})
    return table


def at_equal_speed(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each point of a plan, the agreement of every way at its speed, linear between two sizes; None beyond them."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in table:
        lines.setdefault(f"{row['point'].split()[0]}, {row['as']}", []).append((row["speed-up"], row["agreement"]))
    found = []
    for row in (row for row in table if row["point"].startswith("plan")):
        line = {"point": f"{row['point']}, {row['as']}", "speed-up": row["speed-up"], "agreement": row["agreement"]}
        for name, known in lines.items():
            known = sorted(known)
            if name.startswith("plan") and name.endswith(row["as"]):
                continue
            inside = known[0][0] <= row["speed-up"] <= known[-1][0]
            line[name] = float(np.interp(row["speed-up"], *zip(*known, strict=True))) if inside else None
        found.append(line)
    return found


def draw(table: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Agreement over latency: a colour per way, full lines in fp32, dashed ones in int8."""
    figure, axes = make_axes(size=(9, 6))
    for number, name in enumerate(WAYS):
        for kind, style in (("fp32", "o-"), ("int8", "s--")):
            known = sorted(
                (row["ms"], row["agreement"]) for row in table if row["point"].split()[0] == name and row["as"] == kind
            )
            if known:
                axes.plot(*zip(*known, strict=True), style, color=f"C{number}", label=f"{name}, {kind}")
    axes.set(xlabel="ms per batch of 32 x 64 tokens", ylabel="share of the original's answers kept")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    store(figure, file)


def add_options(options: argparse.ArgumentParser) -> None:
    """What is compared, and with what."""
    options.add_argument("--model", type=Path, required=True, help="folder of the fine-tuned classifier, a BERT")
    options.add_argument("--data", required=True, help="folder that holds SST-2/{train,dev}.tsv")
    options.add_argument("--sentences", type=int, default=2500, help="training sentences of a draw (default 2500)")
    options.add_argument("--seeds", type=int, default=3, help="draws of them (default 3)")
    options.add_argument("--only", nargs="+", default=[], help='points or ways, such as "plan 2x" or svd')
    options.add_argument("--again", action="store_true", help="measure these anew")


def fault(arguments: argparse.Namespace) -> str | None:
    """What is there to measure."""
    if chosen(arguments.only):
        return None
    return f"--only {' '.join(arguments.only)} names no point; expected some of {', '.join(points(float))}"


def chosen(only: Sequence[str]) -> list[str]:
    """The points of these names or ways; all for none."""
    return [name for name in points(float) if not only or name in only or name.split()[0] in only]


def run(arguments: argparse.Namespace) -> None:
    """Measure what is missing, and write after each point."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    teacher = AutoModelForSequenceClassification.from_pretrained(arguments.model, dtype=torch.float32).eval()
    data = TASKS["sst2"].load(arguments.data)
    questions = tokenized(tokenizer, list(data["validation"]["sentence1"]), list(data["validation"]["label"]))
    judge = Judge(teacher, questions, arguments.repetitions)
    given = {"teacher": arguments.model.name, "sentences": arguments.sentences, "threads": torch.get_num_threads()}
    output, names = arguments.output, chosen(arguments.only)
    rows = earlier(output, given)
    if arguments.again:
        rows = [row for row in rows if row["point"] not in names or row["seed"] >= arguments.seeds]

    def seconds(seed: int) -> float:
        found = [row["seconds"] for row in rows if (row["point"], row["seed"]) == (REFERENCE, seed)]
        if not found:
            raise SystemExit(
                f"distillation takes as long as {REFERENCE!r} took, which was not measured; add it to --only"
            )
        return float(found[0])

    for seed in range(arguments.seeds):
        whole = [row for row in data["train"] if len(row["sentence1"]) > SHORTEST]
        texts, labels = ([row[name] for row in whole] for name in ("sentence1", "label"))
        index = np.random.default_rng(seed).permutation(len(texts))[: arguments.sentences].tolist()
        batches = tokenized(tokenizer, [texts[i] for i in index], [labels[i] for i in index])
        for name, make in points(seconds).items():
            if name in names and not any((row["point"], row["seed"]) == (name, seed) for row in rows):
                rows += measured(name, make, seed, judge, batches)
                write_json(output, {**given, "measured": rows})
                for row in rows[-2:]:
                    told = ("speed-up", "agreement", "KL", "accuracy", "seconds")
                    print(
                        f"{name}, {row['as']}, seed {seed}: " + ", ".join(f"{n} {row[n]:.4g}" for n in told), flush=True
                    )
    table = means(rows)
    equal = at_equal_speed(table)
    report({**given, "measured": rows, "at_equal_speed": equal}, table, output, "SST-2: agreement over latency")
    if equal:
        show(equal, "Agreement at equal speed, interpolated")
    draw(table, output.with_name("curve.png"))


def earlier(output: Path, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What an earlier run measured.

    Raises:
        SystemExit: of another model, or otherwise.
    """
    if not output.exists():
        return []
    found = read_json(output)
    if other := [f"{name} {found.get(name)}, now {value}" for name, value in given.items() if found.get(name) != value]:
        raise SystemExit(f"{output} was measured with {'; '.join(other)}: choose another --output, or remove it")
    rows: list[dict[str, Any]] = found["measured"]
    return rows
