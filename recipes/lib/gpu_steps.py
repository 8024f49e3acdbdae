"""The steps of recipes/gpu.py: programs with their arguments, time limits, and the results to keep."""

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
ON_CPU = {"one_gpu.yaml": "cpu.yaml", "multi_gpu.yaml": "multi_cpu.yaml"}  # profile for GPUs -> its substitute
SAMPLE = "posrf-orf or relu-gaussian or bert-ffn or calibration or every_way_to_generate or from_the_processor"
SIDE = 32  # pixels of an image


@dataclass(frozen=True)
class Plan:
    """The command-line options.

    Args:
        device: "cuda" or "cpu".
        small: use sizes that take seconds on a CPU.
        output: folder of all results.
    """

    device: str
    small: bool
    output: Path

    def of(self, usual: Any, small: Any) -> Any:
        """Return the size for `--small`, or the usual one."""
        return small if self.small else usual


@dataclass(frozen=True)
class Step:
    """A program to run.

    Args:
        limit: seconds after which it is killed.
        command: its arguments, from the plan.
        figures: returns the results to keep; raises ValueError if they fail to show what the step is for.
        cards: number of GPUs it needs, if the device is a GPU.
        prepare: writes its input files.
    """

    limit: int
    command: Callable[[Plan], list[str]]
    figures: Callable[[Plan], dict[str, Any]]
    cards: int = 1
    prepare: Callable[[Plan], None] = lambda plan: None


# --- the steps ------------------------------------------------------------------------------------------------------


def tests(plan: Plan) -> list[str]:
    """Return the arguments that run everything in tests/gpu."""
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
    """Return the number of tests."""
    suite = next(ElementTree.parse(plan.output / "tests.xml").iter("testsuite"))
    found = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    if found["tests"] == found["skipped"]:
        raise ValueError("every test was skipped; tests.log says why")
    return found


def training(name: str, profile: str, arguments: Callable[[Plan], Sequence[str]]) -> Callable[[Plan], list[str]]:
    """Run finetune.py through `accelerate launch` in bf16, with the results in a folder named after the step.

    Args:
        name: name of the step.
        profile: file in recipes/accelerate.
        arguments: further arguments.
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
    """Return the score, speed and memory of a run, and check that it used the requested device."""

    def figures(plan: Plan) -> dict[str, Any]:
        report = read_json(plan.output / name / "metrics.json")
        if not report["device"].startswith(plan.device):
            raise ValueError(f"it ran on {report['device']}; expected {plan.device}")
        kept = ("score", "seconds_per_epoch", "train_seconds", "peak_memory_bytes", "device", "examples")
        return {key: report[key] for key in kept}

    return figures


def of_text(plan: Plan) -> list[str]:
    """Return the arguments that train MiniLM on docstrings for three epochs."""
    data = plan.output / "data/text"
    return [
        str(ROOT / "recipes/configs/table.yaml"),
        *(f"data.{split}_file={data / split}.csv" for split in ("train", "eval")),
        *("data.text=text", "data.label=label", f"data.max_length={plan.of(64, 16)}"),
        *(f"train.epochs={plan.of(3, 1)}", f"train.batch_size={plan.of(32, 8)}"),
    ]


def of_images(plan: Plan) -> list[str]:
    """Return the arguments that train adapters in a ViT with random weights on generated images."""
    return [
        str(ROOT / "recipes/configs/cifar10/adapter.yaml"),
        f"model.name_or_path={plan.output / 'data/vit'}",
        f"data.dir={plan.output / 'data/images'}",
        "data.workers=0",
        "augment.flip=0",  # a mirrored wave belongs to another class
        *(f"train.epochs={plan.of(3, 1)}", f"train.batch_size={plan.of(64, 8)}"),
    ]


def prepare_text(plan: Plan) -> None:
    """Write the texts, once for all steps that read them."""
    folder = plan.output / "data/text"
    if not folder.exists():
        folder.mkdir(parents=True)
        write_texts(folder, plan.of(2000, 16))


def prepare_images(plan: Plan) -> None:
    """Write the images and the model."""
    (plan.output / "data/images").mkdir(parents=True)
    write_pictures(plan.output / "data/images", plan.of(100, 2))
    write_vit(plan.output / "data/vit", plan.of(6, 1))


def attention(plan: Plan) -> list[str]:
    """Return the arguments of benchmarks/attention.py for 4k to 64k tokens."""
    lengths = plan.of([4096, 8192, 16384, 32768, 65536], [128])
    return [
        str(ROOT / "recipes/benchmarks/attention.py"),
        *("--sections", "forward", "causal", "training", "--lengths", *map(str, lengths), "--flash"),
        *("--device", plan.device, "--dtype", "bfloat16", "--repetitions", plan.of("9", "1")),
        *("--output", str(plan.output / "attention.json")),
    ]


def kernels(plan: Plan) -> list[str]:
    """Return the arguments of benchmarks/attention_on_gpu.py at all lengths, which also writes a plot."""
    small = ["--lengths", "64", "--batch-sizes", "1", "--compiled"]
    return [
        str(ROOT / "recipes/benchmarks/attention_on_gpu.py"),
        *("--device", plan.device, "--output", str(plan.output / "attention_on_gpu/metrics.json")),
        *plan.of([], small),
    ]


def adapter_step(name: str, model: str, small_model: str) -> Step:
    """Build the step of benchmarks/adapter_step.py, at the sizes that are also measured on a CPU.

    Args:
        name: name of the step.
        model: value of `adapter_step.py --model`.
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
    """Return the arguments of the `pairs` section of benchmarks/attention.py, with LRA's length and batch size."""
    return [
        str(ROOT / "recipes/benchmarks/attention.py"),
        *("--sections", "pairs", "--device", plan.device, "--batch-size", plan.of("32", "1")),
        *("--repetitions", plan.of("9", "1"), "--output", str(plan.output / "pairs.json")),
        *plan.of([], ["--pairs", "posrf-mm", "saderf-orf", "--processes", "1"]),
    ]


def file_figures(name: str, *keys: str) -> Callable[[Plan], dict[str, Any]]:
    """Return a function that reads these entries of a JSON file written by a benchmark."""

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


# --- small data without a download, enough to check that training works on a GPU -----------------------------------


def write_texts(folder: Path, rows: int) -> None:
    """Write train.csv and eval.csv with the columns text and label: docstrings of Python's standard library, by area.

    Args:
        folder: an existing folder.
        rows: maximum number of rows of train.csv; eval.csv has at most a quarter of that.
    """
    for name, sentences, most in zip(("train", "eval"), load_sentences(), (rows, max(1, rows // 4)), strict=True):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows((sentence.text, AREAS[sentence.area]) for sentence in sentences[:most])


def write_pictures(folder: Path, per_class: int) -> None:
    """Write {train,test}/CLASS/NUMBER.png in the layout of task cifar10: waves, with a direction and colour per class.

    Args:
        folder: an existing folder.
        per_class: training images per class; the test split has a quarter of that.
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
    """Write a vision transformer with random weights for images of this size, and its image processor.

    Args:
        folder: folder to create.
        layers: number of layers, of width 192 with 3 heads as in ViT-Ti.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 192, "num_hidden_layers": layers, "num_attention_heads": 3, "intermediate_size": 768}
    ViTForImageClassification(ViTConfig(image_size=SIDE, patch_size=4, **sizes)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
