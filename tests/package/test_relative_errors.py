"""Errors relative to a variance, where batches hold one row, outputs are the same for all rows, or are no numbers."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from snnk_peft import FFNPart, NarrowFFNPart, PoolerPart, SNNKConfig, calibrate, get_snnk_model, plan
from snnk_peft.errors import ConfigError
from snnk_peft.planning.damage import OutputError
from snnk_peft.solvers.error_meter import ErrorMeter
from snnk_peft.solvers.ridge import GramAccumulator

PARTS = [FFNPart(num_features=8), FFNPart(num_features=24), PoolerPart(num_features=4)]


def bert(**changes) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**{"vocab_size": 200, **sizes, "initializer_range": 0.2, **changes})
    return BertForSequenceClassification(config).eval()


def texts(count: int, size: int = 1) -> list[dict[str, torch.Tensor]]:
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
    """By numpy on outputs of the model with that layer converted, over all held-out rows together."""
    model, batches = bert(**problem), texts(20)
    found = plan(model, batches, 0.9, of="macs", parts=PARTS, progress=False)
    part = FFNPart(num_features=24, layers=[1])
    patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(parts=[part], modules_to_save=[]))
    calibrate(patched, batches, held_out=0.3, refit=False, progress=False)
    held_out = split(batches)[1]
    with torch.no_grad():
        wanted, given = (each(input_ids=held_out).logits.double().numpy() for each in (model, patched))
    own = next(c for c in found.candidates if (c.layer, c.size) == (1, "24"))
    assert own.output_error == pytest.approx(
        ((wanted - given) ** 2).sum() / len(wanted) / wanted.var(0).sum(), rel=1e-3
    )
    assert all(0 < c.output_error < 10 for c in found.candidates)


@pytest.mark.parametrize("labels", [1, 2], ids=["regression", "classes"])
@pytest.mark.parametrize("case", ["one row", "one text", "constant output"])
def test_rows_that_are_all_alike_have_errors_that_can_be_compared(case, labels):
    """Relative to the square of the output: 1 is as wrong as zero."""
    model = bert(num_labels=labels)
    batches = texts(3) if case == "one row" else [texts(1)[0]] * 6
    if case == "constant output":
        batches = texts(6)
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
    model = get_snnk_model(bert(), SNNKConfig(parts=[part], modules_to_save=[]))
    with pytest.warns():  # too few tokens
        report = calibrate(model, batches, progress=False)
    assert all(0 <= each < 100 for slot in report.slots for each in (slot.error_before, slot.error_after))


@pytest.mark.parametrize("labels", [1, 3])
def test_outputs_that_are_no_number_are_no_small_error(labels):
    """The larger of zero and NaN would be zero, which is the error of the best candidate."""
    error, logits = OutputError(bert(num_labels=labels).config), torch.randn(4, labels)
    error.update({"logits": logits}, {"logits": torch.where(logits > 0, torch.nan, logits)}, None)
    assert math.isnan(error.value())
    with pytest.raises(ConfigError, match="no token that counts"):
        OutputError(bert().config).value()


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
