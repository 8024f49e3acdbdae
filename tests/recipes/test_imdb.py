"""The task imdb: whole reviews from the official files, in the same order everywhere, and every kind of bad input."""

from __future__ import annotations

import tarfile
from pathlib import Path

import datasets
import pytest
from data import TASKS, imdb
from imdb_files import write_reviews

from snnk_peft.errors import ConfigError

TASK = TASKS["imdb"]


def rows(data) -> dict[str, list[tuple[str, int]]]:
    return {split: list(zip(part["sentence1"], part["label"], strict=True)) for split, part in data.items()}


def test_every_review_once_with_its_label(tmp_path: Path) -> None:
    found = rows(TASK.load(write_reviews(tmp_path)))
    assert {split: len(part) for split, part in found.items()} == {"train": 36, "validation": 4, "test": 6}
    wanted = {(f"{kind} train {n} naïve", label) for label, kind in enumerate(("neg", "pos")) for n in range(20)}
    assert {*found["train"], *found["validation"]} == wanted
    assert {text.split()[1] for text, _ in found["test"]} == {"test"}
    # The files stand by class; the first rows of a split are of both.
    assert {label for _, label in found["train"][:8]} == {0, 1}
    assert TASK.validation_splits == ("validation",)
    assert TASK.label_names == ("negative", "positive")


def test_the_archive_holds_the_same(tmp_path: Path) -> None:
    write_reviews(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with tarfile.open(tmp_path / "b/aclImdb.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "a/aclImdb", "aclImdb")
    wanted = rows(TASK.load(tmp_path / "a"))
    for place in (tmp_path / "a/aclImdb", tmp_path / "b", tmp_path / "b/aclImdb.tar.xz"):
        assert rows(TASK.load(place)) == wanted


def test_so_does_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real `load_dataset`, on a local folder with the columns of the Hub's copy, which has its own row order."""
    wanted = rows(TASK.load(write_reviews(tmp_path)))
    for part in ("train", "test"):
        files = sorted((tmp_path / "aclImdb" / part).glob("[np]*/*.txt"))
        content = {"text": [f.read_text() for f in files], "label": [int(f.parent.name == "pos") for f in files]}
        (tmp_path / "hub").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(content).to_parquet(tmp_path / f"hub/{part}.parquet")
    monkeypatch.setattr(imdb, "HUB", str(tmp_path / "hub"))
    assert rows(TASK.load(cache_dir=tmp_path / "cache")) == wanted
    assert rows(TASK.load(splits=["test"], cache_dir=tmp_path / "cache")) == {"test": wanted["test"]}


def test_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imdb, "HUB", "snnk-peft-tests/absent")
    for given, fault in (
        ({}, r"give data\.dir"),
        ({"data_dir": tmp_path / "none"}, "does not exist"),
        ({"data_dir": tmp_path}, "holds no aclImdb"),
        ({"data_dir": tmp_path, "splits": ["tset"]}, "did you mean 'test'"),
    ):
        with pytest.raises(ConfigError, match=fault):
            TASK.load(**given)
    write_reviews(tmp_path / "few", train=4)
    with pytest.raises(ConfigError, match="8 training reviews, of which one in 10 validates"):
        TASK.load(tmp_path / "few")
    assert len(TASK.load(tmp_path / "few", splits=["test"])["test"]) == 6
    write_reviews(tmp_path / "bad")
    (tmp_path / "bad/aclImdb/test/pos/1_7.txt").write_text(" ")
    for file in (tmp_path / "bad/aclImdb/train/neg").iterdir():
        file.unlink()
    with pytest.raises(ConfigError) as caught:
        TASK.load(tmp_path / "bad")
    assert "test/pos/1_7.txt is empty" in str(caught.value)
    assert "no review train/neg" in str(caught.value)
