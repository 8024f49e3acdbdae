"""Eigenvalues of what attention learned: against closed forms, all permutations, and draws made with numpy alone."""

# The recipes' folder goes on sys.path before what is imported from it.
# ruff: noqa: E402

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

for package in ("accelerate", "matplotlib", "rich", "yaml"):
    pytest.importorskip(package, reason="pip install snnk-peft[recipes]")

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
sys.path.append(str(RECIPES))

from _lib.lra_model import build_classifier
from _lib.lra_settings import AttentionMethod, LongRangeModel
from _lib.spectra import ROWS_PER_DIMENSION, effective_rank, learned_sites, learned_spectra

from snnk_peft import build_feature_map
from snnk_peft.errors import ConfigError
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.tasks import TASKS

TINY = LongRangeModel(dim=12, hidden_dim=8, heads=3, layers=2, dropout=0.0, attention_dropout=0.0)


def attention(projection: str, dim: int, m: int, heads: int = 1, **params: Any) -> KernelAttention:
    """A layer of linear attention, alone: its site is the name of the whole, ""."""
    maps = [
        build_feature_map("posrf", projection, dim, m, site=f"head {head}", projection_params=params)
        for head in range(heads)
    ]
    return KernelAttention(maps, heads)


def spectrum(layer: KernelAttention) -> np.ndarray:
    return learned_spectra(layer)[""].numpy()


def matrix(layer: KernelAttention, head: int = 0) -> Any:
    return learned_sites(layer)[""][head]


def descending(covariance: np.ndarray) -> np.ndarray:
    return np.linalg.eigvalsh(covariance)[..., ::-1]


# --- formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "diagonal"])
def test_mixtures_have_those_of_each_component(kind: str) -> None:
    layer, rng = attention("gmm", 5, 12, heads=3, components=2, covariance=kind), np.random.default_rng(0)
    expected = []
    for head in range(3):
        roots = rng.normal(size=(2, 5, 5) if kind == "full" else (2, 5))
        with torch.no_grad():
            matrix(layer, head).root.copy_(torch.from_numpy(roots))
            matrix(layer, head).mean.fill_(7.0)  # means do not matter
        covariances = roots @ roots.swapaxes(-1, -2) if kind == "full" else [np.diag(root**2) for root in roots]
        expected.append(descending(np.stack(covariances)))
    assert spectrum(layer) == pytest.approx(np.stack(expected), rel=1e-5, abs=1e-5)


def test_fastfood_over_all_permutations() -> None:
    """d = 3 in blocks of n = 4, two blocks, the second cut: every permutation of both, every row, one by one."""
    layer, rng = attention("fastfood_learned", 3, 6, learn="SGB"), np.random.default_rng(1)
    lengths, gauss, signs = rng.uniform(0.5, 3, 6), rng.normal(size=(2, 4)), rng.normal(size=(2, 3))
    with torch.no_grad():
        for name, value in (("lengths", lengths), ("gauss", gauss), ("signs", signs)):
            getattr(matrix(layer), name).copy_(torch.from_numpy(value))
    two = np.array([[1.0, 1.0], [1.0, -1.0]])
    hadamard, rows = np.kron(two, two), []
    for block, kept in ((0, 4), (1, 2)):
        for permutation in itertools.permutations(range(4)):
            scale = np.diag(gauss[block] / np.linalg.norm(gauss[block]))
            shuffled = np.eye(4)[list(permutation)] @ hadamard @ np.diag([*signs[block], 0.0])
            made = (hadamard @ scale @ shuffled)[:kept, :3] / 2
            rows += list(made * lengths[4 * block : 4 * block + kept, None])
    assert spectrum(layer)[0] == pytest.approx(descending(np.cov(np.array(rows).T, bias=True)), rel=1e-5)


def test_fastfood_of_one_dimension() -> None:
    """A row is ± its length, with the sign of B and G: the variance is that of the numbers themselves."""
    layer = attention("fastfood_learned", 1, 4, learn="SGB")
    lengths, gauss, signs = np.array([1.0, 2.0, 0.5, 3.0]), np.array([0.3, -1, 2, -4]), np.array([1.0, 1, 2, -1])
    with torch.no_grad():
        for name, value in (("lengths", lengths), ("gauss", gauss[:, None]), ("signs", signs[:, None])):
            getattr(matrix(layer), name).copy_(torch.from_numpy(value))
    assert spectrum(layer)[0] == pytest.approx([np.var(lengths * np.sign(gauss) * signs)])


def test_fastfood_with_lengths_alone_is_isotropic() -> None:
    """Rows of numpy's own random directions have them, within four standard errors."""
    layer, rng = attention("fastfood_learned", 4, 8, learn="S"), np.random.default_rng(2)
    lengths = rng.uniform(0.5, 3, 8)
    with torch.no_grad():
        matrix(layer).lengths.copy_(torch.from_numpy(lengths))
    directions = rng.normal(size=(20_000, 8, 4))
    rows = directions / np.linalg.norm(directions, axis=-1, keepdims=True) * lengths[:, None]
    found, squares = spectrum(layer)[0], rows.reshape(-1, 4) ** 2
    assert np.ptp(found) == pytest.approx(0, abs=1e-12)
    assert abs(found[0] - squares.mean()) < 4 * squares.mean(1).std() / len(squares) ** 0.5


def test_rows_that_are_free_are_taken_as_they_are() -> None:
    layer, rng = attention("free", 4, 7), np.random.default_rng(3)
    rows = rng.normal(size=(7, 4)) + 5
    with torch.no_grad():
        matrix(layer).weight.copy_(torch.from_numpy(rows))
    assert spectrum(layer)[0] == pytest.approx(descending(np.cov(rows.T, bias=True)), rel=1e-5)


# --- fresh draws ------------------------------------------------------------------------------------------------------


def test_a_generator_against_the_papers_network_in_numpy() -> None:
    """Four times [linear, batch norm over the rows, LeakyReLU], linear, tanh; within the standard errors of both."""
    layer, rng, m, d = attention("generative", 3, 16), np.random.default_rng(4), 16, 3
    given = {
        "hidden": rng.normal(size=(4, d, d)),
        "row_scale": rng.uniform(0.5, 2, (4, d)),
        "row_shift": rng.normal(size=(4, d)),
        "out": rng.normal(size=(d, d)),
        "out_bias": rng.normal(size=d),
        "skip": np.array([0.2, 1.0, 3.0]),
        "gain": np.array([2.0, 1.0, 0.5]),
    }
    before = matrix(layer).noise.clone()
    with torch.no_grad():
        for name, value in given.items():
            getattr(matrix(layer), name).copy_(torch.from_numpy(value))
    draws, noise = 4000, rng.normal(size=(4000, m, d))
    h = noise
    for weight, scale, shift in zip(given["hidden"], given["row_scale"], given["row_shift"], strict=True):
        h = h @ weight.T
        h = (h - h.mean(1, keepdims=True)) / np.sqrt(h.var(1, keepdims=True) + 1e-5) * scale + shift
        h = np.where(h > 0, h, 0.01 * h)
    rows = given["skip"] * noise + given["gain"] * np.tanh(h @ given["out"].T + given["out_bias"])
    values, vectors = np.linalg.eigh(np.cov(rows.reshape(-1, d).T, bias=True))
    along = (rows - rows.mean((0, 1))) @ vectors[:, ::-1]
    error = (along**2).mean(1).std(0) / draws**0.5  # draws are independent, their rows are not
    error *= (1 + draws * m / (ROWS_PER_DIMENSION * d)) ** 0.5
    found = spectrum(layer)[0]
    assert (np.abs(found - values[::-1]) < 4 * error).all()
    assert np.ptp(found) > 20 * error.max()
    assert torch.equal(matrix(layer).noise, before)  # the model's own draw is back
    assert np.array_equal(spectrum(layer)[0], found)


@pytest.mark.parametrize("projection", ["inn", "bbq"])
def test_scales_and_shifts_of_other_learners(projection: str) -> None:
    """Set to ω = scale ⊙ n + shift: eigenvalues scale², within four standard errors √(2/rows)."""
    scale, shift = np.array([0.5, 2.0, 1.0]), np.array([3.0, -1.0, 0.0])
    layer = attention(projection, 3, 64)
    with torch.no_grad():
        if projection == "inn":
            matrix(layer).log_scale[0].copy_(torch.from_numpy(np.log(scale)))
            matrix(layer).shift[-1].copy_(torch.from_numpy(shift))
        else:
            matrix(layer).log_slope.copy_(torch.from_numpy(np.log(scale)[:, None]).expand(-1, 8))
            matrix(layer).offset.copy_(torch.from_numpy(shift))
    assert spectrum(layer)[0] == pytest.approx([4, 1, 0.25], rel=4 * (2 / (ROWS_PER_DIMENSION * 3)) ** 0.5)


# --- models -----------------------------------------------------------------------------------------------------------


def classifier(**part: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    part = {"component": "posrf", "num_features": 8, **part}
    return build_classifier(TASKS["sparsity_50"], TINY, AttentionMethod(part), 12, seed=0).eval()


def test_every_layer_and_head_is_there_and_starts_at_one() -> None:
    found = learned_spectra(classifier(projection="gmm", per_head=True))
    assert [value.shape for value in found.values()] == [(3, 2, 4)] * 2
    assert all((value == 1).all() for value in found.values())
    assert [f".layer.{layer}.attention" in name for layer, name in enumerate(found)] == [True, True]
    (first, *_), (second, *_) = (value for value in learned_spectra(classifier(projection="generative")).values())
    for value in (first, second):
        assert value.shape == (4,)
        assert value.numpy() == pytest.approx(1, rel=2.5 / ROWS_PER_DIMENSION**0.5)
    assert not torch.equal(first, second)  # every site has noise of its own


def test_terms_and_keys_of_their_own() -> None:
    model = classifier(projection="gmm", separate_maps=True, sum_of=[{"projection": "orf", "separate_maps": False}])
    names = list(learned_sites(model))
    assert len(names) == 4
    assert [name.rpartition(".attention.")[2].split(".terms.")[-1] for name in names] == ["0", "0.key_maps"] * 2
    with torch.no_grad():
        learned_sites(model)[names[1]][0].root.fill_(2.0)  # type: ignore[operator,union-attr]
    found = learned_spectra(model)
    assert [float(found[name].mean()) for name in names] == [1, 4, 1, 1]


@pytest.mark.parametrize(("given", "said"), [("orf", "projection orf"), ("centroids", "centroids"), (None, "softmax")])
def test_nothing_learned_is_refused(given: str | None, said: str) -> None:
    if given == "centroids":
        model: torch.nn.Module = classifier(component="mixture", projection="centroids")
    elif given is None:
        model = build_classifier(TASKS["sparsity_50"], TINY, AttentionMethod(), 12, seed=0)
    else:
        model = classifier(projection=given)
    with pytest.raises(ConfigError, match=f"no covariance is learned.*{said}.*such as projection gmm"):
        learned_spectra(model)


def test_effective_ranks() -> None:
    """Equal eigenvalues count all, a single one counts 1, and those of shares ½, ¼, ¼ count 2^1.5."""
    given = torch.tensor([[3.0, 3.0, 3.0], [5.0, 0.0, 0.0], [2.0, 1.0, 1.0]])
    assert effective_rank(given).tolist() == pytest.approx([3, 1, 2**1.5])
