"""The Triton kernels on a card against fp64, with several parts of several blocks of a sequence."""

from __future__ import annotations

import pytest
import torch

from snnk_peft import build_feature_map
from snnk_peft.functional.backend import form_that_ran
from snnk_peft.functional.device_kernels import cuda_exponential
from snnk_peft.functional.exponential_attention import KeyMeans
from snnk_peft.functional.exponential_causal import causal_exponential_attention
from snnk_peft.functional.log_linear import LogLinear
from snnk_peft.layers.kernel_attention import KernelAttention
from tests import linear_oracle, near_oracle
from tests.exponential_oracle import CASES, TOLERANCE, check, compare, dense, error, given
from tests.package.test_adapter_step import adapter_of, errors

pytest.importorskip("triton", reason="pip install triton")
pytestmark = pytest.mark.gpu
CARD = {"L": 600, "B": 1, "d": 64, "D": 64, "m": 64}
SHAPES = {
    **{name: {**CARD, **case} for name, case in CASES.items()},
    "large": {**CARD, "size": 4.0},
    "as wide as they take": {"L": 300, "B": 1, "H": 2, "G": 1, "d": 128, "D": 128},
}


@pytest.fixture(autouse=True)
def _on_a_card(device):
    if device != "cuda":
        pytest.skip("tests/package/test_triton_*.py run the same in Triton's interpreter")


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        *((torch.bfloat16, case) for case in SHAPES),
        *((torch.float32, case) for case in ("plain", "shrinking", "as wide as they take")),
        *((torch.float16, case) for case in ("large", "shrinking", "as wide as they take")),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_attention(causal, case, dtype, device):
    shape = dict(SHAPES[case])
    if case not in CASES:
        shape["m"] = cuda_exponential.ROOM[dtype] // shape["D"]
    tensors, square, mask = given(dtype, **shape)
    there = [x.to(device) for x in tensors], square, None if mask is None else mask.to(device), causal
    torch.manual_seed(1)
    report = compare(*there)
    assert "cuda_exponential" in form_that_ran("causal_exponential_attention" if causal else "exponential_attention")
    print({name: f"{value:.1e}" for name, value in report.items()})
    check(report, dtype, case if case in CASES else "plain")
    torch.manual_seed(1)
    assert compare(*there) == report  # what moves from run to run is a race


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("shape", [{}, {"d": 128, "m": 32}, {"d": 24, "D": 20, "m": 21}], ids=str)
def test_tokens_behind_a_state(shape, tokens, dtype, device):
    """Grouped heads with rows of their own, without gradients: one launch, twice the same."""
    tensors, square, _ = given(dtype, **{**CARD, "L": tokens, "B": 3, "H": 8, "state": True, "rows": "head", **shape})
    mask = torch.rand(3, 40).to(device)[:, -tokens:] > 0.3
    own = [x.to(device) for x in tensors]
    wide = [x.double() for x in own]
    maps = LogLinear(own[3], own[4], 0.0), LogLinear(own[5], own[4].new_zeros(own[4].shape[-1]), square)
    both, behind = causal_exponential_attention(*own[:3], *maps, mask, KeyMeans(*own[6:]), weighed=True)
    found = [both[..., :-1], both[..., -1], *behind]
    expected = dense(*wide[:3], wide[3:6], square, mask, tuple(wide[6:]), True)
    errors = [error(x, y) for x, y in zip(found, expected, strict=True)]
    assert max(errors) < TOLERANCE[torch.float32], errors
    again, behind = causal_exponential_attention(*own[:3], *maps, mask, KeyMeans(*own[6:]), weighed=True)
    assert all(torch.equal(x, y) for x, y in zip(found[2:], behind, strict=True))
    assert torch.equal(again, both)
    narrow, _ = causal_exponential_attention(*own[:3], *maps, mask, KeyMeans(*own[6:]))
    assert error(narrow, found[0].double()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2, (torch.float16,) * 2],
    ids=str,
)
@pytest.mark.parametrize("case", linear_oracle.CASES)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_features_of_any_kind(causal, case, dtype, values, device):
    """With scales and without, signed, behind a state; scales that differ by hundreds in fp32 alone."""
    shape = {**linear_oracle.CASES[case], "L": 600, "m": 64, "D": 64, "values": values}
    if values != torch.float32 and shape.get("scales", (0, 0)) != (0, 0):
        pytest.skip("one key has all weight, and its gradients are as small as roundings")
    tensors, scale, mask = linear_oracle.given(dtype, **shape)
    there = {name: x.to(device) for name, x in tensors.items()}
    scale, mask = (None if x is None else x.to(device) for x in (scale, mask))
    torch.manual_seed(1)
    report = linear_oracle.compare(there, scale, mask, causal)
    assert "cuda_linear" in form_that_ran("causal_linear_attention" if causal else "key_sums")
    print({name: f"{value:.1e}" for name, value in report.items()})
    linear_oracle.check(report, dtype, values)
    torch.manual_seed(1)
    assert linear_oracle.compare(there, scale, mask, causal) == report


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_compiled_models_take_the_kernels(causal, device):
    layer = KernelAttention([build_feature_map("posrf", "orf", 64, 64)], 4).to(device)
    own = [torch.randn(1, 4, 300, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(layer(*own, causal=causal).float().square().sum(), own)
    compiled = torch.compile(lambda *given: layer(*given, causal=causal), fullgraph=True)
    found = torch.autograd.grad(compiled(*own).float().square().sum(), own)
    assert "cuda_exponential" in form_that_ran("causal_exponential_attention" if causal else "exponential_attention")
    assert max(error(x, y.double()) for x, y in zip(found, expected, strict=True)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ["drawn", "learned, with a bias"])
@pytest.mark.parametrize(("component", "normalize"), [("gelu", True), ("relu", True), ("elu", False), ("relu", False)])
def test_steps_of_adapters(component, normalize, rows, dtype, device, monkeypatch):
    """Under autocast, the error of the torch form; twice the same."""
    adapter = adapter_of(component, rows, normalize=normalize).to(device)
    x = (torch.randn(3, 700, 12, device=device) + 0.5).requires_grad_()

    def run():
        with torch.autocast(device, dtype):
            return adapter(x)

    torch.manual_seed(2)
    off = errors(adapter, component, x, None, run)
    taken = "cuda_adapter" in form_that_ran("adapter_sum")
    assert taken == (rows == "drawn" or not normalize)
    torch.manual_seed(2)
    assert errors(adapter, component, x, None, run) == off
    monkeypatch.setenv("SNNK_DEVICE_KERNELS", "off")
    torch.manual_seed(2)
    expected = errors(adapter, component, x, None, run)
    assert form_that_ran("adapter_sum") == "torch"
    assert all(a < 1.2 * b for a, b in zip(off, expected, strict=True)), (off, expected)


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
NEAR_CASES = [
    *(("bf16", case, 64) for case in ("plain", "masked, grouped", "width 1", "two far", "large")),
    ("bf16", "odd sizes", None),
    *((dtype, case, columns) for dtype in DTYPES for case, columns in (("apart", 64), ("far, masked", 128))),
    ("bf16", "behind others", 64),
]


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(("dtype", "case", "columns"), NEAR_CASES)
def test_near_attention(dtype, case, columns, causal, device):
    if "behind" in near_oracle.CASES[case] and not causal:
        pytest.skip("behind other keys a text is causal")
    more = {"L": 600} if columns is None else {"L": 600, "d": columns, "D": columns}
    broad = (
        {} if "ramp" in near_oracle.CASES[case] else {"width": 100}
    )  # so far apart, others than the nearest keys count nothing
    tensors, facts = near_oracle.given(DTYPES[dtype], **{**broad, **near_oracle.CASES[case], **more})
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in facts.items()}
    own = [x.to(device) for x in tensors]
    torch.manual_seed(1)
    report = near_oracle.compare(own, there, causal)
    assert "cuda_near" in form_that_ran("near_attention")
    print({name: f"{value:.1e}" for name, value in report.items()})
    near_oracle.check(report, DTYPES[dtype], case)
    torch.manual_seed(1)
    assert near_oracle.compare(own, there, causal) == report  # what moves from run to run is a race
