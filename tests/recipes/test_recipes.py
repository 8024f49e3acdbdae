"""The fine-tuning recipe on a tiny BERT and stand-in GLUE files: settings, resume, stops, damaged checkpoints."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundle
import datasets
import finetune
import numpy as np
import pytest
import score
import torch
import yaml
from accelerate import Accelerator
from data import TASKS
from glue_files import write_task
from lib import checkpoint as checkpoints
from lib import training
from lib.config import describe, load_config
from lib.data import Examples, epoch_plan, share, steps_per_epoch
from lib.evaluation import DivergedError, held_back_rows
from lib.finetuning import Finetuning
from lib.loop import FiniteWatch, make_optimizer, train_step
from lib.models import dropout_settings, load_pretrained
from lib.schedule import learning_rate
from lib.settings import FinetuneConfig, TrainSection
from lib.task_settings import RECIPE_OF
from papers import study
from papers.lib.sweep import Run, time_left
from recipe_world import RECIPES
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel, BertTokenizerFast

from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base_image import Images
from tests.fresh_process import FreshProcess, start_python
from tests.kill_runs import kill_runs
from tests.stored_runs import stored


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `bert/` (a tiny random BERT with a tokenizer) and `glue/` (stand-ins for RTE, STS-B and MNLI)."""
    folder = tmp_path_factory.mktemp("world")
    for task in ("rte", "stsb", "mnli"):
        write_task(folder / "glue", task, n_train=70, n_dev=20)
    text = (folder / "glue/RTE/train.tsv").read_text().lower().split()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({word.strip('".') for word in text} - {""}), "."]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder / "bert")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    return folder


def settings(world: Path, out: Path, *changes: str, method: str = "full") -> list[str]:
    """Command-line arguments of a small run into `out`."""
    file = out.with_name(f"{out.name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "task": "rte",
        "model": {"name_or_path": str(world / "bert")},
        "data": {"dir": str(world / "glue")},
        "method": {"name": method, "adapter": {"num_features": 4}},
        "train": {"epochs": 3, "batch_size": 8, "log_every": 2, "save_every_steps": 2},
        "output": {"dir": str(out), "tensorboard": False, "save_model": False},
    }
    file.write_text(yaml.safe_dump(content))
    return [str(file), *changes]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(RECIPES.parent)}


def spawn(arguments: list[str]) -> FreshProcess:
    """recipes/finetune.py as its own process."""
    return start_python([str(RECIPES / "finetune.py"), *arguments], env=environment())


def newest(run: Path) -> Path:
    return checkpoints.list_checkpoints(run / "checkpoints")[-1]


def assert_same_tensors(first: Path, second: Path) -> None:
    """Model and optimizer of two runs' newest checkpoints are equal bit for bit."""
    assert newest(first).name == newest(second).name
    for name in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = load_file(newest(first) / name), load_file(newest(second) / name)
        assert mine.keys() == theirs.keys()
        assert mine
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), key


@pytest.fixture(scope="module")
def finished(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of full fine-tuning (dropout active): the reference of the resume tests."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    assert finetune.main(settings(world, out)) == 0
    return out


# --- settings ---------------------------------------------------------------------------------------------------------


def test_every_config_file_is_valid_and_opens_with_its_launch_command() -> None:
    files = sorted((RECIPES / "configs").rglob("*_adapter.yaml"))
    assert {file.stem.removesuffix("_adapter") for file in files} >= {
        *("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli")
    }
    for file in files:
        config = load_config(FinetuneConfig, file)
        assert f"{config.task}_adapter" == file.stem
        first = file.read_text().splitlines()[0]
        assert first.startswith(f"# python recipes/finetune.py recipes/configs/glue/{file.name}")


def test_all_faults_of_a_file_are_listed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "task: rtee\nmodle: {}\nmethod: {name: snnk, adapter: {num_features: 0, componnent: relu}}\n"
        "train: {epochs: 0, learning_rate: fast, schedule: cosine, group_by_length: 1, max_grad_norm: .nan}\n"
        "output: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(FinetuneConfig, file, ["train.bach_size=4", "nonsense", "task.x=1"])
    text = str(caught.value)
    for part in (
        "modle: unknown setting 'modle'; did you mean 'model'?",
        "train.bach_size: unknown setting 'bach_size'; did you mean 'batch_size'?",
        "train.epochs is 0; expected an integer >= 1",
        "train.learning_rate is 'fast'; expected a number",
        "train.schedule is 'cosine'; expected 'constant_with_warmup' or 'linear'",
        "train.group_by_length is 1; expected true or false",
        "train.max_grad_norm is nan; expected a number > 0, or null",
        "output.dir is missing",
        "method.adapter.unknown field 'componnent'; did you mean 'component'?",
        "'nonsense': expected section.key=value",
        "'task.x=1': task is 'rtee', not a section",
    ):
        assert part in text, f"{part!r} not in {text}"


def test_the_faults_of_a_part_and_of_the_task_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method\.adapter\.num_features is 0"):
        load_config(FinetuneConfig, None, ["task=rte", "output.dir=x", "method.adapter={num_features: 0}"])
    with pytest.raises(
        ConfigError, match=r"is listops, whose examples are of modality sequence: use recipes/papers/programs/train_lra"
    ):
        load_config(FinetuneConfig, None, ["task=listops", "output.dir=x", "method.name=full"])
    assert {TASKS[name].modality for name in TASKS} <= RECIPE_OF.keys()
    assert all((RECIPES.parent / program).is_file() for program in RECIPE_OF.values())
    with pytest.raises(ConfigError, match="task: unknown task 'rtee'; did you mean 'rte'"):
        load_config(FinetuneConfig, None, ["task=rtee", "output.dir=x", "method.name=full"])
    with pytest.raises(ConfigError, match="no part given"):
        load_config(FinetuneConfig, None, ["task=rte", "output.dir=x"])
    with pytest.raises(ConfigError, match=r"set method\.name=snnk"):
        load_config(
            FinetuneConfig, None, ["task=rte", "output.dir=x", "method.name=lora", "method.pooler={component: cos}"]
        )
    with pytest.raises(ConfigError, match="has no replaced layer to fit"):
        load_config(FinetuneConfig, None, ["task=rte", "output.dir=x", "method.name=lora", "method.calibrate=true"])
    (tmp_path / "broken.yaml").write_text("train: [1,\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(FinetuneConfig, tmp_path / "broken.yaml")


@pytest.mark.parametrize("name", ["lora", "full", "linear_probe"])
def test_another_method_on_a_file_of_adapters_has_none_of_theirs(name: str) -> None:
    file = RECIPES / "configs/glue/rte_adapter.yaml"
    ours = load_config(FinetuneConfig, file).method
    assert (ours.parts, ours.calibrate_adapters) == ([{"part": "norms"}], True)
    assert ours.adapter["placement"] == "query_value"
    other = load_config(FinetuneConfig, file, [f"method.name={name}"]).method
    assert (other.adapter, other.parts, other.calibrate_adapters) == (None, None, False)


def test_overrides_create_sections_and_numbers_may_be_written_as_people_do() -> None:
    config = load_config(
        FinetuneConfig,
        None,
        ["task=rte", "output.dir=x", "method.adapter.component=cos", "train.learning_rate=1e-3", "train.eval_every=7"],
    )
    assert config.method.adapter == {"component": "cos"}
    assert config.train.learning_rate == 1e-3
    assert config.train.eval_every == 7


def test_every_setting_is_explained_in_the_help() -> None:
    lines = describe(FinetuneConfig)
    assert len(lines) > 30
    assert any(line.startswith("  method.lora.r (8): rank") for line in lines)


def test_wrong_settings_end_with_exit_code_2_and_leave_no_folder(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune.main(settings(world, tmp_path / "run", "train.epochs=none")) == 2
    assert "train.epochs is 'none'" in capsys.readouterr().err
    assert finetune.main(settings(world, tmp_path / "run", f"data.dir={tmp_path}/nowhere")) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [True, False])
def test_each_epoch_visits_every_example_once_in_its_own_order(group: bool) -> None:
    lengths = [random.Random(index).randrange(5, 60) for index in range(517)]
    train = TrainSection(gradient_accumulation=3, group_by_length=group, seed=5)
    plans = [epoch_plan(lengths, 16, train, epoch) for epoch in (0, 1)]
    for plan in plans:
        assert len(plan) == steps_per_epoch(517, 16, 3)
        assert sorted(index for step in plan for batch in step for index in batch) == list(range(517))
    assert plans[0] != plans[1]
    assert plans[0] == epoch_plan(lengths, 16, train, 0)
    padded = sum(len(batch) * max(lengths[i] for i in batch) for step in plans[0] for batch in step)
    # Grouping removes most padding; without it, batches of 16 are about 1.6 times as large as their content.
    assert (padded < 1.15 * sum(lengths)) == group


def test_processes_share_a_batch_and_none_is_idle() -> None:
    assert [share([7, 8, 9], rank, 2) for rank in range(2)] == [([7, 9], 2), ([8], 1)]
    assert share([7], 1, 2) == ([7], 0)


def test_padding_is_masked_and_does_not_change_the_output(world: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "bert")
    examples = Examples(TASKS["rte"].load(world / "glue")["train"], tokenizer, 32)
    order = sorted(range(len(examples)), key=lambda index: examples.lengths[index])
    model = AutoModelForSequenceClassification.from_pretrained(world / "bert").eval()
    both = examples.batch([order[0], order[-1]])
    assert both["attention_mask"].sum(1).tolist() == [examples.lengths[order[0]], examples.lengths[order[-1]]]
    assert examples.lengths[order[0]] < examples.lengths[order[-1]]
    with torch.no_grad():
        together, alone = model(**both).logits[0], model(**examples.batch([order[0]])).logits[0]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_accumulated_gradients_equal_those_of_one_large_batch(world: Path) -> None:
    examples = Examples(TASKS["rte"].load(world / "glue")["train"], AutoTokenizer.from_pretrained(world / "bert"), 32)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(world / "bert").eval().double()
    accelerator, gradients = Accelerator(cpu=True), []
    for batches in ([list(range(21))], [list(range(8)), list(range(8, 16)), list(range(16, 21))]):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        kept: dict[str, torch.Tensor] = {}
        hooks = [
            value.register_post_accumulate_grad_hook(lambda p, n=name: kept.__setitem__(n, p.grad.clone()))
            for name, value in model.named_parameters()
        ]
        loss, norm = train_step(accelerator, model, optimizer, iter(examples.batches(batches)), batches, 0.0, None)
        for hook in hooks:
            hook.remove()
        gradients.append((loss, norm, kept))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("warmup", "total"), [(0, 9), (6, 100), (10, 100), (100, 100), (7, 3), (1, 1)])
def test_every_step_learns_at_the_rate_of_its_schedule(warmup: int, total: int) -> None:
    """By the definition: a rise whose first step is not lost and whose last is the peak, then constant or a fall."""
    for name, after in (
        ("constant_with_warmup", lambda step: 1.0),
        ("linear", lambda step: (total - step) / (total - warmup)),
        ("cosine", lambda step: (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2),
    ):
        rate = learning_rate(name, 2e-3, warmup, total)
        for step in range(total):
            expected = (step + 1) / warmup if step < warmup else after(step)
            assert rate(step, step) == pytest.approx(2e-3 * expected, rel=1e-12, abs=0), (name, step)
            assert rate(step, step) > 0


def test_the_rate_follows_the_settings() -> None:
    changes = ["task=rte", "output.dir=x", "method.name=full", "train.warmup_ratio=0.1", "train.learning_rate=1.0"]
    for name, expected in (("constant_with_warmup", [0.1, 1, 1, 1, 1]), ("linear", [0.1, 1, 1, 0.5, 1 / 90])):
        config = load_config(FinetuneConfig, None, [*changes, "train.epochs=4", f"train.schedule={name}"])
        schedule = Finetuning(config).schedule(per_epoch=25)
        assert (schedule.total, schedule.eval_every, schedule.budget_seconds) == (100, 25, None)
        assert [schedule.rate(step, step) for step in (0, 9, 10, 55, 99)] == pytest.approx(expected)


def test_vectors_are_not_decayed() -> None:
    groups = make_optimizer(torch.nn.Linear(3, 2), TrainSection(weight_decay=0.1)).param_groups
    assert [(group["weight_decay"], [p.dim() for p in group["params"]]) for group in groups] == [(0.1, [2]), (0.0, [1])]


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_a_run_leaves_everything_that_is_promised(finished: Path, world: Path) -> None:
    names = {entry.name for entry in finished.iterdir()}
    assert names == {
        *("checkpoints", "config.yaml", "environment.json", "learning_curve.png", "log.jsonl", "metrics.json")
    }
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["score"] == max(
        json.loads(line)["score"] for line in (finished / "log.jsonl").read_text().splitlines() if "score" in line
    )
    assert metrics["trainable_parameters"] == metrics["total_parameters"] > 10_000
    assert metrics["seconds_per_epoch"] > 0
    assert metrics["peak_memory_bytes"] > 1e7
    assert metrics["examples"] == {"train": 70, "validation": 20}
    assert (finished / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list(finished.rglob("*.tmp"))
    # No pickle anywhere.
    assert {file.suffix for file in (finished / "checkpoints").rglob("*") if file.is_file()} == {
        ".json",
        ".safetensors",
    }
    assert load_config(FinetuneConfig, finished / "config.yaml").output.dir == str(finished)


def test_the_epoch_may_be_chosen_on_training_examples(world: Path, tmp_path: Path) -> None:
    """The dev set is then scored once, by the checkpoint that was best on what was held back."""
    changes = ["train.epochs=3", "train.choose_share=0.2", "train.learning_rate=5e-2", "train.save_every_steps=null"]
    assert finetune.main(settings(world, tmp_path / "run", *changes, "output.save_model=true", method="lora")) == 0
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    assert metrics["examples"] == {"train": 56, "held back": 14, "validation": 20}
    logged = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    scores = [row["score"] for row in logged if "score" in row]
    assert len(scores) == 3
    assert metrics["score_held_back"] == max(scores)
    # The score is that of the dev set, as the saved adapter has it.
    assert score.main([str(tmp_path / "run/adapter"), "--task", "rte", f"data.dir={world / 'glue'}"]) == 0
    evaluated = json.loads((tmp_path / "run/adapter/metrics.json").read_text())["metrics"]
    assert metrics["metrics"] == evaluated
    assert metrics["score"] == evaluated["score"]


def test_rows_held_back_are_of_every_class_and_not_trained_on() -> None:
    rows = datasets.Dataset.from_dict({"sentence1": [str(i) for i in range(50)], "label": [0] * 40 + [1] * 10})
    kept, held = held_back_rows(rows, 0.2)
    assert sorted(held["label"]) == [0] * 8 + [1] * 2
    assert {*kept["sentence1"], *held["sentence1"]} == {*rows["sentence1"]}
    assert len(kept) == 40
    pictures = Images(range(50), np.array([0] * 40 + [1] * 10))  # type: ignore[arg-type]
    assert sorted(held_back_rows(pictures, 0.2)[1]["label"]) == [0] * 8 + [1] * 2
    numbers = datasets.Dataset.from_dict({"label": [0.5 * i for i in range(50)]})
    assert [len(part) for part in held_back_rows(numbers, 0.2)] == [40, 10]
    with pytest.raises(ConfigError, match="none of 2 training examples can be held back"):
        held_back_rows(datasets.Dataset.from_dict({"label": [0, 1]}), 0.2)


def test_dropout_is_what_the_settings_say(world: Path) -> None:
    """Of every kind that the configuration knows; without one, a value is refused."""
    assert dropout_settings(str(world / "bert"), None) == {}
    found = dropout_settings(str(world / "bert"), 0.25)
    assert found == dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.25)
    model, _ = load_pretrained(str(world / "bert"), TASKS["rte"], **found)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}


@pytest.mark.parametrize("method", ["snnk", "lora", "linear_probe", "full"])
def test_methods_learn_and_their_results_load(world: Path, tmp_path: Path, method: str) -> None:
    changes = ["train.epochs=2", "output.save_model=true", "train.save_every_steps=null", "train.learning_rate=5e-3"]
    assert finetune.main(settings(world, tmp_path / "run", *changes, method=method)) == 0
    run = tmp_path / "run"
    metrics = json.loads((run / "metrics.json").read_text())
    folders = {entry.name for entry in run.iterdir() if entry.is_dir()} - {"checkpoints"}
    assert folders == {"snnk": {"adapter", "bundle"}, "lora": {"adapter"}}.get(method, {"model"})
    if method == "linear_probe":
        assert metrics["trainable_parameters"] == 32 * 2 + 2
        assert metrics["trainable_parameters_without_classifier"] == 0


def test_the_dense_pooler_is_trained_when_asked(world: Path, tmp_path: Path) -> None:
    changes = ("train.epochs=1", "method.pooler=dense")
    assert finetune.main(settings(world, tmp_path / "run", *changes, method="linear_probe")) == 0
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    assert metrics["trainable_parameters"] == 32 * 2 + 2 + 32 * 32 + 32


@pytest.mark.parametrize("task", ["stsb", "mnli"])
def test_regression_and_two_validation_sets(world: Path, tmp_path: Path, task: str) -> None:
    assert finetune.main(settings(world, tmp_path / "run", f"task={task}", "train.epochs=1")) == 0
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())["metrics"]
    if task == "stsb":
        assert metrics["score"] == pytest.approx((metrics["pearson"] + metrics["spearmanr"]) / 2)
    else:
        both = [metrics[f"validation_{which}/score"] for which in ("matched", "mismatched")]
        assert metrics["score"] == pytest.approx(sum(both) / 2)


def test_early_stop(world: Path, tmp_path: Path) -> None:
    # With a vanishing learning rate the score cannot improve after the first evaluation.
    changes = ("train.epochs=9", "train.early_stop_patience=2", "train.learning_rate=1e-12")
    assert finetune.main(settings(world, tmp_path / "run", *changes)) == 0
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    assert (metrics["stopped_early"], metrics["epochs"], metrics["best_epoch"]) == (True, 3, 1)
    # The best checkpoint outlives newer ones.
    kept = [entry.name for entry in checkpoints.list_checkpoints(tmp_path / "run/checkpoints")]
    assert kept == ["step-0000009", "step-0000027"]


# --- interruption -----------------------------------------------------------------------------------------------------


class Interrupted(RuntimeError):
    pass


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """interrupt(step): the process dies, without warning, when optimizer step `step` begins."""

    def arrange(step: int) -> None:
        def dying(*arguments: Any) -> torch.Tensor:
            if counter["done"] == step:
                raise Interrupted
            counter["done"] += 1
            return train_step(*arguments)

        counter = {"done": 0}
        monkeypatch.setattr(training, "train_step", dying)

    return arrange


@pytest.mark.parametrize("step", [5, 11, 20])
def test_resume_is_exact_in_the_middle_of_an_epoch(
    world: Path,
    tmp_path: Path,
    finished: Path,
    interrupt: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: int,
) -> None:
    arguments = settings(world, tmp_path / "run")
    interrupt(step)
    with pytest.raises(Interrupted):
        finetune.main(arguments)
    assert newest(tmp_path / "run").name < newest(finished).name
    monkeypatch.undo()
    torch.manual_seed(999)  # what the interrupted process left behind must not matter
    assert finetune.main([*arguments, "--resume"]) == 0
    assert "threads" not in capsys.readouterr().out
    assert_same_tensors(tmp_path / "run", finished)
    first, second = (json.loads((run / "metrics.json").read_text()) for run in (tmp_path / "run", finished))
    assert first["metrics"] == second["metrics"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    "parts",
    [
        ("method.adapter.init=paper",),
        ("train.mixed_precision=bf16", "train.gradient_accumulation=2", "train.schedule=linear", "train.epochs=5"),
        # What calibration wrote (landmarks, readouts) does not follow from the settings: the checkpoint has to hold it.
        ("method.adapter=null", "method.ffn={num_features: 8}", "method.calibrate=true", "method.pooler={init: paper}"),
        # So do rows made of labels.
        (
            "method.adapter={component: relu, projection: informed, num_features: 4}",
            *("method.calibrate_adapters=true", "method.calibrate_samples=40", "method.fit_head=true"),
        ),
        (
            "method.adapter=null",
            "method.parts=[{part: ffn, num_features: 8, layers: [0]}, {part: adapter, num_features: 4}]",
        ),
    ],
    ids=["adapter", "bf16", "calibrated", "informed", "parts"],
)
def test_resume_of_snnk_parts_is_exact(
    world: Path,
    tmp_path: Path,
    interrupt: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parts: tuple[str, ...],
) -> None:
    assert finetune.main(settings(world, tmp_path / "straight", *parts, method="snnk")) == 0
    assert ("of all rows" in capsys.readouterr().out) == ("method.calibrate_adapters=true" in parts)
    arguments = settings(world, tmp_path / "run", *parts, method="snnk")
    interrupt(13)
    with pytest.raises(Interrupted):
        finetune.main(arguments)
    monkeypatch.undo()
    assert finetune.main([*arguments, "--resume"]) == 0
    assert_same_tensors(tmp_path / "run", tmp_path / "straight")
    assert score.main([str(tmp_path / "run")]) == 0
    results = [json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("metrics", "evaluation")]
    assert results[0]["metrics"] == results[1]["metrics"]


def test_a_used_folder_is_refused_and_overwrite_spares_strangers(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = settings(world, tmp_path / "run", "train.epochs=1")
    assert finetune.main(arguments) == 0
    assert finetune.main(arguments) == 2
    assert "--resume" in (error := capsys.readouterr().err)
    assert "--overwrite" in error
    before = (tmp_path / "run/metrics.json").stat().st_mtime_ns
    # Bad data are found before anything is deleted.
    assert finetune.main([*arguments, "--overwrite", "data.dir=nowhere"]) == 2
    assert (tmp_path / "run/metrics.json").stat().st_mtime_ns == before
    assert finetune.main([*arguments, "--overwrite"]) == 0
    assert (tmp_path / "run/metrics.json").stat().st_mtime_ns > before
    (tmp_path / "run/thesis.tex").write_text("x")
    assert finetune.main([*arguments, "--overwrite"]) == 2
    assert "holds more than a run: thesis.tex" in capsys.readouterr().err
    assert (tmp_path / "run/thesis.tex").exists()


def test_resume_refuses_what_it_cannot_continue(
    world: Path, tmp_path: Path, interrupt: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = settings(world, tmp_path / "run")
    assert finetune.main([*arguments, "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err
    interrupt(5)
    with pytest.raises(Interrupted):
        finetune.main(arguments)
    monkeypatch.undo()
    assert finetune.main([*arguments, "--resume", "train.learning_rate=0.1", "train.seed=4"]) == 2
    error = capsys.readouterr().err
    assert "train.learning_rate was 0.001 and is now 0.1" in error
    assert "train.seed was 0 and is now 4" in error
    # Other data under another folder name: the fingerprint differs.
    write_task(tmp_path / "other", "rte", n_train=70, n_dev=20, seed=1)
    assert finetune.main([*arguments, "--resume", f"data.dir={tmp_path / 'other'}"]) == 2
    assert "data was" in capsys.readouterr().err
    assert finetune.main([*arguments, "--checkpoint", "step-0000002"]) == 2
    assert "--checkpoint needs --resume" in capsys.readouterr().err
    assert finetune.main([*arguments, "--resume", "--checkpoint", "step-0000099"]) == 2
    assert "no such checkpoint" in capsys.readouterr().err


def test_resume_on_other_threads_says_that_bits_may_differ(
    world: Path, tmp_path: Path, interrupt: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = settings(world, tmp_path / "run", "train.epochs=1")
    interrupt(5)
    with pytest.raises(Interrupted):
        finetune.main(arguments)
    monkeypatch.undo()
    torch.set_num_threads(2)
    try:
        assert finetune.main([*arguments, "--resume"]) == 0
    finally:
        torch.set_num_threads(1)
    output = capsys.readouterr().out
    assert "saved with 1 threads, continued with 2" in output
    assert "OMP_NUM_THREADS=1" in output


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_offered(
    world: Path,
    tmp_path: Path,
    finished: Path,
    interrupt: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: str,
) -> None:
    arguments = settings(world, tmp_path / "run", "train.keep_checkpoints=2")
    interrupt(5)
    with pytest.raises(Interrupted):
        finetune.main(arguments)
    monkeypatch.undo()
    # A process killed while saving leaves a temporary folder, which is nobody's checkpoint.
    (tmp_path / "run/checkpoints/.step-0000006.tmp").mkdir()
    file = newest(tmp_path / "run") / ("manifest.json" if damage == "manifest" else "optimizer.safetensors")
    content = file.read_bytes()
    if damage in ("remove", "manifest"):
        file.unlink()
    else:
        file.write_bytes(content[:-8] if damage == "truncate" else content[:-1] + bytes([content[-1] ^ 1]))
    assert finetune.main([*arguments, "--resume"]) == 2
    error = capsys.readouterr().err
    assert file.name in error
    assert "--resume --checkpoint step-0000002" in error
    assert finetune.main([*arguments, "--resume", "--checkpoint", "step-0000002"]) == 0
    assert_same_tensors(tmp_path / "run", finished)


def test_a_checkpoint_of_another_model_changes_nothing(finished: Path) -> None:
    model = torch.nn.Linear(3, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="does not exist in this model"):
        checkpoints.load_model(newest(finished), model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_loss_that_is_not_finite_stops_the_run(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("train.learning_rate=10", "train.max_grad_norm=null", "train.warmup_ratio=0")
    real = training.train_step

    def poisoned(accelerator: Any, model: torch.nn.Module, *rest: Any) -> torch.Tensor:
        values = real(accelerator, model, *rest)
        counter["done"] += 1
        if counter["done"] == 6:  # what an overflow leaves behind
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        return values

    counter = {"done": 0}
    monkeypatch.setattr(training, "train_step", poisoned)
    assert finetune.main(settings(world, tmp_path / "run", *changes, "train.save_every_steps=5")) == 1
    error = capsys.readouterr().err
    assert "the loss is nan at step 7 (learning rate 10)" in error
    assert "step-0000005" in error
    checkpoints.verify(newest(tmp_path / "run"))
    assert all(value.isfinite().all() for value in load_file(newest(tmp_path / "run") / "model.safetensors").values())
    assert not (tmp_path / "run/metrics.json").exists()


def test_an_infinite_gradient_is_noticed_before_it_is_saved() -> None:
    watch = FiniteWatch(Accelerator(cpu=True), allow_infinite_norm=False)
    with pytest.raises(DivergedError, match="gradient norm is inf at step 3"):
        watch.add(3, 0.1, torch.tensor([0.5, float("inf")]))


def wait_for(condition: Any, process: FreshProcess, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def reaped() -> Iterator[list[FreshProcess]]:
    """Processes put here are killed when the test ends, also when it fails."""
    processes: list[FreshProcess] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_killed_three_times_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """A sample of what `python tests/kill_runs.py` does."""
    seed = random.randrange(10**6)
    print("\n".join([f"seed {seed}", *kill_runs(tmp_path, 3, seed)]))


@pytest.mark.slow
def test_sigterm_saves_says_how_to_go_on_and_exits_with_143(
    world: Path, tmp_path: Path, finished: Path, reaped: list[FreshProcess]
) -> None:
    arguments = settings(world, tmp_path / "run", "train.save_every_steps=1")
    process = spawn(arguments)
    reaped.append(process)
    wait_for(lambda: checkpoints.list_checkpoints(tmp_path / "run/checkpoints"), process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    assert f"python recipes/finetune.py {arguments[0]} train.save_every_steps=1 --resume" in output
    assert "Traceback" not in output
    checkpoints.verify(newest(tmp_path / "run"))
    assert finetune.main([*arguments, "--resume"]) == 0
    assert_same_tensors(tmp_path / "run", finished)


@pytest.mark.slow
def test_two_processes_train_as_one_does(world: Path, tmp_path: Path) -> None:
    """Half the batch each; without dropout the weights agree with one process up to the order of summation."""
    folder = tmp_path / "bert"
    folder.mkdir()
    for file in (world / "bert").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    same = (f"model.name_or_path={folder}", "train.epochs=2", "train.group_by_length=false")
    assert finetune.main(settings(world, tmp_path / "one", *same)) == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = [str(RECIPES / "finetune.py"), *settings(world, tmp_path / "two", *same, "train.batch_size=4")]
    done = subprocess.run([*launcher, *arguments], env=environment(), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in newest(tmp_path / "two").glob("rng-*")} == {
        f"rng-{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")
    }
    one, two = (load_file(newest(tmp_path / name) / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5)
    first, second = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two"))
    assert first["metrics"] == second["metrics"]


# --- evaluation, sweep, table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["snnk", "lora", "linear_probe", "full"])
def test_evaluation_of_every_saved_form_repeats_the_score_of_training(world: Path, tmp_path: Path, method: str) -> None:
    run = tmp_path / "run"
    changes = ("train.epochs=2", "output.save_model=true", "train.learning_rate=5e-3")
    assert finetune.main(settings(world, run, *changes, method=method)) == 0
    trained = json.loads((run / "metrics.json").read_text())
    assert score.main([str(run)]) == 0
    assert json.loads((run / "evaluation.json").read_text())["metrics"] == trained["metrics"]
    assert json.loads((run / "metrics.json").read_text()) == trained
    folders = {"snnk": ("adapter", "bundle"), "lora": ("adapter",)}.get(method, ("model",))
    for name in folders:
        assert score.main([str(run / name), "--task", "rte", f"data.dir={world / 'glue'}"]) == 0
        assert json.loads((run / name / "metrics.json").read_text())["metrics"] == trained["metrics"], name


def test_evaluation_refuses_what_does_not_fit(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"data.dir={world / 'glue'}"
    run = tmp_path / "run"
    changes = ("train.epochs=1", "output.save_model=true")
    assert finetune.main(settings(world, run, *changes)) == 0
    assert finetune.main(settings(world, tmp_path / "lora", *changes, method="lora")) == 0
    capsys.readouterr()
    for arguments, message in (
        ([str(tmp_path / "nowhere"), "--task", "rte", data], "is no folder"),
        ([str(world / "glue"), "--task", "rte", data], "expected a run (config.yaml)"),
        ([str(run / "model"), data], "task is missing"),
        ([str(run / "model"), "--task", "mnli", data], "has 2 outputs; the task has 3 labels"),
        ([str(tmp_path / "lora/adapter"), "--task", "mnli", data], "does not fit its base model and task"),
        ([str(run), "data.max_lenght=3"], "did you mean 'max_length'"),
    ):
        assert score.main(arguments) == 2
        assert message in capsys.readouterr().err
    weights = run / "checkpoints/step-0000009/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert score.main([str(run)]) == 2
    assert "it was cut or extended" in capsys.readouterr().err


def test_a_run_and_its_adapter_give_the_same_bundle(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    changes = ("train.epochs=1", "output.save_model=true", "output.bundle=false", "train.learning_rate=5e-3")
    assert finetune.main(settings(world, run, *changes, method="snnk")) == 0
    assert not (run / "bundle").exists()
    assert bundle.main([str(run)]) == 0
    assert "parity error" in capsys.readouterr().out
    other = tmp_path / "other"
    assert bundle.main([str(run / "adapter"), "--task", "rte", "--output", str(other)]) == 0
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (run / "bundle", other))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    capsys.readouterr()
    for arguments, message in (
        ([str(run)], "exists; replace it with --overwrite"),
        ([str(run / "adapter")], "give --task"),
        ([str(run / "adapter"), "--task", "rte"], "give --output"),
        ([str(run), "--output", str(run / "checkpoints"), "--overwrite"], "which holds no model"),
        ([str(tmp_path), "--task", "rtee", "--output", str(tmp_path / "x")], "did you mean 'rte'"),
    ):
        assert bundle.main(arguments) == 2
        assert message in capsys.readouterr().err
    assert bundle.main([str(run), "--overwrite"]) == 0


def test_a_table_is_rendered_from_stored_reports(tmp_path: Path) -> None:
    def report(score: float, train: int, seed: int) -> dict[str, Any]:
        return {
            "score": score,
            "seed": seed,
            "seconds_per_epoch": 12.34,
            "processor_seconds_per_epoch": 11.9,
            "trainable_parameters": 74498,
            "examples": {"train": train, "validation": 9},
            "device": "cpu",
            "config": {"model": {"name_or_path": "minilm"}},
            "environment": {"torch_threads": 2},
        }

    for task, method, seed, mean in (
        ("rte", "lora_r8", 0, 0.60),
        ("rte", "lora_r8", 1, 0.64),
        ("rte", "snnk_relu16", 0, 0.65),
        ("mrpc", "snnk_relu16", 0, 0.85),
    ):
        file = tmp_path / "runs" / task / method / f"seed{seed}/metrics.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(report(mean, 100 if task == "rte" else 200, seed)))
    arguments = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "cards")]
    arguments += ["--rates", str(tmp_path / "rates")]
    assert study.main(["page", "glue", *arguments]) == 0
    page = (tmp_path / "cards/README.md").read_text()
    assert "| snnk_relu16 | 65.0 | 85.0 | 75.0 | 74,498 |" in page
    assert "| lora_r8 | 62.0 ± 2.0 (2) | – | – | 74,498 |" in page
    assert "| snnk_relu16 | +5.0 | – | – |" in page  # to LoRA with seed 0
    assert "| training examples | 100 | 200 |" in page
    assert "| lora_r8 | 12 | – |" in page
    assert ("rte", "lora_r8", 1) in stored(tmp_path / "cards")
    assert (tmp_path / "cards/scores.png").read_bytes().startswith(b"\x89PNG")
    # The stored files alone give the same page.
    assert study.main(["page", "glue", "--runs", str(tmp_path / "none"), "--out", str(tmp_path / "cards")]) == 0
    assert (tmp_path / "cards/README.md").read_text() == page
    assert study.main(["page", "glue", "--runs", str(tmp_path / "none"), "--out", str(tmp_path / "empty")]) == 2


def test_the_time_left_is_estimated_from_like_runs() -> None:
    seconds = {"rte/lora_r8/seed0": 60.0, "rte/lora_r8/seed1": 120.0, "rte/snnk_relu16/seed0": 600.0}
    runs = [Run("rte", "lora_r8", 2), Run("rte", "linear_probe", 0)]
    assert time_left(runs, seconds) == "2 runs left, about 6 min"
    assert "1 runs of tasks that have not been timed" in time_left([Run("sst2", "lora_r8", 0)], seconds)


@pytest.mark.slow
def test_a_sweep_runs_skips_and_resumes(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(RECIPES.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = [
        *(f"model.name_or_path={world / 'bert'}", f"data.dir={world / 'glue'}", "train.epochs=1"),
        *("output.tensorboard=false", "output.save_model=false"),
        *("--out", str(tmp_path), "--tasks", "rte", "--methods", "lora_r8", "pooler_cos", "--seeds", "0"),
    ]
    assert study.main(["run", "glue", *arguments]) == 0
    assert "0 runs left" in capfd.readouterr().out
    reports = {file.parts[-3]: json.loads(file.read_text()) for file in tmp_path.glob("*/*/*/metrics.json")}
    assert reports["pooler_cos"]["config"]["method"]["pooler"] == {"component": "cos"}
    assert reports["pooler_cos"]["config"]["method"]["adapter"] is None
    assert reports["lora_r8"]["method"] == "lora"
    (tmp_path / "rte/lora_r8/seed0/metrics.json").unlink()  # as if it had been killed near its end
    assert study.main(["run", "glue", *arguments]) == 0
    output = capfd.readouterr().out
    assert "2 runs, 1 finished" in output
    assert "rte/lora_r8/seed0 (resumed)" in output
    assert "continuing after step 2" in output
    assert json.loads((tmp_path / "rte/lora_r8/seed0/metrics.json").read_text())["score"] == reports["lora_r8"]["score"]
