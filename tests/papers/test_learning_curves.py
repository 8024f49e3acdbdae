"""Learning curves: the last step of a run is on them, and the single point of a very short run can be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from papers.lib import plots as papers_plots
from papers.programs import tiny_llama
from transformers import LlamaConfig

from snnk_cli import plots


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are stored."""
    figures: list[Any] = []
    for module in (plots, papers_plots):
        monkeypatch.setattr(module, "store", lambda figure, file: figures.append(figure))
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
def test_the_curves_of_the_language_model_reach_the_last_step(
    steps: int, drawn: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    monkeypatch.setattr(tiny_llama, "WINDOW", 8)
    monkeypatch.setattr(tiny_llama, "llama_config", lambda: LlamaConfig(vocab_size=256, **sizes))
    monkeypatch.setattr(tiny_llama.TinyLlama, "report", lambda self, done: {})
    monkeypatch.setattr(tiny_llama.TinyLlama, "summary", lambda self, done, figures: "")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    arguments = ["--text", str(tmp_path / "text"), "--steps", str(steps), "--output", str(tmp_path / "run")]
    assert tiny_llama.main(arguments) == 0
    curves = points(drawn[0])
    assert curves["training"] == list(range(1, steps + 1))
    assert (curves["held out"][0], curves["held out"][-1]) == (0, steps)
