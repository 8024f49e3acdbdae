"""What calibrate reports: divergences by an oracle of their own, files, and errors relative to a variance."""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from snnk_peft import (
    AttentionPart,
    FFNPart,
    LowRankPart,
    NarrowFFNPart,
    PoolerPart,
    SNNKConfig,
    calibrate,
    get_snnk_model,
    plan,
)
from snnk_peft.calibrating.answers import Answers, Comparison
from snnk_peft.calibrating.batches import is_held_out
from snnk_peft.calibrating.report import CalibrationReport, SlotReport
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.solvers.reduce import ErrorMeter
from snnk_peft.solvers.ridge import GramAccumulator
from tests.package.test_attention_fit import PART, sentences, vivid
from tests.package.test_calibration_untouched import patched, texts
from tests.tiny_models import far_from_linear


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
    expected["metric"] = "output"
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
    with pytest.raises(ConfigError, match=r"file', which is a file; expected the path of a folder"):
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


# === batches of one row, outputs that are the same for all rows or no numbers =========================================


PARTS = [FFNPart(num_features=8), FFNPart(num_features=24), PoolerPart(num_features=4)]


def unpadded(count: int, size: int = 1) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(1, 200, (size, 9), generator=generator)} for _ in range(count)]


def split(batches: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that are fitted, and ids that are held out, of `plan` and of calibrate(held_out=0.3)."""
    held = [
        index for index in range(len(batches)) if math.floor((index + 1) * 0.3 + 0.5) > math.floor(index * 0.3 + 0.5)
    ]
    ids = [batch["input_ids"] for batch in batches]
    return torch.cat([x for i, x in enumerate(ids) if i not in held]), torch.cat([ids[i] for i in held])


@pytest.mark.parametrize(
    "problem", [{"num_labels": 1}, {"num_labels": 3, "problem_type": "multi_label_classification"}]
)
def test_a_regression_in_batches_of_one_errs_as_one_in_larger_batches(problem):
    """By numpy on outputs of the model with that layer converted, over all held-out rows together; what a plan predicts
    to second order is within a factor of two of it."""
    model, batches = far_from_linear(**problem), unpadded(20)
    found = plan(model, batches, 0.9, of="macs", parts=PARTS, progress=False)
    part = FFNPart(num_features=24, layers=[1])
    patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(parts=[part], modules_to_save=[]))
    calibrate(patched, batches, held_out=0.3, refit=False, progress=False)
    held_out = split(batches)[1]
    with torch.no_grad():
        wanted, given = (each(input_ids=held_out).logits.double().numpy() for each in (model, patched))
    own = next(c for c in found.candidates if (c.layer, c.size) == (1, "24"))
    error = ((wanted - given) ** 2).sum() / len(wanted) / wanted.var(0).sum()
    assert 0.5 < own.output_error / error < 2
    assert all(0 < c.output_error < 10 for c in found.candidates)


@pytest.mark.parametrize("labels", [1, 2], ids=["regression", "classes"])
@pytest.mark.parametrize("case", ["one row", "one text", "constant output"])
def test_rows_that_are_all_alike_have_errors_that_can_be_compared(case, labels):
    """Relative to the square of the output: 1 is as wrong as zero."""
    model = far_from_linear(num_labels=labels)
    batches = unpadded(3) if case == "one row" else [unpadded(1)[0]] * 6
    if case == "constant output":
        batches = unpadded(6)
        with torch.no_grad():
            model.classifier.weight.zero_()
            model.classifier.bias.fill_(3.0)
    with pytest.warns() if case == "one text" else nullcontext():
        found = plan(model, batches, 0.9, of="macs", parts=PARTS, progress=False)
    errors = [candidate.output_error for candidate in found.candidates]
    assert all(0 <= error < 10 for error in errors)
    assert (case == "constant output") == (max(errors) == 0)
    assert all(0 <= candidate.fit_error < 100 for candidate in found.candidates)


@pytest.mark.parametrize(
    "part", [PoolerPart(num_features=4), FFNPart(num_features=8), NarrowFFNPart(keep=0.5)], ids=repr
)
def test_calibrate_tells_errors_of_one_held_out_row(part):
    """One row of one token, whose target has no variance."""
    batches = [{"input_ids": torch.tensor([[token]])} for token in (5, 9, 40)]
    model = get_snnk_model(far_from_linear(), SNNKConfig(parts=[part], modules_to_save=[]))
    with pytest.warns():  # too few tokens
        report = calibrate(model, batches, progress=False)
    assert all(0 <= each < 100 for slot in report.slots for each in (slot.error_before, slot.error_after))


@pytest.mark.parametrize("labels", [1, 3])
def test_outputs_that_are_no_number_are_no_small_error(labels):
    """The larger of zero and NaN would be zero, which is the error of the best candidate."""
    comparison, logits = Comparison(Answers(far_from_linear(num_labels=labels))), torch.randn(4, labels)
    comparison.update({"logits": logits}, {"logits": torch.where(logits > 0, torch.nan, logits)}, {})
    assert math.isnan(comparison.distance())
    with pytest.raises(ConfigError, match="no token that counts"):
        Comparison(Answers(far_from_linear())).distance()


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e4])
def test_equal_targets_by_hand(scale):
    """Both accumulators: twice the target is as wrong as zero, half of it a quarter."""
    target = torch.full((5, 2), scale, dtype=torch.float64)
    for factor, expected in ((1.0, 0.0), (2.0, 1.0), (0.5, 0.25), (0.0, 1.0)):
        meter = ErrorMeter()
        meter.update(target, factor * target)
        assert meter.value() == pytest.approx(expected, abs=1e-12)
        gram = GramAccumulator(3, 2)
        gram.update(torch.randn(5, 3, dtype=torch.float64), target)
        bias = torch.full((2,), factor * scale, dtype=torch.float64)
        assert gram.held_out_error(torch.zeros(2, 3), bias) == pytest.approx(expected, abs=1e-12)
    meter = ErrorMeter()
    meter.update(torch.zeros(4, 2), torch.ones(4, 2))
    assert meter.value() == math.inf
