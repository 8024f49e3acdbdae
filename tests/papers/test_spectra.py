"""Eigenvalues of what attention learned: against closed forms, all permutations, and draws made with numpy alone."""

from __future__ import annotations

import itertools
import json
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import TASKS
from papers.lib.lra_model import build_classifier
from papers.lib.lra_settings import AttentionMethod, LongRangeModel
from papers.lib.masked_model import build_masked
from papers.lib.mlm_settings import MaskedModelSection
from papers.lib.spectra import ROWS_PER_DIMENSION, effective_rank, learned_sites, learned_spectra
from papers.programs import train_lra
from recipe_world import RECIPES, last_weights
from transformers import BertConfig, BertForSequenceClassification

from snnk_peft import SNNKConfig, build_feature_map, bundle, get_snnk_model
from snnk_peft.errors import ConfigError
from snnk_peft.layers.kernel_attention import KernelAttention

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
    return learned_sites(layer)[""][head].projection


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
        learned_sites(model)[names[1]][0].projection.root.fill_(2.0)  # type: ignore[operator,union-attr]
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


# --- the experiment ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(RECIPES / "papers/programs/spectra.py"))


def sequence_run(folder: Path, *changes: str) -> list[str]:
    """Arguments of a run of seconds."""
    sizes = ["dim=8", "heads=2", "layers=2", "hidden_dim=8"]
    few = [f"data.max_{split}_samples=18" for split in ("train", "validation", "test")]
    steps = ["steps=3", "batch_size=6", "eval_every=3", "learning_rate=0.05", "warmup_steps=0"]
    given = [*(f"model.{size}" for size in sizes), *few, *(f"train.{step}" for step in steps)]
    features = "method.attention={component: posrf, projection: gmm, num_features: 8, per_head: true}"
    config = str(RECIPES / "papers/configs/lra/sparsity.yaml")
    return [config, *given, features, f"output.dir={folder}", *changes]


def pretrained(folder: Path, projection: str) -> None:
    """A folder as pretrain_mlm.py leaves it, untrained."""
    sizes = MaskedModelSection(dim=8, hidden_dim=8, heads=2, layers=1)
    features = {"component": "posrf", "projection": projection, "num_features": 16}
    build_masked(sizes, AttentionMethod(features), 20, 16, seed=0).save_pretrained(folder)


def test_from_runs_and_models_to_the_page(
    program: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_lra.main(sequence_run(tmp_path / "run/seed0")) == 0
    pretrained(tmp_path / "generative/model", "generative")
    small = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=0
    )
    part = {"component": "posrf", "projection": "free", "num_features": 3}
    model = get_snnk_model(BertForSequenceClassification(small), SNNKConfig(attention=part, modules_to_save=[]))
    bundle(model).save_pretrained(tmp_path / "free/bundle")
    (tmp_path / "generative/config.yaml").write_text("task: stdlib_docs\n")  # the run that left model/
    folders, out = [tmp_path / name for name in ("run/seed0", "generative", "free/bundle")], tmp_path / "out"
    assert program["main"]([*map(str, folders), "--output", str(out)]) == 0
    figures = json.loads((out / "metrics.json").read_text())
    run, generative, free = figures["models"]
    assert [model["model"] for model in figures["models"]] == ["seed0", "generative", "bundle"]

    # The mixture: squares of what the checkpoint holds.
    saved = last_weights(folders[0]).items()
    roots = [value.numpy() for name, value in saved if name.endswith("projection.root")]
    assert len(roots) == 4
    assert [layer["layer"] for layer in run["layers"]] == ["layer 1", "layer 2"]
    heads = [head for layer in run["layers"] for head in layer["heads"]]
    for head, root in zip(heads, roots, strict=True):
        expected = np.sort(root.astype(float) ** 2)[:, ::-1]
        assert np.array(head["eigenvalues"]) == pytest.approx(expected)
        assert head["condition"] == pytest.approx((expected[:, 0] / expected[:, -1]).tolist())
        shares = expected / expected.sum(1, keepdims=True)
        assert head["effective_rank"] == pytest.approx(np.exp(-(shares * np.log(shares)).sum(1)).tolist())
    assert max(max(head["condition"]) for head in heads) > 1.05  # three steps have learned something
    assert {head["maximum"] for layer in run["layers"] for head in layer["identity"]} == {1.0}

    # What has not been trained is as it was drawn; three free rows of four numbers have no inverse.
    assert generative["layers"][0]["heads"] == generative["layers"][0]["identity"]
    assert generative["layers"][0]["map"] == "posrf-generative"
    assert free["layers"][0]["heads"] == free["layers"][0]["identity"]
    assert free["layers"][0]["heads"][0]["condition"] == [None]

    page, picture = (out / "README.md").read_text(), (out / "eigenvalues.png").read_bytes()
    assert str(tmp_path) not in page + (out / "metrics.json").read_text()
    first = heads[0]
    assert f"| layer 1 | 1 | {first['minimum']:.3g} | {first['maximum']:.3g} | {first['mean']:.3g} | " in page
    assert "| layer 1 | all | 0 | " in page
    assert page.count("| ∞ |") == 3
    assert len(picture) > 10_000
    for name in ("README.md", "eigenvalues.png"):
        (out / name).unlink()
    assert program["main"](["--render", "--output", str(out)]) == 0
    assert ((out / "README.md").read_text(), (out / "eigenvalues.png").read_bytes()) == (page, picture)


def test_places_and_names(program: dict[str, Any], tmp_path: Path) -> None:
    site = "encoder.layer.1.attention.self.snnk_slots.default.0.kernel"
    said = [program["place"](site + end) for end in ("", ".terms.1", ".terms.0.key_maps", ".key_maps")]
    assert said == ["layer 2", "layer 2, term 2", "layer 2, term 1, keys", "layer 2, keys"]
    folders = [tmp_path / "a/seed0", tmp_path / "b/seed0", tmp_path / "b/seed1"]
    assert program["names"](folders) == ["a/seed0", "b/seed0", "b/seed1"]
    assert program["names"](folders[1:]) == ["seed0", "seed1"]
    with pytest.raises(ConfigError, match="given twice"):
        program["names"]([tmp_path / "a", tmp_path / "b/../a"])


def test_lines_are_means_and_medians(program: dict[str, Any]) -> None:
    """Two heads of two components with spectra (4, 1), (2, 2) and (1, 0), (3, 1): conditions 4, 1, ∞, 3."""
    given = torch.tensor([[[4.0, 1.0], [2.0, 2.0]], [[1.0, 0.0], [3.0, 1.0]]], dtype=torch.float64)
    ranks = [math.exp(-0.8 * math.log(0.8) - 0.2 * math.log(0.2)), 2, 1]
    ranks.append(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))
    heads = [program["figures_of"](head) for head in given]
    assert program["line"](heads) == ["0", "4", "1.75", f"{sum(ranks) / 4:.1f}", "4.0"]


def test_seeds_of_a_model_are_one_model_on_the_page(program: dict[str, Any], tmp_path: Path) -> None:
    def model(name: str, *spectrum: float) -> dict[str, Any]:
        heads = [program["figures_of"](torch.tensor([spectrum], dtype=torch.float64))]
        drawn = [program["figures_of"](torch.ones(1, 2, dtype=torch.float64))]
        layer = {"layer": "layer 1", "map": "posrf-gmm", "dimension": 2, "heads": heads, "identity": drawn}
        return {"model": name, "layers": [layer]}

    models = [model("a/seed0", 4.0, 1.0), model("a/seed11", 3.0, 0.5), model("b/seed0", 2.0, 2.0), model("c", 5.0, 5.0)]
    page = program["render"]({"models": models, "rows_per_dimension": 2048})
    assert "| a | 2 | posrf-gmm | 2 | learned | 0.5 | 4 | 2.12 |" in page
    assert "| a | 2 | posrf-gmm | 2 | as drawn | 1 | 1 | 1 |" in page
    assert "| b | 1 | posrf-gmm | 2 | learned | 2 | 2 | 2 | 2.0 | 1.0 |" in page
    assert "| c | 1 | posrf-gmm | 2 | learned | 5 | 5 | 5 | 2.0 | 1.0 |" in page
    by_head = page.split("## a")[1].split("## b")[0]
    assert "Of the first seed; metrics.json has all." in by_head
    assert "| layer 1 | all | 1 | 4 | 2.5 | " in by_head
    assert page.count("Of the first seed") == 1
    figure: list[Any] = []
    program["draw"].__globals__["eigenvalue_panels"] = lambda rows, file, title: figure.append(rows)
    program["draw"]({"models": models}, tmp_path / "x.png")
    assert figure[0]["a"] == {"layer 1": [[4.0, 1.0], [3.0, 0.5]]}
    assert list(figure[0]) == ["a", "b", "c"]


def test_faults(program: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--output", str(tmp_path / "out")]
    assert program["main"](out) == 2
    assert "no folder was given" in capsys.readouterr().err
    assert program["main"]([str(tmp_path / "absent"), *out]) == 2
    assert "absent is not a folder; expected a run or a model" in capsys.readouterr().err
    pretrained(tmp_path / "orf", "orf")
    assert program["main"]([str(tmp_path / "orf"), *out]) == 2
    assert "no covariance is learned in this model: its attention has projection orf" in capsys.readouterr().err
    assert program["main"](["--render", *out]) == 2
    assert "metrics.json: cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_stored_page_is_that_of_the_stored_figures(program: dict[str, Any]) -> None:
    stored = Path(__file__).resolve().parents[2] / "recipes/papers/programs/results/spectra"
    figures = json.loads((stored / "metrics.json").read_text())
    assert (stored / "README.md").read_text() == program["render"](figures)
