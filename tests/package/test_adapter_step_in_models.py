"""The step of an adapter as one operation: in models, with few operations, and with a cast of W that is never old."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model
from snnk_peft.layers.adapter import _NARROW, in_dtype
from tests.package.test_adapter_step import DIM, adapter_of, counted, error, in_one, watched
from tests.tiny_models import inputs_for, tiny, trained


def bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def gradients(module: Any, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Of an output, the output first."""
    module.zero_grad()
    out = run()
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


# --- models ---------------------------------------------------------------------------------------------------------

LEARNED = {"component": "gelu", "projection": "free", "normalize": False}
PLACES = {
    "houlsby": {},
    "pfeiffer": {"placement": "pfeiffer"},
    "query_value": {"placement": "query_value"},
    "parallel": {"placement": "parallel"},
    "learned rows": {"placement": "query_value", **LEARNED},
    "gated": {"init": "paper"},
    "a fast matrix": {"projection": "sorf", "projection_params": {"fast": True}},
    "a quadrature": {"projection": "sgq", "num_features": 65, "component": "relu"},
    "features by a tower": {"component": "trigrf"},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_model_is_trained_as_by_the_modules(place):
    """With dropout, whose draws are the same; a second adapter is in use as well."""
    options = {"num_features": 4, **PLACES[place]}
    model = get_snnk_model(tiny("bert"), SNNKConfig(adapter=AdapterPart(**options), modules_to_save=[]))
    if place != "parallel":  # which lets nothing pass
        model.add_adapter("second", SNNKConfig(adapter=AdapterPart(num_features=3), modules_to_save=[]))
        model.base_model.set_adapter(["default", "second"])
    trained(model).double().train()
    inputs = inputs_for(model)

    def run() -> torch.Tensor:
        torch.manual_seed(5)
        return model(**inputs).logits

    found = gradients(model, run)
    with watched(model) as watch:
        expected = gradients(model, run)
    assert watch.calls
    assert len(found) == len(expected) == 1 + sum(p.requires_grad for p in model.parameters())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_has_no_more_operations_than_loras(autocast):
    layers, inputs = 3, inputs_for(tiny("bert"))
    plain = tiny("bert", num_hidden_layers=layers)

    def operations(model: Any) -> int:
        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**inputs).logits.float().square().sum()
            loss.backward()

        run()
        return sum(counted(run).values())

    lora = get_peft_model(copy.deepcopy(plain), LoraConfig(r=4, target_modules=["query", "value"])).train()
    ours = get_snnk_model(plain, SNNKConfig(adapter=AdapterPart(num_features=4), modules_to_save=[])).train()
    assert operations(ours) <= operations(lora)


@pytest.mark.parametrize(("autocast", "forward", "backward"), [(False, 5, 7), (True, 7, 7)])
def test_few_operations_for_each_adapter(autocast, forward, backward):
    adapter, x = adapter_of("relu"), torch.randn(5, DIM)
    x = (x.bfloat16() if autocast else x).requires_grad_()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return adapter(x)

    found = [run()]  # the cast of W is kept
    assert sum(counted(lambda: found.append(run())).values()) <= forward
    upstream = torch.ones_like(x)
    assert sum(counted(lambda: torch.autograd.grad(found[-1], [x, adapter.readout.A], upstream)).values()) <= backward


# --- the cast of W --------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda p: p.weight.mul_(2),
    "a row": lambda p: p.weight[0].zero_(),
    "loaded": lambda p: p.load_state_dict({name: value * 3 for name, value in p.state_dict().items()}),
    "another tensor": lambda p: setattr(p, "weight", p.weight * 2),
    "other memory": lambda p: setattr(p.weight, "data", p.weight.data * 2),
    "other strides": lambda p: setattr(p.weight, "data", p.weight.flip(0).T.contiguous().T),
    "another dtype": lambda p: p.double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_matrix_is_cast_again(change):
    adapter, x = adapter_of("relu", normalize=False), torch.randn(5, DIM)
    with bf16():
        before = adapter(x)
        with torch.no_grad():
            CHANGES[change](adapter.stage.feature_map.projection)
        found = adapter(x)
        with watched(adapter):
            expected = adapter(x)
    assert in_one(found)
    assert error(found, expected) < 2**-7
    assert change == "another dtype" or error(found, before) > 2**-4


def test_the_matrix_is_cast_once_for_as_long_as_it_lives():
    adapter = adapter_of()
    projection = adapter.stage.feature_map.projection
    first = in_dtype(projection, projection.weight, torch.bfloat16)
    assert in_dtype(projection, projection.weight, torch.bfloat16) is first
    other = in_dtype(projection, projection.weight, torch.float16)
    assert other.dtype == torch.float16
    copied = copy.deepcopy(adapter).stage.feature_map.projection
    assert copied not in _NARROW
    assert pickle.loads(pickle.dumps(projection)) not in _NARROW
    assert len(pickle.dumps(projection)) == len(pickle.dumps(copied))
    alive = weakref.ref(projection)
    del adapter, projection
    gc.collect()
    assert alive() is None


def test_training_after_inference_mode():
    adapter, x = adapter_of(), torch.randn(5, DIM)
    with torch.inference_mode(), bf16():
        adapter(x)
        with torch.enable_grad():
            adapter(x)
    with bf16():
        gradients(adapter, lambda: adapter(x))
    with torch.inference_mode():
        made = copy.deepcopy(adapter.stage.feature_map.projection.weight)
    adapter.stage.feature_map.projection.weight = made
    with bf16():
        gradients(adapter, lambda: adapter(x))


@pytest.mark.parametrize("rows", ["drawn", "learned"])
def test_what_changes_before_the_backward_pass_is_told(rows):
    """The kept cast of a frozen matrix is what the forward pass saw."""
    adapter, x = adapter_of(rows=rows), torch.randn(5, DIM, requires_grad=True)
    found = adapter(x)
    with torch.no_grad():
        (adapter.readout.A if rows == "drawn" else adapter.stage.feature_map.projection.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()
