"""Every part in a model, and every component over every projection, on a device against fp64 on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from snnk_peft import AdapterPart, FFNPart, PoolerPart, SNNKConfig, bundle, calibrate, get_snnk_model
from snnk_peft.config_parts import part_name
from snnk_peft.feature_map import FeatureMap
from snnk_peft.parts import PARTS as REGISTERED
from tests.every_part import PAIRS, PARTS, pair
from tests.gpu.agreement import agree, every_dtype, gradients_agree, moved
from tests.tiny_models import inputs_for, tiny, trained

pytestmark = pytest.mark.gpu
AUTO = {"bert": AutoModelForSequenceClassification, "vit": AutoModelForImageClassification}
IN_VIT = ("houlsby", "parallel", "query_value", "ffn", "attention", "narrow_heads", "narrow_ffn")
CASES = [("bert", part) for part in PARTS] + [("vit", part) for part in IN_VIT]


def test_every_registered_part_is_tried():
    tried = [part for parts in PARTS.values() for part in SNNKConfig(**parts).named_parts().values()]
    own = {
        name for name in REGISTERED if REGISTERED[name].__module__.startswith("snnk_peft.")
    }  # another test brings its part
    assert {part_name(type(part)) for part in tried} >= own


@every_dtype
@pytest.mark.parametrize(("family", "part"), CASES)
def test_every_part_and_its_bundle(family, part, dtype, device, tmp_path):
    model = trained(get_snnk_model(tiny(family), SNNKConfig(**PARTS[part])), std=0.1).to(dtype).eval()
    truth, found = copy.deepcopy(model).double(), model.to(device)
    inputs = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs_for(truth).items()
    }

    expected, logits = truth(**moved(inputs, "cpu", torch.float64)).logits, found(**moved(inputs, device)).logits
    assert (logits.device.type, logits.dtype) == (device, dtype)
    agree(logits, expected, dtype)
    direction = torch.randn_like(expected).to(dtype)
    expected.backward(direction.double())
    logits.backward(direction.to(device))
    gradients_agree(found, truth, dtype)

    small = bundle(found)
    assert {tensor.device.type for tensor in small.state_dict().values()} == {device}
    with torch.no_grad():
        agree(small(**moved(inputs, device)).logits, expected, dtype, times=2)
    small.save_pretrained(tmp_path)
    again = AUTO[family].from_pretrained(tmp_path, device_map=device, dtype=dtype)
    assert (again.device.type, again.dtype) == (device, dtype)
    with torch.no_grad():
        torch.testing.assert_close(again(**moved(inputs, device)).logits, small(**moved(inputs, device)).logits)


@every_dtype
def test_patching_a_model_that_is_on_the_device(dtype, device):
    """Its slots come to it, and it computes what one does that was patched on the CPU."""
    config = SNNKConfig(
        ffn=FFNPart(num_features=6), adapter=AdapterPart("cos", init="paper"), pooler=PoolerPart(num_features=6)
    )
    there = get_snnk_model(tiny("bert").to(device, dtype), config)
    here = get_snnk_model(tiny("bert").to(dtype), config)
    assert {tensor.device.type for tensor in there.state_dict().values()} == {device}
    inputs = inputs_for(here)
    with torch.no_grad():
        agree(there(**moved(inputs, device)).logits, copy.deepcopy(here).double()(**inputs).logits, dtype)


@pytest.mark.parametrize(
    "part",
    [FFNPart(num_features=16), FFNPart("relu", "orf", 16), FFNPart("gelu", "landmark", 16, linear_path=False)],
    ids=["default", "drawn", "landmarks"],
)
def test_calibration(part, device):
    """The fit on a device finds the errors that the one on the CPU finds."""
    batches = [inputs_for(tiny("bert"), batch=6, tokens=16) for _ in range(5)]
    for number, batch in enumerate(batches):
        batch["input_ids"] = (batch["input_ids"] + 7 * number) % 90 + 3
    reports, logits = [], []
    for place in ("cpu", device):
        model = get_snnk_model(tiny("bert").to(place), SNNKConfig(ffn=part)).eval()
        reports.append(calibrate(model, batches, progress=False))
        with torch.no_grad():
            logits.append(model(**moved(batches[0], place)).logits.cpu())
    here, there = ([(slot.path, slot.error_before, slot.error_after) for slot in report.slots] for report in reports)
    for (path, *expected), (name, *found) in zip(here, there, strict=True):
        assert name == path
        assert found == pytest.approx(expected, rel=0.02, abs=1e-4)
    assert all(after < before for _, before, after in there)
    torch.testing.assert_close(logits[1], logits[0], rtol=0.02, atol=0.02)


pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")]
KINK = 0.05  # a rounding must not decide on which side of a kink of f an argument lies


def away_from_kinks(feature_map: FeatureMap, dtype: torch.dtype) -> torch.Tensor:
    """Vectors (3, 8) none of whose projections is nearly 0."""
    for _ in range(200):
        x = (torch.randn(3, 8) / 2).to(dtype)
        z = copy.deepcopy(feature_map.projection).double()(x.double()).detach()
        if not bool(((z.abs() < KINK) & (z != 0)).any()):
            return x
    raise AssertionError("no such vectors were found")


@every_dtype
@pytest.mark.parametrize(("component", "projection"), PAIRS)
def test_every_pair(component, projection, dtype, device):
    rounded = pair(component, projection).to(dtype)
    truth, found = copy.deepcopy(rounded).double(), copy.deepcopy(rounded).to(device)
    given = away_from_kinks(rounded, dtype)
    for tower in ("phi", "psi"):
        x, y = given.double().requires_grad_(), given.to(device, copy=True).requires_grad_()
        expected, out = getattr(truth, tower)(x).dense(), getattr(found, tower)(y).dense()
        assert (out.device.type, out.dtype) == (device, dtype)
        agree(out, expected, dtype)
        direction = torch.randn_like(expected).to(dtype)
        expected.backward(direction.double())
        out.backward(direction.to(device))
        agree(y.grad, x.grad, dtype, times=4)
    if any(parameter.requires_grad for parameter in truth.parameters()):
        gradients_agree(found, truth, dtype)
