"""Compress pretrained models without training: accuracy against parameters and latency, by initialisation.

    python recipes/benchmarks/lowrank_compress.py --resnet path/to/resnet56.safetensors --cifar10 path/to/cifar10
    python recipes/benchmarks/lowrank_compress.py --efficientnet path/to/weights.safetensors --imagenet path/to/pictures
    python recipes/benchmarks/lowrank_compress.py --sst2 path/to/minilm-l6-sst2 --glue path/to/glue

Each pair of options is a study; earlier results of studies that are not requested stay in the file.

resnet: the 3 x 3 convolutions of a CIFAR ResNet's blocks as k x k to `rank` channels, then 1 x 1, batch norms folded in
before. `data` sees every eighth image, without its label; the accuracy is that on the others. If they are from the
training set, like the first 4,000 of CIFAR-10, it shows what is lost and not how well the network generalises.
efficientnet: each pointwise convolution of EfficientNet-Lite0 as two. Agreement with the original's answers; `data` is
fitted on one half of the images and evaluated on the other, then the other way round.
heads: the heads of a fine-tuned BERT, made narrower. `data` sees 2,500 unlabelled training sentences; accuracy on the
872 development sentences. Attention is bilinear up to its softmax, so here `function` is `spectral`.

Latency is the median of alternating repetitions on one batch. compress.png next to the output shows all studies.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench import ROOT, alternate, parser, ratio, show
from data import TASKS
from papers.lib import efficientnet_lite as lite
from papers.lib.cifar_resnet import load_cifar_resnet
from PIL import ImageOps
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, logging

from snnk_cli.files import read_json, write_json
from snnk_cli.plots import make_axes, store
from snnk_cli.run_folder import environment
from snnk_peft import LowRankPart, NarrowHeadsPart, SNNKConfig, bundle, calibrate, get_snnk_model
from snnk_peft.errors import ConfigError
from snnk_peft.layers.low_rank import LowRank
from snnk_peft.tasks.base_image import FilePictures, converted

# Study -> its two options with their help.
PAIRS = {
    "resnet": {"resnet": "safetensors file of a CIFAR ResNet", "cifar10": "folder or archive of CIFAR-10"},
    "efficientnet": {
        "efficientnet": "file that convert_efficientnet_lite.py wrote",
        "imagenet": "folder with images in folders",
    },
    "heads": {"sst2": "folder of a BERT fine-tuned on SST-2", "glue": "folder that holds SST-2/{train,dev}.tsv"},
}
INITS = ("spectral", "function", "data")
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and deviation

Batch = Mapping[str, torch.Tensor]
Parts = Callable[[], list[Any]]


@dataclass(frozen=True)
class Fold:
    """The data to fit on and to evaluate on.

    Args:
        calibration: inputs without labels.
        questions: inputs to evaluate on.
        answers: class ids, one per input, in order.
    """

    calibration: Sequence[Batch]
    questions: Sequence[Batch]
    answers: torch.Tensor


@dataclass(frozen=True)
class Study:
    """A model and how it is compressed.

    Args:
        title: title of table and figure.
        score: name of the share of correct answers.
        original: the model, in eval mode.
        parts: size -> initialisation -> parts of the config.
        folds: folds that together evaluate every input once.
        timed: the batch on which latency is measured.
    """

    title: str
    score: str
    original: nn.Module
    parts: Mapping[str, Mapping[str, Parts]]
    folds: Sequence[Fold]
    timed: Batch


def fold_batch_norms(model: nn.Module) -> nn.Module:
    """Return a copy in which every convolution followed by a batch norm has absorbed it."""
    model = copy.deepcopy(model).eval()
    for parent in model.modules():
        children = list(parent.named_children())
        for (name, first), (other, second) in itertools.pairwise(children):
            if isinstance(first, nn.Conv2d) and isinstance(second, nn.BatchNorm2d):
                setattr(parent, name, fuse_conv_bn_eval(first, second))
                setattr(parent, other, nn.Identity())
    return model


@torch.inference_mode()
def answers(model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    """Return predicted class ids, one per row."""
    outputs = [model(**batch) for batch in batches]
    return torch.cat([getattr(output, "logits", output).argmax(-1) for output in outputs])


def folded(patched: nn.Module, original: nn.Module) -> nn.Module:
    """Return a copy with folded low-rank layers, for a model outside transformers, which `bundle` rejects."""
    small = copy.deepcopy(original)
    for path, module in patched.get_base_model().named_modules():
        if isinstance(module, LowRank):
            small.set_submodule(path.partition(".snnk_slots.")[0], module.fold())
    return small


def compressed(study: Study, make: Parts, fold: Fold, fit: bool) -> tuple[nn.Module, float]:
    """Return the smaller model, and the seconds it took."""
    start = time.perf_counter()
    patched = get_snnk_model(copy.deepcopy(study.original), SNNKConfig(parts=make(), modules_to_save=[]))
    if fit:
        calibrate(patched, fold.calibration, progress=False)
    small = bundle(patched) if isinstance(study.original, PreTrainedModel) else folded(patched, study.original)
    return small.eval(), time.perf_counter() - start


def measure(study: Study, repetitions: int) -> list[dict[str, Any]]:
    """Return one row per size and initialisation; the first is the original."""
    questions = sum(len(fold.answers) for fold in study.folds)
    models: dict[tuple[str, str], nn.Module] = {("original", ""): study.original}
    right = {("original", ""): sum(int((answers(study.original, f.questions) == f.answers).sum()) for f in study.folds)}
    took = {("original", ""): 0.0}
    for size, inits in study.parts.items():
        for init, make in inits.items():
            key = size, init
            # Only fitted models depend on the fold.
            for index, fold in enumerate(study.folds):
                if index == 0 or init == "data":
                    model, seconds = compressed(study, make, fold, init == "data")
                if index == 0:
                    models[key], took[key] = model, seconds
                right[key] = right.get(key, 0) + int((answers(model, fold.questions) == fold.answers).sum())
            print(f"{study.title}: {size}, {init}: {right[key] / questions:.4f}", flush=True)

    def forward(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.inference_mode():
                model(**study.timed)

        return run

    times = alternate({" ".join(key): forward(model) for key, model in models.items()}, repetitions)
    return [
        {
            "size": size,
            "init": init,
            study.score: right[size, init] / questions,
            "parameters": sum(p.numel() for p in model.parameters()),
            "ms": 1000 * statistics.median(times[f"{size} {init}"]),
            "speed-up": ratio(times["original "], times[f"{size} {init}"]),
            "conversion seconds": took[size, init],
        }
        for (size, init), model in models.items()
    ]


def normalised(pictures: Sequence[np.ndarray], mean: Sequence[float], deviation: Sequence[float]) -> torch.Tensor:
    """Convert images (height, width, 3) of bytes to (n, 3, height, width), normalised."""
    found = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255
    return (found - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(deviation).view(-1, 1, 1)


def in_batches(pixels: torch.Tensor, size: int) -> list[Batch]:
    """Split pixels into batches, in order."""
    return [{"pixel_values": batch} for batch in pixels.split(size)]


def low_rank(places: Mapping[str, Sequence[str]], scale: float, init: str) -> list[LowRankPart]:
    """Return low-rank parts for convolutions at a rank scale; `places` maps what follows them to their patterns."""
    start = "spectral" if init == "data" else init  # `calibrate` does the rest
    same = {"kind": "conv", "split": "channel", "rank_scale": scale, "init": start}
    return [LowRankPart(list(patterns), activation=behind, **same) for behind, patterns in places.items()]


def choices(places: Mapping[str, Sequence[str]], asked: argparse.Namespace) -> dict[str, dict[str, Parts]]:
    """Build `Study.parts` of convolutions."""
    return {
        f"rank scale {scale}": {init: partial(low_rank, places, scale, init) for init in asked.inits}
        for scale in asked.rank_scales
    }


def resnet(weights: Path, data: Path, asked: argparse.Namespace) -> Study:
    """Build the study of a CIFAR ResNet: in a block, the first convolution precedes a ReLU, the second the sum."""
    found = TASKS["cifar10"].load(data, splits=["train"])["train"]
    pictures = [np.asarray(found.picture(index)) for index in range(len(found))]
    pixels, labels = normalised(pictures, *IMAGENET), torch.from_numpy(found["label"])
    fitting = torch.arange(len(pixels)) % 8 == 0
    fold = Fold(
        in_batches(pixels[fitting], max(1, int(fitting.sum()) // 10)),
        in_batches(pixels[~fitting], 250),
        labels[~fitting],
    )
    model = fold_batch_norms(load_cifar_resnet(weights, asked.depth))
    places = {"relu": ["layer*.conv1"], "identity": ["layer*.conv2"]}
    return Study(
        f"ResNet-{asked.depth}, CIFAR-10", "accuracy", model, choices(places, asked), [fold], fold.questions[0]
    )


def efficientnet(weights: Path, data: Path, asked: argparse.Namespace) -> Study:
    """Build the study of EfficientNet-Lite0: pointwise convolutions precede a relu6 (ReLU for `function`) or a sum."""
    files = sorted(file for file in data.rglob("*") if file.suffix.lower() in (".jpeg", ".jpg", ".png"))
    if len(files) < 4:
        raise ConfigError(f"{data} holds {len(files)} images in its folders; expected at least 4, JPEG or PNG")
    found = FilePictures(data, [file.relative_to(data).as_posix() for file in files])
    whole = [converted(found.open(index), 3) for index in range(len(found))]
    cropped = [ImageOps.fit(picture, (256, 256)).crop((16, 16, 240, 240)) for picture in whole]
    pixels = normalised([np.asarray(picture) for picture in cropped], [lite.MEAN] * 3, [lite.STD] * 3)
    model = fold_batch_norms(lite.load_efficientnet_lite(weights))
    halves = [pixels[::2], pixels[1::2]]
    folds = [
        Fold(
            in_batches(fitting, max(1, len(fitting) // 10)),
            in_batches(asked, 25),
            answers(model, in_batches(asked, 25)),
        )
        for fitting, asked in (halves, reversed(halves))
    ]
    places = {"relu": ["*.expand.conv", "head.conv"], "identity": ["*.project.conv"]}
    return Study(
        "EfficientNet-Lite0, ImageNet", "agreement", model, choices(places, asked), folds, folds[0].questions[0]
    )


def heads(model: Path, data: Path, asked: argparse.Namespace) -> Study:
    """Build the study of a fine-tuned BERT with narrower heads."""
    task = TASKS["sst2"].load(data)
    chosen = np.random.default_rng(0).permutation(len(task["train"]))[:2500]
    tokenizer = AutoTokenizer.from_pretrained(model)
    original = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()

    def tokenized(sentences: Sequence[str]) -> list[Batch]:
        given = {"truncation": True, "max_length": 64, "padding": True, "return_tensors": "pt"}
        return [dict(tokenizer(list(sentences[i : i + 64]), **given)) for i in range(0, len(sentences), 64)]

    texts, labels = task["validation"]["sentence1"], np.asarray(task["validation"]["label"])
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    unlabelled = sorted((task["train"]["sentence1"][int(index)] for index in chosen), key=len)
    fold = Fold(tokenized(unlabelled), tokenized([texts[i] for i in order]), torch.from_numpy(labels[order]))
    width = original.config.hidden_size // original.config.num_attention_heads
    sizes = {
        f"heads of {size}": {init: partial(narrow, size, init) for init in asked.inits if init != "function"}
        for size in (width // 4, width // 2, 3 * width // 4)
    }
    ids = torch.randint(original.config.vocab_size, (32, 64), generator=torch.Generator().manual_seed(0))
    timed = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Study(f"{model.name}, heads of {width}", "accuracy", original, sizes, [fold], timed)


def narrow(size: int, init: str) -> list[NarrowHeadsPart]:
    """Return the part that narrows all heads of all layers."""
    return [NarrowHeadsPart(head_dim=size, init=init)]


STUDIES: dict[str, Callable[..., Study]] = {"resnet": resnet, "efficientnet": efficientnet, "heads": heads}


def draw(studies: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Plot a panel per study: score over parameters, one line per initialisation."""
    figure, axes = make_axes(1, len(studies), size=(5 * len(studies), 4), squeeze=False)
    for axis, study in zip(axes[0], studies.values(), strict=True):
        first, *others = study["rows"]
        score = study["score"]
        axis.axhline(first[score], color="gray", linestyle=":", label="original")
        for init in dict.fromkeys(row["init"] for row in others):
            rows = [row for row in others if row["init"] == init]
            axis.plot([row["parameters"] / 1e6 for row in rows], [row[score] for row in rows], "o-", label=init)
        axis.axvline(first["parameters"] / 1e6, color="gray", linestyle=":")
        axis.set(xlabel="parameters, millions", ylabel=score, title=study["title"])
        axis.legend()
    store(figure, file)


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "lowrank_compress")
    for name, given in PAIRS.items():
        for option, help in given.items():
            options.add_argument(f"--{option}", type=Path, help=f"{name}: {help}")
    options.add_argument("--depth", type=int, default=56, help="layers of the ResNet")
    options.add_argument("--rank-scales", nargs="+", type=float, default=[0.25, 0.5, 0.75], help="of convolutions")
    options.add_argument("--inits", nargs="+", default=list(INITS), choices=INITS)
    arguments = options.parse_args()
    paths = {name: [getattr(arguments, option) for option in given] for name, given in PAIRS.items()}
    for name, given in paths.items():
        if any(given) and not all(given):
            options.error(f"{name} needs both " + " and ".join(f"--{option}" for option in PAIRS[name]))
    if not any(map(any, paths.values())):
        options.error("nothing to compress; give both options of at least one study")
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    file = arguments.output
    studies = read_json(file)["studies"] if file.exists() else {}
    for name, given in paths.items():
        if any(given):
            study = STUDIES[name](*given, arguments)
            rows = measure(study, arguments.repetitions)
            studies[name] = {"title": study.title, "score": study.score, "rows": rows, "environment": environment(ROOT)}
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"studies": {key: studies[key] for key in PAIRS if key in studies}})
            show(rows, study.title)
    draw(studies, file.with_name("compress.png"))
    print(f"written: {file}")


if __name__ == "__main__":
    main()
