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
    from papers.programs import tiny_llama
    from recipe_world import reset_accelerate
    from transformers import LlamaConfig


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
def short_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text for tiny_llama.py, whose model and windows are small, and which reports nothing about them."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    monkeypatch.setattr(tiny_llama, "WINDOW", 8)
    monkeypatch.setattr(tiny_llama, "llama_config", lambda: LlamaConfig(vocab_size=256, **sizes))
    monkeypatch.setattr(tiny_llama.TinyLlama, "report", lambda self, done: {})
    monkeypatch.setattr(tiny_llama.TinyLlama, "summary", lambda self, done, figures: "")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    return tmp_path / "text"


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
