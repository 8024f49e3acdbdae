"""recipes/papers/peers/adapters_glue.py: the recipe of the sweep, a report that the table reads, the library if there.

The library wants another transformers. The test that uses it runs the interpreter that SNNK_ADAPTERS_PYTHON names, of
an environment made as the program says.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from recipe_world import RECIPES, write_settings, write_world

sys.path.insert(0, str(RECIPES / "papers/peers"))

import adapters_glue
from lib.finetuning import Finetuning
from papers import study
from papers.lib.study import load
from safetensors.torch import load_file

from snnk_cli.config import load_config
from snnk_cli.settings import FinetuneConfig

SMALL = ["train.epochs=1", "train.save_every_steps=null", "train.choose_share=0.2"]


def command(folder: Path) -> list[str]:
    """Arguments of a tiny run into runs/rte/adapters_seq_bn/seed0 below `folder`."""
    world, out = write_world(folder), folder / "runs/rte/adapters_seq_bn/seed0"
    write_settings(folder / "run.yaml", str(world / "bert"), str(world / "glue"), str(out), "snnk")
    return [str(folder / "run.yaml"), *SMALL]


def row_of(folder: Path) -> str:
    """The run's line in the table of scores."""
    given = ["--runs", str(folder / "runs"), "--rates", str(folder / "rates"), "--out", str(folder / "cards")]
    assert study.main(["page", "glue", *given]) == 0
    page = (folder / "cards/README.md").read_text()
    return next(line for line in page.splitlines() if line.startswith("| adapters_seq_bn |"))


@pytest.mark.parametrize("task", load("glue").tasks)
def test_data_and_optimisation_are_those_of_the_sweep(task: str) -> None:
    file = str(RECIPES / f"configs/glue/{task}_adapter.yaml")
    given, *overrides = adapters_glue.arguments([file, "data.dir=x"])
    mine = load_config(adapters_glue.AdaptersConfig, given, overrides)
    known = load("glue").tasks[task].methods["lora_r8"]
    lora = [*(each for each in known if not each.startswith("train.learning_rate=")), "data.dir=x"]
    theirs = load_config(FinetuneConfig, file, lora)
    for section in ("model", "data", "train", "augment"):
        assert dataclasses.asdict(getattr(mine, section)) == dataclasses.asdict(getattr(theirs, section))
    assert mine.method.head_bias == theirs.method.head_bias
    assert mine.train.choose_share == 0.1
    ours, peer = adapters_glue.AdapterHub(mine).schedule(10), Finetuning(theirs).schedule(10)
    assert (ours.total, ours.eval_every) == (peer.total, peer.eval_every)
    rates = [ours.rate(step, step) for step in range(ours.total)]
    assert rates == [peer.rate(step, step) for step in range(peer.total)]
    assert max(rates) == mine.train.learning_rate


def test_settings_that_are_given_come_behind_the_recipe() -> None:
    given = adapters_glue.arguments(["--resume", "a.yaml", "train.choose_share=0.3"])
    assert given[0] == "a.yaml"
    assert given.index("train.choose_share=0.3") > given.index("train.choose_share=0.1")
    assert "--resume" in given
    assert adapters_glue.arguments(["--help"]) == ["--help"]


def test_without_the_library_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "adapters", None)  # what an import then finds is that there is none
    assert adapters_glue.main(command(tmp_path)) == 2
    assert "the library adapters cannot be imported" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert adapters_glue.main([*command(tmp_path), "method.name=lora"]) == 2
    assert "method.name is lora; expected linear_probe" in capsys.readouterr().err


def test_the_table_reads_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library's part left out, so that the classifier alone is trained."""
    version = importlib.metadata.version
    monkeypatch.setitem(sys.modules, "adapters", types.ModuleType("adapters"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.3.0" if name == "adapters" else version(name))
    monkeypatch.setattr(adapters_glue.AdapterHub, "model", Finetuning.model)
    assert adapters_glue.main(command(tmp_path)) == 0
    report = json.loads((tmp_path / "runs/rte/adapters_seq_bn/seed0/metrics.json").read_text())
    assert report["method"] == "adapters_seq_bn"
    assert report["library"] == {"adapters": "1.3.0"}
    assert report["examples"] == {"train": 32, "held back": 8, "validation": 10}
    assert row_of(tmp_path).endswith(f"| {100 * report['score']:.1f} | {32 * 2 + 2} |")


@pytest.mark.parametrize(("name", "places", "rows"), [("seq_bn", 1, 4), ("double_seq_bn", 2, 2)])
def test_a_run_with_the_library(tmp_path: Path, name: str, places: int, rows: int) -> None:
    python = os.environ.get("SNNK_ADAPTERS_PYTHON")
    if python is None:
        pytest.skip("set SNNK_ADAPTERS_PYTHON to the interpreter of an environment for adapters_glue.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    more = ["train.learning_rate=0.05", f"adapters.config={name}", f"adapters.reduction_factor={32 // rows}"]
    done = subprocess.run(
        [python, str(RECIPES / "papers/peers/adapters_glue.py"), *command(tmp_path), *more],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/rte/adapters_seq_bn/seed0"
    report = json.loads((folder / "metrics.json").read_text())
    bottleneck = 2 * 32 * rows + rows + 32
    assert report["trainable_parameters"] == 2 * places * bottleneck + 32 * 2 + 2
    assert report["environment"]["packages"]["transformers"].startswith("4.")
    assert report["method"] == f"adapters_{name}"
    assert f"| {report['trainable_parameters']:,} |" in row_of(tmp_path)
    # An adapter that was not activated would have no gradient, and AdamW would leave its biases at zero.

    tensors = load_file(next((folder / "checkpoints").glob("step-*")) / "model.safetensors")
    biases = [value for key, value in tensors.items() if ".adapters." in key and key.endswith(".bias")]
    assert len(biases) == 2 * 2 * places
    assert all(value.abs().max() > 0 for value in biases)
