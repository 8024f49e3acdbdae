"""What Python and torch do around the launches of a layer, which at a few thousand tokens takes longer than these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from snnk_peft import build_feature_map
from snnk_peft.functional.backend import DEVICE_KERNELS, form_that_ran
from snnk_peft.layers.kernel_attention import KernelAttention

pytest.importorskip("triton", reason="pip install triton: the kernels are not launched here, but imported")
ALLOCATIONS = {"aten::empty", "aten::empty_like"}


@pytest.fixture(autouse=True)
def _launches_that_do_nothing(monkeypatch):
    from snnk_peft.functional.device_kernels import cuda_exponential

    monkeypatch.syspath_prepend("recipes")
    from lib.kernel_launches import watched

    before = dict(DEVICE_KERNELS)
    cuda_exponential.register("cpu")
    with watched(runs=False):
        yield
    DEVICE_KERNELS.clear()
    DEVICE_KERNELS.update(before)


def operations(run: Callable[[], object]) -> Counter[str]:
    """Those of torch that are called from Python, once everything is warm."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as watch:
        run()
    return Counter(event.name for event in watch.events() if event.cpu_parent is None)


def tensors() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 16, 16) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_a_layer_of_drawn_rows_allocates_and_launches(causal, masked):
    layer, inputs = KernelAttention([build_feature_map("posrf", "orf", 16, 16)], 4), tensors()
    mask = torch.ones(2, 16, dtype=torch.bool) if masked else None

    @torch.no_grad()
    def run() -> object:
        return layer(*inputs, mask, causal=causal)

    assert set(operations(run)) <= ALLOCATIONS
    assert "cuda_exponential" in form_that_ran("causal_exponential_attention" if causal else "exponential_attention")


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_a_training_step_is_one_function(causal):
    layer, inputs = KernelAttention([build_feature_map("posrf", "orf", 16, 16)], 4), tensors()
    leaves = [x.requires_grad_() for x in inputs]

    def run() -> object:
        return layer(*leaves, causal=causal).backward(gradient)

    gradient = torch.randn_like(inputs[0])
    found = operations(run)
    assert not [name for name in found if name.startswith(("aten", "snnk"))]
    assert found["Direct"] == 1


@pytest.mark.parametrize(("component", "projection"), [("posrf", "free"), ("mixture", "free")])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_rows_that_learn_cost_no_matrix_product(component, projection, causal):
    layer, inputs = KernelAttention([build_feature_map(component, projection, 16, 16)], 4), tensors()

    def run() -> object:
        return layer(*inputs, causal=causal)

    assert not set(operations(run)) & {"aten::eye", "aten::linear", "aten::matmul", "aten::cat", "aten::contiguous"}
