"""Logarithms of feature maps are formed once, and never outlive what they were made from."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from snnk_peft import build_feature_map
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention

DIM, HEADS = 8, 2


def layer(component: str = "posrf", projection: str = "orf", maps: int = 1, **more: Any) -> KernelAttention:
    made = [build_feature_map(component, projection, DIM, 16, site=str(i)) for i in range(maps)]
    return KernelAttention(made, HEADS, **more).requires_grad_(False)


def inputs(**more: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, 5, DIM, generator=generator).to(**more) for _ in range(3)]


def matrix(attention: KernelAttention) -> Any:
    return attention.maps()[0].projection


@pytest.fixture
def formed(monkeypatch) -> list[AttentionTerm]:
    """Grows by one entry whenever logarithms are formed."""
    found: list[AttentionTerm] = []
    form = AttentionTerm.logarithms

    def watched(term: AttentionTerm, *args: Any) -> Any:
        found.append(term)
        return form(term, *args)

    monkeypatch.setattr(AttentionTerm, "logarithms", watched)
    return found


@pytest.mark.parametrize("maps", [1, HEADS])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("near", [{}, {"near_field": 2, "joint": True}], ids=["", "joint"])
def test_formed_once(formed, near, causal, maps):
    attention = layer(maps=maps, **near)
    first = attention(*inputs(), causal=causal)
    count = len(formed)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(attention(*inputs(), causal=causal), first)
    assert len(formed) == count


def rewrite(attention: KernelAttention) -> None:
    matrix(attention).weight.mul_(1.5)


def point_elsewhere(attention: KernelAttention) -> None:
    """Twice, so that the memory of the first may be that of the third."""
    for _ in range(2):
        matrix(attention).weight.data = matrix(attention).weight * 1.5


def load(attention: KernelAttention) -> None:
    attention.load_state_dict({name: value * 1.5 for name, value in attention.state_dict().items()})


def assign(attention: KernelAttention) -> None:
    attention.load_state_dict({name: value * 1.5 for name, value in attention.state_dict().items()}, assign=True)


def other_map(attention: KernelAttention) -> None:
    attention.terms[0].feature_maps[0] = build_feature_map("posrf", "orf", DIM, 16, seed=1)


def other_matrix(attention: KernelAttention) -> None:
    attention.maps()[0].projection = build_feature_map("posrf", "orf", DIM, 16, seed=1).projection


def other_setting(attention: KernelAttention) -> None:
    attention.maps()[0].component.kernel_name = "gaussian"


def draw_anew(attention: KernelAttention) -> None:
    matrix(attention).seed = 1
    matrix(attention).redraw()


def hooked(attention: KernelAttention) -> None:
    matrix(attention).register_forward_hook(lambda module, args, out: out * 1.5)


CHANGES = [rewrite, point_elsewhere, load, assign, other_map, other_matrix, other_setting, draw_anew, hooked]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_is_formed_anew(change: Callable[[KernelAttention], None]):
    attention = layer()
    before = attention(*inputs())
    change(attention)
    found = attention(*inputs())
    fresh = layer()
    change(fresh)
    torch.testing.assert_close(found, fresh(*inputs()), rtol=0, atol=0)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_goes_its_own_way(copied):
    attention = layer()
    first = attention(*inputs())
    other = copied(attention)
    rewrite(other)
    assert torch.equal(attention(*inputs()), first)
    assert not torch.equal(other(*inputs()), first)


@pytest.mark.parametrize(("kwargs"), [{"fused": True}, {"foreach": True}], ids=str)
def test_what_learns_is_formed_anew(kwargs):
    """A fused optimizer writes to parameters without counting a version; weights may be frozen in between."""
    attention = layer(projection="free")
    optimizer = torch.optim.AdamW(matrix(attention).parameters(), lr=0.1, **kwargs)
    seen: list[torch.Tensor] = []
    for _ in range(3):
        attention.requires_grad_(True)
        attention(*inputs()).square().sum().backward()
        optimizer.step()
        for learns in (True, False):
            attention.requires_grad_(learns)
            with torch.no_grad():
                seen.append(attention(*inputs()))
            expected = layer(projection="free")
            expected.load_state_dict(attention.state_dict())
            assert torch.equal(seen[-1], expected(*inputs()))
    assert not torch.equal(seen[0], seen[-1])
    with torch.no_grad():  # as averages of weights are put in place
        attention.requires_grad_(True)
        matrix(attention).weight.data.mul_(1.5)
        assert not torch.equal(attention(*inputs()), seen[-1])


def test_gradients_pass_what_was_formed_without_them():
    attention = layer()
    with torch.inference_mode():
        attention(*inputs())
    leaves = [x.requires_grad_() for x in inputs()]
    found = torch.autograd.grad(attention(*leaves).square().sum(), leaves)
    again = [x.requires_grad_() for x in inputs()]
    torch.testing.assert_close(found, torch.autograd.grad(layer()(*again).square().sum(), again), rtol=0, atol=0)


def test_other_dtypes_and_temperatures_are_others():
    attention = layer()
    first = attention(*inputs())
    assert attention(*inputs(dtype=torch.float64)).dtype == torch.float64
    assert not torch.equal(attention(*inputs(), scaling=1.0), first)
    assert torch.equal(attention(*inputs()), first)


def test_whoever_looks_at_operations_sees_all_of_them(formed):
    """Compilers, function calls with other weights, dispatch modes (which count, or compute nothing)."""
    attention = layer()
    first = attention(*inputs())
    compiled = torch.compile(lambda *x: attention(*x), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs()), first)
    others = {name: value * 1.5 for name, value in attention.state_dict().items()}
    other = torch.func.functional_call(attention, others, tuple(inputs()))
    assert not torch.equal(other, first)
    assert torch.equal(attention(*inputs()), first)
    count = len(formed)
    with FlopCounterMode(display=False):
        attention(*inputs())
    assert len(formed) == count + 1
    rewrite(attention)
    torch.testing.assert_close(compiled(*inputs()), other)


def test_nothing_of_it_is_saved():
    attention = layer()
    before = set(attention.state_dict())
    attention(*inputs())
    assert set(attention.state_dict()) == before
    assert not any(isinstance(value, nn.Module) for value in vars(attention.terms[0]._kept).values())
