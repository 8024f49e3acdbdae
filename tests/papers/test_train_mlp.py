"""recipes/papers/programs/train_mlp.py on rows of numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data import TASKS, columns
from data_files import write_columns
from papers.lib.mlp import Perceptron, equal_rank
from papers.programs import train_mlp
from papers.programs.train_mlp import columns_of, standard
from recipe_world import RECIPES


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Official sizes would need files of half a million rows."""
    monkeypatch.setattr(columns, "COVER_ENDS", (80, 100))
    monkeypatch.setattr(columns, "HIGGS_TEST", 30)


def test_columns_are_standardised_and_constant_ones_survive(small: None, tmp_path: Path) -> None:
    write_columns(tmp_path, "covertype")
    rows = TASKS["covertype"].load(tmp_path)["train"]
    rows.values[:, 3] = 7.0
    shift, scale = standard(rows)
    scaled = (rows.values - shift) / scale
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(np.delete(scaled.std(0), 3), 1, rtol=1e-5)
    assert not scaled[:, 3].any()


def test_pixels_are_columns() -> None:
    rows = TASKS["digits"].load(splits=["train"])["train"].select([0, 5])
    found = columns_of(rows)
    assert found.values.shape == (2, np.asarray(rows.picture(0)).size)
    np.testing.assert_allclose(found.values[1], np.asarray(rows.picture(1).convert("L")).ravel() / 255, rtol=1e-6)
    assert found.labels.tolist() == rows.labels.tolist()


@pytest.mark.parametrize("kind", ["snnk", "dense", "low_rank"])
def test_every_kind_learns_and_bundles(kind: str, small: None, tmp_path: Path) -> None:
    """Classes that a line separates: all three learn them, from the files to the report."""
    write_columns(tmp_path / "data", "higgs", rows=1500)
    config = str(RECIPES / "papers/configs/mlp/columns.yaml")
    sizes = ["model.width=64", "model.second=48", "train.epochs=8", "train.learning_rate=3e-3"]
    given = ["task=higgs", f"data.dir={tmp_path / 'data'}", f"output.dir={tmp_path / 'run'}", f"method.kind={kind}"]
    assert train_mlp.main([config, *given, *sizes]) == 0
    report = json.loads((tmp_path / "run/metrics.json").read_text())
    assert report["validation"]["accuracy"] > 0.85
    assert report["score"] > 0.7  # of 30 rows
    assert report["examples"]["validation"] == pytest.approx(report["examples"]["train"] / 9, rel=0.05)
    first, last = 28 * 64 + 64, 48 * 2 + 2
    rank = equal_rank(64, 48, 32)
    second = {"snnk": 48 * 32 + 48, "dense": 64 * 48 + 48, "low_rank": rank * (64 + 48) + 48}[kind]
    assert report["trainable_parameters"] == first + second + last
    folded = first + 2 * 32 + 2 if kind == "snnk" else report["trainable_parameters"]
    assert report["bundled_parameters"] == folded
    assert report["bundle_difference"] < 1e-4
    assert str(tmp_path) not in json.dumps(report)


def test_low_rank_has_no_more_numbers_than_snnk_and_nearly_as_many() -> None:
    for width, second, features in ((512, 512, 32), (64, 48, 32), (512, 100, 8)):
        rank = equal_rank(width, second, features)
        assert rank * (width + second) <= features * second < (rank + 1) * (width + second)


@torch.no_grad()
def test_a_bundle_computes_the_same() -> None:
    torch.manual_seed(0)
    network = Perceptron(10, 3, 20, 16, 0.3, snnk={"component": "relu", "projection": "gaussian", "num_features": 8})
    x = torch.randn(5, 10)
    bundled = network.eval().bundled()
    torch.testing.assert_close(bundled(x).logits, network(x).logits, rtol=1e-4, atol=1e-5)
    assert bundled.last.weight.shape == (3, 8)
