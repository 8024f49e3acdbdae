"""Bundles of what is active: the order of two adapters in one place, and a saved module that is switched off."""

import pytest
import torch

from snnk_peft import AdapterPart, PoolerPart, SNNKConfig, bundle, get_snnk_model
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
