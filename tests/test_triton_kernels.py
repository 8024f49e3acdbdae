"""The Triton kernels in Triton's interpreter, on the CPU, against dense formulas in fp64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from snnk_peft.functional.backend import DEVICE_KERNELS, form_that_ran
from tests.exponential_oracle import CASES, TOLERANCE, check, compare, given

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="pip install triton: the kernels are tested in its interpreter")
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="in a process of its own: the first test starts it")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_a_process_of_its_own():
    """The interpreter must be chosen before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """Kernels for the CPU, with several blocks and parts in few tokens."""
    if not INTERPRETED:
        yield
        return
    from snnk_peft.functional.device_kernels import cuda_exponential
    from snnk_peft.functional.device_kernels.triton_exponential import launches

    before = dict(DEVICE_KERNELS)
    cuda_exponential.register("cpu")
    monkeypatch.setattr(launches, "part_tokens", lambda *_: 32)
    monkeypatch.setattr(launches, "launch", lambda *_: (16, {"num_warps": 4, "num_stages": 1}))
    yield
    DEVICE_KERNELS.clear()
    DEVICE_KERNELS.update(before)


@in_interpreter
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_attention(causal, case, dtype):
    tensors, square, mask = given(dtype, **CASES[case])
    report = compare(tensors, square, mask, causal)
    assert "cuda_exponential" in form_that_ran("causal_exponential_attention" if causal else "exponential_attention")
    print({name: f"{value:.1e}" for name, value in report.items()})
    check(report, dtype, case)
