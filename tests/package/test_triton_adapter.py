"""The Triton kernels of the adapter's step in Triton's interpreter, on the CPU, against plain formulas in fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from snnk_peft import build_feature_map
from snnk_peft.functional.backend import DEVICE_KERNELS, form_that_ran
from snnk_peft.functional.device_kernels import cuda_adapter
from snnk_peft.functional.device_kernels.triton_adapter import launches
from snnk_peft.layers.adapter import GatedReadout, SNNKAdapter
from snnk_peft.layers.feature_stage import FeatureStage
from tests.compile_kernels import adapter_usages
from tests.interpreter import INTERPRETED, in_interpreter, kernels_on_the_cpu
from tests.package.test_adapter_step import adapter_of, errors

KERNEL = "snnk_peft.functional.device_kernels.cuda_adapter.adapter_sum"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize(("m", "learned"), [(16, False), (128, True)])
def test_compiled_kernels_fit(capability, dtype, m, learned):
    """Nothing of a thread lies outside of its registers, and a program fits in shared memory, without a GPU."""
    found = list(adapter_usages(capability, dtype, m=m, learned=learned))
    assert len({name for name, _ in found}) == 3
    assert [(name, use) for name, use in found if use["stack"] > 256] == []
    assert max(use["shared"] for _, use in found) <= {80: 163, 90: 227}[capability] * 2**10


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """Kernels for the CPU, with several blocks of columns and parts of tokens in little."""
    if not INTERPRETED:
        yield
        return
    convert = interpreter._convert_float

    def rounded(x, old, new, mode):
        """The interpreter cuts off digits of fp32 that bf16 has not; a card rounds."""
        if (old, new) != (tl.float32, tl.bfloat16):
            return convert(x, old, new, mode)
        narrow = torch.from_numpy(np.frombuffer(x.tobytes(), np.float32).copy()).bfloat16()
        return narrow.view(torch.int16).numpy().view(np.uint16).reshape(x.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(launches, "COLUMNS", 16)
    monkeypatch.setattr(launches, "FEWEST", 10)
    with kernels_on_the_cpu(cuda_adapter):
        yield


def wide_adapter(component: str, rows: str, *, normalize: bool, out: int) -> SNNKAdapter:
    """Inputs of 40 columns, 20 features: neither fills its blocks."""
    torch.manual_seed(1)
    projection, params = {"drawn": ("gaussian", {}), "learned": ("free", {"bias": True})}[rows]
    made = build_feature_map(component, projection, 40, 20, projection_params=params)
    stage = FeatureStage(made, normalize=normalize, center=normalize, scale=0.4)
    readout = GatedReadout(stage, init="default", scaling=3.0, out_dim=out)
    with torch.no_grad():
        for parameter in (*readout.parameters(), *([made.projection.bias] if params else [])):
            parameter.normal_()
    return SNNKAdapter(stage, readout)


@in_interpreter
@pytest.mark.parametrize("component", ["relu", "gelu", "elu"])
@pytest.mark.parametrize(("rows", "normalize"), [("drawn", True), ("drawn", False), ("learned", False)])
@pytest.mark.parametrize("beside", [False, True], ids=["behind", "beside"])
def test_values_and_all_gradients(component, rows, normalize, beside):
    adapter = wide_adapter(component, rows, normalize=normalize, out=24 if beside else 40)
    x = (torch.randn(3, 17, 40) + 0.5).requires_grad_()
    residual = torch.randn(3, 17, 24, requires_grad=True) if beside else None
    found = adapter(x, residual)
    assert form_that_ran("adapter_sum") == KERNEL
    assert max(errors(adapter, component, x, residual, lambda: found)) < 3e-6


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", [torch.float32, None], ids=["autocast", "all narrow"])
@pytest.mark.parametrize("normalize", [True, False])
def test_half_precision_errs_no_more_than_the_modules(dtype, own, normalize):
    """Forward, and for the gradients of x and of A, with inputs in the dtype of the products."""
    adapter = wide_adapter("gelu", "drawn", normalize=normalize, out=40).to(own or dtype)
    x = (torch.randn(3, 17, 40) + 0.5).to(dtype).requires_grad_()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=own is not None):
            return adapter(x)

    found = run()
    assert form_that_ran("adapter_sum") == KERNEL
    off = errors(adapter, "gelu", x, None, lambda: found)
    kernel = DEVICE_KERNELS.pop(("adapter_sum", "cpu"))
    expected = errors(adapter, "gelu", x, None, run)
    DEVICE_KERNELS["adapter_sum", "cpu"] = kernel
    assert len(off) == 3
    assert all(a < 1.2 * b for a, b in zip(off, expected, strict=True)), (off, expected)


@in_interpreter
def test_features_beyond_the_last_and_a_bias_behind_normalisation():
    """A bias moves z: LayerNorm's backward pass must not see it."""
    adapter = adapter_of("gelu", "learned, with a bias", normalize=True)
    adapter.stage.feature_map.projection.weight.requires_grad_(False)
    x = (torch.randn(4, 9, 12) + 0.5).requires_grad_()
    found = adapter(x)
    assert form_that_ran("adapter_sum") == KERNEL
    assert max(errors(adapter, "gelu", x, None, lambda: found)) < 3e-6


@in_interpreter
def test_what_is_no_number_stays_none():
    adapter = wide_adapter("relu", "drawn", normalize=False, out=40)
    x = torch.randn(2, 3, 40)
    x[1, 2, 0] = float("nan")
    found = adapter(x.requires_grad_())
    assert found.isnan().any(-1).tolist() == [[False] * 3, [False, False, True]]


@in_interpreter
def test_second_derivatives_are_those_of_the_formula():
    adapter = wide_adapter("gelu", "drawn", normalize=True, out=40)
    x = torch.randn(2, 3, 40).requires_grad_()

    def penalty() -> torch.Tensor:
        (first,) = torch.autograd.grad(adapter(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), adapter.readout.A)[0]

    found = penalty()
    del DEVICE_KERNELS["adapter_sum", "cpu"]
    expected = penalty()
    assert float((found - expected).norm() / expected.norm()) < 1e-5


@in_interpreter
def test_others_take_the_torch_form():
    for adapter in (
        wide_adapter("sin", "drawn", normalize=True, out=40),
        wide_adapter("gelu", "learned", normalize=True, out=40),
        wide_adapter("gelu", "drawn", normalize=True, out=40).double(),
    ):
        adapter(torch.randn(2, 3, 40, dtype=adapter.readout.A.dtype, requires_grad=True))
        assert form_that_ran("adapter_sum") == "torch"
    assert cuda_adapter.LARGEST == 128
