"""Rows of numbers: the official layouts of UCI, and every kind of bad input."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from data import TASKS, columns
from data_files import write_columns

from snnk_peft.errors import ConfigError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Official sizes would need files of half a million rows."""
    monkeypatch.setattr(columns, "COVER_ENDS", (80, 100))
    monkeypatch.setattr(columns, "HIGGS_TEST", 30)


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
    with pytest.raises(ConfigError, match="is not a folder"):
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
