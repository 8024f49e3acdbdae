"""Every part: switched off and on, beside another adapter, saved, loaded and bundled, here and in a fresh process."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from snnk_peft import AdapterPart, NarrowFFNPart, NormsPart, SNNKConfig, bundle, get_snnk_model
from tests.elsewhere import check_elsewhere, save_known
from tests.every_part import PARTS
from tests.tiny_families import build, main_head
from tests.tiny_models import inputs_for, logits, same, trained

ROWS = AdapterPart("gelu", "free", num_features=3, placement="query_value", normalize=False, scaling=4.0)
NORMS = {"norms": {"parts": [NormsPart()]}, "norms and rows": {"parts": [NormsPart(), ROWS]}}
PER_LAYER = [NarrowFFNPart(keep=0.5, layers=[0]), NarrowFFNPart(num_features=7, rule="leverage", layers=[1])]
# Family and parts: all parts in BERT, and in others what depends on how they are built.
CASES: dict[tuple[str, str], dict[str, Any]] = {
    **{("bert", part): fields for part, fields in PARTS.items()},
    **{(family, part): fields for family in ("bert", "vit", "distilbert", "electra") for part, fields in NORMS.items()},
    **{(family, "narrow_ffn per layer"): {"parts": PER_LAYER} for family in ("bert", "llama", "modernbert")},
    ("vit", "narrow_heads"): PARTS["narrow_heads"],
    ("roberta", "mean_pooling"): PARTS["mean_pooling"],
    ("llama", "attention-joint"): PARTS["attention-joint"],
}
IDENTITY = {"houlsby", "pfeiffer", "query_value", "free", *NORMS}  # what a new one of these does, bit for bit


def base_of(family: str) -> Any:
    return build(family, main_head(family))


def patched(family: str, part: str) -> Any:
    return trained(get_snnk_model(base_of(family), SNNKConfig(**copy.deepcopy(CASES[family, part]))), std=0.1)


@pytest.mark.parametrize(("family", "part"), CASES)
def test_switched_saved_loaded_and_bundled(family: str, part: str, tmp_path: Path) -> None:
    original, model = base_of(family), patched(family, part)
    inputs = inputs_for(original)
    plain, changed = logits(original, inputs), logits(model, inputs)
    assert not torch.allclose(changed, plain, atol=1e-3)
    with model.disable_adapter():
        assert torch.equal(logits(model, inputs), plain)
    second = "norms" if part == "ffn-drawn" else part  # which saves a contraction, and no other part may touch it
    model.add_adapter("second", SNNKConfig(**copy.deepcopy(PARTS.get(second, CASES[family, part])), seed=1))
    model.set_adapter("second")
    assert torch.equal(logits(model, inputs), plain if second in IDENTITY else changed) == (second in IDENTITY)
    model.set_adapter("default")
    assert torch.equal(logits(model, inputs), changed)

    model.save_pretrained(tmp_path, selected_adapters=["default"])
    given = SNNKConfig(**copy.deepcopy(CASES[family, part]))
    assert SNNKConfig.from_pretrained(tmp_path).named_parts() == given.named_parts()
    again = PeftModel.from_pretrained(base_of(family), tmp_path)
    state = again.state_dict()
    own = {name: value for name, value in model.state_dict().items() if ".default." in name}
    assert own
    assert all(torch.equal(value, state[name]) for name, value in own.items())
    assert same(logits(again, inputs), changed)
    assert torch.equal(logits(copy.deepcopy(again), inputs), logits(again, inputs))
    small = bundle(again)
    for each in (small, pickle.loads(pickle.dumps(small))):
        torch.testing.assert_close(logits(each, inputs), changed, rtol=1e-4, atol=1e-5)


def test_bundles_in_a_fresh_process(tmp_path: Path) -> None:
    """With the package, and without it as remote code."""
    folders = []
    for family, part in CASES:
        model = patched(family, part)
        inputs = inputs_for(model)
        folder = tmp_path / f"{family} {part}"
        folders.append(save_known(bundle(model), inputs, folder, logits(model, inputs)))
    for package in (True, False):
        check_elsewhere(*folders, package=package)
