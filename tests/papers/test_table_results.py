"""README.md's table and picture say what the stored figures say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from papers import table_results
from PIL import Image

from snnk_peft.errors import ConfigError

FAR, STEP = "convert_llama/metrics", "adapter_step/metrics"


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """The stored figures in a folder of their own."""
    shutil.copytree(root / "recipes/benchmarks/results", tmp_path / "recipes/benchmarks/results")
    shutil.copytree(root / "model_cards", tmp_path / "model_cards")
    return tmp_path


def stored(root: Path, name: str) -> Any:
    return json.loads((root / f"recipes/benchmarks/results/{name}.json").read_text())


def test_readme_has_the_measured_results(root: Path) -> None:
    text = (root / "README.md").read_text()
    rendered = table_results.render(root)
    assert table_results.replaced(text, rendered) == text, "run recipes/papers/table_results.py --write"
    other = text.replace("LoRA's seconds |", "LoRA's minutes |")
    assert other != text
    assert table_results.replaced(other, rendered) == text
    assert f"]({table_results.PICTURE})" in text
    assert (root / table_results.PICTURE).stat().st_size < 100_000


def test_rows_have_the_figures_of_the_files(root: Path) -> None:
    header, _, *rows = table_results.render(root).splitlines()
    assert header == "| task | before | after | cost |"
    assert len(rows) == 9
    curve = {(row["point"], row["as"]): row for row in stored(root, "convert_curve/sst2")["rows"]}
    for row, point in zip(rows[:2], (("original", "int8"), ("plan 2x", "fp32")), strict=True):
        told = curve[point]
        assert f"| {100 * told['score']:.1f} at {told['speed-up']:.1f} × the speed, " in row
        assert f" {100 * told['agreement']:.1f} % the same answers |" in row
    models = {row["model"]: row for row in stored(root, "convert_embeddings/metrics")["rows"]}
    original, int8, small = (models[name] for name in ("original", "original int8", "2x"))
    assert f"| Spearman on STS-B {100 * original['spearman']:.1f} | {100 * small['spearman']:.1f} at " in rows[4]
    assert f" cosine {small['cosine']:.3f}; " in rows[4]
    assert f" {int8['speed-up']:.1f} ×, {int8['cosine']:.3f} |" in rows[4]
    ours = next(row for row in stored(root, FAR)["rows"] if row["model"] == "converted, 0.1")
    told = ours["cache bytes behind 8192"] / 1e6, ours["reviews, to 2048"], 100 * ours["copied after 640"]
    assert "| {:.0f} MB; {:.1f}; {:.0f} % |".format(*told) in rows[5]
    page = (root / "model_cards/glue_gpu/README.md").read_text()
    for method in ("lora_r8", "rows6_fitted_head", "full"):
        line = next(line for line in page.splitlines() if line.startswith(f"| {method} |"))
        assert f" {line.split('|')[7].strip()}" in rows[7]  # its average


def test_curves_begin_at_the_original_and_keep_every_size(root: Path) -> None:
    curves = table_results.curves(root)
    rows = stored(root, "convert_curve/sst2")["rows"]
    for way in ("plan", "svd", "distilled"):
        sizes = [(row["speed-up"], 100 * row["agreement"]) for row in rows if row["point"].startswith(f"{way} ")]
        kinds = [row["as"] for row in rows if row["point"].startswith(f"{way} ")]
        full = sorted(size for size, kind in zip(sizes, kinds, strict=True) if kind == "fp32")
        assert curves[way, "fp32"] == [(1.0, 100.0), *full]
    assert len(curves["original", "int8"]) == 1
    assert curves["plan", "int8"]


def test_the_picture_fits_a_phone(root: Path, tmp_path: Path) -> None:
    table_results.draw(table_results.curves(root), tmp_path / "picture.png")
    width, height = Image.open(tmp_path / "picture.png").size
    assert 600 <= width <= 800
    assert height <= 1.1 * width


def test_changed_figures_change_the_table(copied: Path) -> None:
    before = table_results.render(copied)
    file = copied / f"recipes/benchmarks/results/{STEP}.json"
    figures = json.loads(file.read_text())
    next(row for row in figures["rows"] if row["method"] == "rows")["time / LoRA"] = 7.0
    file.write_text(json.dumps(figures))
    assert "a step: 7.00 × LoRA's time" in table_results.render(copied)
    assert "a step: 7.00 × LoRA's time" not in before


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no lines"):
        table_results.replaced("no marks", "table")
    with pytest.raises(ConfigError, match="cannot be read"):
        table_results.render(tmp_path)
