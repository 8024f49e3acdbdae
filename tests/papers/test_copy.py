"""train_copy.py and the study fmm: the copy task, its score, who learns it, and the page."""

from __future__ import annotations

import copy
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import data.listops as listops
import numpy as np
import pytest
import torch
from papers import study
from papers.lib.copies import KNOWN, SPLITS, Copies, Pieces, copy_scores
from papers.lib.study import load
from papers.lib.study_runs import data_settings
from papers.pages import fmm as fmm_page
from papers.programs import train_copy, train_lra
from recipe_world import RECIPES
from transformers import AutoModelForCausalLM

from snnk_cli.config import load_config
from snnk_cli.evaluation import Alone
from snnk_peft.tasks.base import IGNORED
from tests.stored_runs import put_run, stored

CONFIG = RECIPES / "papers/configs/copy/copy.yaml"
KINDS = {"train_copy.py": train_copy.TrainCopy, "train_lra.py": train_lra.LongRange}


# --- data -------------------------------------------------------------------------------------------------------------


def test_the_second_half_is_the_first_and_alone_has_labels() -> None:
    inputs = Copies(50, 20, 10, 3, "train").batch(range(50))
    ids, labels = inputs["input_ids"], inputs["labels"]
    assert ids.shape == labels.shape == (50, 20)
    assert torch.equal(ids[:, :10], ids[:, 10:])
    assert (ids[:, 0] == 0).all()
    assert (ids[:, 1:10] > 0).all()
    assert (ids[:, 1:10] <= 10).all()
    assert (labels[:, :11] == IGNORED).all()
    assert torch.equal(labels[:, 11:], ids[:, 1:10])


def test_pieces_stand_in_the_first_half_at_any_place() -> None:
    examples = Pieces(60, 40, 50, 3, "train", 5)
    inputs = examples.batch(range(60))
    places = []
    for ids, labels in zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True):
        assert labels[:20] == [IGNORED] * 20
        for begin in range(20, 40, 5):
            piece = ids[begin : begin + 5]
            places.append(next(start for start in range(16) if ids[start : start + 5] == piece))
            assert labels[begin : begin + 5] == [IGNORED] * KNOWN + piece[KNOWN:]
    assert set(places) == set(range(16))
    others = [Pieces(60, 40, 50, 3, "test", 5), Pieces(60, 40, 50, 3, "train", 10), Copies(60, 40, 50, 3, "train")]
    assert len({each.fingerprint() for each in (examples, *others)}) == 4


def test_symbols_are_uniform_and_independent() -> None:
    words = np.stack([Copies(4000, 14, 5, 0, "test").word(index) for index in range(4000)])
    for values, options in ((words - 1, 5), (5 * (words[:, :-1] - 1) + words[:, 1:] - 1, 25)):
        share = np.bincount(values.ravel(), minlength=options) / values.size
        # Neighbouring pairs overlap; five standard errors of independent draws are more than enough for them too.
        assert len(share) == options
        assert abs(share - 1 / options).max() < 5 * math.sqrt((1 / options) * (1 - 1 / options) / values.size)


def test_a_sequence_is_a_function_of_seed_split_and_index() -> None:
    examples = Copies(40, 64, 10, 1, "train")
    whole = examples.batch(range(40))["input_ids"]
    assert torch.equal(Copies(90, 64, 10, 1, "train").batch([7, 3])["input_ids"], whole[[7, 3]])
    seen = {tuple(row) for row in whole.tolist()}
    assert len(seen) == 40
    others = [(1, "validation"), (1, "test"), (2, "train")]
    for seed, split in others:
        other = Copies(40, 64, 10, seed, split)
        assert seen.isdisjoint(tuple(row) for row in other.batch(range(40))["input_ids"].tolist())
        assert other.fingerprint() != examples.fingerprint()
    assert Copies(40, 64, 10, 1, "train").fingerprint() == examples.fingerprint()


# --- loss and score ---------------------------------------------------------------------------------------------------


def built(given: list[str], length: int = 16) -> tuple[train_copy.TrainCopy, Any, Any]:
    small = ["model.dim=32", "model.hidden_dim=32", "data.train_examples=64", "train.device=cpu"]
    experiment = train_copy.TrainCopy(
        load_config(train_copy.CopyConfig, CONFIG, [f"data.length={length}", *small, *given])
    )
    data = experiment.data(None)
    torch.manual_seed(0)
    return experiment, data, experiment.model(data, None, resumed=False).eval()


def test_the_loss_is_that_of_the_second_copy_alone() -> None:
    _, data, model = built(["method.attention=softmax"])
    inputs = data.train.batch(range(8))
    with torch.no_grad():
        output = model(**inputs)
    chances, ids = output.logits.double().log_softmax(-1), inputs["input_ids"]
    # The mark of the second copy stands at 8; 9 ... 15 are the word, each predicted one place before.
    wanted = [-chances[row, place - 1, ids[row, place]].item() for row in range(8) for place in range(9, 16)]
    assert output.loss.item() == pytest.approx(statistics.mean(wanted), rel=1e-5)


class Shifted(torch.nn.Module):
    """Says that the next token is the one that stood `back` places before; at `wrong` (rows), its last one is not."""

    def __init__(self, back: int, wrong: int = 0):
        super().__init__()
        self.back, self.wrong = back, wrong

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        said = torch.nn.functional.pad(input_ids, (self.back, 0))[:, : input_ids.shape[1]]
        said[: self.wrong, -2] = said[: self.wrong, -2] % 10 + 1
        return SimpleNamespace(logits=torch.nn.functional.one_hot(said, 11))


def test_the_answer_stands_at_the_distance_that_is_told() -> None:
    examples = Copies(30, 24, 10, 0, "test")
    alone = Alone(torch.device("cpu"))

    def scored(model: torch.nn.Module) -> dict[str, float]:
        found = copy_scores(model, {"test": examples}, 30, alone, lambda: False)
        assert found is not None
        return found

    assert scored(Shifted(examples.distance)) == {"score": 1.0, "accuracy": 1.0, "whole": 1.0}
    n, one_less = examples.distance, scored(Shifted(examples.distance - 1))
    assert one_less["accuracy"] < 0.25
    assert one_less["whole"] == 0.0
    some = scored(Shifted(examples.distance, wrong=6))
    assert some["whole"] == pytest.approx(24 / 30)
    assert some["accuracy"] == some["score"] == pytest.approx(1 - 6 / (30 * n))
    assert copy_scores(Shifted(n), {"test": examples}, 30, alone, lambda: True) is None


# --- model ------------------------------------------------------------------------------------------------------------


METHODS = load("fmm").tasks["copy_128"].methods


@pytest.mark.parametrize("method", METHODS)
def test_no_method_sees_what_comes_later(method: str) -> None:
    # Rows of the further maps are as many as a head is wide here.
    _, data, model = built([text.replace("num_features: 32", "num_features: 16") for text in METHODS[method]])
    ids = data.train.batch(range(4))["input_ids"]
    later = ids.clone()
    later[:, 11:] = later[:, 11:] % 10 + 1
    with torch.no_grad():
        first, second = (model(input_ids=rows, use_cache=False).logits for rows in (ids, later))
    torch.testing.assert_close(first[:, :11], second[:, :11])
    assert (first[:, 11:] - second[:, 11:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_all_of_it_is_trained(method: str) -> None:
    _, data, model = built([text.replace("num_features: 32", "num_features: 16") for text in METHODS[method]])
    model.train()(**data.train.batch(range(8))).loss.backward()
    still = [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    assert not still


@pytest.mark.parametrize("attention", ["softmax", "{component: elu, projection: identity, near_field: 8}"])
def test_who_sees_the_answer_learns_to_copy(tmp_path: Path, attention: str) -> None:
    """Words of 7: the answer is 7 places back, inside of softmax and of a band of 8."""
    sizes = ["data.length=16", "model.dim=32", "model.hidden_dim=64", "model.layers=1", "model.heads=1"]
    few = ["data.validation_examples=50", "data.test_examples=100", "train.device=cpu"]
    run = ["train.steps=250", "train.eval_every=250", "train.warmup_steps=20", "train.learning_rate=1e-2"]
    given = [*sizes, *few, *run, f"method.attention={attention}", f"output.dir={tmp_path / 'run'}"]
    assert train_copy.main([str(CONFIG), *given]) == 0
    report = json.loads((tmp_path / "run/metrics.json").read_text())
    assert report["accuracy"] > 0.95
    assert report["distance"] == 7
    assert report["steps"] == 250
    assert report["train_cpu_seconds"] == pytest.approx(250 * report["cpu_seconds_per_step"])


@pytest.mark.parametrize("layout", ["gpt2", "llama", "gpt_neox"])
def test_the_saved_model_has_the_score_of_the_run(tmp_path: Path, layout: str) -> None:
    sizes = ["data.length=64", "data.piece=8", "model.dim=32", "model.hidden_dim=48", "model.layers=2", "model.heads=2"]
    few = ["data.validation_examples=20", "data.test_examples=40", "train.device=cpu", "train.steps=20"]
    given = [*sizes, *few, "method.attention=softmax", f"model.layout={layout}", f"output.dir={tmp_path / 'run'}"]
    assert train_copy.main([str(CONFIG), *given]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").eval()
    sizes_of = (model.config.model_type, model.config.max_position_embeddings, model.config.hidden_size)
    assert sizes_of == (layout, 64, 32)
    assert any(value.shape[0] == 48 or value.shape[-1] == 48 for value in model.parameters())
    test = Pieces(40, 64, 10, 0, "test", 8)
    found = copy_scores(model, {"test": test}, 40, Alone(torch.device("cpu")), lambda: False)
    assert found is not None
    assert found["accuracy"] == json.loads((tmp_path / "run/metrics.json").read_text())["accuracy"]


# --- sweep and page ---------------------------------------------------------------------------------------------------


def test_every_method_has_the_near_field_and_the_rank_of_its_name() -> None:
    for task in load("fmm").tasks.values():
        found = {}
        for name, settings in task.methods.items():
            config = load_config(KINDS[task.program.name].settings, task.config, settings)
            attention = copy.deepcopy(config.method.attention)
            found[name] = fmm_page.fields({"config": {"method": {"attention": attention}}})
            if name != "softmax":
                # Maps that are alike would be one map: only the first has no draw of its own.
                terms = config.method.snnk_config(0).attention.terms()
                assert [term.projection for term in terms] == ["identity", *["orf"] * (len(terms) - 1)]
                assert {term.num_features for term in terms[1:]} <= {config.model.dim // config.model.heads}
        linear = {f"linear_{rank}": (0, rank) for rank in (1, 2, 3)}
        fmm = {f"fmm_{width}_{rank}": (width, rank) for width in (16, 64) for rank in (1, 2, 3)}
        assert found == {"softmax": (0, 0), **linear, **fmm}


def test_from_runs_to_the_page(tmp_path: Path, called: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "runs", tmp_path / "page"
    few = ["train.steps=2", "train.eval_every=2", "train.warmup_steps=1", "train.batch_size=2", "train.device=cpu"]
    few += ["data.validation_examples=4", "data.test_examples=6", "data.length=32"]
    asked = [*few, "--out", str(out), "--tasks", "copy_128", "--methods", "fmm_16_2", "softmax", "--seeds", "0", "1"]
    assert study.main(["run", "fmm", *asked]) == 0
    capsys.readouterr()
    assert study.main(["run", "fmm", *asked]) == 0
    assert capsys.readouterr().out.count("4 runs, 4 finished") == 1
    assert called == ["train_copy"] * 4  # started again, nothing is run
    assert study.main(["page", "fmm", "--runs", str(out), "--out", str(page)]) == 0
    text = (page / "README.md").read_text()
    reports = [stored(page)["copy_128", "fmm_16_2", seed] for seed in (0, 1)]
    shares = [100 * report["accuracy"] for report in reports]
    cell = f"{statistics.mean(shares):.1f} ± {abs(shares[0] - shares[1]) / 2:.1f}"  # of two: deviation / √2
    assert f"| fmm_16_2 | 16 | 2 | 2 | {cell} | 0.0 ± 0.0 | 2 |" in text
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["| attention", "| ---", "| softmax", "| fmm_16_2"]
    assert "All methods have equal steps, 2 of 2 sequences" in text
    assert "w of 15 random symbols out of 10" in text
    assert str(tmp_path) not in text
    assert (page / "accuracy.png").stat().st_size > 10_000
    # Reports that must not be compared are told apart.
    put_run(page, "copy_128", "softmax", 0, {**reports[0], "steps": 7})
    assert study.main(["page", "fmm", "--runs", str(tmp_path / "none"), "--out", str(page)]) == 0
    assert "**The runs differ in their steps (2 / 7)" in (page / "README.md").read_text()


def test_short_expressions_are_written_once_and_belong_to_listops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listops, "SIZES", {"test": 3, "validation": 4, "train": 20})
    wanted, out = {name: task.data for name, task in load("fmm").tasks.items()}, tmp_path / "runs"
    assert data_settings("copy_256", wanted["copy_256"], None, out) == []
    assert not out.exists()
    assert data_settings("listops", wanted["listops"], None, out) == [f"data.dir={tmp_path / 'runs/listops_files'}"]
    read = listops.read_file(tmp_path / "runs/listops_files/basic_train.tsv")
    assert len(read.tokens[0]) == 20
    assert all(50 <= len(tokens) <= 250 for tokens in read.tokens[0])
    monkeypatch.setattr("papers.lib.study_runs.write_listops", None)  # called again, it would fail
    data_settings("listops", wanted["listops"], None, out)


def test_the_page_tells_the_processor_time_of_listops() -> None:
    def report(minutes: float, accuracy: float) -> dict[str, Any]:
        config = {"train": {"max_cpu_minutes": minutes}, "method": {"attention": "softmax"}}
        sizes = {"peak_memory_bytes_before_training": 5e8, "peak_memory_bytes": 6e8, "total_parameters": 1234}
        return {"accuracy": accuracy, "steps": 10, "cpu_seconds_per_step": 0.5, "longest_sequence": 9, **sizes} | {
            "config": config
        }

    text = fmm_page.render({"listops": {"softmax": [report(5, 0.25), report(5, 0.35), report(5, 0.30)]}})
    error = 100 * 0.05 / math.sqrt(3)
    assert f"| softmax | all | full | 3 | 30.0 ± {error:.1f} | 10 | 0.5 | 500 → 600 | 1,234 |" in text
    assert "equal processor time (CPU minutes of training: 5)" in text
    text = fmm_page.render({"listops": {"softmax": [report(5, 0.3)], "other": [report(6, 0.3)]}})
    assert "**The runs differ in their CPU minutes (5 / 6): compare with care**" in text


def test_splits_are_those_of_the_recipe() -> None:
    _, data, _ = built(["data.validation_examples=5", "data.test_examples=6"])
    assert SPLITS == ("train", "validation", "test")
    assert data.sizes == {"train": 64, "validation": 5, "test": 6}
    kept = [data.train, data.splits["validation"], data.test["test"]]
    assert [examples.split for examples in kept] == list(SPLITS)
