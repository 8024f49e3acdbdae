"""recipes/fit_head.py: a head in closed form from files to a bundle, in one process and in two."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path

import finetune
import fit_head
import pytest
import torch
import yaml
from data_files import write_task
from lib.head_fitting import FitHead
from recipe_world import RECIPES, reset_accelerate, write_world
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from snnk_peft import ClosedFormHead, HeadStatistics
from snnk_peft.errors import NumericalWarning
from tests.fresh_process import run_processes, run_python

pytestmark = pytest.mark.slow

ROWS = 120


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bert/`, `glue/` with RTE and STS-B, and head.yaml."""
    folder = write_world(tmp_path_factory.mktemp("world"))
    for task in ("rte", "stsb"):
        write_task(folder / "glue", task, n_train=ROWS, n_dev=12)
    content = {
        "task": "rte",
        "model": {"name_or_path": str(folder / "bert")},
        "data": {"dir": str(folder / "glue")},
        "train": {"batch_size": 8, "eval_batch_size": 8, "device": "cpu"},
        "output": {"dir": "run"},
    }
    (folder / "head.yaml").write_text(yaml.safe_dump(content))
    return folder


def fitted(world: Path, out: Path, *changes: str) -> dict:
    assert fit_head.main([str(world / "head.yaml"), f"output.dir={out}", *changes]) == 0
    return json.loads((out / "metrics.json").read_text())


def test_from_files_to_a_pipeline(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["method.name=lora", "train.epochs=2", f"output.dir={tmp_path / 'lora'}", "output.save_model=false"]
    assert finetune.main([str(world / "head.yaml"), *lora]) == 0
    reset_accelerate()
    figures = fitted(world, tmp_path / "head", f"method.beside=[{tmp_path / 'lora'}]")
    assert [point["examples"] for point in figures["points"]] == [ROWS // 8, ROWS // 4, ROWS // 2, ROWS]
    assert all(point["seconds"] > 0 for point in figures["points"])
    assert figures["points"][-1]["score"] == pytest.approx(figures["score"], abs=1e-6)
    assert 0 <= figures["leave_one_out"]["accuracy"] <= 1
    assert str(tmp_path) not in json.dumps(figures)  # no path of this machine
    assert 0 <= figures["expected_calibration_error"]["validation"] <= 1
    shown = capsys.readouterr().out
    assert "leave-one-out" in shown
    with (tmp_path / "head/score_over_seconds.png").open("rb") as stream:
        assert stream.read(4) == b"\x89PNG"

    # What was scored is what was saved.
    folder = tmp_path / "head/bundle"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    lines = [line.split("\t") for line in (world / "glue/RTE/dev.tsv").read_text().splitlines()[1:]]
    with torch.no_grad():
        found = [model(**tokenizer(a, b, return_tensors="pt")).logits.argmax(-1).item() for _, a, b, _ in lines]
    right = [model.config.id2label[index] == line[-1] for index, line in zip(found, lines, strict=True)]
    assert sum(right) / len(right) == pytest.approx(figures["metrics"]["accuracy"], abs=1e-6)
    told = pipeline("text-classification", str(folder), top_k=None)({"text": lines[0][1], "text_pair": lines[0][2]})
    assert sum(entry["score"] for entry in told) == pytest.approx(1, abs=1e-5)

    # The statistics are those of all rows, and forget them again.
    statistics = HeadStatistics.load(tmp_path / "head/statistics.safetensors")
    assert statistics.count == ROWS
    rows = [line.split("\t") for line in (world / "glue/RTE/train.tsv").read_text().splitlines()[1:]]
    base = AutoModelForSequenceClassification.from_pretrained(world / "bert", num_labels=2)
    base.config.id2label = model.config.id2label
    head = ClosedFormHead(base, fit_head_views(model))
    head.merge(statistics)
    inputs = tokenizer([r[1] for r in rows[:8]], [r[2] for r in rows[:8]], padding=True, return_tensors="pt")
    labels = torch.tensor([model.config.label2id[row[-1]] for row in rows[:8]])
    assert head.remove([{**inputs, "labels": labels}]) == 8
    assert head.statistics.count == ROWS - 8


def fit_head_views(model):
    return model.snnk_head.reader.features


def test_seconds_are_of_reading_and_one_fit(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stops at all examples has not fitted a half of them before."""
    fit, clock, fits = ClosedFormHead.fit, time.perf_counter, []

    def slow(self, *given):
        fits.append(1000)  # seconds by the clock
        return fit(self, *given)

    monkeypatch.setattr(ClosedFormHead, "fit", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(fits))
    first, *_, last = (point["seconds"] for point in fitted(world, tmp_path / "head")["points"])
    assert len(fits) == 4
    assert first > 1000
    assert last - first < 1000


def test_a_finished_run_is_replaced_on_request(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that the run leaves is known as a run's; a file of somebody else's is not."""
    fitted(world, tmp_path / "head", "data.max_train_samples=64")
    reset_accelerate()
    assert fitted(world, tmp_path / "head", "--overwrite", "data.max_train_samples=72")["examples"]["train"] == 72
    reset_accelerate()
    (tmp_path / "head/thesis.tex").write_text("mine")
    assert fit_head.main([str(world / "head.yaml"), f"output.dir={tmp_path / 'head'}", "--overwrite"]) == 2
    assert "holds more than a run: thesis.tex" in capsys.readouterr().err
    assert (tmp_path / "head/statistics.safetensors").is_file()


def test_beside_lora_in_one_run(world: Path, tmp_path: Path) -> None:
    """benchmarks/head_beside_lora.py: figures are those of its runs, which are not repeated."""
    runs, output = tmp_path / "runs", tmp_path / "metrics.json"
    asked = [
        *(str(RECIPES / "benchmarks/head_beside_lora.py"), "--data", str(world / "glue"), "--tasks", "rte", "stsb"),
        *("--runs", str(runs), "--output", str(output), "--set", f"model.name_or_path={world / 'bert'}"),
        *("train.device=cpu", "data.max_train_samples=64"),
    ]
    first = run_python(asked)
    assert first.returncode == 0, first.stderr[-3000:]
    rows = json.loads(output.read_text())["rows"]
    assert [row["task"] for row in rows] == ["rte"] * 4 + ["stsb"] * 4 + ["mean"] * 4
    for row in rows:
        assert row["score / LoRA's"] == pytest.approx(row["score"] / row["LoRA's score"], abs=1e-4)
        assert row["seconds / LoRA's"] == pytest.approx(row["seconds"] / row["LoRA's seconds"], abs=1e-4)
    whole = [row for row in rows if row["share of examples"] == 1]
    for row in whole[:2]:
        folders = [runs / row["task"] / method / "seed0" for method in ("head", "lora_r8")]
        head, lora = (json.loads((folder / "metrics.json").read_text()) for folder in folders)
        assert (row["score"], row["LoRA's score"]) == (head["points"][-1]["score"], lora["score"])
        assert (row["seconds"], row["LoRA's seconds"]) == (head["seconds"], lora["train_seconds"])
        assert head["examples"]["train"] == 64
        assert lora["config"]["method"]["name"] == "lora"
    assert whole[2]["score"] == pytest.approx((whole[0]["score"] + whole[1]["score"]) / 2)
    again = run_python(asked)
    assert again.returncode == 0
    assert again.stdout.count("1 runs, 1 finished") == 4


def test_numbers_views_and_a_feature_map(world: Path, tmp_path: Path) -> None:
    chosen = "method.feature_map={component: relu, projection: orf, num_features: 16}"
    figures = fitted(world, tmp_path / "head", "task=stsb", "method.views=[[1, mean], [-1, max]]", chosen)
    assert set(figures["leave_one_out"]) >= {"pearson", "spearmanr"}
    assert "expected_calibration_error" not in figures
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "head/bundle")
    assert model.config.problem_type == "regression"
    assert model.snnk_head.linear.in_features == 16 + 2 * 32


def test_two_processes_fit_the_head_of_one(world: Path, tmp_path: Path) -> None:
    given = [str(RECIPES / "fit_head.py"), str(world / "head.yaml"), f"output.dir={tmp_path / 'two'}"]
    for code, output in run_processes(given, env={"OMP_NUM_THREADS": "1"}):
        assert code == 0, output[-3000:]
    one = fitted(world, tmp_path / "one")
    two = json.loads((tmp_path / "two/metrics.json").read_text())
    assert two["fit"]["ridge"] == one["fit"]["ridge"]
    assert two["fit"]["examples"] == one["fit"]["examples"] == ROWS
    assert two["fit"]["cross_validated"] == pytest.approx(one["fit"]["cross_validated"], rel=1e-5)
    tensors = [load_file(tmp_path / name / "bundle/model.safetensors") for name in ("one", "two")]
    for key, value in tensors[0].items():
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(tensors[1][key] / scale, value / scale, rtol=1e-3, atol=1e-4)


def test_a_stopped_report_is_resumed(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fitted is not fitted again."""
    out = tmp_path / "head"

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(FitHead, "report", fail)
        with pytest.raises(OSError, match="no space"):
            fit_head.main([str(world / "head.yaml"), f"output.dir={out}"])
    reset_accelerate()
    with monkeypatch.context() as patch:
        patch.setattr(FitHead, "_fitted", fail)
        assert fit_head.main([str(world / "head.yaml"), f"output.dir={out}", "--resume"]) == 0
    reset_accelerate()
    plain = fitted(world, tmp_path / "plain")
    resumed = json.loads((out / "metrics.json").read_text())
    assert resumed["score"] == plain["score"]
    assert resumed["fit"] == plain["fit"]
    first, second = (load_file(path / "bundle/model.safetensors") for path in (out, tmp_path / "plain"))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_wrong_views_are_refused_before_the_run(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(world / "head.yaml"), f"output.dir={tmp_path / 'run'}"]
    assert fit_head.main([*given, "method.views=[[9, mean]]"]) == 2
    assert "hidden states 9" in capsys.readouterr().err
    reset_accelerate()
    assert fit_head.main([*given, "method.views=[[1, median]]"]) == 2
    assert "median" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_twelve_examples_are_enough_for_every_point(world: Path, tmp_path: Path) -> None:
    """The first point, an eighth of the examples, may lack a class; all of them do not, and nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        figures = fitted(world, tmp_path / "head", "data.max_train_samples=12")
    assert [point["examples"] for point in figures["points"]] == [2, 3, 6, 12]
