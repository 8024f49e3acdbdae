"""Tables as people, spreadsheets and pandas write them: read exactly right, or refused with place and remedy."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from data import TASKS
from recipe_world import faults_of

from snnk_peft.errors import ConfigError
from tests.fresh_process import run_python


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, so that faults name files as they were given."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(**settings: Any) -> Any:
    return TASKS["table"].with_settings(settings)


def both(file: Path | str, **settings: Any) -> Any:
    """Trained on and scored on the same rows."""
    return table(train_file=str(file), eval_file=str(file), **settings)


def loaded(file: Path, **settings: Any) -> tuple[list[Any], list[Any]]:
    task = both(file, **settings)
    rows = task.load()["train"]
    labels = rows["label"][:]
    return list(rows["sentence1"]), labels if task.label_names is None else [task.label_names[at] for at in labels]


def message(file: Path, **settings: Any) -> str:
    return "\n".join(faults_of(lambda: loaded(file, **settings)))


def write_csv(path: Path, header: list[str], rows: list[Any], **dialect: Any) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, **dialect).writerows([header, *rows])


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- what people write ------------------------------------------------------------------------------------------------


def test_every_fault_of_json_lines_has_its_line(here: Path) -> None:
    lines = [
        '{"text": "a", "label": "x"}',
        '{"text": 5, "label": "x"}',
        "{",
        "[1]",
        "",
        '{"text": "b", "label": ["x"]}',
    ]
    (here / "x.jsonl").write_text("\n".join([*lines, '{"label": "y"}', '{"text": "c", "label": null}']))
    assert faults_of(table(train_file="x.jsonl", kind="classification").load) == [
        "x.jsonl, line 2: text is 5 (int); expected a text",
        "x.jsonl, line 3: not valid JSON (Expecting property name enclosed in double quotes at position 2); expected "
        "one object per line",
        "x.jsonl, line 4: list; expected one object {...} per line",
        "x.jsonl, line 6: label is ['x'] (list); expected one label",
        "x.jsonl, line 7: text is empty; expected a text",
        "x.jsonl, line 8: label is missing; expected a label",
    ]


def test_so_many_faulty_rows_may_be_left_out(here: Path) -> None:
    lines = ["text,label", "good,a", ",b", "poor,b", "bad,", "fine,a", "ill,b"]
    (here / "x.csv").write_text("\n".join(lines) + "\n")
    given = {"train_file": "x.csv", "eval_file": "x.csv"}
    assert len(faults_of(table(**given).load)) == 2 * 2  # both splits
    assert "x.csv: 2 rows are faulty; expected at most 1 (max_unreadable)" in faults_of(
        table(**given, max_unreadable=1).load
    )
    with pytest.warns(UserWarning, match=r"(?s)x.csv: 2 faulty rows are left out, 4 are read.*line 3: text is empty"):
        rows = table(**given, max_unreadable=2).load()["train"]
    assert (rows["sentence1"][:], rows["label"][:]) == (["good", "poor", "fine", "ill"], [0, 1, 0, 1])
    assert rows["idx"][:] == [0, 2, 4, 5]
    (here / "y.csv").write_text("text,label\n,a\n,b\n")
    assert (
        "y.csv: 2 rows are faulty" in faults_of(table(train_file="x.csv", eval_file="y.csv", max_unreadable=2).load)[0]
    )


def test_every_fault_of_tagged_words_has_its_line(here: Path) -> None:
    rows = [
        {"text": ["a", "b"], "label": ["X", "Y"]},
        {"text": ["a", "b"], "label": ["X"]},
        {"text": [], "label": []},
        {"text": ["a", " "], "label": ["X", None]},
        {"text": 3, "label": ["X"]},
        {"text": ["a"], "label": 4},
    ]
    write_lines(here / "x.jsonl", rows)
    assert faults_of(table(train_file="x.jsonl").load) == [
        "x.jsonl, line 2: text has 2 words, label 1 tags; expected as many",
        "x.jsonl, line 3: text is empty; expected a list of words",
        "x.jsonl, line 4: label is missing; expected a label",
        "x.jsonl, line 4: word 2 of text is empty; expected a text",
        "x.jsonl, line 5: text is 3 (int); expected a list of words",
        "x.jsonl, line 6: label is 4 (int); expected a list of tags",
    ]
    write_lines(here / "y.jsonl", [{"text": ["a"], "label": ["Z"]}])
    task = table(train_file="x.jsonl", eval_file="y.jsonl")
    assert task.label_names == ("X", "Y")
    fault = "y.jsonl, line 1: label is 'Z', which is not among the labels: X, Y"
    assert faults_of(lambda: task.load(splits=["validation"])) == [fault]


def test_numbers_that_are_none_and_many_faults(here: Path) -> None:
    write_csv(here / "x.csv", ["text", "label"], [("a", "1.5"), ("b", "1,5"), ("c", "nan"), *[("d", "x")] * 12])
    faults = faults_of(table(train_file="x.csv", kind="regression").load)
    assert faults[:2] == [
        "x.csv, line 3: label is '1,5' (str); expected a number, with a point and not a comma",
        "x.csv, line 4: label is 'nan' (str); expected a number",
    ]
    assert len(faults) == 11
    assert faults[-1] == "x.csv: ... and 4 more"


def test_files_that_cannot_be_read(here: Path) -> None:
    write_csv(here / "x.csv", ["txt", "label"], [("a", "x"), ("b", "y")])
    (here / "empty.csv").write_text("text,label\n")
    (here / "broken.parquet").write_text("text")
    (here / "a.txt").write_text("a")
    (here / "folder").mkdir()
    for file, message in {
        "x.csv": "x.csv: unknown column 'text'; did you mean 'txt'? Available: txt, label",
        "empty.csv": "empty.csv holds no row",
        "broken.parquet": "broken.parquet: not a readable Parquet file",
        "folder": "folder is a folder, but not one that save_to_disk has written",
        "x.xlsx": "x.xlsx does not exist",
        "a.txt": "files .txt are not read; expected a file .csv, .tsv, .jsonl, .parquet",
    }.items():
        [fault] = faults_of(lambda file=file: table(train_file=file))
        assert message in fault


def test_folders_of_save_to_disk_and_data_sets(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "maybe", "a yes"])}
    )
    rows = datasets.Dataset.from_dict({"text": list("abcdef"), "label": [0, 1, 2, 0, 1, 2]}, features=features)
    secret = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, -1]}, features=features)
    rows.save_to_disk(here / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([4]), "hidden": secret}).save_to_disk(here / "all")
    one = both("one")
    assert one.label_names == ("no", "maybe", "a yes")  # the names and the order of the data set
    assert one.load()["validation"]["label"][:] == [0, 1, 2, 0, 1, 2]
    assert table(dataset="all", eval_split="test").load()["validation"]["sentence1"][:] == ["e"]
    assert [len(part) for part in table(dataset="all", eval_split="train").load().values()] == [3, 3]
    [fault] = faults_of(table(dataset="all").load)
    assert "all: unknown split 'validation'" in fault
    assert "data.eval_split=train holds back a part" in fault
    [fault] = faults_of(table(dataset="all", eval_split="hidden").load)
    assert fault == "all, split hidden, row 2: label is missing; expected a label"
    tags = datasets.Features({"text": datasets.List(datasets.Value("string")),
                              "label": datasets.List(datasets.ClassLabel(names=["O", "B-X"]))})  # fmt: skip
    datasets.Dataset.from_dict({"text": [["a", "b"]] * 2, "label": [[1, 0]] * 2}, features=tags).save_to_disk(
        here / "t"
    )
    assert both("t").label_names == ("O", "B-X")
    assert both("t").load()["train"]["label"][:] == [[1, 0]] * 2
    assert "give it as data.dataset" in faults_of(lambda: table(train_file="all"))[0]
    # What load_dataset reads: here a folder of files, as a repository of the Hub is one.
    rows.to_parquet(here / "hub/train.parquet")
    rows.select([1]).to_parquet(here / "hub/validation.parquet")
    hub = table(dataset="./hub")
    assert hub.label_names == ("no", "maybe", "a yes")
    assert {split: len(part) for split, part in hub.load().items()} == {"train": 6, "validation": 1}
    [fault] = faults_of(lambda: table(dataset="snnk-peft-tests/absent"))
    assert "data.dataset 'snnk-peft-tests/absent' (None) could not be loaded" in fault


# --- what programs write ----------------------------------------------------------------------------------------------


FRAME = pd.DataFrame({"text": ["good, really", "bad", "fine", "NA"], "label": [1, 0, 1, 0]})


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_what_pandas_writes_is_what_pandas_reads(name: str, tmp_path: Path) -> None:
    file, separator = tmp_path / name, {"x.csv": ",", "x.tsv": "\t"}[name]
    frame = FRAME.assign(text=["a\nb", ' "said" he', "x" * 200_000, "null"])
    frame.to_csv(file, sep=separator, index=False, lineterminator="\r\n", encoding="utf-8-sig")
    before = csv.field_size_limit()
    again = pd.read_csv(file, sep=separator, keep_default_na=False)
    assert loaded(file) == (again["text"].tolist(), again["label"].astype(str).tolist())
    assert csv.field_size_limit() == before
    file.write_bytes(b"\n\r\n" + file.read_bytes().removeprefix(b"\xef\xbb\xbf"))  # blank lines above the header
    assert loaded(file)[0] == again["text"].tolist()


def test_whole_numbers_behind_a_gap_are_classes(tmp_path: Path) -> None:
    frame = FRAME.assign(label=[1, None, 1, 0])
    assert frame["label"].dtype == float
    frame.to_csv(tmp_path / "x.csv", index=False)
    assert "x.csv, line 3: label is missing; expected a label" in message(tmp_path / "x.csv")
    for kind in ("csv", "jsonl", "parquet"):
        file, whole = tmp_path / f"y.{kind}", frame.dropna()
        if kind == "csv":
            whole.to_csv(file, index=False)
        elif kind == "parquet":
            whole.to_parquet(file)
        else:
            whole.to_json(file, orient="records", lines=True, double_precision=1)
        assert both(file).label_names == ("0", "1"), kind
        assert loaded(file)[1] == ["1", "1", "0"]
    assert both(file, labels=[1, 0]).label_names == ("1", "0")


@pytest.mark.parametrize(("separator", "name"), [(";", "';'"), ("\t", "tabs"), ("|", "'|'")])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_other_separators_are_named(separator: str, name: str, quoting: int, tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    FRAME.to_csv(file, sep=separator, index=False, quoting=quoting)
    found = message(file)
    assert f"x.csv, line 1: the columns are separated by {name}; expected ','" in found
    pd.read_csv(file, sep=separator, keep_default_na=False).to_csv(file, index=False)  # as the message says
    assert loaded(file)[0] == FRAME["text"].tolist()


@pytest.mark.parametrize("indent", [None, 1])
def test_one_json_array_is_named(indent: int | None, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(FRAME.to_dict("records"), indent=indent))
    assert "x.json, line 1: the file is one JSON array" in message(file)
    file.write_text(json.dumps({"data": FRAME.to_dict("records")}, indent=1))
    assert "one JSON object over several lines" in message(file)
    FRAME.to_json(file, orient="records", lines=True)  # as the message says
    assert loaded(file) == (FRAME["text"].tolist(), FRAME["label"].astype(str).tolist())


def test_lists_written_as_text_are_named(tmp_path: Path) -> None:
    frame = pd.DataFrame({"words": [["EU", "rejects"], ["call", "me"]], "tags": [["B-ORG", "O"], ["O", "O"]]})
    for number, kind in enumerate((None, "token_classification")):
        file = tmp_path / f"{number}.csv"
        frame.to_csv(file, index=False)
        found = message(file, text="words", label="tags", kind=kind)
        assert "the cells of 'words' hold lists written as text" in found
        assert "the cells of 'tags' hold lists written as text" in found
    frame.to_json(tmp_path / "x.jsonl", orient="records", lines=True)  # as the message says
    task = both(tmp_path / "x.jsonl", text="words", label="tags")
    assert (task.settings.kind, task.label_names) == ("token_classification", ("B-ORG", "O"))


def test_decimal_commas_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x.tsv"
    frame = pd.DataFrame({"text": ["a", "b", "c"], "label": [3.5, 1.25, 2.0]})
    frame.to_csv(file, sep="\t", decimal=",", index=False)
    assert "holds numbers with a decimal comma" in message(file)
    assert "x.tsv, line 2: label is '3,5' (str); expected a number, with a point" in message(file, kind="regression")
    frame.to_csv(file, sep="\t", index=False)
    assert loaded(file)[1] == [3.5, 1.25, 2.0]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.jsonl", b'{"text": "a", "label": %s}' % (b"9" * 5000), "line 1: Exceeds the limit"),
        ("x.jsonl", b'{"text": "a", "label": %s}' % (b"[" * 200_000), "line 1: brackets inside brackets"),
        ("x.jsonl", b'{"text": "\\ud83d", "label": 1}', "line 1: text holds half of a surrogate pair"),
        ("x.jsonl", b'{"text": ["a", "\\ude00"], "label": ["O", "O"]}', "line 1: text holds half of a surrogate pair"),
        ("x.jsonl", b'{"text": "a", "text": "b", "label": 1}', "line 1: key 'text' occurs more than once"),
        ("x.csv", b"text,label\na,%s\n" % (b"9" * 5000), "expected"),
        ("x.csv", b"text,label\na\0b,1\n", "line 2: a NUL byte"),
        ("x.csv", b"text,label\ncaf\xe9,1\n", "line 2: byte 0xe9 at position 4 is not UTF-8"),
        ("x.csv", b"text,label,text\na,1,b\n", "line 1: column 'text' occurs more than once"),
        ("x.csv", b'text,label\n"Great" film,1\nbad,0\n', "line 2: ',' expected after '\"'"),
        ("x.csv", b"text,label\na,\nb,\n", "holds no label; expected at least two"),
        ("x.csv", b"text,label\na,1\nb,0\nc,NA\n", "line 4: label is 'NA' among numbers"),
        ("x.csv", b"t\0e\0x\0t\0", "line 1: a NUL byte"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_line(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    found = message(tmp_path / name)
    assert name in found
    assert told in found


def test_a_name_that_may_mean_nothing_is_noted(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label\na,EU\nb,NA\n")
    task = both(tmp_path / "x.csv")
    assert task.label_names == ("EU", "NA")
    assert any("NA is taken as a name" in note for note in task.notes)


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet"])
def test_a_pipe_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    code = (
        "from snnk_peft.tasks._rows import read_table; from pathlib import Path; import sys\n"
        "try: read_table(Path(sys.argv[1]), ['text', 'label'])\nexcept ValueError as error: print(error)"
    )
    done = run_python(["-c", code, str(tmp_path / name)], timeout=60)
    assert "is a pipe or a device; expected a regular file" in done.stdout


# --- what is inferred -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "labels", "kind", "names"),
    [
        ("x.csv", ["b", "a", "b", "NA"], "classification", ("NA", "a", "b")),
        ("x.csv", ["10", "9", "2", "9"], "classification", ("2", "9", "10")),
        ("x.csv", ["1", "2.5", "3"], "regression", None),
        ("x.csv", ["1", "2.5", "x"], "classification", ("1", "2.5", "x")),
        ("x.jsonl", [1.5, 2, 3], "regression", None),
        ("x.jsonl", [1.0, 0.0, 1.0], "classification", ("0", "1")),
        ("x.jsonl", ["3.10", "3.9", "3.10"], "classification", ("3.10", "3.9")),
        ("x.jsonl", [True, False], "classification", ("false", "true")),
        ("x.jsonl", [1, 0], "classification", ("0", "1")),
    ],
)
def test_kind_and_labels(here: Path, file: str, labels: list[Any], kind: str, names: tuple[str, ...] | None) -> None:
    if file == "x.csv":
        write_csv(here / file, ["text", "label"], [("a text", label) for label in labels])
    else:
        write_lines(here / file, [{"text": "a text", "label": label} for label in labels])
    task = both(file)
    assert (task.settings.kind, task.label_names) == (kind, names)
    assert any(f"kind is {kind}" in note for note in task.notes)
    found = task.load()["validation"]["label"][:]
    assert found == ([float(x) for x in labels] if names is None else [names.index(json_name(x)) for x in labels])


def json_name(label: Any) -> str:
    if isinstance(label, float):
        return str(int(label))
    return label if isinstance(label, str) else json.dumps(label)


TOPICS = [["maths"], ["art", "law"], [], ["art", "maths"], ["law"], ["art"]]


@pytest.mark.parametrize("file", ["x.csv", "x.jsonl"])
def test_any_number_of_labels(here: Path, file: str) -> None:
    texts = [f"paper number {number}" for number in range(len(TOPICS))]
    kind = "multi_label_classification"
    if file == "x.csv":
        write_csv(here / file, ["text", "label"], list(zip(texts, map(", ".join, TOPICS), strict=True)))
        task = both(file, kind=kind)
    else:
        write_lines(here / file, [{"text": t, "label": topics} for t, topics in zip(texts, TOPICS, strict=True)])
        task = both(file)
        assert any(f"kind is {kind}, because label holds lists" in note for note in task.notes)
    assert (task.settings.kind, task.label_names) == (kind, ("art", "law", "maths"))
    assert (task.problem_type, task.settings.metric, task.tokens) == (kind, "micro_f1", False)
    found = task.load()["validation"]["label"][:]
    assert found == [[float(name in topics) for name in ("art", "law", "maths")] for topics in TOPICS]
    # Only these are held back, whatever sets they have.
    assert len(table(train_file=file, kind=kind, hold_out=0.3).load()["validation"]) == 2

    logits = np.random.default_rng(0).normal(size=(6, 3))
    mine, true = logits > 0, np.asarray(found) > 0
    hits, wrong = (mine & true).sum(0), (mine != true).sum(0)
    metrics = task.compute(logits, found)
    assert metrics["micro_f1"] == metrics["score"] == pytest.approx(2 * hits.sum() / (2 * hits.sum() + wrong.sum()))
    assert metrics["macro_f1"] == pytest.approx(np.mean(2 * hits / np.maximum(2 * hits + wrong, 1)))
    assert metrics["accuracy"] == pytest.approx((mine == true).all(1).mean())
    with pytest.raises(ConfigError, match="expected logits and labels"):
        task.compute(logits[:, :2], found)


def test_lists_beside_words_are_tags_where_there_are_as_many(here: Path) -> None:
    write_lines(here / "x.jsonl", [{"text": "a b", "label": ["X", "O"]}, {"text": "c d", "label": ["O", "O"]}])
    assert both("x.jsonl").settings.kind == "token_classification"
    write_lines(
        here / "x.jsonl", [{"text": "a b", "label": ["X", 7.5]}, {"text": "c d e f", "label": ["O"]}, {"text": "g h"}]
    )
    assert both("x.jsonl").settings.kind == "multi_label_classification"
    faults = faults_of(lambda: both("x.jsonl", labels=["X", "O"]).load())
    assert any("line 1: label is '7.5', which is not among the labels" in fault for fault in faults)


def test_settings_go_before_what_is_inferred(here: Path) -> None:
    write_csv(here / "x.csv", ["text", "label"], [("a", "1.0"), ("b", "2.0"), ("c", "1.0")])
    assert both("x.csv", kind="classification").label_names == ("1", "2")
    given = both("x.csv", labels=["2.0", "1.0", "3.0"], metric="macro_f1")
    assert given.load()["train"]["label"][:] == [1, 0, 1]
    assert given.num_labels == 3
    write_csv(here / "x.csv", ["text", "label"], [(str(n), n) for n in range(30)])
    many = both("x.csv")
    assert many.num_labels == 30
    assert any(
        "30 different whole numbers: if they are amounts, set data.kind=regression" in note for note in many.notes
    )
    assert both("x.csv", kind="regression").load()["train"]["label"][:4] == [0, 1, 2, 3]
    # Words and tags between spaces, as CSV has no lists.
    write_csv(here / "x.csv", ["text", "label"], [("a b", "X O"), ("c", "O")])
    words = both("x.csv", kind="token_classification")
    assert words.load()["train"]["words"][:] == [["a", "b"], ["c"]]
    assert words.label_names == ("O", "X")
    assert words.settings.metric == "macro_f1"  # the tags are not IOB2: there are no entities


def test_a_file_is_read_once(here: Path) -> None:
    """The rows from which kind and labels were inferred are those that are loaded, and are not kept longer."""
    write_csv(here / "x.csv", ["text", "label"], [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")])
    apart, held_out = table(train_file="x.csv", eval_file="y.csv"), table(train_file="x.csv")
    (here / "x.csv").rename(here / "y.csv")
    assert {split: len(rows) for split, rows in apart.load().items()} == {"train": 4, "validation": 4}
    assert {split: len(rows) for split, rows in held_out.load().items()} == {"train": 2, "validation": 2}
    assert not apart.rows
    assert "x.csv does not exist" in faults_of(apart.load)[0]


def test_the_part_held_back(here: Path) -> None:
    labels = ["a"] * 30 + ["b"] * 6 + ["c"]
    write_csv(here / "x.csv", ["text", "label"], [(f"text {i}", label) for i, label in enumerate(labels)])
    parts = {seed: table(train_file="x.csv", split_seed=seed).load() for seed in (0, 1)}
    again = table(train_file="x.csv", split_seed=0).load()
    held = {seed: part["validation"]["idx"][:] for seed, part in parts.items()}
    assert held[0] == again["validation"]["idx"][:] != held[1]
    for part in parts.values():
        assert sorted([*part["train"]["idx"], *part["validation"]["idx"]]) == list(range(37))
        assert np.bincount(part["validation"]["label"][:]).tolist() == [3, 1]
    assert len(table(train_file="x.csv").load(max_samples={"train": 5})["train"]) == 5
    write_csv(here / "x.csv", ["text", "label"], [("a", "x"), ("b", "y")])
    assert "none can be held back" in faults_of(table(train_file="x.csv").load)[0]
