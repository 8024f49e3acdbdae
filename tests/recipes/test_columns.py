"""Rows of numbers: the official layouts of UCI, and recipes/papers/programs/train_mlp.py."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from column_files import write_columns
from data import TASKS, covertype, higgs
from papers.lib.column_rows import columns_of, standard
from papers.lib.mlp import Perceptron, equal_rank
from papers.programs import train_mlp
from recipe_world import RECIPES

from snnk_peft.errors import ConfigError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Official sizes would need files of half a million rows."""
    monkeypatch.setattr(covertype, "TRAIN", 80)
    monkeypatch.setattr(covertype, "VALIDATION", 20)
    monkeypatch.setattr(higgs, "TEST", 30)


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["covertype", "higgs", "hepmass"])
def test_official_layouts(name: str, packed: bool, small: None, tmp_path: Path) -> None:
    wanted = write_columns(tmp_path, name, packed=packed)
    task = TASKS[name]
    found = task.load(tmp_path)
    assert list(found) == list(task.splits)
    for split, part in found.items():
        values, labels = wanted[split]
        assert part.values.dtype == np.float32
        np.testing.assert_allclose(part.values, values, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(part["label"], labels)
        assert part.values.shape[1] == task.columns
    some = task.load(tmp_path, splits=["train"], max_samples={"train": 7}, seed=3)["train"]
    assert len(some) == 7
    assert all(row.tolist() in wanted["train"][0].astype(np.float32).tolist() for row in some.values)


def test_a_part_of_higgs_in_two_files(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("test", 3)):
        (tmp_path / f"HIGGS_{split}_{count}.csv").write_text("".join(f"1,{'0.5,' * 27}2\n" for _ in range(count)))
    assert {split: len(part) for split, part in TASKS["higgs"].load(tmp_path).items()} == {"train": 5, "test": 3}
    (tmp_path / "HIGGS_test_more.csv").write_text("")
    with pytest.raises(ConfigError, match=r"has 2 files HIGGS_test\*.csv\(.gz\); expected one, or HIGGS.csv"):
        TASKS["higgs"].load(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2,x" + ",0" * 51 + ",3", r"covtype.data, line 3: could not convert string 'x'"),
        ("1,2,3", r"covtype.data, line 3: the number of columns changed from 55 to 3"),
        (",".join(["0"] * 54) + ",9", r"row 3: label 9 \(1 such\); expected 1, 2, 3, 4, 5, 6, 7"),
        ("nan" + ",0" * 53 + ",1", r"covtype.data, line 3: a number is NaN or infinite"),
    ],
)
def test_faults_name_the_line(line: str, message: str, tmp_path: Path) -> None:
    good = ",".join(["0"] * 54) + ",1"
    (tmp_path / "covtype.data").write_text("\n".join([good, good, line, good]) + "\n")
    with pytest.raises(ConfigError, match=message):
        TASKS["covertype"].load(tmp_path)


def test_faults_of_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs data.dir .*, a folder with covtype.data or covtype.data.gz"):
        TASKS["covertype"].load()
    with pytest.raises(ConfigError, match=r"has no covtype.data or covtype.data.gz"):
        TASKS["covertype"].load(tmp_path)
    with pytest.raises(ConfigError, match=r"has no all_train.csv\(.gz\)\n.*has no all_test.csv"):
        TASKS["hepmass"].load(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        TASKS["higgs"].load(tmp_path / "absent")
    whole = gzip.compress(("0," * 54 + "1\n").encode() * 100)
    (tmp_path / "covtype.data.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="fetch it again"):
        TASKS["covertype"].load(tmp_path)
    (tmp_path / "HIGGS.csv").write_text("1" + ",0" * 28 + "\n")
    with pytest.raises(ConfigError, match="has 1 rows; expected more than 500,000"):
        TASKS["higgs"].load(tmp_path)
    (tmp_path / "HIGGS.csv").write_text("1,2\n")
    with pytest.raises(ConfigError, match="2 numbers in a row; expected 29"):
        TASKS["higgs"].load(tmp_path)


@pytest.mark.parametrize(("name", "folder"), [("covertype", "covtype"), ("higgs", "higgs")])
def test_real_files(name: str, folder: str, shared_dir: Path) -> None:
    """The samples at hand; the first row of CoverType as it is printed in its description."""
    found = TASKS[name].load(shared_dir / "data/uci" / folder)
    assert all(np.isfinite(part.values).all() for part in found.values())
    if name == "covertype":
        assert (len(found["train"]), len(found["validation"])) == (11_340, 3_780)
        assert np.unique(found["train"].labels, return_counts=True)[1].tolist() == [1620] * 7
        assert found["train"].values[0, :4].tolist() == [2596, 51, 3, 258]


# --- the recipe -------------------------------------------------------------------------------------------------------


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
    config = str(RECIPES / "papers/configs/mlp/higgs.yaml")
    given = ["model.width=64", "model.second=48", "train.epochs=8", "train.learning_rate=3e-3", f"method.kind={kind}"]
    assert train_mlp.main([config, f"data.dir={tmp_path / 'data'}", f"output.dir={tmp_path / 'run'}", *given]) == 0
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


def test_wrong_settings_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(RECIPES / "papers/configs/mlp/higgs.yaml")
    for given, message in (
        ("task=rte", "task"),
        ("method.snnk.component=rellu", "rellu"),
        ("method.kind=sparse", "method.kind"),
    ):
        assert train_mlp.main([config, f"output.dir={tmp_path / 'run'}", given]) == 2
        assert message in capsys.readouterr().err
