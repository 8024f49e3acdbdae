"""Learning curves: the last step of a run is on them, and the single point of a very short run can be seen."""

# ruff: noqa: E402

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("accelerate", "matplotlib", "rich", "yaml"):
    pytest.importorskip(package, reason="pip install snnk-peft[recipes]")

sys.path.append(str(Path(__file__).resolve().parent.parent / "recipes"))

from _lib import plots


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are stored."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "_store", lambda figure, file: figures.append(figure))
    return figures


def points(figure: Any) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_xdata()) for axes in figure.axes for line in axes.get_lines()}


def test_a_single_point_is_marked(drawn: list[Any], tmp_path: Path) -> None:
    plots.learning_curve([{"step": 2, "loss": 1.0}, {"step": 2, "score": 0.5}], tmp_path / "a.png", "title")
    assert points(drawn[0]) == {"training loss": [2], "evaluation score": [2]}
    for axes in drawn[0].axes:
        assert all(line.get_marker() == "o" for line in axes.get_lines())
    rows = [{"step": step, "loss": 1.0} for step in range(99)]
    plots.learning_curve([*rows, {"step": 98, "score": 0.5}], tmp_path / "b.png", "title")
    assert drawn[1].axes[0].get_lines()[0].get_marker() == "None"


@pytest.mark.parametrize("steps", [1, 13, 25])
def test_the_curves_of_the_language_model_reach_the_last_step(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_llama
    from rich.console import Console
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(tiny_llama, "WINDOW", 8)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    text = torch.randint(256, (400,))
    curves = tiny_llama.train(model, text, text, steps, 0, Console(quiet=True))
    assert [points[-1][0] for points in curves.values()] == [steps, steps]
