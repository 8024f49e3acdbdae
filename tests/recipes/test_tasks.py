"""GLUE tasks: registry, official files (generated and real), the Hub's layout, metrics, and every kind of bad input."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import datasets
import evaluate
import numpy as np
import pytest
import torch
from data import TASKS, ColumnsTask, SequenceTask, TaskSpec, TsvLayout
from data_files import FOLDERS, HEADERS, write_task
from recipe_world import faults_of

from snnk_peft.errors import ConfigError
from snnk_peft.tasks import ImageTask, TextTask, metrics
from snnk_peft.tasks.metrics import METRICS, load_metric
from tests.fresh_process import run_python

GLUE = ["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]
# Rows of train and dev. MNLI and QQP: samples of the official files.
REAL_ROWS = {
    "rte": (2490, 277),
    "mrpc": (3668, 408),
    "stsb": (5749, 1500),
    "cola": (8551, 1043),
    "sst2": (67349, 872),
    "mnli": (7999, 1920),
    "qqp": (7999, 2000),
}


def edit(path: Path, line: int, new: str | bytes | None) -> None:
    """Replace line `line` (from 1) of a file; None removes it."""
    lines = path.read_bytes().split(b"\n")
    lines[line - 1 : line] = [] if new is None else [new.encode() if isinstance(new, str) else new]
    path.write_bytes(b"\n".join(lines))


# --- registry -----------------------------------------------------------------------------------------------------


def test_registry_holds_the_nine_glue_tasks():
    assert set(GLUE) <= set(TASKS.names())
    assert [TASKS[name].folder for name in GLUE] == [FOLDERS[name] for name in GLUE]
    with pytest.raises(ConfigError, match="unknown task 'mrcp'; did you mean 'mrpc'"):
        TASKS["mrcp"]


def test_the_package_alone_has_the_readers_of_own_data():
    """Recipes register theirs beside them, and so may anybody."""
    program = (
        "import sys; from snnk_peft.tasks import TASKS; print(*TASKS); "
        "TASKS.register('mine', object()); print(*TASKS); "
        "sys.path.append('recipes'); import data; print(data.TASKS is TASKS, 'mrpc' in TASKS, 'mine' in TASKS)"
    )
    done = run_python(["-c", program], cwd=Path(__file__).parents[2])
    assert done.stdout.splitlines() == ["image_folder table", "image_folder mine table", "True True True"]


def test_every_registered_task_is_consistent():
    assert len(TASKS) >= 9
    for name in TASKS:
        task = TASKS[name]
        assert isinstance(task, (TextTask, SequenceTask, ImageTask, ColumnsTask))
        assert task.name == name
        if name in ("table", "image_folder", "imagenet1k"):  # by settings: test_own_data.py, test_image_tasks.py
            continue
        assert task.with_settings({}) is task
        assert task.check({"train_file": None}) == []
        assert "set task=table" in task.check({"train_file": "x.csv"})[0]
        assert hash(task) == hash(dataclasses.replace(task))
        assert task.num_labels == (1 if task.label_names is None else len(set(task.label_names)))
        assert (task.problem_type == "regression") == (task.label_names is None) == (task.id2label is None)
        if task.label_names is not None:
            assert {v: k for k, v in task.id2label.items()} == task.label2id
            perfect = np.arange(12) % task.num_labels
        else:
            perfect = np.linspace(*task.tsv.label_range, 12)
        assert task.compute(perfect, perfect)["score"] == pytest.approx(1.0)
        assert set(task.compute(perfect, perfect)) == {*task.metrics, "score"}


@pytest.mark.parametrize("name", ["sst2", "stsb", "lra_retrieval", "table"])
def test_one_load_whatever_the_examples_are(tmp_path, name):
    """Rows of the Hub's kind, numbers as labels, token sequences, a table: `load` and `Split` say the same of all."""
    task, folder = TASKS[name], tmp_path
    if name == "lra_retrieval":
        for part in ("train", "eval", "test"):
            rows = "".join(f"{n % 2}\tA{n}\tB{n}\tfirst {n}\tsecond\n" for n in range(30))
            (tmp_path / f"new_aan_pairs.{part}.tsv").write_text(rows)
    elif name == "table":
        (tmp_path / "x.csv").write_text("text,label\n" + "".join(f"text {n},{'ab'[n % 2]}\n" for n in range(30)))
        task, folder = task.with_settings({"train_file": str(tmp_path / "x.csv"), "hold_out": 0.5}), None
    else:
        write_task(tmp_path, name)
    whole, limits = task.load(folder), dict.fromkeys(task.splits, 5)
    assert list(whole) == list(task.splits)
    parts = [task.load(folder, max_samples=limits, seed=seed) for seed in (0, 1)]
    for split, rows in whole.items():
        labels, few = list(rows["label"]), parts[0][split]
        assert len(labels) == len(rows) > 5
        assert list(rows.select([3, 1])["label"]) == [labels[3], labels[1]]
        assert len(few) == len(few["label"]) == 5
        assert task.label_names is None or set(labels) <= set(range(task.num_labels))
    assert list(task.load(folder, splits=["validation"])) == ["validation"]
    faults = faults_of(lambda: task.load(folder, splits=["validation", "trian"], max_samples={"train": 0}))
    assert len(faults) == 3
    assert f"unknown split of {name} 'trian'; did you mean 'train'" in faults[0]


def test_label_ids_are_those_of_the_hub():
    names = {name: TASKS[name].label_names for name in GLUE}
    assert names == {
        "cola": ("unacceptable", "acceptable"),
        "sst2": ("negative", "positive"),
        "mrpc": ("not_equivalent", "equivalent"),
        "qqp": ("not_duplicate", "duplicate"),
        "stsb": None,
        "mnli": ("entailment", "neutral", "contradiction"),
        "qnli": ("entailment", "not_entailment"),
        "rte": ("entailment", "not_entailment"),
        "wnli": ("not_entailment", "entailment"),
    }


def test_a_contradictory_spec_lists_every_fault():
    faults = faults_of(
        lambda: TaskSpec(
            name="x",
            folder="X",
            tsv=TsvLayout(text=("a", "b"), label="y", labels=("0", "1")),
            hub_columns=("a",),
            label_names=("no", "yes", "maybe"),
            metrics=("acuracy",),
            primary=("f1",),
            splits=("validation",),
        )
    )
    assert len(faults) == 5
    assert "did you mean 'accuracy'" in faults[0]


WITHOUT_EXTRA = """
import sys

class Hide:
    "A finder that does not see the packages of the extra."
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in ("datasets", "evaluate", "sklearn", "scipy")
        return None if hidden else self.finder.find_spec(name, path, target)
    def find_distributions(self, context):
        found = getattr(self.finder, "find_distributions", lambda context: [])(context)
        return [d for d in found if d.metadata["Name"] not in ("datasets", "evaluate", "scikit-learn", "scipy")]

sys.path.append("recipes")
sys.meta_path[:] = [Hide(finder) for finder in sys.meta_path]
from data import TASKS
from snnk_peft.tasks import metrics
assert len(TASKS) >= 9
for action in (
    lambda: TASKS["rte"].load(sys.argv[1]),
    lambda: TASKS["rte"].load(),
    lambda: TASKS["rte"].compute([0, 1], [0, 1]),
    lambda: TASKS["stsb"].compute([0.0, 1.0], [0.0, 1.0]),
    lambda: TASKS["rte"].metric(),
    lambda: metrics.Accuracy,
):
    try:
        action()
    except ImportError as error:
        print(error)
"""


def test_without_the_extra_tasks_are_listed_and_the_remedy_is_named(tmp_path):
    write_task(tmp_path, "rte")
    command = [sys.executable, "-c", WITHOUT_EXTRA, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    packages = ["datasets", "datasets", "sklearn", "scipy", "evaluate", "datasets"]
    assert done.stdout.splitlines() == [
        f"this needs the package {package!r}, which is not installed: pip install snnk-peft[recipes]"
        for package in packages
    ], done.stderr


# --- official files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GLUE)
def test_official_layout(tmp_path, name):
    task = TASKS[name]
    folder = write_task(tmp_path, name, n_train=20, n_dev=7)
    loaded = task.load(tmp_path)
    assert list(loaded) == list(task.splits)
    assert [len(split) for split in loaded.values()] == [20] + [7] * len(task.validation_splits)
    for split in loaded.values():
        assert split.column_names == [*task.text_columns, "label", "idx"]
        assert split["idx"][:] == list(range(len(split)))
        assert all(split["sentence1"])
        if task.label_names is None:
            assert split.features["label"].dtype == "float32"
            assert all(0 <= score <= 5 for score in split["label"])
        else:
            assert tuple(split.features["label"].names) == task.label_names
            assert split["label"][: task.num_labels] == list(range(task.num_labels))  # write_task starts with each
    own_folder = task.load(folder)  # the task's own folder is as good as its parent
    assert own_folder["train"].to_dict() == loaded["train"].to_dict()


def test_texts_are_kept_as_they_are(tmp_path):
    folder = tmp_path / "RTE"
    folder.mkdir()
    text = 'he said "no \x85 \u2028 to it,\rtwice '
    rows = f'index\tsentence1\tsentence2\tlabel\r\n0\t{text}\t" x\tnot_entailment\r\n1\ta\tb\tentailment\t\t\r\n\r\n'
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_bytes(rows.encode())
    train = TASKS["rte"].load(tmp_path)["train"]
    assert train["sentence1"][:] == [text, "a"]
    assert train["sentence2"][:] == ['" x', "b"]
    assert train["label"][:] == [1, 0]


@pytest.mark.parametrize("name", sorted(REAL_ROWS))
def test_real_files(shared_dir, name):
    task = TASKS[name]
    train, dev = REAL_ROWS[name]
    loaded = task.load(shared_dir / "data" / "glue")
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": train, task.validation_splits[0]: dev}
    references = np.array(loaded[task.validation_splits[0]]["label"])
    assert task.compute(references, references)["score"] == pytest.approx(1.0)


def test_real_labels(shared_dir):
    """First examples as they stand in the official files."""
    rte = TASKS["rte"].load(shared_dir / "data" / "glue", splits=["validation"])["validation"]
    assert (rte[0]["label"], rte[1]["label"]) == (1, 0)
    assert rte[0]["sentence2"] == "Christopher Reeve had an accident."
    mrpc = TASKS["mrpc"].load(shared_dir / "data" / "glue", splits=["train"])["train"]
    assert mrpc[0]["label"] == 1
    assert mrpc[0]["sentence1"].startswith('Amrozi accused his brother , whom he called " the witness "')


def test_mnli_without_mismatched(tmp_path):
    folder = write_task(tmp_path, "mnli")
    (folder / "dev_mismatched.tsv").unlink()
    assert list(TASKS["mnli"].load(tmp_path)) == ["train", "validation_matched"]
    assert "no dev_mismatched.tsv; found: dev_matched.tsv, train.tsv" in str(
        faults_of(lambda: TASKS["mnli"].load(tmp_path, splits=["validation_mismatched"]))
    )
    (folder / "dev_matched.tsv").unlink()
    assert "no dev_matched.tsv or dev_mismatched.tsv; found: train.tsv" in str(
        faults_of(lambda: TASKS["mnli"].load(tmp_path))
    )


def test_splits_and_training_subset(tmp_path):
    write_task(tmp_path, "sst2", n_train=200)
    task = TASKS["sst2"]
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    subsets = [task.load(tmp_path, max_samples={"train": 20}, seed=seed)["train"]["idx"][:] for seed in (0, 0, 1)]
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert subsets[0] == subsets[1] != subsets[2]
    assert len(set(subsets[0])) == 20
    assert subsets[0] == sorted(subsets[0]) != list(range(20))
    assert len(task.load(tmp_path, max_samples={"train": 1000})["train"]) == 200
    assert faults_of(lambda: task.load(tmp_path, splits=[]))


# --- the Hub ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GLUE)
def test_hub_layout(tmp_path, name):
    """The real `load_dataset`, on a local folder with the configuration, columns and labels of the Hub's copy."""
    task = TASKS[name]
    count = 6
    texts = {column: [f"{column} {i}" for i in range(count)] for column in task.hub_columns}
    label = datasets.Value("float32") if task.label_names is None else datasets.ClassLabel(names=list(task.label_names))
    features = datasets.Features(
        {**dict.fromkeys(texts, datasets.Value("string")), "label": label, "idx": datasets.Value("int32")}
    )
    labels = [i % task.num_labels for i in range(count)]
    rows = datasets.Dataset.from_dict({**texts, "label": labels, "idx": list(range(count))}, features=features)
    for split in (*task.splits, "test"):
        rows.to_parquet(tmp_path / "hub" / name / f"{split}.parquet")
    files = "".join(f"  - split: {split}\n    path: {name}/{split}.parquet\n" for split in (*task.splits, "test"))
    readme = f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n"
    (tmp_path / "hub" / "README.md").write_text(readme)
    local = dataclasses.replace(task, hub_path=str(tmp_path / "hub"))
    loaded = local.load(cache_dir=tmp_path / "cache", max_samples={"train": 4})
    assert {split: len(rows) for split, rows in loaded.items()} == {
        split: 4 if split == "train" else count for split in task.splits
    }
    write_task(tmp_path, name)
    from_files = task.load(tmp_path)
    for split in task.splits:
        assert loaded[split].features == from_files[split].features
    validation = loaded[task.validation_splits[0]]
    assert validation["sentence1"][:] == texts[task.hub_columns[0]]
    assert validation[task.text_columns[-1]][:] == texts[task.hub_columns[-1]]
    if task.label_names is not None:  # another order of labels must not pass silently
        swapped = dataclasses.replace(local, label_names=task.label_names[::-1])
        assert "labels are" in faults_of(lambda: swapped.load(cache_dir=tmp_path / "cache"))[0]
    renamed = dataclasses.replace(local, hub_columns=tuple(f"{column}_" for column in task.hub_columns))
    assert f"found {task.hub_columns[0]}" in faults_of(lambda: renamed.load(cache_dir=tmp_path / "cache"))[0]


def test_unreachable_hub_says_to_give_data_dir(tmp_path):
    absent = dataclasses.replace(TASKS["rte"], hub_path="snnk-peft-tests/absent")
    [fault] = faults_of(lambda: absent.load(cache_dir=tmp_path))
    assert "task 'rte' could not be loaded from the Hub (snnk-peft-tests/absent, rte)" in fault
    assert "give data.dir" in fault
    assert "RTE/{train.tsv,dev.tsv}" in fault


# --- metrics ------------------------------------------------------------------------------------------------------


def ranks(values):
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def correlation(x, y):
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())


@pytest.fixture
def binary():
    rng = np.random.default_rng(0)
    references = rng.integers(0, 2, 60)
    return np.where(rng.random(60) < 0.7, references, 1 - references), references


def test_classification_metrics(binary):
    predictions, references = binary
    hit = predictions == references
    tp, fp = (hit & (predictions == 1)).sum(), (~hit & (predictions == 1)).sum()
    tn, fn = (hit & (predictions == 0)).sum(), (~hit & (predictions == 0)).sum()
    expected_f1 = 2 * tp / (2 * tp + fp + fn)
    expected_mcc = (tp * tn - fp * fn) / np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    assert TASKS["mrpc"].compute(predictions, references) == pytest.approx(
        {"accuracy": hit.mean(), "f1": expected_f1, "score": (hit.mean() + expected_f1) / 2}
    )
    assert TASKS["qqp"].compute(predictions, references) == TASKS["mrpc"].compute(predictions, references)
    cola = TASKS["cola"].compute(predictions, references)
    assert cola == pytest.approx({"matthews_correlation": expected_mcc, "accuracy": hit.mean(), "score": expected_mcc})


def test_regression_metrics():
    rng = np.random.default_rng(1)
    references = np.round(rng.uniform(0, 5, 50), 1)  # with ties
    predictions = np.round(references + rng.normal(0, 1, 50), 1)
    linear, rank = correlation(predictions, references), correlation(ranks(predictions), ranks(references))
    result = TASKS["stsb"].compute(predictions[:, None], references)
    assert result == pytest.approx({"pearson": linear, "spearmanr": rank, "score": (linear + rank) / 2})


def test_constants_score_zero():
    """Nothing can be told of them; NaN would be the best of all checkpoints, or of none."""
    ids = np.arange(10) % 2
    assert TASKS["stsb"].compute(ids * 5.0, np.full(10, 2.5)) == {"pearson": 0.0, "spearmanr": 0.0, "score": 0.0}
    assert TASKS["cola"].compute(ids, np.ones(10, int))["score"] == 0.0
    assert TASKS["stsb"].compute(np.full(10, 2.5), ids * 5.0)["score"] == 0.0
    assert TASKS["cola"].compute(np.ones(10, int), ids)["score"] == 0.0
    assert TASKS["mrpc"].compute(np.zeros(10, int), ids) == {"accuracy": 0.5, "f1": 0.0, "score": 0.25}


def test_logits_tensors_and_lists():
    references = torch.tensor([0, 1, 2, 1])
    logits = torch.eye(3)[torch.tensor([0, 1, 1, 1])]
    expected = {"accuracy": 0.75, "score": 0.75}
    for predictions in (logits, logits.bfloat16().requires_grad_(), logits.numpy(), logits.argmax(-1), [0, 1, 1, 1]):
        assert TASKS["mnli"].compute(predictions, references) == expected
    assert TASKS["rte"].compute([0, 1], [0, 1])["score"] == 1.0  # two ids for two examples are not logits


@pytest.mark.parametrize(
    ("name", "predictions", "references", "message"),
    [
        ("rte", np.zeros((3, 2)), [0, 1], r"predictions \(3, 2\), references \(2,\)"),
        ("rte", np.zeros((2, 3)), [0, 1], r"or logits \(examples, 2\)"),
        ("rte", [], [], "at least one example"),
        ("rte", [[0.0, float("nan")]], [0], "logits contain NaN"),
        ("rte", [0, 2], [0, 1], r"predictions\[1\] is 2 \(1 such\); expected class ids 0 to 1"),
        ("rte", [0, 1], [-1, -1], r"references\[0\] is -1 \(2 such\)"),
        ("stsb", [0.0, float("nan")], [0.0, 1.0], r"predictions\[1\] is nan"),
        ("stsb", np.zeros((2, 2)), [0.0, 1.0], "expected at least one example, both"),
    ],
)
def test_bad_predictions(name, predictions, references, message):
    with pytest.raises(ConfigError, match=message):
        TASKS[name].compute(predictions, references)


def test_summary_of_matched_and_mismatched():
    task = TASKS["mnli"]
    one, two = {"accuracy": 0.5, "score": 0.5}, {"accuracy": 0.7, "score": 0.7}
    assert task.summarize({"validation_matched": one}) == one
    both = task.summarize({"validation_matched": one, "validation_mismatched": two})
    assert both["score"] == both["accuracy"] == pytest.approx(0.6)
    assert both["validation_mismatched/accuracy"] == 0.7
    with pytest.raises(ConfigError, match="no results"):
        task.summarize({})


@pytest.mark.parametrize("name", sorted(METRICS))
def test_evaluate_metrics_work_offline(tmp_path, name, binary):
    predictions, references = binary
    metric = load_metric(name, cache_dir=str(tmp_path))
    assert isinstance(metric, evaluate.Metric)
    expected = {name: pytest.approx(METRICS[name](predictions, references))}
    assert metric.compute(predictions=predictions, references=references) == expected
    for start in (0, 30):  # batch by batch, as a training loop does
        metric.add_batch(predictions=predictions[start : start + 30], references=references[start : start + 30])
    assert metric.compute() == expected


def test_evaluate_combine(tmp_path, binary):
    predictions, references = binary
    combined = evaluate.combine(
        [metrics.Accuracy(cache_dir=str(tmp_path)), metrics.MatthewsCorrelation(cache_dir=str(tmp_path))]
    )
    result = combined.compute(predictions=predictions, references=references)
    expected = TASKS["cola"].compute(predictions, references)
    assert result == pytest.approx({key: expected[key] for key in ("accuracy", "matthews_correlation")})
    mrpc = TASKS["mrpc"].metric(cache_dir=str(tmp_path))
    mrpc.add_batch(predictions=predictions, references=references)
    expected = TASKS["mrpc"].compute(predictions, references)
    assert mrpc.compute() == pytest.approx({key: expected[key] for key in ("accuracy", "f1")})


def test_metric_names():
    with pytest.raises(ConfigError, match="unknown metric 'spearman'; did you mean 'spearmanr'"):
        load_metric("spearman")
    with pytest.raises(AttributeError, match="Recall"):
        _ = metrics.Recall
    assert [type(load_metric(name)).__name__ for name in METRICS] == [
        "Accuracy",
        "F1",
        "MacroF1",
        "MatthewsCorrelation",
        "MicroF1",
        "Pearson",
        "Spearmanr",
    ]


# --- bad input ----------------------------------------------------------------------------------------------------


def test_missing_columns(tmp_path):
    path = write_task(tmp_path, "rte") / "dev.tsv"
    edit(path, 1, "index\tsentnce1\tSENTENCE2\tlabels")
    faults = faults_of(lambda: TASKS["rte"].load(tmp_path))
    assert len(faults) == 3
    assert faults[0].startswith(f"{path}, line 1: no column 'sentence1'; did you mean 'sentnce1'")
    assert "no column 'sentence2'; did you mean 'SENTENCE2'" in faults[1]
    assert "no column 'label'; did you mean 'labels'" in faults[2]
    assert "Found: index, sentnce1, SENTENCE2, labels" in faults[2]
    edit(path, 1, "sentence1\tsentence1\tsentence2\tlabel")
    assert "column 'sentence1' occurs 2 times" in faults_of(lambda: TASKS["rte"].load(tmp_path))[0]


@pytest.mark.parametrize("name", GLUE)
def test_ragged_rows(tmp_path, name):
    task = TASKS[name]
    path = write_task(tmp_path, name) / f"{task.files[1]}.tsv"
    width = len(HEADERS[name] or "1234")
    edit(path, 3, "\t".join(["1"] * (width - 1)))
    edit(path, 5, "\t".join(["1"] * (width + 2)))
    edit(path, 6, "")
    faults = faults_of(lambda: task.load(tmp_path))
    assert len(faults) == 3
    for fault, line, cells in zip(faults, (3, 5, 6), (width - 1, width + 2, 1), strict=True):
        assert fault.startswith(f"{path}, line {line}: {cells} cells; expected {width} (")


def test_unknown_labels(tmp_path):
    path = write_task(tmp_path, "mnli") / "dev_mismatched.tsv"
    row = path.read_text().split("\n")[3].split("\t")
    edit(path, 4, "\t".join([*row[:-1], "entailmnt"]))
    edit(path, 5, "\t".join([*row[:-1], "-"]))
    faults = faults_of(lambda: TASKS["mnli"].load(tmp_path))
    assert faults[0].startswith(f"{path}, line 4: unknown label 'entailmnt'; did you mean 'entailment'?")
    assert faults[1].startswith(f"{path}, line 5: unknown label '-'.")
    assert "entailment, neutral, contradiction" in faults[1]
    cola = write_task(tmp_path, "cola") / "train.tsv"
    edit(cola, 1, "source\tlabel\tmark\tsentence")
    assert f"{cola}, line 1: unknown label 'label'" in str(faults_of(lambda: TASKS["cola"].load(tmp_path)))


def test_scores(tmp_path):
    path = write_task(tmp_path, "stsb") / "train.tsv"
    row = path.read_text().split("\n")[1].split("\t")[:-1]
    for line, score in enumerate(("five", "", "5.1", "-0.1", "nan", "inf"), start=2):
        edit(path, line, "\t".join([*row, score]))
    faults = faults_of(lambda: TASKS["stsb"].load(tmp_path))
    assert len(faults) == 6
    assert faults[0] == f"{path}, line 2: score is 'five'; expected a number from 0 to 5"
    assert faults[2] == f"{path}, line 4: score is 5.1; expected a number from 0 to 5"


def test_empty_files(tmp_path):
    folder = write_task(tmp_path, "sst2")
    (folder / "train.tsv").write_bytes(b"")
    (folder / "dev.tsv").write_bytes(b"sentence\tlabel\n\n")
    faults = faults_of(lambda: TASKS["sst2"].load(tmp_path))
    assert faults == [
        f"{folder / 'train.tsv'}: the file is empty; expected tab-separated columns sentence, label",
        f"{folder / 'dev.tsv'}: there is a header but no example after line 1; expected tab-separated columns "
        "sentence, label",
    ]
    (write_task(tmp_path, "cola") / "dev.tsv").write_bytes(b"\n")
    assert "the file is empty; expected no header and" in faults_of(lambda: TASKS["cola"].load(tmp_path))[0]


def test_bytes_that_are_not_utf8(tmp_path):
    path = write_task(tmp_path, "sst2") / "train.tsv"
    edit(path, 4, "un café noir\t1".encode("latin-1"))
    edit(path, 9, b"\xff\xfe\t0")
    faults = faults_of(lambda: TASKS["sst2"].load(tmp_path))
    assert len(faults) == 2
    assert faults[0].startswith(f"{path}, line 4: byte 0xe9 at position 7 is not UTF-8")
    assert f"{path}, line 9: byte 0xff" in faults[1]


def test_missing_folder_and_files(tmp_path):
    absent = tmp_path / "nowhere"
    assert "does not exist; expected a folder that holds RTE/" in faults_of(lambda: TASKS["rte"].load(absent))[0]
    folder = write_task(tmp_path, "sst2")
    fault = faults_of(lambda: TASKS["rte"].load(tmp_path))[0]
    assert f"{tmp_path} has neither a folder RTE/ nor the files train.tsv, dev.tsv; found: SST-2/" in fault
    fault = faults_of(lambda: TASKS["sst2"].load(folder / "dev.tsv"))[0]
    assert "is a file; expected a folder" in fault
    (folder / "train.tsv").rename(folder / "training.tsv")
    assert faults_of(lambda: TASKS["sst2"].load(tmp_path)) == [
        f"{folder} has no train.tsv; found: dev.tsv, training.tsv"
    ]
    (folder / "dev.tsv").unlink()
    assert len(faults_of(lambda: TASKS["sst2"].load(tmp_path))) == 2
    (folder / "training.tsv").unlink()
    assert "found: nothing" in faults_of(lambda: TASKS["sst2"].load(tmp_path, splits=["train"]))[0]


def test_many_faults_are_capped_per_file_and_all_files_are_checked(tmp_path):
    folder = write_task(tmp_path, "sst2", n_train=40, n_dev=20)
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "good\tyes\n" * 40)
    edit(folder / "dev.tsv", 2, "only one cell")
    faults = faults_of(lambda: TASKS["sst2"].load(tmp_path))
    assert len(faults) == 12
    assert faults[9].startswith(f"{folder / 'train.tsv'}, line 11: unknown label 'yes'")
    assert faults[10] == f"{folder / 'train.tsv'}: ... and 30 more"
    assert faults[11].startswith(f"{folder / 'dev.tsv'}, line 2: 1 cells")


def test_qqp_leaves_out_the_few_rows_that_its_official_file_breaks(tmp_path):
    path = write_task(tmp_path, "qqp", n_train=10_000) / "train.tsv"
    edit(path, 12, "10\t1\t2\tWhat is this?\tWhat\n is that?\t1")
    with pytest.warns(UserWarning, match=r"left out 2 of 10001 lines.*lines 12, 13"):
        train = TASKS["qqp"].load(tmp_path)["train"]
    assert len(train) == 9999
    assert train["idx"][9:11] == [9, 12]
    edit(path, 20, "1\t1")  # one more than the official share is a fault of this copy
    assert len(faults_of(lambda: TASKS["qqp"].load(tmp_path))) == 3


@pytest.mark.parametrize("blank", ["", "  "])
def test_empty_texts_are_refused_but_for_the_few_of_an_official_file(tmp_path, blank):
    path = write_task(tmp_path, "rte") / "dev.tsv"
    cells = path.read_text().splitlines()[3].split("\t")
    edit(path, 4, "\t".join([cells[0], cells[1], blank, *cells[3:]]))
    with pytest.raises(ConfigError, match=r"RTE/dev\.tsv, line 4: sentence2 is empty; expected a text"):
        TASKS["rte"].load(tmp_path)
    path = write_task(tmp_path, "qqp", n_train=5000) / "train.tsv"
    cells = path.read_text().splitlines()[1].split("\t")
    cells[HEADERS["qqp"].index("question2")] = blank
    edit(path, 2, "\t".join(cells))
    with pytest.warns(UserWarning, match="left out 1 of 5000 lines"):
        train = TASKS["qqp"].load(tmp_path)["train"]
    assert (len(train), train["idx"][0]) == (4999, 1)
