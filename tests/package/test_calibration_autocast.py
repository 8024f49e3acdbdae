"""calibrate and bundle within the caller's autocast, which keeps copies of weights until it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from snnk_peft import (
    AttentionPart,
    FFNPart,
    LowRankPart,
    NarrowFFNPart,
    NarrowHeadsPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    calibrate,
    get_snnk_model,
)
from tests.package.test_calibrate import batches, tiny_bert

CENTROIDS = AttentionPart("mixture", "centroids", num_features=8)
JOINT = AttentionPart("mixture", "centroids", 8, near_field=2, near_field_normalisation="joint", sinks=1)
CASES: dict[str, dict[str, Any]] = {
    "ffn": {"ffn": FFNPart(num_features=8)},
    "narrow_ffn": {"parts": [NarrowFFNPart(num_features=24)]},
    "pooler": {"pooler": PoolerPart(num_features=8)},
    "attention": {"attention": CENTROIDS},
    "joint": {"attention": JOINT},
    "narrow_heads": {"parts": [NarrowHeadsPart(head_dim=8)]},
    "low_rank": {"parts": [LowRankPart("ffn", rank=8)]},
}
STEPPED = ("ffn", "narrow_ffn", "attention", "joint")


def patched(name: str) -> Any:
    return get_snnk_model(tiny_bert(), SNNKConfig(**CASES[name], modules_to_save=[])).eval()


def lowered() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(**batches()[0]).logits


@pytest.mark.parametrize("name", CASES)
def test_what_is_fitted_counts_at_once(name):
    model = patched(name)
    with lowered():
        before = logits(model)  # autocast has its copies now
        calibrate(model, batches(), progress=False)
        within = logits(model)
    assert not torch.equal(within, before)
    with lowered():
        assert torch.equal(logits(model), within)


@pytest.mark.parametrize("name", STEPPED)
def test_steps_descend(name):
    """As far as without autocast."""
    expected = calibrate(patched(name), batches(), steps=60, progress=False)
    closed = calibrate(patched(name), batches(), progress=False)
    with lowered():
        found = calibrate(patched(name), batches(), steps=60, progress=False)
    for wanted, plain, slot in zip(expected.slots, closed.slots, found.slots, strict=True):
        gained = plain.error_after - wanted.error_after
        assert slot.error_after == pytest.approx(wanted.error_after, abs=max(0.5 * gained, 0.05 * plain.error_after))


def test_an_interrupted_fit_leaves_no_copies():
    """The first layer is fitted, and run, when the second one fails."""
    model = patched("ffn")
    layers = model.get_base_model().bert.encoder.layer
    fitted = [p for p in layers[0].parameters() if p.requires_grad]
    start = [each.clone() for each in fitted]

    def fail(*_: object) -> None:
        if not all(map(torch.equal, fitted, start)):
            raise RuntimeError("power cut")

    with lowered():
        before = logits(model)
        hook = layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="power cut"):
            calibrate(model, batches(), progress=False)
        hook.remove()
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", CASES)
def test_a_bundle_is_compared_in_full_precision(name):
    model = patched(name)
    with lowered():
        calibrate(model, batches(), progress=False)
        small = bundle(model).eval()
    torch.testing.assert_close(logits(small), logits(model), rtol=1e-4, atol=1e-5)
