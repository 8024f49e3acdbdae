"""Tests of the papers' experiments, which `make test` leaves out; all of them need the packages of the recipes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDED = ("accelerate", "datasets", "matplotlib", "PIL", "rich", "scipy", "sklearn", "yaml")
collect_ignore_glob: list[str] = []

if missing := [name for name in NEEDED if find_spec(name) is None]:
    collect_ignore_glob.append("test_*.py")
    warnings.warn(f"tests/papers is left out for lack of {missing}: pip install snnk-peft[recipes]", stacklevel=1)
else:
    from papers.lib import sweep
    from recipe_world import reset_accelerate


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies beside this file."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.papers)


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    reset_accelerate()
    yield
    reset_accelerate()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names, in order, of what a sweep starts: it runs in this process, without the seconds that imports take."""
    names: list[str] = []

    def in_this_process(command: list[str]) -> tuple[int, None]:
        reset_accelerate()
        file = Path(command[1])
        names.append(file.stem)
        program = import_module(f"papers.programs.{file.stem}" if file.parent.name == "programs" else file.stem)
        return program.main(command[2:]), None

    monkeypatch.setattr(sweep, "execute", in_this_process)
    return names
