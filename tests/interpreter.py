"""What tests of Triton kernels in Triton's interpreter share; it must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from snnk_peft.functional.backend import DEVICE_KERNELS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_interpreter = pytest.mark.skipif(not INTERPRETED, reason="in a process of its own: the first test starts it")


def run_in_a_process_of_its_own(file: str) -> None:
    """Run the tests of a file again, in the interpreter."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@contextmanager
def kernels_on_the_cpu(*modules: Any) -> Iterator[None]:
    """Kernels of these modules take tensors of the CPU, and memory that nobody has written to is NaN."""
    from triton.runtime.interpreter import InterpretedFunction

    original, known = InterpretedFunction.__call__, set()

    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The original prepares the language anew at each call of a function in a kernel: half of the time."""
        if self.fn in known:
            return self.rewrite()(*args, **kwargs)
        known.add(self.fn)
        return original(self, *args, **kwargs)

    before = dict(DEVICE_KERNELS)
    for module in modules:
        module.register("cpu")
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        with mock.patch.object(InterpretedFunction, "__call__", inner):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        DEVICE_KERNELS.clear()
        DEVICE_KERNELS.update(before)
