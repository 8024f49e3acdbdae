"""What tests of the recipes share: the packages of the extra, and an accelerate that has not been used."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

EXTRA = ("accelerate", "datasets", "evaluate", "matplotlib", "pandas", "PIL", "rich", "scipy", "sklearn", "yaml")
MISSING = [package for package in EXTRA if find_spec(package) is None]


class Skipped(pytest.Module):
    """A file that is not imported."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"there is no {', '.join(MISSING)}: pip install snnk-peft[recipes]")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Without the extra, nothing of this folder is run."""
    return Skipped.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    from recipe_world import reset_accelerate  # which needs the extra

    reset_accelerate()
    yield
    reset_accelerate()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bert/`, tiny and random with a tokenizer, and `glue/`, a stand-in of RTE. Nothing is written there."""
    from recipe_world import write_world

    return write_world(tmp_path_factory.mktemp("world"))
