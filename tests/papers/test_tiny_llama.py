"""The recipe that trains a tiny Llama on bytes, from end to end, and learning curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from papers.lib import plots as papers_plots
from papers.programs import tiny_llama

from snnk_cli import plots


@pytest.mark.slow
def test_the_recipe_trains_bundles_and_generates(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    out = tmp_path / "run"
    assert tiny_llama.main(["--text", str(text), "--steps", "5", "--output", str(out), "--near-field", "4"]) == 0
    figures = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    assert figures["bits_per_byte"]["after"] < figures["bits_per_byte"]["before"] - 1
    assert figures["reload_parity_error"] < 1e-5
    assert figures["cache"] == "RecurrentCache"
    assert figures["sample"].startswith("Return the ")
    sizes = {name: [row["cache_bytes"] for row in rows.values()] for name, rows in figures["decoding"].items()}
    assert sizes["recurrent"][0] == sizes["recurrent"][1] < sizes["growing"][0] < sizes["growing"][1]
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert {entry.name for entry in tmp_path.iterdir()} == {"text.txt", "run"}
    for arguments, messages in (
        (["--output", str(out), "--steps", "0"], ["replace it with --overwrite", "--steps is 0"]),
        (["--output", str(tmp_path), "--overwrite"], ["holds more than a run: run, text.txt"]),
        (["--output", str(tmp_path / "new"), "--text", str(tmp_path / "none")], ["cannot be read"]),
        ([], ["--output is missing"]),
    ):
        assert tiny_llama.main(arguments) == 2
        errors = capsys.readouterr().err
        assert all(message in errors for message in messages)


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
    steps: int, drawn: list[Any], short_text: Path, tmp_path: Path
) -> None:
    arguments = ["--text", str(short_text), "--steps", str(steps), "--output", str(tmp_path / "run")]
    assert tiny_llama.main(arguments) == 0
    curves = points(drawn[0])
    assert curves["training"] == list(range(1, steps + 1))
    assert (curves["held out"][0], curves["held out"][-1]) == (0, steps)
