"""Pretraining by hidden word pieces and fine-tuning behind it: masks, vocabulary, resume, learned kernels, page."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from data_files import sentences, write_task
from fresh_process import run_python
from papers import study
from papers.lib.masked_model import build_masked, with_attention
from papers.lib.masked_text import SPECIAL, MaskedWindows, read_texts, train_tokenizer
from papers.lib.study import load
from papers.pages import kernels as kernels_page
from papers.programs import finetune_kernel, pretrain_mlm
from recipe_world import RECIPES, InterruptedRun, at_step, die, reset_accelerate, same_tensors
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification

from snnk_cli.checkpoint import list_checkpoints
from snnk_cli.config import load_config
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base import IGNORED
from tests.stored_runs import drop_run, stored

CONFIG = str(RECIPES / "papers/configs/pretrain_mlm.yaml")
SIZES = ["model.dim=24", "model.hidden_dim=32", "model.heads=2", "model.layers=2", "data.vocabulary=100"]
SMALL = [*SIZES, "data.max_length=16", "data.positions=64", "train.max_cpu_minutes=null", "train.warmup_steps=5"]
SAYINGS = ("still waters run deep", "time will surely tell", "practice makes perfect people", "birds fly south early")
# What is learned, and what was drawn and must stay with it.
LEARNED = {
    "gmm": ({"root", "mean"}, {"noise"}),
    "generative": ({"hidden", "row_scale", "row_shift", "out", "out_bias", "skip", "gain"}, {"noise"}),
    "fastfood_learned": ({"lengths", "gauss", "signs"}, {"permutation"}),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """WikiText's layout: sentences in both halves, between headings and blank lines; and RTE beside them."""
    folder = tmp_path_factory.mktemp("texts")
    found = sentences()
    for split, part in (("train", found[::2]), ("valid", found[1::8])):
        (folder / f"wiki.{split}.tokens").write_text(" \n = Of places = \n" + "".join(f" {text} \n" for text in part))
    write_task(folder / "glue", "rte", n_train=24, n_dev=8)
    return folder


def settings(texts: Path, out: Path, *more: str) -> list[str]:
    given = ["task=wikitext", f"data.dir={texts}", f"output.dir={out}", "train.log_every=10"]
    return [CONFIG, *SMALL, *given, *more]


def attention(projection: str) -> str:
    return f"method.attention={{component: posrf, projection: {projection}, num_features: 8}}"


def windows(texts: Path, length: int = 16, seed: int = 0) -> MaskedWindows:
    train, _ = read_texts("wikitext", str(texts))
    return MaskedWindows(train, train_tokenizer(train, 100, 64), length, 0.15, seed)


# --- texts and masks --------------------------------------------------------------------------------------------------


def test_headings_and_blank_lines_are_no_text(texts: Path, tmp_path: Path) -> None:
    train, held_out = read_texts("wikitext", str(texts))
    assert train == sentences()[::2]
    assert held_out == sentences()[1::8]
    with pytest.raises(ConfigError, match=r"wiki\.train\.tokens: cannot be read"):
        read_texts("wikitext", str(tmp_path))
    (tmp_path / "wiki.train.tokens").write_text("\n = A heading = \n")
    with pytest.raises(ConfigError, match="holds no line of text"):
        read_texts("wikitext", str(tmp_path))


def test_windows_are_the_text(texts: Path) -> None:
    train, _ = read_texts("wikitext", str(texts))
    found = windows(texts)
    tokenizer = train_tokenizer(train, 100, 64)
    start, inner, end = found.ids[:, 0], found.ids[:, 1:-1], found.ids[:, -1]
    assert set(start.tolist()) == {tokenizer.cls_token_id}
    assert set(end.tolist()) == {tokenizer.sep_token_id}
    whole = [index for text in train for index in (*tokenizer.encode(text)[1:-1], tokenizer.sep_token_id)]
    assert inner.flatten().tolist() == whole[: inner.numel()]
    assert 0 <= len(whole) - inner.numel() < 14
    assert tokenizer.unk_token_id not in whole


def test_a_vocabulary_does_not_depend_on_the_process(texts: Path) -> None:
    """The trainer of `tokenizers` alone numbers characters, and breaks ties, differently in every process."""
    code = (
        f"import sys; sys.path.append({str(RECIPES)!r})\n"
        "from papers.lib.masked_text import train_tokenizer\n"
        "text = ['the quick brown fox jumps over the lazy dog while sphinxes of black quartz judge my vow'] * 3\n"
        "print(sorted(train_tokenizer(text, 90, 64).get_vocab().items()))"
    )
    found = {run_python(["-c", code]).stdout for _ in range(3)}
    assert len(found) == 1
    assert "##" in found.pop()


def test_masks_are_as_in_bert(texts: Path) -> None:
    """Shares of 15 %, and of these 80, 10 and 10 %, within four standard errors; what is not asked for is read."""
    found = windows(texts)
    ids, mask, counts = found.ids, 4, Counter[str]()
    assert SPECIAL[mask] == "[MASK]"
    for epoch in range(40):
        batch = found.batch(range(len(found)), epoch=epoch)
        asked, given = batch["labels"] != IGNORED, batch["input_ids"]
        assert torch.equal(batch["labels"][asked], ids[asked])
        assert torch.equal(given[~asked], ids[~asked])
        assert not asked[ids < len(SPECIAL)].any()
        assert asked.any(1).all()
        counts["pieces"] += int((ids >= len(SPECIAL)).sum())
        counts["asked"] += int(asked.sum())
        counts["mask"] += int((given[asked] == mask).sum())
        counts["same"] += int((given[asked] == ids[asked]).sum())
    # A window that hides nothing is asked for one piece: (1 − 0.15)^pieces of them.
    extra = sum(0.85 ** int(row) for row in (ids >= len(SPECIAL)).sum(1)) * 40
    kinds = int(found.batch([0])["input_ids"].max())
    assert kinds < found._vocabulary
    random_same = 0.1 / (found._vocabulary - len(SPECIAL))
    for name, total, share, more in (
        ("asked", counts["pieces"], 0.15, extra),
        ("mask", counts["asked"], 0.8, 0),
        ("same", counts["asked"], 0.1 + random_same, 0),
    ):
        error = math.sqrt(total * share * (1 - share))
        assert abs(counts[name] - total * share - more) < 4 * error, name


def test_masks_depend_on_seed_epoch_and_index_alone(texts: Path) -> None:
    found, again, other = windows(texts), windows(texts), windows(texts, seed=1)
    one = found.batch([5, 2], epoch=3)
    assert torch.equal(one["input_ids"][1], again.batch([2], epoch=3)["input_ids"][0])
    assert torch.equal(found.batch([2])["labels"], found.batch([2])["labels"])
    rows = range(len(found))
    for different in (found.batch(rows, epoch=4), other.batch(rows, epoch=3), found.batch(rows)):
        assert not torch.equal(different["labels"], found.batch(rows, epoch=3)["labels"])
    assert found.fingerprint() == again.fingerprint() != other.fingerprint()


# --- pretraining ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["method.attention=softmax", attention("gmm")], ids=["softmax", "gmm"])
def test_it_learns_more_than_how_often_pieces_occur(tmp_path: Path, method: str) -> None:
    out, rng = tmp_path / "run", random.Random(0)
    for split, count in (("train", 200), ("valid", 100)):  # of every saying, most words follow from one beside them
        lines = (" ".join(rng.choices(SAYINGS, k=3)) for _ in range(count))
        (tmp_path / f"wiki.{split}.tokens").write_text("\n".join(lines))
    more = ["train.steps=300", "train.eval_every=300", "train.learning_rate=3e-3", "train.warmup_steps=20", method]
    more += ["model.dim=64", "model.hidden_dim=128", "model.layers=1", "model.dropout=0", "model.attention_dropout=0"]
    more += ["data.max_length=10", "data.share=0.3", "train.batch_size=64"]
    assert pretrain_mlm.main(settings(tmp_path, out, *more)) == 0
    report = json.loads((out / "metrics.json").read_text())
    train, held_out = (
        MaskedWindows(part, AutoTokenizer.from_pretrained(out / "model"), 10, 0.3, 0, count)
        for part, count in zip(read_texts("wikitext", str(tmp_path)), (None, 256), strict=True)
    )
    asked = held_out.batch(range(len(held_out)))["labels"]
    often = Counter(train.ids[train.ids >= len(SPECIAL)].tolist())
    total, answers = often.total(), asked[asked != IGNORED].tolist()
    kinds = report["vocabulary"] - len(SPECIAL)  # each counts once more than it occurs
    without_context = -sum(math.log((often[piece] + 1) / (total + kinds)) for piece in answers) / len(answers)
    assert report["loss"] < 0.75 * without_context
    assert report["loss_without_context"] == pytest.approx(without_context)
    assert report["masked_accuracy"] > often.most_common(1)[0][1] / total
    assert report["steps"] == 300
    assert report["vocabulary"] == len(AutoTokenizer.from_pretrained(out / "model"))
    assert "dir" not in report["config"]["data"]
    assert str(tmp_path) not in json.dumps(report)


def test_interrupted_and_resumed_equals_uninterrupted(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["train.steps=24", "train.eval_every=12", "train.save_every_steps=1", "train.batch_size=16"]
    more.append(attention("generative"))
    assert pretrain_mlm.main(settings(texts, tmp_path / "straight", *more)) == 0
    with monkeypatch.context() as patched:
        at_step(patched, 18, die)
        with pytest.raises(InterruptedRun):
            pretrain_mlm.main(settings(texts, tmp_path / "run", *more))
    assert list_checkpoints(tmp_path / "run/checkpoints")[-1].name == "step-0000017"
    torch.manual_seed(999)  # what the interrupted process left behind must not matter
    assert pretrain_mlm.main([*settings(texts, tmp_path / "run", *more), "--resume"]) == 0
    assert same_tensors(*(load_file(tmp_path / run / "model/model.safetensors") for run in ("straight", "run")))
    reports = [json.loads((tmp_path / run / "metrics.json").read_text()) for run in ("straight", "run")]
    assert reports[0]["loss"] == reports[1]["loss"]
    assert 0 < reports[0]["best_step"] < reports[0]["config"]["train"]["steps"] + 1


# --- fine-tuning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", LEARNED)
def test_the_learned_kernel_arrives_and_goes_on_learning(texts: Path, tmp_path: Path, projection: str) -> None:
    before = tmp_path / "before"
    more = ["train.steps=8", "train.eval_every=8", "train.learning_rate=1e-2", attention(projection)]
    assert pretrain_mlm.main(settings(texts, before, *more)) == 0
    reset_accelerate()
    kept = load_file(before / "model/attention/adapter_model.safetensors")
    learned, drawn = LEARNED[projection]
    config = load_config(pretrain_mlm.MaskedConfig, CONFIG, settings(texts, before, *more)[1:])
    vocabulary = json.loads((before / "metrics.json").read_text())["vocabulary"]
    fresh = build_masked(config.model, config.method, vocabulary, 64, 0).model.state_dict()
    seen = set()
    for name, value in kept.items():
        leaf = name.rpartition(".")[2]
        seen.add(leaf)
        (start,) = (tensor for key, tensor in fresh.items() if key.replace(".default.", ".") == name)
        if leaf in drawn:
            assert torch.equal(start, value), name
        elif leaf in learned and leaf not in ("hidden",):
            assert not torch.equal(start, value), f"{name} has not learned"
    assert seen >= learned | drawn

    arguments = [
        str(RECIPES / "papers/configs/kernels.yaml"),
        *(f"data.dir={texts / 'glue'}", f"model.name_or_path={before / 'model'}", f"output.dir={tmp_path / 'after'}"),
        *("train.epochs=1", "train.batch_size=8", "data.max_length=32", "train.learning_rate=1e-2"),
    ]
    recipe = finetune_kernel.FinetuneKernel(load_config(finetune_kernel.FinetuneConfig, arguments[0], arguments[1:]))
    accelerator = Accelerator(cpu=True)
    model: Any = recipe.model(recipe.data(accelerator), accelerator, resumed=False)
    assert all(value.requires_grad for value in model.parameters())
    arrived = {name.replace(".default.", "."): tensor for name, tensor in model.state_dict().items()}
    assert kept.keys() <= arrived.keys()
    assert all(torch.equal(value, arrived[name]) for name, value in kept.items())
    weights = load_file(before / "model/model.safetensors")
    words = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(model.get_base_model().get_parameter(words), weights[words])
    reset_accelerate()

    assert finetune_kernel.main(arguments) == 0
    report = json.loads((tmp_path / "after/metrics.json").read_text())
    assert report["attention"] == f"posrf-{projection}"
    assert report["trainable_parameters"] == report["total_parameters"]
    assert str(tmp_path) not in json.dumps(report)
    trained = AutoModelForSequenceClassification.from_pretrained(tmp_path / "after/bundle").state_dict()
    moved = set()
    for name, value in kept.items():
        leaf = name.rpartition(".")[2]
        found = [key for key in trained if same_place(key, name)]
        assert len(found) == 1, (name, found)
        if leaf in drawn:
            assert torch.equal(trained[found[0]], value), name
        elif leaf in learned and not torch.equal(trained[found[0]], value):
            moved.add(leaf)
    assert moved == learned


def same_place(bundled: str, saved: str) -> bool:
    """Whether a tensor of a bundle is that tensor of an adapter: same layer, same path inside the kernel."""
    if "snnk_kernel" not in bundled:
        return False
    layer, inside = bundled.partition(".snnk_kernel.")[::2]
    return layer in saved and saved.endswith(f".{inside}")


def test_softmax_needs_no_attention_folder(texts: Path, tmp_path: Path) -> None:
    more = ["train.steps=2", "train.eval_every=2", "method.attention=softmax"]
    assert pretrain_mlm.main(settings(texts, tmp_path / "run", *more)) == 0
    assert not (tmp_path / "run/model/attention").exists()
    model = BertForSequenceClassification.from_pretrained(tmp_path / "run/model")
    assert with_attention(model, tmp_path / "run/model") is model


def test_other_methods_than_full_are_refused(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(RECIPES / "papers/configs/kernels.yaml"), "method.name=linear_probe"]
    assert finetune_kernel.main(given) == 2
    assert "method.name is linear_probe; expected full" in capsys.readouterr().err


# --- sweep and page ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("called")
def test_from_runs_to_the_page(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    write_task(data / "glue", "rte", n_train=24, n_dev=8)
    (data / "wikitext").mkdir()
    for split in ("train", "valid"):
        (data / f"wikitext/wiki.{split}.tokens").write_text((texts / f"wiki.{split}.tokens").read_text())
    out, page = tmp_path / "runs", tmp_path / "page"
    asked = [*SMALL, "train.steps=2", "train.eval_every=2", "finetune.data.max_length=32"]
    asked += ["--data", str(data), "--text", "wikitext", "--out", str(out), "--tasks", "rte", "--seeds", "0", "1"]
    asked += ["--methods", "softmax", "posrf_generative"]
    assert study.main(["run", "kernels", *asked]) == 0
    capsys.readouterr()
    assert study.main(["run", "kernels", *asked]) == 0
    again = capsys.readouterr().out
    assert again.count("1 runs, 1 finished") == again.count("2 runs, 2 finished") == 2
    assert study.main(["page", "kernels", "--runs", str(out), "--out", str(page)]) == 0
    text = (page / "README.md").read_text()
    assert str(tmp_path) not in text
    reports = [stored(page)["rte", "posrf_generative", seed] for seed in (0, 1)]
    assert {report["attention"] for report in reports} == {"posrf-generative"}
    first_score, second_score = (report["metrics"]["accuracy"] for report in reports)
    mean, error = 50 * (first_score + second_score), 50 * abs(first_score - second_score)
    assert f"| posrf_generative | {mean:.1f} ± {error:.1f} (2) |" in text
    before = stored(page)["pretraining", "posrf_generative", 0]
    assert f"| posrf_generative | {100 * before['masked_accuracy']:.1f} (1) | " in text
    assert f"| {before['loss']:.3f} | {before['loss_without_context']:.3f} | 2 |" in text
    # What the page holds is not run again; one report less, and its pretraining is, for the model that it starts from.
    elsewhere = ["--out", str(tmp_path / "elsewhere"), "--stored", str(page)]
    assert study.main(["run", "kernels", *asked, *elsewhere]) == 0
    assert not list((tmp_path / "elsewhere").glob("*/*/*"))
    drop_run(page, "rte", "softmax", 1)
    assert study.main(["run", "kernels", *asked, *elsewhere]) == 0
    ran = {"/".join(file.parts[-4:-1]) for file in (tmp_path / "elsewhere").glob("*/*/*/metrics.json")}
    assert ran == {"pretraining/softmax/seed0", "rte/softmax/seed1"}


def test_the_papers_figures_are_rows_of_their_own() -> None:
    """All four tasks, one seed: what the paper prints stands in italics, and nowhere else."""
    report = {"config": {"data": {"max_length": 8}, "train": {"epochs": 1, "learning_rate": 1e-4}}}
    report |= {"examples": {"train": 5}, "processor_seconds_per_epoch": 2.0}  # type: ignore[dict-item]
    table: Any = {
        task: {"softmax": [report | {"metrics": dict.fromkeys(names, 0.25)}]}
        for task, names in kernels_page.METRICS.items()
    }
    text = kernels_page.render(table)
    assert "| softmax | 25.0 / 25.0 (1) | 25.0 (1) | 25.0 (1) | 25.0 / 25.0 (1) |" in text
    assert "| *the paper's GMM-PRF* | *71/82* | *59* | *21* | – |" in text
    assert text.count("| *the paper's ") == len(kernels_page.PAPER)


def test_methods_are_those_of_the_paper_and_a_matrix_that_does_not_learn() -> None:
    learned = {"posrf_gmm", "posrf_fastfood_learned", "posrf_generative"}
    assert load("kernels").tasks["pretraining"].methods.keys() == {"softmax", "posrf_orf", *learned}


def test_a_sweep_says_which_folder_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        study.main(["run", "kernels", "--data", str(tmp_path), "--text", "imdb"])
    assert stop.value.code == 2
    assert "has no folder glue and none imdb" in capsys.readouterr().err
