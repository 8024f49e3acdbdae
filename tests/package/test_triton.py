"""Starts the tests of Triton kernels, test_triton_*.py, in Triton's interpreter: each file in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="pip install triton: the kernels are tested in its interpreter")


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(Path(__file__).parent.glob("test_triton_*.py")), ids=lambda file: file.stem)
def test_in_the_interpreter(file):
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
