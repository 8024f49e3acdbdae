"""Ways to make a fine-tuned BERT smaller and faster, side by side: accuracy on SST-2 against latency and seconds spent.

    python recipes/benchmarks/convert_models.py peers --model path/to/minilm-l6-sst2 --data path/to/glue

Every method gets the same training sentences and is asked for the same shares of the multiply-adds of attention and
FFNs. Accuracy and agreement with the teacher's answers are those on the 872 development sentences at 64 tokens, over
draws of the training sentences; latency is that of 32 x 64 tokens, all models in turn in one process; seconds are the
whole conversion.

- ours: FFNPart and `calibrate`, no labels.
- narrow: NarrowFFNPart and `calibrate`, no labels: another way to choose, and weights that stay trainable.
- plan: parts, layers and sizes that `plan` chooses for this share at 64 tokens, and `calibrate`, no labels.
- svd: every FFN matrix becomes two of the rank that is best for its real inputs (activation-aware SVD, that is whitened
  by the covariance of the inputs), no labels; `LowRankPart` and `calibrate` for linear layers are exactly this.
- fisher: heads and units pruned by mask search, rearrangement and tuning (Kwon et al., 2022); uses labels.
- modegpt: Nyström for FFNs, CR for queries and keys, SVD for values and outputs (Lin et al., 2025), no labels.
- uptrained: the SNNK paper's start, then training on labels for as many seconds as ours took in all at this share.

peers.png is written beside the output. Interpolated is what a method reaches at a latency between those of its sizes.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import alternate, ratio, report, show
from _peers import fisher_pruning, modegpt, uptraining
from _peers.blocks import Batch, Cost, model_inputs
from data import TASKS
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from snnk_cli.plots import make_axes, store
from snnk_peft import FFNPart, LowRankPart, NarrowFFNPart, SNNKConfig, bundle, calibrate, get_snnk_model, plan
from snnk_peft.parts.base import Part

Convert = Callable[[nn.Module, Sequence[Batch], float], nn.Module]
SHARES = (0.85, 0.7, 0.58, 0.46)


def calibrated(teacher: nn.Module, batches: Sequence[Batch], *parts: Part) -> nn.Module:
    """A bundle with these parts, fitted."""
    patched = get_snnk_model(copy.deepcopy(teacher), SNNKConfig(parts=[*parts], modules_to_save=[]))
    calibrate(patched, batches, progress=False)
    return bundle(patched).eval()


def ffn_features(config: Any, share: float) -> int:
    """Features of every FFN that leave this share of all multiply-adds; a feature costs as much as a hidden unit."""
    return max(1, round(Cost.of(config).unit_share(share) * config.intermediate_size))


def ours(teacher: nn.Module, batches: Sequence[Batch], share: float) -> nn.Module:
    """FFNs over landmarks."""
    return calibrated(teacher, batches, FFNPart(num_features=ffn_features(teacher.config, share)))


def narrow(teacher: nn.Module, batches: Sequence[Batch], share: float) -> nn.Module:
    """FFNs of fewer hidden units."""
    return calibrated(teacher, batches, NarrowFFNPart(num_features=ffn_features(teacher.config, share)))


def planned(teacher: nn.Module, batches: Sequence[Batch], share: float) -> nn.Module:
    """What `plan` finds among FFNs and heads."""
    ids = torch.ones(1, 64, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": ids}
    found = plan(teacher, [model_inputs(batch) for batch in batches], share, of="macs", inputs=inputs, progress=False)
    return calibrated(teacher, batches, *found.config.parts)


def svd(teacher: nn.Module, batches: Sequence[Batch], share: float) -> nn.Module:
    """FFN matrices of the rank whose two factors cost the share."""
    config: Any = teacher.config
    dim, units = config.hidden_size, config.intermediate_size
    rank = max(1, round(Cost.of(config).unit_share(share) * dim * units / (dim + units)))
    return calibrated(teacher, batches, LowRankPart("ffn", rank=rank, activation="identity"))


METHODS: dict[str, Convert] = {
    "ours": ours,
    "narrow": narrow,
    "plan": planned,
    "svd": svd,
    "fisher": fisher_pruning.prune,
    "modegpt": modegpt.decompose,
}


def methods(names: Sequence[str], rate: float) -> dict[str, Convert]:
    """The functions of these names. "uptrained" gets the seconds that "ours" took before it at the same share."""
    took: dict[float, float] = {}

    def timed(teacher: nn.Module, batches: Sequence[Batch], share: float) -> nn.Module:
        start = time.perf_counter()
        model = ours(teacher, batches, share)
        took[share] = time.perf_counter() - start
        return model

    def uptrained(teacher: nn.Module, batches: Sequence[Batch], share: float) -> nn.Module:
        features = ffn_features(teacher.config, share)
        return uptraining.uptrain(teacher, batches, features, took[share], rate=rate)

    known = {**METHODS, "ours": timed, "uptrained": uptrained}
    return {name: known[name] for name in known if name in names}


@torch.inference_mode()
def answers(model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    """Class ids, one per sentence."""
    return torch.cat([model(**model_inputs(batch)).logits.argmax(-1) for batch in batches])


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


def measure(
    teacher: nn.Module,
    converts: Mapping[str, Convert],
    draws: Sequence[Sequence[Batch]],
    questions: Sequence[Batch],
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A row per method and share, the teacher's first.

    Args:
        teacher: what is converted.
        converts: by name.
        draws: of training sentences, each a list of batches.
        questions: development sentences.
        arguments: shares, repetitions, tokens.
    """
    labels = torch.cat([batch["labels"] for batch in questions])
    taught = answers(teacher, questions)
    models: dict[str, nn.Module] = {"teacher": teacher}
    found: dict[str, dict[str, list[float]]] = {}
    for number, batches in enumerate(draws):
        for share in arguments.shares:
            for name, convert in converts.items():
                start = time.perf_counter()
                model = convert(teacher, batches, share)
                seconds = time.perf_counter() - start
                key = f"{name} {share}"
                given = answers(model, questions)
                cell = found.setdefault(key, {"accuracy": [], "agreement": [], "seconds": []})
                cell["accuracy"].append(float((given == labels).float().mean()))
                cell["agreement"].append(float((given == taught).float().mean()))
                cell["seconds"].append(seconds)
                # No method changes the embeddings, half of all numbers: one copy serves all models.
                model.base_model.embeddings = teacher.base_model.embeddings
                models.setdefault(key, model)
                print(f"draw {number}, {key}: " + ", ".join(f"{n} {v[-1]:.4g}" for n, v in cell.items()), flush=True)

    ids = torch.randint(teacher.config.vocab_size, (32, arguments.tokens), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def forward(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.inference_mode():
                model(**inputs)

        return run

    latency = alternate({key: forward(model) for key, model in models.items()}, arguments.repetitions)
    first = {"accuracy": [float((taught == labels).float().mean())], "agreement": [1.0], "seconds": [0.0]}
    return [
        {
            "method": key.split()[0],
            "share": float(key.split()[1]) if key != "teacher" else 1.0,
            "accuracy": statistics.mean(cell["accuracy"]),
            "spread": statistics.pstdev(cell["accuracy"]),
            "agreement": statistics.mean(cell["agreement"]),
            "speed-up": ratio(latency["teacher"], latency[key]),
            "ms": 1000 * statistics.median(latency[key]),
            "seconds": statistics.mean(cell["seconds"]),
            # Rows of a bundle are buffers.
            "parameters": sum(t.numel() for t in models[key].state_dict().values() if t.is_floating_point()),
        }
        for key, cell in {"teacher": first, **found}.items()
    ]


def at_equal_latency(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per size of the first method, what each method's accuracy is at the same latency.

    Linear between the two nearest sizes of a method, the teacher being its largest; None where it is never as fast.
    """
    teacher, *rest = rows
    names = list(dict.fromkeys(row["method"] for row in rest))
    table = []
    for wanted in (row for row in rest if row["method"] == names[0]):
        line = {"speed-up": wanted["speed-up"], "ms": wanted["ms"], names[0]: wanted["accuracy"]}
        for name in names[1:]:
            points = sorted((row["ms"], row["accuracy"]) for row in rest if row["method"] == name)
            points.append((teacher["ms"], teacher["accuracy"]))
            inside = points[0][0] <= wanted["ms"] <= points[-1][0]
            line[name] = float(np.interp(wanted["ms"], *zip(*points, strict=True))) if inside else None
        table.append(line)
    return table


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Accuracy over latency and over seconds, a line per method; bars are one standard deviation over draws."""
    teacher, *rest = rows
    figure, panels = make_axes(1, 2, size=(11, 4.5), sharey=True)
    for panel, column, label in zip(
        panels, ("ms", "seconds"), ("ms per batch of 32 sentences", "seconds spent on the conversion"), strict=True
    ):
        for name in dict.fromkeys(row["method"] for row in rest):
            points = [(row[column], row["accuracy"], row["spread"]) for row in rest if row["method"] == name]
            x, y, spread = zip(*points, strict=True)
            panel.errorbar(x, y, yerr=spread, marker="o", capsize=3, label=name)
        panel.axhline(teacher["accuracy"], color="tab:gray", linestyle="--", label="teacher")
        panel.set(xlabel=label)
    panels[0].set_ylabel("accuracy on SST-2, development sentences")
    panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    store(figure, file)


def add_options(options: argparse.ArgumentParser) -> None:
    """What is compared, and with what."""
    names = [*METHODS, "uptrained"]
    options.add_argument("--model", type=Path, required=True, help="folder of the fine-tuned classifier, a BERT")
    options.add_argument("--data", required=True, help="folder that holds SST-2/{train,dev}.tsv")
    options.add_argument("--sentences", type=int, default=2500, help="training sentences of a draw (default 2500)")
    options.add_argument("--seeds", type=int, default=3, help="draws of them (default 3)")
    options.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the multiply-adds that stay")
    options.add_argument("--methods", nargs="+", choices=names, default=names, help="which (default: all)")
    options.add_argument("--rate", type=float, default=3e-4, help="learning rate of uptraining (default 3e-4)")
    options.add_argument("--tokens", type=int, default=64, help="of the sentences that are timed (default 64)")
    options.add_argument("--quick", action="store_true", help="one draw of 200 sentences, two shares, one repetition")


def fault(arguments: argparse.Namespace) -> str | None:
    """What cannot be done."""
    if "uptrained" in arguments.methods and "ours" not in arguments.methods:
        return "uptrained takes as long as ours took; expected ours among --methods as well"
    return None


def run(arguments: argparse.Namespace) -> None:
    """Measure and write."""
    if arguments.quick:
        arguments.sentences, arguments.seeds, arguments.repetitions = 200, 1, 1
        arguments.shares = arguments.shares[::3]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    teacher = AutoModelForSequenceClassification.from_pretrained(arguments.model, dtype=torch.float32).eval()
    data = TASKS["sst2"].load(arguments.data)
    texts, labels = data["train"]["sentence1"], data["train"]["label"]
    draws = []
    for seed in range(arguments.seeds):
        chosen = np.random.default_rng(seed).permutation(len(texts))[: arguments.sentences].tolist()
        draws.append(tokenized(tokenizer, [texts[i] for i in chosen], [labels[i] for i in chosen]))
    questions = tokenized(tokenizer, list(data["validation"]["sentence1"]), list(data["validation"]["label"]))

    rows = measure(teacher, methods(arguments.methods, arguments.rate), draws, questions, arguments)
    equal = at_equal_latency(rows)
    given = {"teacher": arguments.model.name, "sentences": arguments.sentences, "seeds": arguments.seeds}
    given |= {"threads": torch.get_num_threads(), "timed": f"32x{arguments.tokens} tokens", "at_equal_latency": equal}
    report(given, rows, arguments.output, "An SST-2 classifier, smaller in several ways")
    show(equal, "Accuracy at equal latency, interpolated")
    draw(rows, arguments.output.with_name("peers.png"))
