"""The Triton kernels of the near field on a card against fp64, with several parts of several blocks of a sequence."""

from __future__ import annotations

import pytest
import torch

from snnk_peft.functional.backend import form_that_ran
from tests.near_oracle import CASES, check, compare, given

pytest.importorskip("triton", reason="pip install triton")
pytestmark = pytest.mark.gpu
ALL = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
CHOSEN = [
    *(("bf16", case, 64) for case in ("plain", "masked, grouped", "width 1", "two far", "large")),
    ("bf16", "odd sizes", None),
    *((dtype, case, columns) for dtype in ALL for case, columns in (("apart", 64), ("far, masked", 128))),
    ("bf16", "behind others", 64),
]


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(("dtype", "case", "columns"), CHOSEN)
def test_near_attention(dtype, case, columns, causal, device):
    if device != "cuda":
        pytest.skip("tests/package/test_triton_near.py runs the same in Triton's interpreter")
    if "behind" in CASES[case] and not causal:
        pytest.skip("behind other keys a text is causal")
    more = {"L": 600} if columns is None else {"L": 600, "d": columns, "D": columns}
    broad = {} if "ramp" in CASES[case] else {"width": 100}  # so far apart, others than the nearest keys count nothing
    tensors, facts = given(ALL[dtype], **{**broad, **CASES[case], **more})
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in facts.items()}
    own = [x.to(device) for x in tensors]
    torch.manual_seed(1)
    report = compare(own, there, causal)
    assert "cuda_near" in form_that_ran("near_attention")
    print({name: f"{value:.1e}" for name, value in report.items()})
    check(report, ALL[dtype], case)
    torch.manual_seed(1)
    assert compare(own, there, causal) == report  # what moves from run to run is a race
