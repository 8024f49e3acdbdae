"""Bundles of what is active: several adapters in one place, slots in each other's way, a saved module switched off."""

import pytest
import torch
from torch import nn

from snnk_peft import AdapterPart, FFNPart, PoolerPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.errors import UnsupportedError
from snnk_peft.layers.slots import Slot
from tests.tiny_models import inputs_for, tiny, trained


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_two_adapters_in_one_place_act_in_their_order(order):
    part = {"placement": "pfeiffer", "init": "random"}
    config = SNNKConfig(adapter=AdapterPart(num_features=6, **part), modules_to_save=[])
    model = get_snnk_model(tiny("bert"), config, adapter_name="a")
    other = AdapterPart(num_features=9, component="sin", **part)
    model.add_adapter("b", SNNKConfig(adapter=other, modules_to_save=[], seed=1))
    for name in ("a", "b"):
        model.set_adapter(name)
        trained(model, std=1.0)
    model.base_model.set_adapter(order)
    inputs = inputs_for(model.get_base_model())
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        torch.testing.assert_close(bundle(model)(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
        model.base_model.set_adapter(order[::-1])
        assert not torch.allclose(model(**inputs).logits, expected, rtol=1e-3, atol=1e-3)


def test_a_saved_module_that_is_switched_off_is_bundled_as_it_was():
    model = trained(get_snnk_model(tiny("bert"), SNNKConfig(pooler=PoolerPart(num_features=8)))).eval()
    inputs = inputs_for(model.get_base_model())
    classifier = model.get_base_model().classifier
    with torch.no_grad():
        on = model(**inputs).logits
        classifier.enable_adapters(False)
        off = model(**inputs).logits
        assert not torch.allclose(on, off, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(bundle(model)(**inputs).logits, off, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("placement", "slot"), [("parallel", "BesideExpansion"), ("query_value", "BesideLinear")], ids=lambda value: value
)
def test_two_slots_that_must_be_alone_are_refused(placement, slot):
    """Both outputs are sums, but there is one plain form for one of them."""
    configs = [SNNKConfig(adapter=AdapterPart(num_features=4, placement=placement), modules_to_save=[]) for _ in "ab"]
    model = get_snnk_model(tiny("bert"), configs[0], adapter_name="a")
    model.add_adapter("b", configs[1])
    model.base_model.set_adapter(["a", "b"])
    with pytest.raises(UnsupportedError, match=f"2 active adapters put a {slot} here; activate one of them with set_a"):
        bundle(model)
    model.set_adapter("b")
    assert bundle(model).bundle_report.parity_error < 1e-5


class Doubled(Slot):
    """2 · module(x), which has a plain form, but not between modules that are multiplied into one another."""

    def forward(self, base, x, *args, **kwargs):
        return 2 * base(x, *args, **kwargs)

    def fold(self, place):
        place.put(nn.Sequential(place.module, nn.Identity()))


@pytest.mark.parametrize("place", ["dense", "intermediate_act_fn"])
@pytest.mark.parametrize(
    "parts",
    [{"ffn": FFNPart(num_features=6)}, {"adapter": AdapterPart(num_features=4, placement="parallel")}],
    ids=["ffn", "parallel"],
)
def test_a_slot_between_modules_that_fold_together_is_refused(parts, place):
    model = get_snnk_model(tiny("bert"), SNNKConfig(**parts))
    path = f"bert.encoder.layer.0.intermediate.{place}"
    model.get_submodule(f"base_model.model.{path}").add_slot("default", Doubled())
    with pytest.raises(UnsupportedError, match=f"{path}: a Doubled slot has no folded form in this place"):
        bundle(model)
