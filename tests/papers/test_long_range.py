"""Long Range Arena: the ListOps generator, loaders of official layouts, and the training recipe end to end."""

from __future__ import annotations

import json
import os
import signal
import statistics
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from data import TASKS, Sequences
from data._listops_trees import WORDS, draw_expressions
from data.listops import FILES, expressions, write_listops
from data_files import write_reviews
from papers import study
from papers.lib.lra_model import build_classifier
from papers.lib.lra_settings import AttentionMethod, LongRangeConfig, LongRangeModel, LongRangeTrain
from papers.lib.sequences import SequenceExamples
from papers.pages import lra as lra_page
from papers.programs import train_lra
from papers.programs import write_listops as write_listops_recipe
from recipe_world import RECIPES, last_weights, same_tensors

from snnk_cli import checkpoint as checkpoints
from snnk_cli.config import load_config
from snnk_cli.settings import RunOutput
from snnk_peft.errors import ConfigError
from tests.fresh_process import FreshProcess, start_python
from tests.stored_runs import drop_run, put_figures

EASY = {"min_length": 4, "max_length": 24, "max_depth": 3, "max_args": 4}


# --- ListOps --------------------------------------------------------------------------------------------------------


def parsed(words: list[str]) -> Any:
    """A digit, or [operator, argument, ...]; the words are used up."""
    word = words.pop(0)
    if not word.startswith("["):
        return int(word)
    node: list[Any] = [word]
    while words[0] != "]":
        node.append(parsed(words))
    words.pop(0)
    return node


def value(node: Any) -> int:
    """By the definition, one operator at a time."""
    if isinstance(node, int):
        return node
    arguments = [value(argument) for argument in node[1:]]
    return {
        "[MAX": lambda: max(arguments),
        "[MIN": lambda: min(arguments),
        "[MED": lambda: int(statistics.median(arguments)),
        "[SM": lambda: sum(arguments) % 10,
    }[node[0]]()


def nodes(node: Any, depth: int = 1) -> Iterator[tuple[Any, int]]:
    yield node, depth
    for argument in node[1:] if isinstance(node, list) else []:
        yield from nodes(argument, depth + 1)


def tree(tokens: np.ndarray) -> Any:
    words = [WORDS[token] for token in tokens]
    result = parsed(words)
    assert not words, "something follows the expression"
    return result


def test_every_value_is_that_of_a_plain_evaluation() -> None:
    found = draw_expressions(np.random.default_rng(0), 3000, 1, 400, 10, 10)
    assert len(found) > 2500
    assert {len(tokens) for tokens, _ in found} > {1, 4, 5}
    for tokens, expected in found:
        assert value(tree(tokens)) == expected


def test_the_distribution_is_that_of_the_recursive_definition() -> None:
    found = draw_expressions(np.random.default_rng(1), 4000, 1, 10**9, 10, 10)
    assert len(found) == 4000  # nothing is dropped without bounds
    below, at_limit, arguments, operators, digits = [], [], [], [], []
    for tokens, _ in found:
        for node, depth in nodes(tree(tokens)):
            (at_limit if depth == 10 else below).append(isinstance(node, list))
            if isinstance(node, list):
                arguments.append(len(node) - 1)
                operators.append(node[0])
            else:
                digits.append(node)
            assert depth <= 10
    assert not any(at_limit)
    assert at_limit
    assert abs(np.mean(below) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / len(below))
    for values, options in ((arguments, range(2, 11)), (operators, WORDS[11:15]), (digits, range(10))):
        share = 1 / len(options)
        bound = 5 * np.sqrt(share * (1 - share) / len(values))
        assert set(values) == set(options)
        assert all(abs(values.count(option) / len(values) - share) < bound for option in options)


def test_generated_splits_have_the_published_bounds_and_share_nothing() -> None:
    limits = {"train": 150, "validation": 150, "test": 150}
    data = TASKS["listops"].load(max_samples=limits)
    again = TASKS["listops"].load(splits=["train"], max_samples={"train": 40}, seed=5)["train"]
    keys = {split: {ids.tobytes() for ids in rows.tokens[0]} for split, rows in data.items()}
    assert all(len(found) == 150 for found in keys.values())
    assert len(set.union(*keys.values())) == 450
    # A smaller training set is the beginning of a larger one, whatever the seed of the run.
    assert [ids.tobytes() for ids in again.tokens[0]] == [ids.tobytes() for ids in data["train"].tokens[0][:40]]
    for rows in data.values():
        assert all(500 < len(ids) < 2000 for ids in rows.tokens[0])
        assert all(
            depth <= 10 and (not isinstance(node, list) or 3 <= len(node) <= 11)
            for ids in rows.tokens[0][:20]
            for node, depth in nodes(tree(ids))
        )


def test_bounds_that_no_tree_meets_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected 0 <= seed"):
        next(expressions(min_length=9, max_length=4))
    with pytest.raises(ConfigError, match="10 different ListOps expressions of 1 to 2 tokens"):
        list(expressions(min_length=1, max_length=2, max_depth=1))


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of short expressions."""
    folder = tmp_path_factory.mktemp("easy")
    write_listops(folder, {"train": 1500, "validation": 200, "test": 200}, seed=3, **EASY)
    return folder


def test_listops_files_return_what_was_written(easy: Path, tmp_path: Path) -> None:
    data = TASKS["listops"].load(easy)
    stream = expressions(3, **EASY)
    for split in ("test", "validation", "train"):
        for ids, label in zip(data[split].tokens[0], data[split].labels, strict=True):
            tokens, expected = next(stream)
            assert np.array_equal(ids, tokens)
            assert label == expected
    # The official program puts parentheses around every step.
    (tmp_path / FILES["test"]).write_text("Source\tTarget\n( ( ( [MAX 2 ) ( ( ( [SM 9 ) 4 ) ] ) ) ] )\t3\n")
    rows = TASKS["listops"].load(tmp_path, splits=["test"])["test"]
    assert [WORDS[token] for token in rows.tokens[0][0]] == ["[MAX", "2", "[SM", "9", "4", "]", "]"]
    (tmp_path / FILES["test"]).write_text("Source\tTarget\n[MAX 2 3 ]\t3\n[AVG 2 3 ]\t2\n\t1\n")
    with pytest.raises(ConfigError) as error:
        TASKS["listops"].load(tmp_path, splits=["test"])
    assert "line 3: unknown word '[AVG'" in str(error.value)
    assert "line 4: Source is empty" in str(error.value)


def test_subsets_are_fixed_for_evaluation_and_seeded_for_training(easy: Path) -> None:
    task, limits = TASKS["listops"], {"train": 50, "test": 50}
    first, second = (task.load(easy, max_samples=limits, seed=seed) for seed in (0, 1))
    assert len(first["train"]) == 50

    def key(rows: Sequences) -> list[bytes]:
        return [ids.tobytes() for ids in rows.tokens[0]]

    assert key(first["train"]) != key(second["train"])
    assert key(first["test"]) == key(second["test"])
    assert [max(SequenceExamples(first["train"], limit).lengths) for limit in (6, 10)] == [6, 10]


# --- the other tasks ------------------------------------------------------------------------------------------------


def test_imdb_from_folder_and_archive(tmp_path: Path) -> None:
    write_reviews(tmp_path / "a")
    (tmp_path / "a/aclImdb/train/neg/0_7.txt").write_text("neg" + 5000 * "x")
    task = TASKS["lra_text"]
    data = task.load(tmp_path / "a")
    assert {split: rows.labels.tolist() for split, rows in data.items()} == {
        "train": [0] * 18 + [1] * 18,
        "validation": [0] * 2 + [1] * 2,
        "test": [0] * 3 + [1] * 3,
    }
    texts = {bytes((ids - 1).astype(np.uint8)).decode() for ids in data["train"].tokens[0] if len(ids) < 50}
    assert texts < {f"{kind} train {number}<br /><br />naïve" for kind in ("neg", "pos") for number in range(20)}
    assert len(texts) == 35
    assert max(len(ids) for ids in data["train"].tokens[0]) == 4000
    (tmp_path / "b").mkdir()
    with tarfile.open(tmp_path / "b/aclImdb.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "a/aclImdb", "aclImdb")
    for place in (tmp_path / "a/aclImdb", tmp_path / "b", tmp_path / "b/aclImdb.tar.xz"):
        other = task.load(place)
        assert all(
            np.array_equal(ids, twin)
            for split in data
            for ids, twin in zip(data[split].tokens[0], other[split].tokens[0], strict=True)
        )


def test_imdb_faults(tmp_path: Path) -> None:
    task = TASKS["lra_text"]
    with pytest.raises(ConfigError, match=r"needs data\.dir"):
        task.load()
    with pytest.raises(ConfigError, match="does not exist"):
        task.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no aclImdb"):
        task.load(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'validation'"):
        task.load(tmp_path, splits=["validatoin"])
    (tmp_path / "aclImdb.tar.xz").write_bytes(b"\xfd7zXZ\x00 damaged")
    with pytest.raises(ConfigError, match="not a readable tar archive"):
        task.load(tmp_path)
    write_reviews(tmp_path / "a")
    (tmp_path / "a/aclImdb/test/pos/1_7.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"test/pos/1_7\.txt is empty"):
        task.load(tmp_path / "a")


def test_retrieval_pairs(tmp_path: Path) -> None:
    for name, rows in (
        ("train", ["1.0\tA1\tB1\tfirst é\tsecond\n", "0.0\tA2\tB2\tthird\t" + "y" * 4001 + "\n"]),
        ("eval", ["1\tA\tB\tx\ty\n"]),
        ("test", ["0\tA\tB\tx\tyy\n"]),
    ):
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("".join(rows), encoding="utf-8")
    task = TASKS["lra_retrieval"]
    data = task.load(tmp_path)
    assert data["train"].labels.tolist() == [1, 0]
    assert [bytes((ids - 1).astype(np.uint8)).decode() for ids in data["train"].tokens[0]] == ["first é", "third"]
    assert [len(ids) for ids in data["train"].tokens[1]] == [6, 4000]
    batch = SequenceExamples(data["train"], 4000).batch([0, 1])
    assert batch["input_ids"].shape == (2, 2, 4000)
    assert batch["attention_mask"].sum(-1).tolist() == [[8, 6], [5, 4000]]
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("0.5\tA\tB\tx\ty\n1\tA\tB\t\ty\n")
    with pytest.raises(ConfigError) as error:
        task.load(tmp_path)
    assert "line 1: label is 0.5" in str(error.value)
    assert "line 2: text1 is empty" in str(error.value)
    (tmp_path / "new_aan_pairs.eval.tsv").unlink()
    with pytest.raises(ConfigError, match=r"new_aan_pairs\.eval\.tsv does not exist"):
        task.load(tmp_path)


def test_images_from_binary_batches_and_folders_agree(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    pixels = {part: rng.integers(0, 256, (20, 3, 1024), np.uint8) for part in ("train", "test")}
    task = TASKS["lra_image"]
    for part, images in pixels.items():
        records = b"".join(bytes([index % 2]) + image.tobytes() for index, image in enumerate(images))
        (tmp_path / f"bin/{'data_batch_1' if part == 'train' else 'test_batch'}.bin").parent.mkdir(exist_ok=True)
        (tmp_path / f"bin/{'data_batch_1' if part == 'train' else 'test_batch'}.bin").write_bytes(records)
        for index, image in enumerate(images):
            file = tmp_path / f"img/{part}/{('airplane', 'automobile')[index % 2]}/{index:04}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            image_module.fromarray(image.T.reshape(32, 32, 3)).save(file)
    binary, folders = task.load(tmp_path / "bin"), task.load(tmp_path / "img")
    assert [len(binary[split]) for split in task.splits] == [18, 2, 20]
    expected = np.round(pixels["test"].transpose(0, 2, 1) @ np.array([0.299, 0.587, 0.114])).astype(int) + 1
    assert np.abs(np.stack(binary["test"].tokens[0]).astype(int) - expected).max() <= 1
    for split in task.splits:
        ours, theirs = (sorted(ids.tobytes() for ids in data[split].tokens[0]) for data in (binary, folders))
        assert ours == theirs
        assert sorted(binary[split].labels) == sorted(folders[split].labels)
    (tmp_path / "bin/data_batch_1.bin").write_bytes(b"\x00" * 3000)
    with pytest.raises(ConfigError, match=r"data_batch_1\.bin: 3000 bytes; expected a multiple of 3073"):
        task.load(tmp_path / "bin")
    image_module.new("RGB", (8, 8)).save(tmp_path / "img/test/airplane/9999.png")
    with pytest.raises(ConfigError, match="image of 8 x 8 pixels"):
        task.load(tmp_path / "img")


def test_real_imdb(shared_dir: Path) -> None:
    data = TASKS["lra_text"].load(shared_dir / "data/imdb", max_samples={"train": 100})
    assert [len(rows) for rows in data.values()] == [100, 2500, 25000]
    assert data["test"].labels.mean() == 0.5


# --- the model ------------------------------------------------------------------------------------------------------

TINY = LongRangeModel(dim=16, hidden_dim=16, heads=2, layers=1, dropout=0.0, attention_dropout=0.0)
KERNEL = AttentionMethod({"component": "posrf", "projection": "orf", "num_features": 16})


@pytest.mark.parametrize("method", [AttentionMethod(), KERNEL], ids=["softmax", "posrf"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_does_not_change_a_prediction(method: AttentionMethod, pooling: str) -> None:
    task = TASKS["lra_retrieval"]
    model = LongRangeModel(**{**vars(TINY), "pooling": pooling, "positions": "sinusoidal"})
    torch.manual_seed(0)
    classifier = build_classifier(task, model, method, 64, seed=0).eval()
    with torch.no_grad():
        for parameter in classifier.encoder.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)  # as after training: fresh, it hardly looks at its input
    ids = torch.randint(1, 257, (2, 2, 20))
    padded = torch.nn.functional.pad(ids, (0, 30))
    with torch.no_grad():
        short = classifier(ids, torch.ones_like(ids)).logits
        long = classifier(padded, (padded != 0).long()).logits
        swapped = classifier(ids.flip(1), torch.ones_like(ids)).logits
    torch.testing.assert_close(short, long, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(short, swapped, atol=1e-4)  # a − b knows which document is which


def test_all_parameters_of_a_patched_encoder_are_trained() -> None:
    method = AttentionMethod({"component": "posrf", "projection": "gmm", "num_features": 16, "per_head": True})
    classifier = build_classifier(TASKS["listops"], TINY, method, 32, seed=0)
    classifier(
        torch.randint(1, 16, (4, 1, 12)), torch.ones(4, 1, 12).long(), torch.tensor([1, 2, 3, 4])
    ).loss.backward()
    names = {
        name for name, parameter in classifier.named_parameters() if "attention" in name and parameter.requires_grad
    }
    assert any("feature_maps" in name for name in names)
    assert any("query" in name for name in names)
    without = [n for n, p in classifier.named_parameters() if not p.requires_grad or p.grad is None]
    assert without == []


# --- the recipe -----------------------------------------------------------------------------------------------------


def settings(data: Path, out: Path, *changes: str) -> list[str]:
    """Command-line arguments of a small run into `out`."""
    file = out.with_name(f"{out.name}.yaml")
    content = {
        "task": "listops",
        "data": {"dir": str(data), "max_length": 24},
        "model": {"dim": 32, "hidden_dim": 32, "layers": 1, "dropout": 0.1},
        "method": {"attention": {**vars(KERNEL)["attention"], "projection_params": {"redraw_every": 3}}},
        "train": {
            **{"steps": 12, "batch_size": 16, "learning_rate": 3e-3, "warmup_steps": 2, "eval_every": 6},
            **{"save_every_steps": 2, "log_every": 2, "schedule": "constant"},
        },
        "output": {"dir": str(out)},
    }
    file.write_text(yaml.safe_dump(content))
    return [str(file), *changes]


def spawn(arguments: list[str]) -> FreshProcess:
    environment = {**os.environ, "PYTHONPATH": str(RECIPES.parent)}
    return start_python([str(RECIPES / "papers/programs/train_lra.py"), *arguments], env=environment)


def wait_for_checkpoint(run: Path, process: FreshProcess) -> None:
    deadline = time.monotonic() + 120
    while not checkpoints.list_checkpoints(run / "checkpoints"):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_short_training_beats_chance_and_leaves_a_full_run_folder(easy: Path, tmp_path: Path) -> None:
    changes = ("train.steps=250", "train.eval_every=125", "train.batch_size=32", "train.save_every_steps=null")
    assert train_lra.main(settings(easy, tmp_path / "run", *changes)) == 0
    report = json.loads((tmp_path / "run/metrics.json").read_text())
    # The most frequent class has less than a fifth of these expressions; four standard errors of 200 examples more.
    labels = TASKS["listops"].load(easy)["test"].labels
    majority = np.bincount(labels).max() / len(labels)
    assert report["accuracy"] > majority + 4 * np.sqrt(majority * (1 - majority) / len(labels)), (report, majority)
    assert report["method"] == "posrf-orf"
    assert report["steps"] == 250
    assert report["examples"] == {"train": 1500, "validation": 200, "test": 200}
    assert report["train_cpu_seconds"] > 0
    assert report["peak_memory_bytes"] >= report["peak_memory_bytes_before_training"] > 1e7
    assert "dir" not in report["config"]["data"]
    assert {entry.name for entry in (tmp_path / "run").iterdir()} == {
        *("config.yaml", "environment.json", "log.jsonl", "metrics.json", "learning_curve.png", "checkpoints"),
    }
    assert train_lra.main(settings(easy, tmp_path / "run", *changes)) == 2  # the folder is in use


@pytest.mark.slow
def test_killed_and_stopped_and_resumed_equals_uninterrupted(easy: Path, tmp_path: Path) -> None:
    long = ("train.steps=40", "train.save_every_steps=1", "train.eval_every=20")
    assert train_lra.main(settings(easy, tmp_path / "straight", *long)) == 0
    arguments = settings(easy, tmp_path / "run", *long)
    for number, end in enumerate((signal.SIGKILL, signal.SIGTERM)):
        process = spawn([*arguments, "--resume"] if number else arguments)
        try:
            if number == 0:
                wait_for_checkpoint(tmp_path / "run", process)
            else:
                assert "continuing after step" in (process.stdout.readline() if process.stdout else "")
            process.send_signal(end)
            output = process.communicate(timeout=120)[0]
        finally:
            process.kill()
        assert process.returncode == (-9 if end == signal.SIGKILL else 143), output
    assert "--resume" in output
    assert train_lra.main([*arguments, "--resume"]) == 0
    assert same_tensors(last_weights(tmp_path / "straight"), last_weights(tmp_path / "run"))
    reports = [json.loads((tmp_path / run / "metrics.json").read_text()) for run in ("straight", "run")]
    for key in ("accuracy", "best_step", "steps"):
        assert reports[0][key] == reports[1][key]


def test_a_budget_of_processor_time_ends_the_run(easy: Path, tmp_path: Path) -> None:
    budget = 0.01  # minutes
    changes = (
        f"train.max_cpu_minutes={budget}",
        "train.steps=100000",
        "train.schedule=linear",
        "train.eval_every=50000",
    )
    assert train_lra.main(settings(easy, tmp_path / "run", *changes)) == 0
    report = json.loads((tmp_path / "run/metrics.json").read_text())
    assert report["stopped_early"]
    assert 60 * budget <= report["train_cpu_seconds"] < 60 * budget + 5 * report["cpu_seconds_per_step"] + 0.5
    rates = [json.loads(line).get("learning_rate") for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert min(rate for rate in rates[1:] if rate is not None) < 1.5e-3  # it fell with the time, not with the steps


def test_schedules() -> None:
    def rate(schedule: str, step: int, fraction: float | None = None) -> float:
        train = LongRangeTrain(steps=100, warmup_steps=10, schedule=schedule, learning_rate=1.0)
        config = LongRangeConfig(output=RunOutput(dir="x"), task="listops", train=train)
        return (
            train_lra.LongRange(config).schedule(per_epoch=1).rate(step, step if fraction is None else 100 * fraction)
        )

    assert [rate("linear", step) for step in (0, 9, 10, 55)] == pytest.approx([0.1, 1.0, 1.0, 0.5])
    assert [rate("cosine", step) for step in (10, 55, 99)] == pytest.approx([1.0, 0.5, 0.0], abs=1e-3)
    assert rate("linear", 20, fraction=0.55) == pytest.approx(0.5)
    assert rate("constant", 99) == 1.0
    assert [rate("rsqrt", step) for step in (4, 9, 39)] == pytest.approx([0.5 / 10**0.5, 1 / 10**0.5, 1 / 40**0.5])


def test_settings_are_strict(tmp_path: Path) -> None:
    given = {
        "task": "listop",
        "model": {"heads": 3, "pooling": "max"},
        "method": {"attention": {"component": "posfr", "num_features": 0}},
        "train": {"step": 5, "schedule": "sqrt"},
        "output": {"dir": "x"},
    }
    with pytest.raises(ConfigError) as error:
        load_config(LongRangeConfig, given)
    for text in ("model.pooling", "did you mean 'posrf'", "did you mean 'steps'", "train.schedule", "num_features"):
        assert text in str(error.value)
    with pytest.raises(ConfigError, match="did you mean 'listops'"):
        load_config(LongRangeConfig, {"task": "listop", "output": {"dir": "x"}})
    with pytest.raises(ConfigError, match=r"task is rte, .*: use recipes/finetune\.py; expected .* listops, lra_image"):
        load_config(LongRangeConfig, {"task": "rte", "output": {"dir": "x"}})
    with pytest.raises(ConfigError, match="heads is 3, which does not divide dim 64"):
        load_config(LongRangeConfig, {"task": "listops", "model": {"heads": 3}, "output": {"dir": "x"}})
    with pytest.raises(ConfigError, match="did you mean 'softmax'"):
        load_config(LongRangeConfig, {"task": "listops", "method": {"attention": "softmx"}, "output": {"dir": "x"}})


@pytest.mark.parametrize("file", sorted((RECIPES / "papers/configs/lra").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_published_configurations_have_the_sizes_of_the_papers(file: Path) -> None:
    config = load_config(LongRangeConfig, file)
    assert config.output.dir.startswith(f"runs/lra/{file.stem}/")
    model = config.model
    sizes = (model.dim, model.hidden_dim, model.heads, model.layers)
    if file.stem.startswith("sparsity"):  # Learning the Transformer Kernel, appendix E.2
        assert (*sizes, config.method.snnk_config(0).attention.num_features) == (64, 64, 4, 3, 64)
    elif not file.stem.endswith("_kl") and file.stem != "image":
        assert (*sizes, config.method.snnk_config(0).attention.num_features) == (64, 128, 2, 2, 128)


def test_the_recipe_that_writes_listops_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--train", "30", "--validation", "5", "--test", "6", "--min-length", "20", "--max-length", "60"]
    assert write_listops_recipe.main(["--output", str(tmp_path / "short"), *sizes]) == 0
    rows = TASKS["listops"].load(tmp_path / "short")
    assert {name: len(part.labels) for name, part in rows.items()} == {"train": 30, "validation": 5, "test": 6}
    assert all(20 <= len(tokens) <= 60 for part in rows.values() for tokens in part.tokens[0])
    before = (tmp_path / "short/basic_train.tsv").read_bytes()
    assert write_listops_recipe.main(["--output", str(tmp_path / "short"), *sizes]) == 2
    assert "exists" in capsys.readouterr().err
    assert write_listops_recipe.main(["--output", str(tmp_path / "again"), *sizes]) == 0
    assert (tmp_path / "again/basic_train.tsv").read_bytes() == before
    assert write_listops_recipe.main(["--output", str(tmp_path / "none"), "--train", "0", "--test", "-1"]) == 2
    error = capsys.readouterr().err
    assert "--train is 0" in error
    assert "--test is -1" in error
    assert not (tmp_path / "none").exists()


def report(method: str, seed: int, accuracy: float, **train: Any) -> dict[str, Any]:
    config = load_config(LongRangeConfig, {"task": "lra_text", "data": {"max_length": 1000}, "output": {"dir": "x"}})
    return {
        **{"task": "lra_text", "method": method, "seed": seed, "accuracy": accuracy, "steps": 300},
        **{"stopped_early": True, "train_seconds": 1000.0, "train_cpu_seconds": 900.0, "cpu_seconds_per_step": 3.1234},
        **{"peak_memory_bytes": 2_000_000_000, "peak_memory_bytes_before_training": 500_000_000},
        **{"total_parameters": 123456, "longest_sequence": 1000, "environment": {"torch_threads": 1, "gpu": None}},
        "examples": {"train": 22500, "validation": 500, "test": 1000},
        "config": {
            "data": {"max_length": 1000},
            "model": vars(config.model),
            "train": {**vars(config.train), "max_cpu_minutes": 15.0, **train},
        },
    }


def test_the_table_says_what_its_numbers_are_worth(tmp_path: Path) -> None:
    for method, seed, accuracy, rate in (
        *(("softmax", 0, 0.6, 1e-3), ("softmax", 1, 0.64, 1e-3)),
        ("posrf_orf", 0, 0.61, 5e-4),
    ):
        file = tmp_path / f"runs/text/{method}/seed{seed}/metrics.json"
        put_figures(file, report(method, seed, accuracy, learning_rate=rate))
    arguments = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "cards")]
    assert study.main(["page", "lra", *arguments]) == 0
    page = (tmp_path / "cards/README.md").read_text()
    assert "| softmax | 2 | 62.0 ± 2.0 | 300 | 3.12 | 15.0 | 16.7 | 500 → 2,000 | 123,456 |" in page
    assert "| posrf_orf | 1 | 61.0 |" in page
    assert "Chance is 50 %" in page
    assert "longest document 1,000 tokens" in page
    assert "15 CPU minutes (at most 50,000 steps)" in page
    assert "differ in: learning rate 0.0005 / 0.001" in page
    assert "fewer than three seeds" in page
    assert "PosRF-MM against" not in page
    assert "3 of 3 runs ended before the 50,000 steps" in page
    assert "shorter than the published 4,000 tokens" in page
    assert (tmp_path / "cards/accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_checks_the_papers_claim(tmp_path: Path) -> None:
    given = {"posrf_mm": (((0.62, 0.30), (0.60, 0.34)), 10**9), "saderf_orf": (((0.58, 0.40), (0.58, 0.40)), 1.5e9)}
    for method, (runs, memory) in given.items():
        for seed, (accuracy, seconds) in enumerate(runs):
            measured = {"cpu_seconds_per_step": seconds, "peak_memory_bytes": memory}
            file = tmp_path / f"runs/text/{method}/seed{seed}/metrics.json"
            put_figures(file, {**report(method, seed, accuracy), **measured})
    assert study.main(["page", "lra", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "cards")]) == 0
    page = (tmp_path / "cards/README.md").read_text()
    # (1.0 − .5) GB against (1.5 − .5) GB of growth; .32 against .40 s; 61 against 58 ± 1.
    # Of a process, memory says more about its allocator.
    assert "PosRF-MM against SADERF-ORF: 20.0 % less time per step, +3.0 ± 1.0 points of accuracy" in page
    for file in (tmp_path / "runs").rglob("metrics.json"):
        card = {"device": "cuda", "environment": {"torch_threads": 1, "gpu": "a card"}}
        file.write_text(json.dumps(json.loads(file.read_text()) | card))
    assert study.main(["page", "lra", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "cards")]) == 0
    page = (tmp_path / "cards/README.md").read_text()
    assert "20.0 % less time per step, 50.0 % less memory (grown in training), +3.0 ± 1.0 points" in page
    assert "computed on a card;" in page
    none = [report("saderf_orf", 0, 0.5) | {"peak_memory_bytes": 9, "peak_memory_bytes_before_training": 9}]
    none[0]["device"] = "cuda"
    (said, *_) = lra_page.claim({"posrf_mm": none, "saderf_orf": none})
    assert "0.0 % less time per step, no measurable memory" in said
    for method in ("posrf_mm", "saderf_orf"):  # one seed has no error
        drop_run(tmp_path / "cards", "text", method, 1)
    assert study.main(["page", "lra", "--runs", str(tmp_path / "none"), "--out", str(tmp_path / "cards")]) == 0
    assert "+4.0 points of accuracy" in (tmp_path / "cards/README.md").read_text()
