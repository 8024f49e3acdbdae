"""The steps of recipes/gpu.py: programs with their arguments, time limits and what is kept of their results."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from data import TASKS
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from snnk_cli.config import ROOT
from snnk_cli.files import read_json
from snnk_peft.tasks.stdlib_docs import AREAS, load_sentences

PROFILES = ROOT / "recipes/accelerate"
ON_CPU = {"one_gpu.yaml": "cpu.yaml", "multi_gpu.yaml": "multi_cpu.yaml"}  # the profile in place of one for GPUs
SAMPLE = "posrf-orf or relu-gaussian or bert-ffn or calibration or every_way_to_generate or from_the_processor"
SIDE = 32  # pixels of an image


@dataclass(frozen=True)
class Plan:
    """What the command line asks for.

    Args:
        device: "cuda" or "cpu".
        small: sizes at which a processor is done in seconds.
        output: folder of all results.
    """

    device: str
    small: bool
    output: Path

    def of(self, usual: Any, small: Any) -> Any:
        """The size that goes with `--small`, or the usual one."""
        return small if self.small else usual


@dataclass(frozen=True)
class Step:
    """One program.

    Args:
        limit: seconds after which it is ended.
        command: its arguments, from the plan.
        figures: what to keep of its results; raises ValueError if they are not what the step is for.
        cards: GPUs that it needs, where the device is one.
        prepare: writes what it reads.
    """

    limit: int
    command: Callable[[Plan], list[str]]
    figures: Callable[[Plan], dict[str, Any]]
    cards: int = 1
    prepare: Callable[[Plan], None] = lambda plan: None


# --- the steps ------------------------------------------------------------------------------------------------------


def tests(plan: Plan) -> list[str]:
    """Everything in tests/gpu."""
    report = plan.output / "tests.xml"
    only = ["-k", SAMPLE] if plan.small else []
    return [
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "--device",
        plan.device,
        f"--junitxml={report}",
        "-q",
        "-n",
        plan.of("auto", "0"),
        *only,
    ]


def test_figures(plan: Plan) -> dict[str, Any]:
    """How many tests there were."""
    suite = next(ElementTree.parse(plan.output / "tests.xml").iter("testsuite"))
    found = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    if found["tests"] == found["skipped"]:
        raise ValueError("every test was skipped; tests.log says why")
    return found


def training(name: str, profile: str, arguments: Callable[[Plan], Sequence[str]]) -> Callable[[Plan], list[str]]:
    """finetune.py through `accelerate launch`, in bf16, with the results in a folder of the step's name.

    Args:
        name: of the step.
        profile: file in recipes/accelerate.
        arguments: what else it is told.
    """

    def command(plan: Plan) -> list[str]:
        chosen = PROFILES / (ON_CPU.get(profile, profile) if plan.device == "cpu" else profile)
        settings = [
            "train.mixed_precision=bf16",
            f"train.device={'cpu' if plan.device == 'cpu' else 'auto'}",
            f"output.dir={plan.output / name}",
            "output.save_model=false",
            "output.tensorboard=false",
        ]
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(chosen), str(ROOT / "recipes/finetune.py")]
        return [*launcher, *arguments(plan), *settings, "--overwrite"]

    return command


def training_figures(name: str) -> Callable[[Plan], dict[str, Any]]:
    """Score, speed and memory of a run, which must have been where it was wanted."""

    def figures(plan: Plan) -> dict[str, Any]:
        report = read_json(plan.output / name / "metrics.json")
        if not report["device"].startswith(plan.device):
            raise ValueError(f"it ran on {report['device']}; expected {plan.device}")
        kept = ("score", "seconds_per_epoch", "train_seconds", "peak_memory_bytes", "device", "examples")
        return {key: report[key] for key in kept}

    return figures


def of_text(plan: Plan) -> list[str]:
    """MiniLM on docstrings, in three epochs."""
    data = plan.output / "data/text"
    return [
        str(ROOT / "recipes/configs/table.yaml"),
        *(f"data.{split}_file={data / split}.csv" for split in ("train", "eval")),
        *("data.text=text", "data.label=label", f"data.max_length={plan.of(64, 16)}"),
        *(f"train.epochs={plan.of(3, 1)}", f"train.batch_size={plan.of(32, 8)}"),
    ]


def of_images(plan: Plan) -> list[str]:
    """Adapters in a ViT with random weights, on generated images."""
    return [
        str(ROOT / "recipes/configs/cifar10/adapter.yaml"),
        f"model.name_or_path={plan.output / 'data/vit'}",
        f"data.dir={plan.output / 'data/images'}",
        "data.workers=0",
        "augment.flip=0",  # a mirrored wave is one of another class
        *(f"train.epochs={plan.of(3, 1)}", f"train.batch_size={plan.of(64, 8)}"),
    ]


def prepare_text(plan: Plan) -> None:
    """Once for all steps that read it."""
    folder = plan.output / "data/text"
    if not folder.exists():
        folder.mkdir(parents=True)
        write_texts(folder, plan.of(2000, 16))


def prepare_images(plan: Plan) -> None:
    """Images and the model."""
    (plan.output / "data/images").mkdir(parents=True)
    write_pictures(plan.output / "data/images", plan.of(100, 2))
    write_vit(plan.output / "data/vit", plan.of(6, 1))


def attention(plan: Plan) -> list[str]:
    """From 4k to 64k tokens."""
    lengths = plan.of([4096, 8192, 16384, 32768, 65536], [128])
    return [
        str(ROOT / "recipes/benchmarks/attention.py"),
        *("--sections", "forward", "causal", "training", "--lengths", *map(str, lengths), "--flash"),
        *("--device", plan.device, "--dtype", "bfloat16", "--repetitions", plan.of("9", "1")),
        *("--output", str(plan.output / "attention.json")),
    ]


def kernels(plan: Plan) -> list[str]:
    """Of all lengths, with a plot beside the figures."""
    small = ["--lengths", "64", "--batch-sizes", "1", "--compiled"]
    return [
        str(ROOT / "recipes/benchmarks/attention_on_gpu.py"),
        *("--device", plan.device, "--output", str(plan.output / "attention_on_gpu/metrics.json")),
        *plan.of([], small),
    ]


def adapter_step(name: str, model: str, small_model: str) -> Step:
    """At the sizes that are measured on a processor, and its own.

    Args:
        name: of the step.
        model: as `adapter_step.py --model`.
        small_model: the same with `--small`.
    """

    def command(plan: Plan) -> list[str]:
        small = ["--batch-size", "2", "--length", "8", "--processes", "0"] if plan.small else []
        return [
            str(ROOT / "recipes/benchmarks/adapter_step.py"),
            *("--model", plan.of(model, small_model), "--device", plan.device, "--dtype", "bfloat16"),
            *("--repetitions", plan.of("10", "1"), *small, "--output", str(plan.output / f"{name}.json")),
        ]

    kept = ("step_time_ratio", "host_time_ratio", "peak_memory_ratio", "rows", "dtype", "model")
    return Step(40, command, file_figures(f"{name}.json", *kept))


def pairs(plan: Plan) -> list[str]:
    """Of the length and batch of the Long Range Arena."""
    return [
        str(ROOT / "recipes/benchmarks/attention.py"),
        *("--sections", "pairs", "--device", plan.device, "--batch-size", plan.of("32", "1")),
        *("--repetitions", plan.of("9", "1"), "--output", str(plan.output / "pairs.json")),
        *plan.of([], ["--pairs", "posrf-mm", "saderf-orf", "--processes", "1"]),
    ]


def file_figures(name: str, *keys: str) -> Callable[[Plan], dict[str, Any]]:
    """These entries of a JSON file that a benchmark wrote."""

    def figures(plan: Plan) -> dict[str, Any]:
        report = read_json(plan.output / name)
        return {key: report[key] for key in keys}

    return figures


STEPS: dict[str, Step] = {
    "tests": Step(140, tests, test_figures),
    "kernels": Step(115, kernels, file_figures("attention_on_gpu/metrics.json", "card", "forms", "rows", "left_out")),
    "adapter_step": adapter_step("adapter_step", "minilm", "minilm"),
    "adapter_step_bert": adapter_step("adapter_step_bert", "bert_base", "minilm"),
    "adapter_step_llama": adapter_step("adapter_step_llama", "llama12", "llama"),
    "attention": Step(45, attention, file_figures("attention.json", "forward", "causal", "training")),
    "pairs": Step(45, pairs, file_figures("pairs.json", "pairs", "pairs_on")),
    "text": Step(65, training("text", "one_gpu.yaml", of_text), training_figures("text"), prepare=prepare_text),
    "images": Step(
        45, training("images", "one_gpu.yaml", of_images), training_figures("images"), prepare=prepare_images
    ),
    "ddp": Step(60, training("ddp", "multi_gpu.yaml", of_text), training_figures("ddp"), 2, prepare_text),
    "fsdp2": Step(60, training("fsdp2", "fsdp2.yaml", of_text), training_figures("fsdp2"), 2, prepare_text),
}


# --- small data that need no download, on which a GPU shows whether training works ---------------------------------


def write_texts(folder: Path, rows: int) -> None:
    """train.csv and eval.csv with the columns text and label: docstrings of Python's standard library, by area.

    Args:
        folder: is there.
        rows: of train.csv at most; eval.csv has a quarter of that at most.
    """
    for name, sentences, most in zip(("train", "eval"), load_sentences(), (rows, max(1, rows // 4)), strict=True):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows((sentence.text, AREAS[sentence.area]) for sentence in sentences[:most])


def write_pictures(folder: Path, per_class: int) -> None:
    """{train,test}/CLASS/NUMBER.png in the layout of task cifar10: waves, whose direction and colour are the class.

    Args:
        folder: is there.
        per_class: training images of each class; a quarter of that for the test.
    """
    classes = TASKS["cifar10"].label_names
    draw = np.random.default_rng(0)
    places = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE)), -1) / SIDE
    for number, name in enumerate(classes):
        angle = np.pi * number / len(classes)
        colour = np.array([1 + np.cos(2 * angle), 1 + np.sin(2 * angle), 1.0])
        for split, count in (("train", per_class), ("test", max(1, per_class // 4))):
            target = folder / split / name
            target.mkdir(parents=True)
            for index in range(count):
                phase = draw.uniform(0, 2 * np.pi)
                wave = np.sin(20 * places @ np.array([np.cos(angle), np.sin(angle)]) + phase)
                pixels = 60 * (1 + wave)[..., None] * colour / 2 + draw.normal(0, 20, (SIDE, SIDE, 3)) + 40
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(target / f"{index:04d}.png")


def write_vit(folder: Path, layers: int) -> None:
    """A vision transformer with random weights for images of this size, and its image processor.

    Args:
        folder: is made.
        layers: of 192 numbers and 3 heads, as ViT-Ti has them.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": layers, "num_attention_heads": 3, "intermediate_size": 768}
    ViTForImageClassification(ViTConfig(image_size=SIDE, patch_size=4, **sizes)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
