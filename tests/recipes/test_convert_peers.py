"""`peers`: activation-aware SVD, uptraining, and the program. The other methods: test_peer_methods.py."""

from __future__ import annotations

import copy
import importlib
import itertools
import json

import pytest
import torch
from fresh_process import run_python
from glue_files import write_task
from peer_world import BENCHMARKS, LAYER, logits, modules, seen_by, sentences, teacher
from recipe_world import write_world
from transformers import BertConfig, BertForSequenceClassification

from snnk_peft import LowRankPart, SNNKConfig, calibrate, get_snnk_model

pytestmark = pytest.mark.slow


@pytest.fixture
def peers(monkeypatch):
    return modules(monkeypatch)


# --- activation-aware SVD -------------------------------------------------------------------------------------------


def test_low_rank_part_is_the_svd_whitened_by_the_input_covariance():
    """The published recipe, with a Cholesky factor: truncate W L, multiply by L⁻¹; what is left goes into the bias."""
    model, batches = teacher(), sentences(10)
    patched = get_snnk_model(
        copy.deepcopy(model), SNNKConfig(parts=[LowRankPart("ffn", rank=3, activation="identity")], modules_to_save=[])
    )
    calibrate(patched, batches, progress=False)
    path = f"{LAYER}.intermediate.dense"
    x = seen_by(model, path, batches)
    dense = model.get_submodule(path)
    W, centred = dense.weight.detach().double(), x - x.mean(0)
    # The norm before it takes the mean out of its inputs: a little is added for the factor to exist.
    L = torch.linalg.cholesky(centred.T @ centred / len(x) + 1e-9 * torch.eye(16))
    U, s, Vt = torch.linalg.svd(W @ L)
    wanted = U[:, :3] * s[:3] @ Vt[:3] @ torch.linalg.inv(L)
    layer = patched.get_submodule(f"base_model.model.{path}").snnk_slots["default"][0].layer
    found = layer.weight_matrix().detach().double()
    torch.testing.assert_close(centred @ found.T, centred @ wanted.T, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        off = (layer(x.float()) - dense(x.float())).mean(0)
    torch.testing.assert_close(off, torch.zeros(24), rtol=0, atol=1e-4)


# --- the paper's start, trained -------------------------------------------------------------------------------------


def test_uptraining_learns_within_its_time(peers):
    """A clock that strikes once per step: 60 of them, and then 1."""
    model, batches = teacher(), sentences(6)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    labels = torch.cat([batch["labels"] for batch in batches])
    losses = []
    for steps in (60, 1):
        clock = itertools.count()
        made = peers.uptraining.uptrain(model, batches, 8, steps, rate=3e-3, size=6, clock=lambda: float(next(clock)))
        losses.append(float(torch.nn.functional.cross_entropy(logits(made, batches), labels)))
        assert next(clock) == steps + 1
    assert losses[0] < 0.7 * losses[1]
    assert made.bert.encoder.layer[0].output.dense.in_features == 8
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[name])


# --- the program ----------------------------------------------------------------------------------------------------


def test_the_benchmark(tmp_path):
    write_world(tmp_path)
    write_task(tmp_path / "glue", "sst2", n_train=200, n_dev=30)
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig.from_pretrained(tmp_path / "bert")).save_pretrained(tmp_path / "bert")
    output = tmp_path / "metrics.json"
    given = ["--model", str(tmp_path / "bert"), "--data", str(tmp_path / "glue"), "--output", str(output)]
    done = run_python(
        [str(BENCHMARKS / "convert_models.py"), "peers", *given, "--quick", "--tokens", "8", "--shares", "0.9", "0.7"]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    (first, *rows) = found["rows"]
    assert first["method"] == "teacher"
    assert first["agreement"] == 1
    names = ["ours", "narrow", "plan", "svd", "fisher", "modegpt", "uptrained"]
    assert [(row["method"], row["share"]) for row in rows] == [(name, 0.9) for name in names]
    # Per layer and hidden unit that goes two rows of 32, and a bias or, of a bundled readout, none.
    units = round(0.9 * 64 - 0.1 * (4 * 32 * 32 + 2 * 32 * 64) / (2 * 32))
    gone = {row["method"]: first["parameters"] - row["parameters"] for row in rows}
    for name in ("ours", "narrow", "uptrained"):
        assert gone[name] == pytest.approx(2 * (64 - units) * 2 * 32, rel=0.05)
    assert min(gone.values()) > 0
    assert [line["ours"] for line in found["at_equal_latency"]] == [rows[0]["accuracy"]]
    assert (tmp_path / "peers.png").stat().st_size > 1000
    refused = run_python([str(BENCHMARKS / "convert_models.py"), "peers", *given, "--methods", "uptrained"])
    assert refused.returncode == 2
    assert "expected ours among --methods" in refused.stderr


def test_accuracy_between_two_sizes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("_conversions.peers")

    def row(method, ms, accuracy):
        return {"method": method, "ms": ms, "accuracy": accuracy, "speed-up": 10 / ms}

    rows = [
        row("teacher", 10, 0.9),
        row("ours", 6, 0.8),
        row("ours", 4, 0.7),
        row("other", 8, 0.7),
        row("other", 5, 0.4),
    ]
    first, second = program.at_equal_latency(rows)
    assert first == {"speed-up": 10 / 6, "ms": 6, "ours": 0.8, "other": pytest.approx(0.5)}
    assert second["other"] is None
