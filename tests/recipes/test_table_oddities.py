"""Tables as spreadsheets, pandas and others write them: read exactly right, or refused with place and remedy."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from data import TASKS

from snnk_peft.errors import ConfigError

pytestmark = pytest.mark.slow


def table(file: Path, **settings: Any) -> Any:
    return TASKS["table"].with_settings({"train_file": str(file), "eval_file": str(file), **settings})


def loaded(file: Path, **settings: Any) -> tuple[list[Any], list[Any]]:
    task = table(file, **settings)
    rows = task.load()["train"]
    labels = rows["label"][:]
    return list(rows["sentence1"]), labels if task.label_names is None else [task.label_names[at] for at in labels]


def message(file: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(file, **settings)
    return str(caught.value)


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
        assert table(file).label_names == ("0", "1"), kind
        assert loaded(file)[1] == ["1", "1", "0"]
    assert table(file, labels=[1, 0]).label_names == ("1", "0")


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
    task = table(tmp_path / "x.jsonl", text="words", label="tags")
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
        ("x.csv", b"text,label\na,1,\n", "line 2: 3 cells; expected 2"),
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
    task = table(tmp_path / "x.csv")
    assert task.label_names == ("EU", "NA")
    assert any("NA is taken as a name" in note for note in task.notes)


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet"])
def test_a_pipe_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    code = (
        "from snnk_peft.tasks._rows import read_table; from pathlib import Path; import sys\n"
        "try: read_table(Path(sys.argv[1]), ['text', 'label'])\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "is a pipe or a device; expected a regular file" in done.stdout
