"""recipes/papers/programs/fit_picture.py: a picture as a function of its coordinates, by sines and by SNNK layers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from papers.lib.sine_network import Sine, SineNetwork, derivatives, low_rank, stand_in
from papers.programs import fit_picture
from papers.programs.fit_picture import PictureRows, read_picture
from PIL import Image
from recipe_world import RECIPES

from snnk_peft.errors import ConfigError
from snnk_peft.layers.snnk_linear import SNNKLinear

CONFIG = str(RECIPES / "papers/configs/pictures/siren.yaml")
SMALL = ["data.size=16", "model.width=48", "train.steps=60", "train.eval_every=20", "train.learning_rate=2e-3"]


def run(folder: Path, *given: str) -> dict:
    assert fit_picture.main([CONFIG, *SMALL, f"output.dir={folder}", *given]) == 0
    return json.loads((folder / "metrics.json").read_text())


def test_dense_and_snnk_fit_a_picture(tmp_path: Path) -> None:
    dense = run(tmp_path / "dense", "method.snnk=null")
    ours = run(tmp_path / "ours")
    learned = run(tmp_path / "learned", "method.snnk.projection=free")
    flat = 10 * math.log10(4 / float(read_picture("china", None, 16).values.var()))  # decibels of the mean value
    assert min(dense["score"], ours["score"], learned["score"]) > flat + 3
    assert (dense["method"], ours["method"]) == ("dense", "sin-gaussian-64")
    assert ours["trainable_parameters"] == 3 * 48 + 48 * 64 + 48 + 48 + 1
    assert learned["trainable_parameters"] == ours["trainable_parameters"] + 64 * 48
    assert dense["trainable_parameters"] == 3 * 48 + 48 * 48 + 48 + 48 + 1
    low_rank = run(tmp_path / "low_rank", "method.kind=low_rank")
    assert low_rank["score"] > flat + 3
    assert low_rank["method"] == "low_rank"
    assert low_rank["trainable_parameters"] == ours["trainable_parameters"]  # rank 64 · 48 / (48 + 48) = 32
    assert (tmp_path / "ours/pictures.png").stat().st_size > 10_000
    assert (tmp_path / "ours/learning_curve.png").is_file()
    run(tmp_path / "ours", "--overwrite", "train.steps=2")


def test_a_file_of_ones_own_and_its_path_is_not_told(tmp_path: Path) -> None:
    ramp = np.tile(np.arange(0, 250, 5, dtype=np.uint8)[:, None, None], (1, 70, 3))  # 50 × 70, brighter downwards
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    picture = read_picture("china", tmp_path / "ramp.png", 20)
    assert picture.values.shape == (20, 20)
    assert (picture.values.diff(dim=0) > 0).all()
    assert (picture.values.diff(dim=1).abs() < 0.02).all()
    report = run(tmp_path / "run", f"data.file={tmp_path / 'ramp.png'}", "train.steps=2")
    assert str(tmp_path) not in json.dumps(report)
    assert report["picture"] == "ramp.png"
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ConfigError, match=r"text\.png cannot be read as an image"):
        read_picture("china", tmp_path / "text.png", 20)


def test_rows_are_examples_and_differences_are_those_of_the_function() -> None:
    y, x = torch.meshgrid(torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 13), indexing="ij")
    picture = PictureRows((2 * y - 3 * x + y**2 / 2 + x**2).float())
    batch = picture.batch([3, 5])
    assert batch["coordinates"].shape == (2, 13, 2)
    torch.testing.assert_close(batch["coordinates"][1, 4], torch.stack([y[5, 4], x[5, 4]]))
    torch.testing.assert_close(batch["values"][0, :, 0], picture.values[3])
    gradient, laplacian = picture.gradient()
    inner = (slice(2, -2), slice(2, -2))
    torch.testing.assert_close(gradient[inner], torch.stack([2 + y, -3 + 2 * x], -1)[inner], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(laplacian[inner], torch.full((5, 9), 3.0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("snnk", [None, {"component": "sin", "projection": "gaussian", "num_features": 32}])
def test_derivatives_are_those_of_the_network(snnk: dict | None) -> None:
    """Against central differences in fp64."""
    torch.manual_seed(0)
    network = SineNetwork(2, 1, 24, 2, 6.0, snnk=snnk, layers=None if snnk is None else [1]).double()
    at, step = torch.rand(5, 2, dtype=torch.float64), 1e-4
    values, gradient, laplacian = derivatives(network, at)

    def value(shift: torch.Tensor) -> torch.Tensor:
        return network(at + shift).values[:, 0].detach()

    total = torch.zeros(5, dtype=torch.float64)
    for axis in range(2):
        shift = torch.zeros(2, dtype=torch.float64)
        shift[axis] = step
        torch.testing.assert_close(gradient[:, axis], (value(shift) - value(-shift)) / (2 * step), rtol=1e-5, atol=1e-6)
        total += (value(shift) + value(-shift) - 2 * values) / step**2
    torch.testing.assert_close(laplacian, total, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_arguments_of_sines_have_unit_size_and_nystrom_starts_near_the_layer() -> None:
    torch.manual_seed(0)
    network = SineNetwork(2, 1, 256, 3, 30.0)
    hidden = network.layers[0](2 * torch.rand(2000, 2) - 1)
    for layer in list(network.layers)[1:4]:
        assert 0.8 < float((layer.omega * hidden @ layer.linear.weight.T).std()) < 1.2
        hidden = layer(hidden)
    layer = Sine(32, 40, 30.0)
    layer.linear.bias.zero_()  # sine features are odd
    x = torch.sin(6 * torch.randn(4000, 32))
    truth = layer(x)
    errors = {}
    for init in ("nystrom", "paper", "random"):
        made = stand_in(layer, {"component": "sin", "projection": "gaussian", "num_features": 256, "init": init}, 0, 0)
        errors[init] = float((made(x) - truth).square().sum() / (truth - truth.mean(0)).square().sum())
    assert errors["nystrom"] < 0.2, errors
    assert errors["nystrom"] < min(errors["paper"], errors["random"])


@torch.no_grad()
def test_a_layer_of_low_rank_has_its_rank_and_starts_with_arguments_of_unit_size() -> None:
    torch.manual_seed(0)
    made = low_rank(256, 32, 30.0)
    x = torch.sin(6 * torch.randn(2000, 256))
    assert 0.8 < float((made[1].omega * made[0](x) @ made[1].linear.weight.T).std()) < 1.2
    made = made.double()
    argument = torch.asin(made(1e-3 * torch.randn(300, 256, dtype=torch.float64)))  # within a quarter of a period
    bias = torch.asin(made(torch.zeros(1, 256, dtype=torch.float64)))
    assert torch.linalg.matrix_rank(argument - bias, rtol=1e-6) == 32
    network = SineNetwork(2, 1, 16, 3, 30.0, layers=[1], rank=4)
    assert [isinstance(layer, torch.nn.Sequential) for layer in network.layers] == [False, False, True, False, False]


def test_only_the_chosen_layers_are_replaced() -> None:
    fields = {"component": "sin", "projection": "gaussian", "num_features": 8}
    network = SineNetwork(2, 1, 16, 3, 30.0, snnk=fields, layers=[1])
    assert [isinstance(layer, SNNKLinear) for layer in network.layers] == [False, False, True, False, False]
