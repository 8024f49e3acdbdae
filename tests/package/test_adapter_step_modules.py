"""The modules of an adapter serve where its step as one operation could not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from snnk_peft.components.relu import Relu
from snnk_peft.feature_map import FeatureMap
from snnk_peft.layers.adapter import GatedReadout, SNNKAdapter
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.projections import PROJECTIONS
from tests.package.test_adapter_step import DIM, M, adapter_of, watched
from tests.package.test_adapter_step_in_models import gradients


def functional(adapter: SNNKAdapter) -> tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]:
    parameters = {name: p.detach() for name, p in adapter.named_parameters()}
    return lambda given, x: torch.func.functional_call(adapter, given, (x,)), parameters


@pytest.mark.parametrize("rows", ["drawn", "learned"])
def test_transforms_of_functions(rows):
    adapter, x = adapter_of(rows=rows), torch.randn(4, DIM)
    run, parameters = functional(adapter)
    each = torch.func.vmap(torch.func.grad(lambda p, one: run(p, one).square().sum()), (None, 0))(parameters, x)
    whole = torch.func.grad(lambda p: run(p, x).square().sum())(parameters)
    by_hand = gradients(adapter, lambda: adapter(x))[1:]
    for (name, gradient), found in zip(whole.items(), by_hand, strict=True):
        torch.testing.assert_close(gradient, found)
        torch.testing.assert_close(each[name].sum(0), found)


def test_forward_mode():
    adapter, x, tangent = adapter_of(rows="learned"), torch.randn(4, DIM), torch.randn(4, DIM)
    with torch.autograd.forward_ad.dual_level():
        out = adapter(torch.autograd.forward_ad.make_dual(x, tangent))
        found = torch.autograd.forward_ad.unpack_dual(out).tangent
    jacobian = torch.autograd.functional.jacobian(lambda one: adapter(one), x)
    torch.testing.assert_close(found, torch.einsum("tirj,rj->ti", jacobian, tangent))


@pytest.mark.parametrize("rows", ["drawn", "learned"])
def test_compiled_in_one_graph_and_exported(rows):
    adapter, x = adapter_of(rows=rows), torch.randn(4, DIM, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(adapter, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(adapter, lambda: compiled(x)), gradients(adapter, lambda: adapter(x)), strict=True):
        torch.testing.assert_close(a, b)
    exported = torch.export.export(adapter, (x.detach(),)).module()
    torch.testing.assert_close(exported(x), adapter(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointed(reentrant, autocast):
    adapter, x = adapter_of("relu").train(), torch.randn(4, DIM, requires_grad=True)

    def run(way: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return way(x)

    expected = gradients(adapter, lambda: run(adapter))
    found = gradients(adapter, lambda: run(partial(checkpoint, adapter, use_reentrant=reentrant)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("which", ["stage", "readout", "stage.feature_map", "stage.feature_map.projection"])
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_of_the_modules_are_called(which, hook):
    adapter, seen = adapter_of(normalize=False), []
    getattr(adapter.get_submodule(which), hook)(lambda *unused: seen.append(which))
    adapter(torch.randn(4, DIM, requires_grad=True)).sum().backward()
    assert seen == [which]


def test_a_component_of_ones_own():
    """One that inherits a derivative but has another function, and one that learns."""

    class Cubed(Relu):
        def function(self, z: torch.Tensor) -> torch.Tensor:
            return z**3

    class Steep(Relu):
        def __init__(self) -> None:
            super().__init__()
            self.slope = torch.nn.Parameter(torch.ones(()))

        def function(self, z: torch.Tensor) -> torch.Tensor:
            return torch.relu(z) * self.slope

        def gradient(self, z: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return grad * (z > 0) * self.slope

    x = torch.randn(4, DIM, requires_grad=True)
    for component in (Cubed(), Steep()):
        stage = FeatureStage(FeatureMap(component, PROJECTIONS["gaussian"](DIM, M)))
        adapter = SNNKAdapter(stage, GatedReadout(stage))
        torch.nn.init.normal_(adapter.readout.A)
        z = x.detach().double() @ stage.feature_map.projection.weight.double().T
        slope = 3 * z**2 if isinstance(component, Cubed) else (z > 0).double()
        expected = 1 + (slope * adapter.readout.A.detach().double().sum(0) / M**0.5) @ (
            stage.feature_map.projection.weight.double()
        )
        (found,) = torch.autograd.grad(adapter(x).sum(), x)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        adapter(x).sum().backward()
        assert all(p.grad is not None for p in adapter.parameters())


def test_what_follows_may_change_the_output_in_place():
    adapter, x = adapter_of(), torch.randn(4, DIM)
    found = gradients(adapter, lambda: torch.relu_(adapter(x)))
    expected = gradients(adapter, lambda: torch.relu(adapter(x)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_gradients_the_modules_are_called():
    adapter = adapter_of()
    with watched(adapter) as watch, torch.no_grad():
        adapter(torch.randn(4, DIM))
    assert watch.calls == 1
