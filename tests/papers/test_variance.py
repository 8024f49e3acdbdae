"""Variance over draws of random features: the metrics, and fresh draws of a model's attention."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import finetune
import numpy as np
import pytest
import torch
import yaml
from data import TASKS
from data.sparse_sums import BOUND, draw_pairs
from papers.lib.lra_model import build_classifier
from papers.lib.lra_settings import AttentionMethod, LongRangeModel
from papers.lib.runs import load_folder
from papers.programs import train_lra
from recipe_world import recipe, reset_accelerate, write_settings, write_world
from safetensors.torch import load_file

from snnk_cli.draws import (
    inconsistency,
    majority,
    redrawn,
    relative_deviation,
    resamplable,
    variance_figures,
    voting_gain,
)
from snnk_cli.run_folder import best_checkpoint
from snnk_peft.errors import ConfigError

TINY = LongRangeModel(dim=16, hidden_dim=16, heads=2, layers=1, dropout=0.0, attention_dropout=0.0)
ORF = {"component": "posrf", "projection": "orf", "num_features": 16}


@pytest.mark.parametrize("classes", [2, 3])
def test_metrics_are_those_of_counting(classes: int) -> None:
    rng = np.random.default_rng(0)
    logits, truth = rng.normal(size=(6, 40, classes)), rng.integers(0, classes, 40)
    votes, changed, right, rsd = [], [], 0, []
    for example in range(40):
        labels = [max(range(classes), key=lambda c: logits[n, example, c]) for n in range(6)]
        most = max(Counter(labels).values())
        votes.append(min(label for label, count in Counter(labels).items() if count == most))
        changed.append(6 - most)
        right += sum(label == truth[example] for label in labels)
        margins = [logits[n, example, 1] - logits[n, example, 0] for n in range(6)]
        rsd.append(statistics.stdev(margins) / abs(statistics.mean(margins)))
    got = variance_figures(logits, truth)
    accuracy = np.mean(np.array(votes) == truth)
    assert got["pi"] == pytest.approx(np.mean(changed))
    assert got["pi_share"] == pytest.approx(np.mean(changed) / 6)
    assert got["voting_accuracy"] == pytest.approx(accuracy)
    assert got["voting_gain"] == pytest.approx(accuracy / (right / 240))
    assert (got["rsd_mean"] is None) if classes > 2 else (got["rsd_mean"] == pytest.approx(np.mean(rsd)))


def test_zero_means_ties_and_nothing_right() -> None:
    assert relative_deviation(np.array([[1.0, 0.0, 2.0], [-1.0, 0.0, 2.0]])).tolist() == [np.inf, 0.0, 0.0]
    tied = np.array([[2, 1], [1, 1]])
    assert majority(tied, 3).tolist() == [1, 1]
    assert inconsistency(tied, 3).tolist() == [1, 0]
    assert np.isnan(voting_gain(tied, np.array([0, 0]), 3))
    with pytest.raises(ConfigError, match="at least 2 draws"):
        relative_deviation(np.ones((1, 3)))


def test_fresh_draws_differ_repeat_and_leave_the_saved_one() -> None:
    torch.manual_seed(0)
    model = build_classifier(TASKS["sparsity_50"], TINY, AttentionMethod(ORF), 12, seed=0).eval()
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
    ids = torch.randint(1, 5, (3, 1, 12))

    def answer() -> torch.Tensor:
        with torch.no_grad():
            return model(ids, torch.ones_like(ids)).logits

    before, state = answer(), {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for seed, number in ((0, 0), (0, 1), (1, 0), (0, 0)):
        with redrawn(model, seed, number):
            found.append(answer())
    assert torch.equal(found[0], found[3])
    for one, other in ((found[0], found[1]), (found[0], found[2]), (found[0], before)):
        assert not torch.allclose(one, other, atol=1e-4)
    assert torch.equal(answer(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises(ZeroDivisionError), redrawn(model, 5, 0):
        raise ZeroDivisionError
    assert torch.equal(answer(), before)


def test_attention_without_a_sample_is_refused() -> None:
    soft = build_classifier(TASKS["sparsity_50"], TINY, AttentionMethod(), 12, seed=0)
    with pytest.raises(ConfigError, match="softmax"):
        resamplable(soft)
    fixed = {"component": "elu", "projection": "identity"}
    with pytest.raises(ConfigError, match="identity"):
        resamplable(build_classifier(TASKS["sparsity_50"], TINY, AttentionMethod(fixed), 12, seed=0))


@pytest.mark.parametrize("percent", [10, 50, 90])
def test_sparse_sums(percent: int) -> None:
    task = TASKS[f"sparsity_{percent}"]
    data, again = (task.load(max_samples={"train": 900, "validation": 90, "test": 90}) for _ in range(2))
    assert {len(rows) for rows in data.values()} == {900, 90}
    for split, rows in data.items():
        assert np.bincount(rows.labels).tolist() == [len(rows) // 9] * 9
        tokens = np.stack(rows.tokens[0]).astype(int) - 1
        assert np.array_equal(tokens + 1, np.stack(again[split].tokens[0]))
        sums = np.cumsum(np.where(tokens // 2 == 1, 1, -1) * (tokens % 2), 1)
        assert np.abs(sums).max() == BOUND
        assert np.array_equal(sums[:, -1] + BOUND, rows.labels)
    assert len({ids.tobytes() for rows in data.values() for ids in rows.tokens[0]}) == 1080
    raw, _ = draw_pairs(np.random.default_rng(1), 2000, percent / 100)
    share, p = ((raw - 1) % 2).mean(), percent / 100
    assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / raw.size)


def test_evaluate_stores_the_figures_of_fresh_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_world(tmp_path)
    monkeypatch.chdir(tmp_path)
    file = write_settings(tmp_path / "run.yaml", "bert", "glue", "run", method="snnk")
    linear = "method.attention={component: posrf, projection: orf, num_features: 8}"
    for folder, changes in (("run", [linear]), ("plain", [])):
        assert finetune.main([file, f"output.dir={folder}", "train.epochs=1", *changes]) == 0
    evaluate = recipe("score")
    found = []
    for seed in ("3", "3", "4"):
        assert evaluate.main(["run", "--draws", "3", "--draws-seed", seed]) == 0
        found.append(json.loads(Path("run/evaluation.json").read_text()))
    trained = json.loads(Path("run/metrics.json").read_text())
    assert found[0]["metrics"] == trained["metrics"]  # the saved draw
    assert found[0]["draws"] == found[1]["draws"]
    assert found[0]["draws"]["splits"] != found[2]["draws"]["splits"]
    assert len(found[0]["draws"]["scores"]) == 3
    assert found[0]["draws"]["splits"]["validation"]["rsd_mean"] > 0
    # The run's model without its data, as experiments read it: the tensors of the best checkpoint.
    saved = load_file(best_checkpoint(Path("run")) / "model.safetensors")
    state = load_folder(Path("run")).state_dict()
    assert any(torch.equal(state[name], value) for name, value in saved.items() if name.endswith("projection.weight"))
    assert all(torch.equal(state[name], value) for name, value in saved.items())
    assert evaluate.main(["plain", "--draws", "3"]) == 2
    assert "softmax attention" in capsys.readouterr().err
    assert evaluate.main(["run", "--draws", "1"]) == 2
    assert "expected 2 or more" in capsys.readouterr().err


def test_evaluate_draws_anew_for_runs_on_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The saved draw scores as its training reported; fresh ones as brute force over the run's model says."""
    monkeypatch.chdir(tmp_path)

    def large(*args: Any) -> torch.nn.Module:
        """Fresh, a model hardly looks at its input, and all draws give the same answers."""
        model = build_classifier(*args)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(10 if parameter.dim() == 2 else 1)
        return model

    monkeypatch.setattr(train_lra, "build_classifier", large)
    sizes = {"dim": 8, "heads": 2, "layers": 1, "hidden_dim": 8}
    settings = {
        "task": "sparsity_50",
        "model": sizes,
        "data": dict.fromkeys(("max_train_samples", "max_validation_samples", "max_test_samples"), 36),
        "train": {"steps": 6, "batch_size": 12, "eval_every": 3, "learning_rate": 1e-3, "warmup_steps": 0},
    }
    for name, attention in (("run", {**ORF, "num_features": 4}), ("plain", "softmax")):
        given = {**settings, "method": {"attention": attention}, "output": {"dir": name}}
        Path(f"{name}.yaml").write_text(yaml.safe_dump(given))
        reset_accelerate()
        assert train_lra.main([f"{name}.yaml"]) == 0
    evaluate, trained = recipe("score"), json.loads(Path("run/metrics.json").read_text())
    assert evaluate.main(["run", "--draws", "3", "--draws-seed", "7"]) == 0
    found = json.loads(Path("run/evaluation.json").read_text())
    assert found["score"] == found["metrics"]["accuracy"] == trained["accuracy"]
    assert (found["task"], found["examples"], found["max_length"]) == ("sparsity_50", {"test": 36}, 200)

    rows, model = TASKS["sparsity_50"].load(splits=["test"], max_samples={"test": 36})["test"], load_folder(Path("run"))
    ids, logits = torch.from_numpy(np.stack(rows.tokens[0]).astype(np.int64)), []
    for number in range(3):
        with redrawn(model, 7, number), torch.no_grad():
            logits.append(model(ids[:, None], torch.ones_like(ids)[:, None]).logits.numpy())
    assert found["draws"]["scores"] == [float((each.argmax(-1) == rows.labels).mean()) for each in logits]
    expected = variance_figures(np.stack(logits), rows.labels)
    assert found["draws"]["splits"] == {"test": expected}
    assert expected["pi"] > 0  # the draws do not agree
    assert evaluate.main(["run", "data.max_test_samples=9", "--output", "few.json"]) == 0
    few = json.loads(Path("few.json").read_text())
    assert (few["examples"], "draws" in few) == ({"test": 9}, False)
    for given, said in (
        (["plain", "--draws", "3"], "softmax attention"),
        (["run", "task=listops"], "task is listops; run was trained on sparsity_50: leave the setting out"),
        (["run", "data.max_length=9"], "data.max_length"),
    ):
        assert evaluate.main(given) == 2
        assert said in capsys.readouterr().err
