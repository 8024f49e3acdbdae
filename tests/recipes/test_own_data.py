"""Own data: tables of every kind, trained, evaluated and bundled from the command line; every fault with its line."""

from __future__ import annotations

import json
import random
import re
import string
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
from data import TASKS
from recipe_world import RECIPES, faults_of, scored, write_world
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    RobertaTokenizerFast,
    pipeline,
)

from snnk_cli.data import Examples
from snnk_cli.modality import load_tokenizer
from snnk_peft.tasks.metrics import entity_f1, macro_f1
from tests.recipes.test_tables import table, write_csv, write_lines

# The made-up sentences repeat, of which the labelled pass before the training warns.
pytestmark = pytest.mark.filterwarnings("ignore:.*held-out rows are also among:snnk_peft.errors.NumericalWarning")
TABLE = str(RECIPES / "configs/table.yaml")
CUES = {"bad": ["terrible", "awful", "boring"], "good": ["wonderful", "brilliant"], "mixed": ["ordinary", "common"]}
NAMES = {"PER": ["Ada Byron", "Grace"], "LOC": ["Turin", "New York"]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT whose tokenizer splits unknown words into letters."""
    cues = [word for words in CUES.values() for word in words]
    letters = [form for letter in string.ascii_lowercase for form in (letter, f"##{letter}")]
    return write_world(tmp_path_factory.mktemp("own"), pieces=["film", ",", *cues, *letters])


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the model beside the tables."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").symlink_to(world / "bert")
    return tmp_path


def train(*changes: str, method: str = "snnk", epochs: int = 2) -> int:
    """recipes/finetune.py on the tiny model, into runs/x."""
    small = ["model.name_or_path=bert", "method.adapter.num_features=4", "train.batch_size=8", "output.dir=runs/x"]
    arguments = [TABLE, *small, f"method.name={method}", f"train.epochs={epochs}", "output.tensorboard=false", *changes]
    return finetune.main(arguments)


def read(file: str) -> Any:
    return json.loads(Path(file).read_text())


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """(text, label); the label is given away by a word. Some texts hold what CSV has to quote."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        label = sorted(CUES)[index % 3]
        tail = rng.choice(["", ",\nall in all", ' "', " near the river"])
        rows.append((f"film was{4 * (' ' + rng.choice(CUES[label]))}{tail}", label))
    rng.shuffle(rows)
    return rows


def classes(folder: str, texts: list[Any]) -> tuple[list[str], np.ndarray]:
    """Names of the predicted classes and logits of a saved model, one text (or pair) at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [model(**tokenizer(*text, return_tensors="pt")).logits[0].numpy() for text in texts]
    return [model.config.id2label[int(row.argmax())] for row in logits], np.stack(logits)


# --- from the command line --------------------------------------------------------------------------------------------


def test_a_csv_with_three_labels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_rows, eval_rows = sentences(96, 0), sentences(15, 1)
    write_csv(here / "x.csv", ["id", "text", "label"], [(i, *row) for i, row in enumerate(train_rows)])
    write_csv(here / "y.csv", ["label", "text"], [(label, text) for text, label in eval_rows])
    files = ["data.train_file=x.csv", "data.eval_file=y.csv", "data.text=text", "data.label=label"]
    fixed = ["method.adapter={component: cos, num_features: 64}", "method.calibrate_adapters=false"]
    wide = [*fixed, "method.parts=null", "method.pooler=dense"]
    learns = [*wide, "train.learning_rate=0.01", "train.schedule=linear", "train.eval_every=60"]
    assert train(*files, *learns, epochs=10) == 0
    said = capsys.readouterr().out
    assert "kind is classification, because label holds names" in said
    assert "3 labels from column 'label' of x.csv: bad, good, mixed" in said
    assert "checkpoints are chosen by accuracy" in said
    recorded = yaml.safe_load(Path("runs/x/config.yaml").read_text())["data"]
    assert (recorded["kind"], recorded["labels"], recorded["metric"]) == (
        "classification",
        ["bad", "good", "mixed"],
        "accuracy",
    )

    # The saved bundle, by an oracle: one text at a time, metrics from their definitions.
    predicted, _ = classes("runs/x/bundle", [(text,) for text, _ in eval_rows])
    true = [label for _, label in eval_rows]
    accuracy = sum(map(str.__eq__, predicted, true)) / len(true)
    report = read("runs/x/metrics.json")
    assert report["metrics"]["accuracy"] == report["score"] == pytest.approx(accuracy)
    assert report["metrics"]["macro_f1"] == pytest.approx(mean_f1(predicted, true))
    assert accuracy > 0.6  # a third by chance: the labels are those of the texts
    assert report["examples"] == {"train": 96, "validation": 15}
    assert str(here) not in Path("runs/x/metrics.json").read_text()

    # score.py on the run, and on the bundle, which knows its labels; also with rows in another file.
    for told in (scored(Path("runs/x")), scored(Path("runs/x/bundle"), "--task", "table", "data.eval_file=y.csv")):
        assert told["metrics"] == pytest.approx(report["metrics"])
    write_lines(here / "new.jsonl", [{"text": text, "label": label} for text, label in eval_rows[:4]])
    assert score.main(["runs/x", "data.eval_file=new.jsonl", "--output", "new.json"]) == 0
    assert read("new.json")["examples"] == {"validation": 4}

    # bundle.py, and the names that a user of the bundle sees.
    assert bundle.main(["runs/x", "--output", "small"]) == 0
    again, _ = classes("small", [(text,) for text, _ in eval_rows])
    assert again == predicted
    found = pipeline("text-classification", model="small")(eval_rows[0][0])
    assert found[0]["label"] == predicted[0]
    capsys.readouterr()
    write_lines(here / "new.jsonl", [{"text": "the film", "label": "good"}, {"text": "the film", "label": "god"}])
    assert score.main(["runs/x", "data.eval_file=new.jsonl"]) == 2
    assert (
        "new.jsonl, line 2: label is 'god', which is not among the labels: bad, good, mixed" in capsys.readouterr().err
    )


def mean_f1(predicted: list[str], true: list[str]) -> float:
    scores = []
    for name in set(predicted) | set(true):
        hits = sum(mine == theirs == name for mine, theirs in zip(predicted, true, strict=True))
        scores.append(2 * hits / (predicted.count(name) + true.count(name)))
    return sum(scores) / len(scores)


@pytest.mark.parametrize("head", ["own", "wide"])
def test_texts_with_any_number_of_labels(here: Path, head: str) -> None:
    rng = random.Random(0)
    rows = []
    for _ in range(120):
        chosen = sorted(rng.sample(sorted(CUES), rng.randrange(4)))
        words = " ".join(rng.choice(CUES[name]) for name in chosen)
        rows.append((f"the film was {words}", ", ".join(chosen)))
    write_csv(here / "x.csv", ["text", "label"], rows)
    write_csv(here / "y.csv", ["text", "label"], rows[:25])
    files = ["data.train_file=x.csv", "data.eval_file=y.csv", "data.kind=multi_label_classification"]
    assert train(*files, f"method.head={head}", "train.learning_rate=0.01", "train.dropout=0", epochs=6) == 0
    report = read("runs/x/metrics.json")
    assert report["score"] == report["metrics"]["micro_f1"] > 0.8

    # The saved bundle, by an oracle: one text at a time, a label where its logit is above 0.
    bundled = AutoModelForSequenceClassification.from_pretrained("runs/x/bundle")
    assert bundled.config.problem_type == "multi_label_classification"
    _, logits = classes("runs/x/bundle", [(text,) for text, _ in rows[:25]])
    names = list(bundled.config.id2label.values())
    true = np.array([[name in label.split(", ") for name in names] for _, label in rows[:25]])
    hits, wrong = ((logits > 0) & true).sum(), ((logits > 0) != true).sum()
    assert report["metrics"]["micro_f1"] == pytest.approx(2 * hits / (2 * hits + wrong))
    for folder in ("runs/x", "runs/x/bundle", "runs/x/adapter"):
        extra = [] if folder == "runs/x" else ["--task", "table", "data.eval_file=y.csv"]
        if folder.endswith("adapter"):
            extra += ["data.labels=[bad,good,mixed]", "data.kind=multi_label_classification"]
        assert scored(Path(folder), *extra)["metrics"] == pytest.approx(report["metrics"]), folder


@pytest.mark.filterwarnings("ignore:.*occur with more than one label:snnk_peft.errors.NumericalWarning")
def test_rare_classes_may_count_more(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cue of the rare class also stands in texts of the other, so that only its weight makes it the answer."""
    rows = [("the film was wonderful", "good")] * 5 + [("the film was wonderful", "bad")] * 15
    rows += [("the film was terrible", "bad")] * 20
    write_csv(here / "x.csv", ["text", "label"], rows)
    files = ["data.train_file=x.csv", "data.eval_file=x.csv", "train.learning_rate=0.01", "train.dropout=0"]
    found = {}
    for weights in ("none", "balanced"):
        out = f"output.dir=runs/{weights}"
        assert (
            train(*files, "data.metric=macro_f1", f"train.class_weights={weights}", out, method="full", epochs=8) == 0
        )
        found[weights] = classes(f"runs/{weights}/model", [("the film was wonderful",), ("the film was terrible",)])[0]
    assert found == {"none": ["bad", "bad"], "balanced": ["good", "bad"]}
    capsys.readouterr()
    write_csv(here / "n.csv", ["text", "label"], [("a film", 1.5), ("the film", 2.5), ("film", 3.5)] * 4)
    assert train("data.train_file=n.csv", "train.class_weights=balanced", "output.dir=runs/n") == 2
    assert "task table has numbers; expected a class per example" in capsys.readouterr().err


def test_a_regression(here: Path) -> None:
    rng = random.Random(0)
    rows = [(f"the film was {'very ' * n}common", n / 2 + rng.random() / 10) for n in list(range(5)) * 8]
    write_csv(here / "x.tsv", ["review", "stars"], rows, delimiter="\t")
    write_csv(here / "y.tsv", ["review", "stars"], rows[:11], delimiter="\t")
    assert train("data.train_file=x.tsv", "data.eval_file=y.tsv", "data.text=review", "data.label=stars") == 0
    _, logits = classes("runs/x/bundle", [(text,) for text, _ in rows[:11]])
    assert logits.shape == (11, 1)
    x, y = logits[:, 0] - logits.mean(), np.array([stars for _, stars in rows[:11]])
    y = y - y.mean()
    report = read("runs/x/metrics.json")
    assert report["score"] == pytest.approx((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()), abs=1e-4)
    assert report["config"]["data"]["kind"] == "regression"
    columns = ("data.text=review", "data.label=stars")
    told = scored(Path("runs/x/bundle"), "--task", "table", "data.eval_file=y.tsv", *columns)
    assert told["score"] == pytest.approx(report["score"], abs=1e-4)
    assert bundle.main(["runs/x", "--output", "small"]) == 0


def test_pairs_of_texts_of_which_a_part_is_held_back(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = [(a, b, a == b) for _ in range(8) for a in ("a dog", "the film", "a report") for b in ("a dog", "the film")]
    columns = {"first": [f"{a} {i}" for i, (a, _, _) in enumerate(same)], "second": [b for _, b, _ in same]}
    datasets.Dataset.from_dict({**columns, "same": [equal for _, _, equal in same]}).to_parquet(here / "x.parquet")
    files = ["data.train_file=x.parquet", "data.text=first", "data.text_pair=second", "data.label=same"]
    assert train(*files, "data.hold_out=0.25", "data.metric=macro_f1") == 0
    assert "25% of the training rows are held back" in capsys.readouterr().out
    known = yaml.safe_load(Path("runs/x/config.yaml").read_text())["data"]
    assert known["labels"] == ["false", "true"]
    report = read("runs/x/metrics.json")
    assert report["examples"] == {"train": 36, "validation": 12}
    assert report["score"] == report["metrics"]["macro_f1"]
    # The rows that were held back are those that the task gives to anybody who asks again.
    held = TASKS["table"].with_settings(known).load()["validation"]
    predicted, _ = classes("runs/x/bundle", list(zip(held["sentence1"], held["sentence2"], strict=True)))
    true = [held.features["label"].int2str(label) for label in held["label"]]
    assert report["metrics"]["accuracy"] == pytest.approx(sum(map(str.__eq__, predicted, true)) / 12)
    assert scored(Path("runs/x"))["metrics"] == pytest.approx(report["metrics"])
    assert bundle.main(["runs/x", "--output", "small"]) == 0
    assert train(*files, "data.hold_out=0.25", "data.metric=macro_f1", "--resume") == 0  # finished: settings agree
    assert train(*files, "data.hold_out=0.5", "data.metric=macro_f1", "--resume") == 2


def tagged(count: int, seed: int) -> list[dict[str, list[str]]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        row: dict[str, list[str]] = {"tokens": [], "tags": []}
        for kind in rng.sample(sorted(NAMES), 2):
            name = rng.choice(NAMES[kind]).split()
            row["tokens"] += ["the", "film", *name]
            row["tags"] += ["O", "O", f"B-{kind}", *[f"I-{kind}"] * (len(name) - 1)]
        rows.append(row)
    return rows


def spans(tags: list[str]) -> set[tuple[int, int, str]]:
    """Entities by a pattern over the tags written as text: (first letter, last letter, type)."""
    text = "".join("o" if tag == "O" else {"PER": "pP", "LOC": "lL"}[tag[2:]][tag[0] == "B"] for tag in tags)
    return {(m.start(), m.end(), m[0].lower()[0]) for m in re.finditer("Pp*|Ll*|p+|l+", text)}


@pytest.mark.filterwarnings("ignore:.*occur with more than one label")  # tags are drawn
@pytest.mark.parametrize("method", ["snnk", "lora"])
def test_words_with_tags(here: Path, method: str) -> None:
    eval_rows = tagged(10, 1)
    write_lines(here / "x.jsonl", tagged(40, 0))
    write_lines(here / "y.jsonl", eval_rows)
    files = ["data.train_file=x.jsonl", "data.eval_file=y.jsonl", "data.text=tokens", "data.label=tags"]
    # Batches of different lengths are joined; a model that is always right, as the fitted head is, would not show how.
    given = ("train.learning_rate=0.01", "train.eval_batch_size=4", "train.eval_every=end")
    assert train(*files, *given, method=method) == 0
    report = read("runs/x/metrics.json")
    assert report["config"]["data"]["labels"] == ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
    assert set(report["metrics"]) == {"accuracy", "macro_f1", "entity_f1", "score"}
    if method == "lora":
        assert scored(Path("runs/x"))["metrics"] == pytest.approx(report["metrics"])
        return
    # The oracle tokenises word by word and reads the logits where each word begins.
    model = AutoModelForTokenClassification.from_pretrained("runs/x/bundle").eval()
    tokenizer = AutoTokenizer.from_pretrained("runs/x/bundle")
    predicted: list[list[str]] = []
    for row in eval_rows:
        pieces = [tokenizer.encode(word, add_special_tokens=False) for word in row["tokens"]]
        starts = np.cumsum([1, *(len(piece) for piece in pieces[:-1])])
        ids = [tokenizer.cls_token_id, *(token for piece in pieces for token in piece), tokenizer.sep_token_id]
        with torch.no_grad():
            best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1)
        predicted.append([model.config.id2label[int(best[start])] for start in starts])
    true = [row["tags"] for row in eval_rows]
    flat = [(mine, theirs) for pair in zip(predicted, true, strict=True) for mine, theirs in zip(*pair, strict=True)]
    assert report["metrics"]["accuracy"] == pytest.approx(sum(mine == theirs for mine, theirs in flat) / len(flat))
    assert report["metrics"]["macro_f1"] == pytest.approx(mean_f1(*map(list, zip(*flat, strict=True))))
    right = sum(len(spans(mine) & spans(theirs)) for mine, theirs in zip(predicted, true, strict=True))
    total = sum(len(spans(tags)) for tags in [*predicted, *true])
    assert report["score"] == report["metrics"]["entity_f1"] == pytest.approx(2 * right / total)
    assert 0 < 2 * right < total
    told = scored(Path("runs/x/bundle"), "--task", "table", "data.eval_file=y.jsonl", *files[2:])
    assert told["metrics"] == pytest.approx(report["metrics"])
    assert bundle.main(["runs/x", "--output", "small"]) == 0
    found = pipeline("token-classification", model="small")("the film New York")
    assert {piece["entity"] for piece in found} <= {"B-LOC", "B-PER", "I-LOC", "I-PER", "O"}
    card = Path("runs/x/bundle/README.md").read_text()
    assert "AutoModelForTokenClassification" in card
    assert "fine-tuned on x.jsonl" in card
    # An adapter folder says nothing about labels; the command line does.
    labels = ["data.kind=token_classification", "data.labels=[B-LOC,B-PER,I-LOC,I-PER,O]"]
    assert bundle.main(["runs/x/adapter", "--task", "table", "--output", "other"]) == 2
    assert bundle.main(["runs/x/adapter", "--task", "table", "--output", "other", *labels]) == 0
    assert AutoModelForTokenClassification.from_pretrained("other").config.id2label == model.config.id2label


# --- refused ----------------------------------------------------------------------------------------------------------


def test_every_fault_of_a_csv_has_its_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "x.csv").write_text(
        'text,label\n"two\nlines",pos\n ,neg\n"more\nlines",\nshort\n\none,two,three\nok,neg\n"ok,so",pos\n"open,neg\n'
    )
    expected = [
        "x.csv, line 4: text is empty; expected a text",
        "x.csv, line 5: label is missing; expected a label",
        "x.csv, line 7: 1 cells; expected 2 (text, label)",
        "x.csv, line 9: 3 cells; expected 2 (text, label)",
        "x.csv, line 12: unexpected end of data; expected quotes around a cell as a whole, those inside it doubled, "
        "as csv.writer and DataFrame.to_csv write them",
    ]
    assert faults_of(table(train_file="x.csv").load) == expected
    (here / "y.csv").write_text("text,label\nfine,pso\n")
    both = table(train_file="x.csv", eval_file="y.csv")
    last = "y.csv, line 2: label is 'pso', which is not among the labels: neg, pos"
    assert faults_of(both.load) == [*expected, last]
    assert train("data.train_file=x.csv", "data.eval_file=y.csv") == 2
    said = capsys.readouterr().err
    assert all(fault in said for fault in [*expected, last])
    assert not Path("runs").exists()


def test_settings_that_contradict_each_other(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(here / "x.csv", ["text", "label"], [("a", "x"), ("b", "y")])
    faults = faults_of(
        lambda: table(train_file="x.csv", dataset="y", kind="token_classification", text_pair="text", labels=["x"])
    )
    assert [fault.split(" ")[0] for fault in faults] == ["train_file", "text,", "text_pair", "labels"]
    assert "labels are given, but a regression" in faults_of(lambda: table(kind="regression", labels=["a", "b"]))[0]
    assert "did you mean 'macro_f1'" in faults_of(lambda: table(train_file="x.csv", metric="macrof1"))[0]
    assert "data.train_file is missing" in faults_of(lambda: table())[0]
    assert "no data before with_settings" in faults_of(TASKS["table"].load)[0]
    write_csv(here / "z.csv", ["text", "label"], [("a", "x"), ("b", "x")])
    assert "column 'label' of z.csv holds x; expected at least two" in faults_of(lambda: table(train_file="z.csv"))[0]
    assert train("data.train_file=x.csv", "data.kind=clasification") == 2
    assert "data.kind: unknown kind 'clasification'; did you mean 'classification'?" in capsys.readouterr().err
    assert train("data.train_file=x.csv", "data.hold_out=0") == 2
    assert "data.hold_out is 0.0; expected a number > 0 and <= 0.9, or null" in capsys.readouterr().err
    assert train("data.train_file=x.csv", "data.dir=glue") == 2
    assert "data.dir is glue, but a table is given as data.train_file" in capsys.readouterr().err
    assert train("data.train_file=x.csv", "task=rte") == 2
    assert "data.train_file is 'x.csv', but task rte has its own files" in capsys.readouterr().err


# --- tokens and metrics -----------------------------------------------------------------------------------------------


def test_labels_stand_at_the_first_piece_of_a_word(world: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "bert")
    rows = datasets.Dataset.from_dict({"words": [["film", "ada", "film"], ["film"]], "label": [[1, 2, 0], [1]]})
    examples = Examples(rows, tokenizer, 16)
    batch = examples.batch([0, 1])
    assert tokenizer.convert_ids_to_tokens(batch["input_ids"][0]) == [
        *("[CLS]", "film", "a", "##d", "##a", "film", "[SEP]")
    ]
    assert batch["labels"].tolist() == [[-100, 1, 2, -100, -100, 0, -100], [-100, 1, *[-100] * 5]]
    assert Examples(rows, tokenizer, 4).batch([0])["labels"].tolist() == [[-100, 1, 2, -100]]  # cut
    other = datasets.Dataset.from_dict({"words": rows["words"][:], "label": [[1, 2, 1], [1]]})
    assert examples.fingerprint() == Examples(rows, tokenizer, 16).fingerprint()
    assert examples.fingerprint() != Examples(other, tokenizer, 16).fingerprint()


def test_words_of_a_byte_level_tokenizer_keep_their_spaces(tmp_path: Path) -> None:
    """There " b" and "b" are different tokens: a word of a list must be the one that a text has."""
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4, "a": 5, "b": 6, "\u0120a": 7, "\u0120b": 8}
    RobertaTokenizerFast(vocab=vocabulary | {"\u0120": 9}, merges=[("\u0120", "a"), ("\u0120", "b")]).save_pretrained(
        tmp_path
    )
    task = table(kind="token_classification", labels=["O", "X"])
    rows = datasets.Dataset.from_dict({"words": [["a", "b"]], "label": [[0, 1]]})
    examples = Examples(rows, load_tokenizer(str(tmp_path), task), 8)
    assert examples.columns["input_ids"][0].tolist() == [0, 7, 8, 2]
    assert examples.columns["labels"][0].tolist() == [-100, 0, 1, -100]
    assert load_tokenizer(str(tmp_path))("a b")["input_ids"] == [0, 5, 8, 2]  # for texts nothing changes


def test_entities() -> None:
    true = ["B-PER", "I-PER", "O", "B-LOC"]
    assert entity_f1([true], [true]) == 1
    assert entity_f1([["B-PER", "O", "O", "B-LOC"]], [true]) == 0.5  # a part of an entity is none
    assert entity_f1([["B-LOC", "I-LOC", "O", "B-LOC"]], [true]) == 0.5  # nor is one of another type
    assert entity_f1([["I-PER", "I-PER", "O", "I-LOC"]], [true]) == 1  # I begins one where none is open
    assert entity_f1([["B-PER", "B-PER", "O", "O"]], [["B-PER", "I-PER", "O", "O"]]) == 0
    assert entity_f1([["O"], ["B-PER"]], [["B-PER"], ["O"]]) == 0  # sentences are apart
    assert entity_f1([["O"] * 4], [true]) == 0
    rng = random.Random(0)
    tags = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    for _ in range(50):
        mine, theirs = ([[rng.choice(tags) for _ in range(7)] for _ in range(4)] for _ in range(2))
        right = sum(len(spans(a) & spans(b)) for a, b in zip(mine, theirs, strict=True))
        assert entity_f1(mine, theirs) == pytest.approx(2 * right / sum(len(spans(row)) for row in [*mine, *theirs]))


def test_macro_f1_is_the_mean_over_the_classes() -> None:
    rng = random.Random(0)
    predicted, true = ([rng.choice("abcd") for _ in range(40)] for _ in range(2))
    ids = [["abcd".index(name) for name in names] for names in (predicted, true)]
    assert macro_f1(*ids) == pytest.approx(mean_f1(predicted, true))
