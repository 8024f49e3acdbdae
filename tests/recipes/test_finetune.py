"""recipes/finetune.py, score.py and bundle.py on a tiny BERT and stand-in GLUE files: settings, batches, whole runs."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bundle
import datasets
import finetune
import numpy as np
import pytest
import score
import torch
from accelerate import Accelerator
from data import TASKS
from data_files import write_task
from lib.finetuning import Finetuning
from lib.training_rows import WeightedExamples, balanced_weights, held_back_rows, matched_threshold
from recipe_world import RECIPES, program_file, same_tensors, scored, write_settings, write_world
from safetensors.torch import load_file
from sklearn.utils.class_weight import compute_class_weight
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from snnk_cli import checkpoint as checkpoints
from snnk_cli import training
from snnk_cli.config import describe, load_config
from snnk_cli.data import (
    Examples,
    ExampleSet,
    epoch_plan,
    share,
    steps_per_epoch,
)
from snnk_cli.evaluation import DivergedError
from snnk_cli.experiment import RATE, learning_rate, make_optimizer
from snnk_cli.modality import check_length, positions
from snnk_cli.models import dropout_settings, load_pretrained, resolve_model
from snnk_cli.settings import FinetuneConfig, FinetuneTrain, TrainSection
from snnk_cli.task_settings import RECIPE_OF
from snnk_cli.training import FiniteWatch, mean_loss, train_step
from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base_image import Images


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bert/` and `glue/` with stand-ins of RTE, STS-B and MNLI."""
    folder = write_world(tmp_path_factory.mktemp("world"))
    for task in ("rte", "stsb", "mnli"):
        write_task(folder / "glue", task, n_train=70, n_dev=20)
    return folder


def settings(world: Path, out: Path, *changes: str, method: str = "full") -> list[str]:
    """Command-line arguments of a small run into `out`."""
    file = out.with_name(f"{out.name}.yaml")
    write_settings(file, str(world / "bert"), str(world / "glue"), str(out), method)
    return [str(file), "train.epochs=3", *changes]


def newest(run: Path) -> Path:
    return checkpoints.list_checkpoints(run / "checkpoints")[-1]


@pytest.fixture(scope="module")
def finished(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of full fine-tuning (dropout active): the reference of the resume tests."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    assert finetune.main(settings(world, out)) == 0
    return out


# --- settings ---------------------------------------------------------------------------------------------------------


def test_all_faults_of_a_file_are_listed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(
        "task: rtee\nmodle: {}\nmethod: {name: snnk, adapter: {num_features: 0, componnent: relu}}\n"
        "train: {epochs: -1, learning_rate: fast, schedule: cosine, group_by_length: 1, max_grad_norm: .nan}\n"
        "output: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(FinetuneConfig, file, ["train.bach_size=4", "nonsense", "task.x=1"])
    text = str(caught.value)
    for part in (
        "modle: unknown setting 'modle'; did you mean 'model'?",
        "train.bach_size: unknown setting 'bach_size'; did you mean 'batch_size'?",
        "train.epochs is -1; expected an integer >= 0",
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["method.adapter={num_features: 0}"], r"method\.adapter\.num_features is 0"),
        (
            ["task=listops", "method.name=full"],
            "modality sequence: use .*papers/programs/train_lra",
        ),
        (["task=rtee", "method.name=full"], "task: unknown task 'rtee'; did you mean 'rte'"),
        ([], "no part given"),
        (["method.name=lora", "method.pooler={component: cos}"], r"set method\.name=snnk"),
        (["method.name=lora", "method.calibrate=true"], "has no replaced layer to fit"),
        (
            ["augment.mixup=0.5", "method.name=full"],
            "augment.mixup is 0.5, but .* task rte are not images",
        ),
    ],
)
def test_a_fault_says_what_to_do(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(FinetuneConfig, None, ["task=rte", "output.dir=x", *changes])


def test_every_kind_of_task_has_a_recipe(tmp_path: Path) -> None:
    assert {TASKS[name].modality for name in TASKS} <= RECIPE_OF.keys()
    assert all((RECIPES.parent / program).is_file() for program in RECIPE_OF.values())
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


HEAVY = ("torch", "transformers", "peft", "datasets", "sklearn", "accelerate")


@pytest.mark.parametrize("name", ["finetune", "fit_head", "score", "convert", "bundle", "export", "gpu"])
def test_help_answers_before_the_large_libraries_are_loaded(name: str) -> None:
    # -X importtime names every module that is loaded, on standard error.
    asked = [sys.executable, "-X", "importtime", str(program_file(name)), "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert "usage:" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & set(HEAVY)


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


def test_the_head_may_learn_at_a_rate_of_its_own() -> None:
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(3, 2), "classifier": torch.nn.Linear(2, 2)})
    optimizer = make_optimizer(model, FinetuneTrain(learning_rate=1e-2, head_learning_rate=1e-3, weight_decay=0))
    before = copy.deepcopy(model.state_dict())
    for value in model.parameters():
        value.grad = torch.ones_like(value)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * group.get(RATE, 1)
    optimizer.step()
    moved = {name: float((value - before[name]).abs().max()) for name, value in model.state_dict().items()}
    expected = {"encoder": 1e-2, "classifier": 1e-3}
    assert moved == pytest.approx({name: expected[name.split(".")[0]] for name in moved}, rel=1e-3)


# --- models and their texts -------------------------------------------------------------------------------------------


def test_dropout_is_what_the_settings_say(world: Path) -> None:
    """Of every kind that the configuration knows; without one, a value is refused."""
    assert dropout_settings(str(world / "bert"), None) == {}
    found = dropout_settings(str(world / "bert"), 0.25)
    assert found == dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.25)
    model, _ = load_pretrained(str(world / "bert"), TASKS["rte"], **found)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.25}


def test_names_on_the_hub_and_home_folders_are_understood(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("HOME", str(world))
    assert resolve_model("google-bert/bert-base-uncased") == "google-bert/bert-base-uncased"
    assert resolve_model("~/bert") == str(world / "bert")
    assert resolve_model("bert") == "bert"
    with pytest.raises(ConfigError, match="--model is a/b/c: no such folder"):
        resolve_model("a/b/c", "--model")


def test_examples_longer_than_the_positions_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_world(tmp_path, positions=16)
    write_settings(tmp_path / "run.yaml", "bert", "glue", "run")
    monkeypatch.chdir(tmp_path)
    line = "word " * 40
    with (tmp_path / "glue/RTE/train.tsv").open("a") as stream:
        stream.write(f"99\t{line}\t{line}\tentailment\n")
    assert finetune.main(["run.yaml"]) == 2
    expected = (
        "data.max_length is 128; BertForSequenceClassification has positions for 16 tokens: set data.max_length=16"
    )
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert finetune.main(["run.yaml", "data.max_length=16", "train.epochs=1"]) == 0
    assert score.main(["run", "data.max_length=17"]) == 2
    assert "set data.max_length=16" in capsys.readouterr().err


def test_roberta_counts_its_positions_from_the_padding_token() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = RobertaConfig(vocab_size=20, max_position_embeddings=12, pad_token_id=1, **sizes)
    model = RobertaForSequenceClassification(config).eval()
    room = positions(model)
    assert room == 10
    model(input_ids=torch.full((1, room), 5))  # exactly what fits
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, room + 1), 5))
    check_length(model, 10)
    with pytest.raises(ConfigError, match=r"positions for 10 tokens: set data\.max_length=10"):
        check_length(model, 11)
    assert positions(torch.nn.Linear(2, 2)) is None


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
    evaluated = scored(tmp_path / "run/adapter", "--task", "rte", f"data.dir={world / 'glue'}")["metrics"]
    assert metrics["metrics"] == evaluated
    assert metrics["score"] == evaluated["score"]


def test_a_fitted_head_that_no_step_makes_better_is_the_best(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("method.fit_head=true", "train.learning_rate=1e-30", "output.save_model=true")
    assert finetune.main(settings(world, tmp_path / "run", *changes)) == 0
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    logged = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in logged if "score" in row] == [0, 1, 2, 3]
    assert (metrics["best_step"], metrics["epochs"]) == (0, 3)
    assert metrics["before_training"]["score"] == metrics["score"]
    assert metrics["before_training"]["seconds"] > 0
    assert "before training" in capsys.readouterr().out
    for end in ("epoch", "end"):  # without a step it is what is saved
        folder = tmp_path / f"no_epoch_{end}"
        assert finetune.main(settings(world, folder, *changes, "train.epochs=0", f"train.eval_every={end}")) == 0
        alone = json.loads((folder / "metrics.json").read_text())
        assert alone["metrics"] == metrics["metrics"]
        assert (alone["best_step"], alone["epochs"], alone["train_seconds"]) == (0, 0, 0)
        assert scored(folder)["metrics"] == metrics["metrics"]
    assert finetune.main(settings(world, tmp_path / "nothing", "train.epochs=0")) == 2
    assert "method.fit_head is false: nothing would be learned" in capsys.readouterr().err
    # Without a fitted head there is nothing worth a look; at the end alone nothing else is scored.
    for name, other in (("plain", "method.fit_head=false"), ("end", "train.eval_every=end")):
        assert finetune.main(settings(world, tmp_path / name, *changes, other)) == 0
        assert "before_training" not in json.loads((tmp_path / name / "metrics.json").read_text())


def test_the_threshold_gives_each_class_as_often_as_it_occurs() -> None:
    logits = torch.randn(101, 2, generator=torch.Generator().manual_seed(0)) - torch.tensor([0.0, 3.0])
    labels = torch.arange(101) < 12
    assert (logits.argmax(-1) == 1).sum() < 6
    threshold = matched_threshold(logits, labels.long())
    assert ((logits[:, 1] - logits[:, 0]) > threshold).sum() == 12
    assert matched_threshold(logits, torch.zeros(101).long()) == matched_threshold(logits, torch.ones(101).long()) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((), "choose_share null; set the share to choose it on, such as choose_share=0.1"),
        (("train.choose_share=0.1", "task=stsb"), "task stsb has numbers; expected two classes"),
        (("train.choose_share=0.1", "task=mnli"), "task mnli has 3 classes; expected two classes"),
        (("train.choose_share=0.1", "output.cost=true", "method.head=wide"), "which it does not count"),
        (
            ("train.choose_share=0.1", "data.max_unreadable=2"),
            "data.max_unreadable is 2, but task rte has",
        ),
    ],
)
def test_settings_that_do_not_fit_the_task_are_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: tuple[str, ...], message: str
) -> None:
    assert finetune.main(settings(world, tmp_path / "run", "train.choose_threshold=true", *changes)) == 2
    assert message in capsys.readouterr().err


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


def test_weights_of_classes_are_those_of_the_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 9 + [1] * 2 + [2])
    weights = balanced_weights(labels, 3)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels.numpy())
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))
    logits = torch.randn(12, 3, generator=generator)

    class Plain(ExampleSet):
        lengths, labels = [1] * 12, torch.empty(0)

        def batch(self, indices, device="cpu"):
            return {"labels": labels[list(indices)]}

        def fingerprint(self):
            return ""

    class Model(torch.nn.Module):
        def forward(self, **inputs):
            assert not inputs
            return SimpleNamespace(logits=logits)

    examples = WeightedExamples(Plain(), weights)
    (inputs,) = examples.batches([range(12)], epoch=0)
    each = torch.nn.functional.cross_entropy(logits, labels, weights, reduction="none")
    torch.testing.assert_close(mean_loss(Model(), inputs), each.mean())
    assert examples.batch(range(12)).keys() == {"labels"}  # scored as they are


def test_an_infinite_gradient_is_noticed_before_it_is_saved() -> None:
    watch = FiniteWatch(Accelerator(cpu=True), allow_infinite_norm=False)
    with pytest.raises(DivergedError, match="gradient norm is inf at step 3"):
        watch.add(3, 0.1, torch.tensor([0.5, float("inf")]))


# --- what is saved ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["own", "wide"])
@pytest.mark.parametrize("method", ["snnk", "lora", "ia3", "vera", "boft", "linear_probe", "bitfit", "full"])
def test_evaluation_of_every_saved_form_repeats_the_score_of_training(
    world: Path, tmp_path: Path, method: str, head: str
) -> None:
    run = tmp_path / "run"
    changes: tuple[str, ...] = ("train.epochs=2", "output.save_model=true", "train.learning_rate=5e-3")
    if head == "wide":
        changes += ("method.head=wide", "method.fit_head=true", "train.head_learning_rate=1e-3")
    else:
        changes += ("train.choose_share=0.2", "train.choose_threshold=true")
    assert finetune.main(settings(world, run, *changes, method=method)) == 0
    trained = json.loads((run / "metrics.json").read_text())
    assert scored(run)["metrics"] == trained["metrics"]
    assert json.loads((run / "metrics.json").read_text()) == trained
    assert head == "wide" or trained["threshold"] != 0
    if method == "linear_probe":  # of pairs, the means of two layers and how they differ
        inputs = {"own": 32, "wide": 4 * 32}[head]
        parameters = (inputs * 2 + 2, 0)
        assert (trained["trainable_parameters"], trained["trainable_parameters_without_classifier"]) == parameters
    whole = {"linear_probe", "bitfit", "full"}
    folders = {"model"} if method in whole else {"adapter", "bundle"} if method == "snnk" else {"adapter"}
    assert {entry.name for entry in run.iterdir() if entry.is_dir()} == {*folders, "checkpoints"}
    for name in folders:
        told = scored(run / name, "--task", "rte", f"data.dir={world / 'glue'}")
        assert told["metrics"] == trained["metrics"], name


def test_evaluation_refuses_what_does_not_fit(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"data.dir={world / 'glue'}"
    run = tmp_path / "run"
    changes = ("train.epochs=1", "output.save_model=true")
    assert finetune.main(settings(world, run, *changes)) == 0
    assert finetune.main(settings(world, tmp_path / "lora", *changes, method="lora")) == 0
    capsys.readouterr()
    for arguments, message in (
        ([str(tmp_path / "nowhere"), "--task", "rte", data], "is not a folder"),
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
    assert "it was truncated or extended" in capsys.readouterr().err


def test_an_adapter_folder_is_no_base_model(world: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(world / "bert")
    get_snnk_model(model, SNNKConfig(adapter=AdapterPart(num_features=2))).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"an adapter: a second one would be trained on top. Give its base model"):
        load_pretrained(str(tmp_path / "adapter"), TASKS["rte"])


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
    assert same_tensors(*(load_file(folder / "model.safetensors") for folder in (run / "bundle", other)))
    capsys.readouterr()
    for arguments, message in (
        ([str(run)], "exists; replace it with --overwrite"),
        ([str(run / "adapter")], "give --task"),
        ([str(run / "adapter"), "--task", "rte"], "--output is missing"),
        ([str(run), "--output", str(run / "checkpoints"), "--overwrite"], "which holds no model"),
        ([str(tmp_path), "--task", "rtee", "--output", str(tmp_path / "x")], "did you mean 'rte'"),
    ):
        assert bundle.main(arguments) == 2
        assert message in capsys.readouterr().err
    assert bundle.main([str(run), "--overwrite"]) == 0
