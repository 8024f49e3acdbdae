"""Scored rows that are trained on, and rows with two labels, are told with counts; unreadable pictures all at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data import TASKS
from image_layouts import png
from transformers import ViTImageProcessorPil

from snnk_cli import evaluation as repeated_examples
from snnk_cli.evaluation import repeat_notes
from snnk_cli.images import ImageExamples
from snnk_peft.errors import ConfigError


def test_rows_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label\na,1\na,0\nb,1\nc,0\n")
    (tmp_path / "y.csv").write_text("text,label\na,1\nb,0\nd,1\n")
    task = TASKS["table"].with_settings({"train_file": str(tmp_path / "x.csv"), "eval_file": str(tmp_path / "y.csv")})
    data = task.load()
    repeated, two = repeat_notes(task, data["train"], {"validation": data["validation"]})
    assert repeated.startswith("2 of 3 rows of validation are also among those of train")
    assert two.startswith("1 of the 3 different rows of train occur with more than one label (2 of 4 rows)")
    assert repeat_notes(task, data["train"].select([2, 3]), {"validation": data["validation"].select([0, 2])}) == []


def test_pictures_are_compared_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"train/a/0": 1, "train/a/1": 2, "train/b/0": 3, "train/b/1": 1, "val/a/9": 2, "val/b/9": 7}
    for name, value in values.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.png").write_bytes(png(np.full((4, 4, 3), value, np.uint8)))
    task = TASKS["image_folder"].with_settings({"dir": str(tmp_path)})
    data = task.load()
    repeated, two = repeat_notes(task, data["train"], {"validation": data["validation"]})
    assert repeated.startswith("1 of 2 rows of validation")
    assert two.startswith("1 of the 3 different rows of train")
    monkeypatch.setattr(repeated_examples, "MOST_IMAGES", 5)
    assert repeat_notes(task, data["train"], {"validation": data["validation"]})[0].startswith("6 images were not")


def test_unreadable_pictures_are_named_in_one_run(tmp_path: Path) -> None:
    for index in range(30):
        file = tmp_path / f"train/{'ab'[index % 2]}/{index:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(np.zeros((4, 4, 3), np.uint8)) if index < 14 else b"")
    rows = TASKS["image_folder"].with_settings({"dir": str(tmp_path)}).load()["train"]
    bad = sum(int(rows.name(index)[-6:-4]) >= 14 for index in range(len(rows)))
    made = ImageExamples(rows, ViTImageProcessorPil(size={"height": 4, "width": 4}), 3, 2)
    with pytest.raises(ConfigError) as caught:
        list(made.batches([[0], [len(rows) - 1]]))
    first, *listed = caught.value.faults
    assert first.startswith(f"{bad} images cannot be read; expected at most 0")
    assert len(listed) == 11
    assert listed[-1] == f"unreadable: ... and {bad - 10} more"
