"""Tests for a CUDA card. `--device cpu` runs the same code on the processor, as `make test` does with a few of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("SNNK_DEVICE_KERNELS", "all")  # read when the kernels are imported, at the first call on a card


def missing(device: str) -> str | None:
    """Why tests for this device cannot run here, and what to do; None if they can."""
    if device != "cuda" or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build (README, 'On a GPU')"
    return (
        f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and finds no GPU; see what nvidia-smi says"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (reason := missing(item.config.getoption("device"))) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where the tests compute."""
    return request.config.getoption("device")


@pytest.fixture(autouse=True)
def _full_fp32() -> Iterator[None]:
    """fp32 is compared as fp32: convolutions on a GPU otherwise use TF32, which has ten bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
