"""The Triton kernels on a card against fp64, with several parts of several blocks of a sequence."""

from __future__ import annotations

import pytest
import torch

from snnk_peft.functional.backend import form_that_ran
from snnk_peft.functional.device_kernels import cuda_exponential
from tests.exponential_oracle import CASES, check, compare, given

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
        pytest.skip("tests/test_triton_kernels.py runs the same in Triton's interpreter")


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
