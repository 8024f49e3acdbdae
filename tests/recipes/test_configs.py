"""Every YAML of settings: read, and data, model and schedule built on a stand-in of the official layout.

A file in a folder that `STAND_INS` does not know fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import convert
import image_layouts
import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from data import TASKS
from data_files import sentences, write_columns, write_reviews, write_task
from lib.finetuning import Finetuning
from lib.head_fitting import FitHead
from papers.lib.cifar_resnet import CifarResNet
from papers.programs import (
    finetune_kernel,
    fit_picture,
    fit_potential,
    pretrain_mlm,
    train_copy,
    train_lowrank,
    train_lra,
    train_mlp,
    write_listops,
)
from recipe_world import RECIPES, save_classifier, write_world
from safetensors.torch import save_file
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from snnk_cli.config import load_config
from snnk_cli.converting import Converting
from snnk_cli.data import steps_per_epoch
from snnk_cli.training import mean_loss

CONFIGS = [RECIPES / "configs", RECIPES / "papers/configs"]
FILES = {file.relative_to(folder): file for folder in CONFIGS for file in sorted(folder.rglob("*.yaml"))}
TEXTS = FILES.pop(Path("convert/texts.yaml"))  # one call, without a schedule
WNIDS = ("n01440764", "n01443537")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bert/`, and `vit/` as deep as the pretrained one and with more hidden units than any file asks for."""
    folder = write_world(tmp_path_factory.mktemp("models"))
    sizes = {"hidden_size": 16, "intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(folder / "vit")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "vit")
    return folder


def glue(file: Path, models: Path, out: Path) -> list[str]:
    write_task(out, yaml.safe_load(file.read_text())["task"], n_train=20, n_dev=6)
    return [f"data.dir={out}", f"model.name_or_path={models / 'bert'}"]


def uptraining(file: Path, models: Path, out: Path) -> list[str]:
    return [*glue(file, models, out), "method.ffn.layers=top-2"]  # as deep as the model is


def head(file: Path, models: Path, out: Path) -> list[str]:
    write_task(out, "rte", n_train=330, n_dev=6)  # five batches at least, of which one chooses the ridge
    return ["task=rte", f"data.dir={out}", f"model.name_or_path={models / 'bert'}", f"output.dir={out / 'run'}"]


def table(file: Path, models: Path, out: Path) -> list[str]:
    (out / "x.csv").write_text("text,label\n" + "".join(f"a sentence {row},{'ab'[row % 2]}\n" for row in range(20)))
    return [f"data.train_file={out / 'x.csv'}", f"model.name_or_path={models / 'bert'}"]


def reviews(file: Path, models: Path, out: Path) -> list[str]:
    return [f"data.dir={write_reviews(out)}", f"model.name_or_path={models / 'bert'}"]


def conversion(file: Path, models: Path, out: Path) -> list[str]:
    """A tiny classifier with the labels of the task; an epoch of training behind the conversion, which has none."""
    task = TASKS[file.stem]
    save_classifier(out / "model", models / "bert", task)
    given = [f"model.name_or_path={out / 'model'}", "train.epochs=1", "convert.samples=40", "convert.batch_size=4"]
    if task.name == "imdb":
        sizes = ["convert.attention.num_features=4", "convert.ffn.num_features=8", "convert.steps=2"]
        return [*given, *sizes, f"data.dir={write_reviews(out)}"]
    write_task(out, task.name, n_train=40, n_dev=6)
    return [*given, "convert.ffn.num_features=8", f"data.dir={out}"]


def long_range(file: Path, models: Path, out: Path) -> list[str]:
    kind = file.stem.removesuffix("_kl")
    if kind == "text":
        write_reviews(out)
    elif kind == "retrieval":
        for part in ("train", "eval", "test"):
            pairs = "".join(f"{row % 2}\tA\tB\tpaper {row}\tother {row}\n" for row in range(4))
            (out / f"new_aan_pairs.{part}.tsv").write_text(pairs)
    elif kind == "image":
        for name in ("data_batch_1", "test_batch"):
            rows = np.random.default_rng(0).integers(0, 256, (20, 3073), np.uint8)
            rows[:, 0] = np.arange(20) % 2
            (out / f"{name}.bin").write_bytes(rows.tobytes())
    else:
        few = ["data.max_train_samples=4", "data.max_validation_samples=2", "data.max_test_samples=2"]
        if kind.startswith("sparsity"):
            return few  # they make their own data
        sizes = ["--train", "8", "--validation", "4", "--test", "4", "--min-length", "20", "--max-length", "60"]
        assert write_listops.main(["--output", str(out / "listops"), *sizes]) == 0
        return [f"data.dir={out / 'listops'}", *few]
    return [f"data.dir={out}"]


def pictures(write: str, classes: int) -> Callable[[Path, Path, Path], list[str]]:
    def stand_in(file: Path, models: Path, out: Path) -> list[str]:
        data = image_layouts.draw(("train", "test" if write != "class_folders" else "val"), classes, per_class=12)
        if write == "class_folders":
            data_dir = image_layouts.class_folders(out, data, WNIDS)
        else:
            data_dir = getattr(image_layouts, write)(out, data)
        model = RECIPES / "models/vit_cifar" if file.stem == "scratch" else models / "vit"
        return [f"data.dir={data_dir}", f"model.name_or_path={model}", "data.workers=0", "data.max_train_samples=24"]

    return stand_in


def digits(file: Path, models: Path, out: Path) -> list[str]:
    model = RECIPES / "models/vit_digits" if file.stem == "scratch" else models / "vit"
    return [f"model.name_or_path={model}", "data.max_train_samples=24"]


def masked(file: Path, models: Path, out: Path) -> list[str]:
    for split in ("train", "valid"):
        (out / f"wiki.{split}.tokens").write_text("\n".join(sentences()[:200]))
    return ["task=wikitext", f"data.dir={out}"]


def picture(file: Path, models: Path, out: Path) -> list[str]:
    return ["data.size=16"]


def copies(file: Path, models: Path, out: Path) -> list[str]:
    return ["data.length=64"]


def potential(file: Path, models: Path, out: Path) -> list[str]:
    return ["data.points=16"]


def numbers(file: Path, models: Path, out: Path) -> list[str]:
    if file.stem == "mnist":
        drawn = image_layouts.draw(("train", "test"), 10, side=28, colours=False, per_class=12)
        return [f"data.dir={image_layouts.mnist(out, drawn)}"]
    write_columns(out, "covertype", rows=15_200)
    return [f"data.dir={out}"]


# Sizes at which a network of recipes/models is built in a moment; its module paths are the same.
TINY = {
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
    "mobilenet_v2": {"depth_multiplier": 0.1, "image_size": 32},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128, "image_size": 32},
    "vit": {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2},
}


def low_rank(file: Path, models: Path, out: Path) -> list[str]:
    settings = yaml.safe_load(file.read_text())
    data, name = settings["task"].removesuffix("1k"), settings["model"]["name_or_path"]
    writer = pictures("class_folders", 2) if data == "imagenet" else pictures(f"{data}_binary", int(data[5:]))
    given = [text for text in writer(file, models, out) if not text.startswith("model.")]
    if settings["model"].get("weights"):
        save_file(CifarResNet(56).state_dict(), out / "weights.safetensors")
        given.append(f"model.weights={out / 'weights.safetensors'}")
    if (folder := RECIPES.parent / name).is_dir():
        (out / "model").mkdir()
        config = json.loads((folder / "config.json").read_text())
        (out / "model/config.json").write_text(json.dumps({**config, **TINY[config["model_type"]]}))
        reader = json.loads((folder / "preprocessor_config.json").read_text())
        reader |= (
            {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}} if data == "imagenet" else {}
        )
        (out / "model/preprocessor_config.json").write_text(json.dumps(reader))
        given.append(f"model.name_or_path={out / 'model'}")
    return given


# Folder or file of settings -> the recipe, and what writes the data and names the settings that point there.
STAND_INS = {
    "glue": (Finetuning, glue),
    "uptraining.yaml": (Finetuning, uptraining),
    "table.yaml": (Finetuning, table),
    "head.yaml": (FitHead, head),
    "imdb.yaml": (Finetuning, reviews),
    "convert": (Converting, conversion),
    "kernels.yaml": (finetune_kernel.FinetuneKernel, glue),
    "pretrain_mlm.yaml": (pretrain_mlm.PretrainMasked, masked),
    "lowrank": (train_lowrank.LowRankTraining, low_rank),
    "lra": (train_lra.LongRange, long_range),
    "cifar10": (Finetuning, pictures("cifar10_binary", 10)),
    "cifar100": (Finetuning, pictures("cifar100_binary", 100)),
    "digits": (Finetuning, digits),
    "imagenet": (Finetuning, pictures("class_folders", 2)),
    "mlp": (train_mlp.TrainMlp, numbers),
    "pictures": (fit_picture.FitPicture, picture),
    "copy": (train_copy.TrainCopy, copies),
    "potential": (fit_potential.FitPotential, potential),
}


# The stand-ins are a few rows, some of them alike.
@pytest.mark.filterwarnings("ignore:too few tokens for", "ignore:.* held-out rows are also among")
@pytest.mark.parametrize("name", FILES, ids=lambda name: str(name.with_suffix("")))
def test_it_builds_data_model_and_schedule(name: Path, models: Path, tmp_path: Path) -> None:
    file = FILES[name]
    assert name.parts[0] in STAND_INS, f"{file} has no stand-in in this test"
    kind, stand_in = STAND_INS[name.parts[0]]
    first = file.read_text().splitlines()[0]
    assert first.startswith(f"# python recipes/{kind.program} {file.relative_to(RECIPES.parent)}")
    experiment = kind(load_config(kind.settings, file, stand_in(file, models, tmp_path)))
    accelerator = Accelerator(cpu=True)
    data = experiment.data(accelerator)
    torch.manual_seed(0)
    model = experiment.model(data, accelerator, resumed=False)
    train = experiment.config.train
    schedule = experiment.schedule(steps_per_epoch(len(data.train), train.batch_size, train.gradient_accumulation))
    if kind is FitHead:
        assert schedule.total == 0  # fitted when it is made
    else:
        assert schedule.total > 0
        assert 0 < schedule.rate(0, 0) <= train.learning_rate
    (inputs,) = data.train.batches([[0, 1]], epoch=0)
    mean_loss(model.train(), inputs).backward()
    assert any(value.grad is not None for value in experiment.optimizer(model).param_groups[0]["params"])


def test_texts_are_converted_in_one_call(models: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(sentences()[:60]))
    first = TEXTS.read_text().splitlines()[0]
    assert first.startswith(f"# python recipes/convert.py {TEXTS.relative_to(RECIPES.parent)}")
    # Multiply-adds need not be timed.
    few = ["convert.ffn.num_features=8", "convert.of=macs", "convert.budget=0.9", "convert.recover=0"]
    given = [f"model.name_or_path={models / 'bert'}", f"data.texts={tmp_path / 'texts.txt'}", "convert.batch_size=4"]
    assert convert.main([str(TEXTS), *given, *few, f"output.dir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run/plan.json").is_file()
