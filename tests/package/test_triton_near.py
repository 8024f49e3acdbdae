"""The Triton kernels of the near field in Triton's interpreter, on the CPU, against dense formulas in fp64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from snnk_peft import build_feature_map
from snnk_peft.functional.backend import SWITCH, form_that_ran
from snnk_peft.functional.device_kernels import cuda_exponential, cuda_near
from snnk_peft.functional.device_kernels.triton_exponential import launches as exponential
from snnk_peft.functional.device_kernels.triton_near import launches, operators
from snnk_peft.functional.near_field import Sinks, banded_softmax_attention, near_attention
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention, continue_attention
from tests.interpreter import (
    check_compiled_and_exported,
    check_gradients_of_gradients,
    in_interpreter,
    kernels_on_the_cpu,
)
from tests.near_oracle import CASES, NOWHERE, check, compare, given

KERNEL = "snnk_peft.functional.device_kernels.cuda_near.near_attention"


@pytest.fixture(autouse=True)
def _on_the_cpu():
    with kernels_on_the_cpu(cuda_near, cuda_exponential, launches=[launches, exponential]):
        yield


def cases() -> list[Any]:
    """Behind other keys a text is causal. What depends on the dtype: roundings, and whether their range is enough."""
    found = []
    for dtype, names in (
        (torch.float32, CASES),
        (torch.bfloat16, ("far, masked", "large", "apart")),
        (torch.float16, ("large", "apart")),
    ):
        for name in names:
            for causal in (True,) if "behind" in CASES[name] else (False, True):
                label = f"{'causal-' if causal else ''}{str(dtype)[6:]}-{name}"
                found.append(pytest.param(dtype, name, causal, id=label))
    return found


@in_interpreter
@pytest.mark.parametrize(("dtype", "case", "causal"), cases())
def test_attention(dtype, case, causal):
    report = compare(*given(dtype, **CASES[case]), causal)
    assert form_that_ran("near_attention") == KERNEL
    print({name: f"{value:.1e}" for name, value in report.items()})
    check(report, dtype, case)


def small(L: int = 20) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Arguments, with all that there can be."""
    tensors, facts = given(torch.float32, B=2, H=2, G=1, L=L, D=16, width=6, sinks=2, far=1, masked=True)
    tensors[5][tensors[6] < NOWHERE / 2] = 0.0  # the torch form gives it where there is nothing else
    own = [x.requires_grad_() for x in tensors]
    sinks = Sinks(own[3], own[4], facts["known"])
    facts = {"mask": facts["mask"], "scaling": facts["scaling"], "sinks": sinks, "far": ((own[5], own[6]),)}
    return own, {**facts, "width": 6, "causal": True}


@in_interpreter
def test_gradients_of_gradients_are_those_of_the_torch_form(monkeypatch):
    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        own, rest = small()
        return near_attention(*own[:3], **rest).square().sum(), own

    check_gradients_of_gradients(run, monkeypatch)


@in_interpreter
def test_compiled_in_one_graph():
    own, rest = small()

    def call(q: torch.Tensor) -> torch.Tensor:
        return near_attention(q, *own[1:3], **rest).cos()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(own[0]).sum(), own) for f in (compiled, call))
    torch.testing.assert_close(found, expected)
    assert form_that_ran("near_attention") == KERNEL


@in_interpreter
def test_operators_keep_their_promises():
    """Schema, shapes without data, and gradients that compilers can trace; with all that there can be and without."""
    own, rest = small(L=5)
    for beside in (
        (rest["mask"], True, 0.3, *rest["sinks"], *rest["far"][0]),
        (None, False, 0.3, None, None, None, None, None),
    ):
        torch.library.opcheck(operators.near, (*own[:3], 6, *beside))
        with torch.no_grad():
            out, lse = operators.near(*own[:3], 6, *beside)
            torch.library.opcheck(operators.near_back, (out, *own[:3], 6, *beside, lse))


@in_interpreter
def test_what_the_kernel_does_not_take():
    """Other dtypes, more columns or sinks than fit, one mask for all texts: the torch form, and no error."""
    (q, k, v, *_), rest = small()
    broad, many = torch.randn(2, 1, 20, 130), torch.randn(2, 1, 40, 16)
    sinks = Sinks(many, many, torch.ones(2, 20, dtype=torch.long))
    plain = {"width": 6, "causal": True}
    for args, more in (
        ((q.double(), k.double(), v.double()), plain),
        ((q, k, v.half()), plain),
        ((q, k, broad), plain),
        ((q, k, v), {**plain, "sinks": sinks}),
        ((q, k, v), {**plain, "mask": rest["mask"][:1]}),
        ((q, k, v), {**plain, "far": ((rest["far"][0][0].half(), rest["far"][0][1].half()),)}),
    ):
        near_attention(*args, **more)
        assert form_that_ran("near_attention") == "torch"
    banded_softmax_attention(q, k, v, 6)
    assert form_that_ran("near_attention") == KERNEL


# --- the layer --------------------------------------------------------------------------------------------------------


def layer(sinks: int, count: int) -> tuple[KernelAttention, list[torch.Tensor], torch.Tensor]:
    """With `count` feature maps; its queries, keys and values; and a mask: left padding, and nothing but padding."""
    maps = [build_feature_map("posrf", "orf", 16, 16) for _ in range(count)]
    kernel = KernelAttention([AttentionTerm(maps)], 2, near_field=5, joint=True, sinks=sinks)
    kernel.joint.factor.data.normal_(std=0.3)
    mask = torch.ones(2, 25, dtype=torch.bool)
    mask[0, :7] = mask[1] = False
    return kernel, [torch.randn(2, heads, 25, 16) for heads in (2, 1, 1)], mask


@in_interpreter
@pytest.mark.parametrize(("causal", "sinks", "count"), [(True, 3, 2), (False, 3, 1), (True, 0, 1)])
def test_a_joint_layer_is_as_without_kernels(causal, sinks, count):
    """Forward and backward, in fp32; a layer in fp64 has no kernels."""
    kernel, tensors, mask = layer(sinks, count)
    results = []
    for dtype in (torch.float32, torch.float64):
        used = copy.deepcopy(kernel).to(dtype)
        own = [x.to(dtype).requires_grad_() for x in tensors]
        out = used(*own, mask, causal=causal)
        assert (form_that_ran("near_attention") == KERNEL) == (dtype == torch.float32)
        assert not out[1].any()
        gradients = torch.autograd.grad(out.square().sum(), [*own, *used.parameters()])
        results.append([out, *gradients])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5 * float(theirs.detach().abs().max()))


@in_interpreter
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_a_joint_layer_compiles_and_exports(causal):
    kernel, tensors, mask = layer(3, 1)
    own = dict(zip("qkv", (x.requires_grad_() for x in tensors), strict=True))
    check_compiled_and_exported(kernel, {**own, "mask": mask, "causal": causal}, tensors, "near_attention")


@in_interpreter
def test_a_joint_layer_continues(monkeypatch):
    """In pieces of several lengths, each form behind the state of the other."""
    kernel, (q, k, v), mask = layer(3, 1)
    with torch.no_grad():
        whole = copy.deepcopy(kernel).double()(q.double(), k.double(), v.double(), mask, causal=True)
        for first in ("", "off"):
            state, place, found = None, 0, []
            for number, size in enumerate((7, 1, 12, 5)):
                monkeypatch.setenv(SWITCH, first if number % 2 else ("off" if first == "" else ""))
                piece = slice(place, place + size)
                given = (x[:, :, piece] for x in (q, k, v))
                out, state = continue_attention(kernel, *given, mask[:, piece], state)
                found.append(out)
                place += size
            torch.testing.assert_close(torch.cat(found, 2).double(), whole, rtol=1e-4, atol=1e-5)
