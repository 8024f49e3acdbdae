"""What `calibrate` reports: divergences by an oracle of their own, files, the number of tokens that are needed."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from snnk_peft import AttentionPart, FFNPart, LowRankPart, SNNKConfig, calibrate, get_snnk_model
from snnk_peft.calibrating.batches import is_held_out
from snnk_peft.calibrating.report import CalibrationReport, SlotReport
from snnk_peft.errors import ConfigError, NumericalWarning
from tests.package.test_attention_fit import PART, sentences, vivid
from tests.package.test_calibration_untouched import patched, texts


def weights_of(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return model.eval()(**batch, output_attentions=True).attentions


@pytest.mark.parametrize("near", [{}, {"near_field": 2, "near_field_normalisation": "joint", "sinks": 1}])
def test_divergences_are_those_of_the_weights(near: dict[str, Any]) -> None:
    """Of the first layer, from the weights that transformers gives for the original and the converted model."""
    original = vivid()
    data = sentences(original)
    held_out = [batch for index, batch in enumerate(data) if is_held_out(index, 0.2)]
    original.set_attn_implementation("eager")
    exact = [weights_of(original, batch)[0] for batch in held_out]
    original = vivid()
    part = AttentionPart(**PART, **near, num_features=12, layers="bottom-1")
    model = get_snnk_model(original, SNNKConfig(attention=part))

    def divergence() -> float:
        total, count = 0.0, 0
        for batch, wanted in zip(held_out, exact, strict=True):
            found = weights_of(model, batch)[0]
            queries, keys = batch["attention_mask"][:, None, :, None].bool(), batch["attention_mask"][:, None, None]
            terms = torch.where(queries & keys.bool(), wanted * (wanted.log() - found.log()), 0.0)
            total, count = total + float(terms.sum()), count + int(batch["attention_mask"].sum()) * wanted.shape[1]
        return total / count

    before = divergence()
    report = calibrate(model, data, progress=False)
    assert report.slots[0].divergence_before == pytest.approx(before, rel=1e-3)
    assert report.slots[0].divergence_after == pytest.approx(divergence(), rel=1e-3)
    assert report.slots[0].divergence_after < 0.5 * before
    assert "KL before -> after" in str(report)


def test_settings_say_what_was_fitted_and_how() -> None:
    model = patched([FFNPart(num_features=6, component="relu", projection="orf", projection_params={"norms": "chi"})])
    report = calibrate(model, texts(), held_out=0.4, ridges=[1e-3], refit=False, progress=False)
    assert report.slots[0].settings == {
        "component": "relu",
        "projection": "orf",
        "component_params": {},
        "projection_params": {"norms": "chi"},
    }
    expected = {"landmarks": "greedy", "held_out": 0.4, "ridges": [1e-3], "refit": False, "steps": 0}
    assert report.settings == {**expected, "batches": 5, "processes": 1}
    assert report.slots[0].divergence_after is None
    assert "KL" not in str(report)


def slot(**changes: Any) -> SlotReport:
    given = {"path": "layer.0", "num_features": 4, "tokens": 50, "held_out_tokens": 10, "ridge": None}
    return SlotReport(**{**given, "error_before": 0.5, "error_after": 0.1, "seconds": 1.0, **changes})


def test_files(tmp_path: Path) -> None:
    report = CalibrationReport(
        [slot(), slot(path="layer.1", error_before=float("inf"), divergence_before=0.4, divergence_after=0.0)],
        {"held_out": 0.2},
    )
    folder = tmp_path / "new" / "folder"
    report.save(folder)
    report.save(str(folder))  # once more
    assert sorted(path.name for path in folder.iterdir()) == ["calibration.json", "calibration.png"]
    data = json.loads((folder / "calibration.json").read_text(), parse_constant=lambda text: pytest.fail(text))
    assert data["slots"][0] == report.to_dict()["slots"][0]
    assert data["slots"][1]["error_before"] is None
    assert (data["seconds"], data["settings"]) == (2.0, {"held_out": 0.2})
    picture = Image.open(folder / "calibration.png").convert("RGB")
    colours = {colour for _, colour in picture.getcolors(1 << 20)}
    assert {(0xB0, 0xB0, 0xB0), (0x1F, 0x77, 0xB4), (0x7A, 0x9E, 0x7E)} <= colours
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file cannot be written to.*give another folder"):
        report.save(tmp_path / "file")
    CalibrationReport().save(tmp_path / "empty")


def test_without_matplotlib_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install snnk-peft\[demo\]"):
        CalibrationReport([slot()]).save(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("part", "needed"),
    [
        (FFNPart(num_features=20), 21),
        (FFNPart(num_features=4, linear_path=True), 21),  # 4 features and 16 inputs
        (AttentionPart(**PART, num_features=40, refit_output=False), 40),
        (AttentionPart(**PART, num_features=4), 17),  # the output projection reads 16 features
        (LowRankPart(rank=12, targets="*.output.dense"), 13),
    ],
)
def test_too_few_tokens_are_told_with_the_number_needed(part: Any, needed: int) -> None:
    def few() -> list[dict[str, torch.Tensor]]:
        return [{key: value[:1, :5] for key, value in batch.items()} for batch in texts(3)]

    with pytest.warns(NumericalWarning, match=rf"\(10 fitted, {needed} needed\).*with {10 * needed} tokens"):
        report = calibrate(patched([part]), few(), held_out=0.34, progress=False)
    assert report.slots[0].needed_tokens == needed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate(patched([part]), texts(), progress=False)
