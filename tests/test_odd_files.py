"""Tables, archives, pickles and settings as they come: read rightly, or an error with the cause."""

# Imports follow the check that the optional packages are there.
# ruff: noqa: E402

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("datasets", reason="pip install snnk-peft[recipes]")
pandas = pytest.importorskip("pandas")
yaml = pytest.importorskip("yaml")

from snnk_peft.errors import ConfigError
from snnk_peft.tasks import TASKS, _folders
from snnk_peft.tasks._cifar import CIFAR10
from snnk_peft.tasks._folders import read_files
from snnk_peft.tasks._pickled_batches import read_pickled_batch
from snnk_peft.tasks.base_columns import read_numbers
from snnk_peft.tasks.mnist import read_mnist
from snnk_peft.yaml_file import load_yaml

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


def table(path: Path, content: str, **settings: object):
    """The task of a table with this content, and its rows."""
    path.write_text(content, encoding="utf-8")
    task = TASKS["table"].with_settings({"train_file": str(path), **settings})
    return task, task.load()


# --- tables ---------------------------------------------------------------------------------------------------------


def test_whole_numbers_beside_a_gap_are_classes(tmp_path: Path) -> None:
    """As pandas writes them; the same labels in another file, without a gap, are the same classes."""
    frame = pandas.DataFrame({"text": list("abcdef"), "label": [1, 0, None, 1, 0, 2]}).dropna()
    other = pandas.DataFrame({"text": list("xyz"), "label": [2, 0, 1]})
    other.to_csv(tmp_path / "other.csv", index=False)
    task, rows = table(tmp_path / "t.csv", frame.to_csv(index=False), eval_file=str(tmp_path / "other.csv"))
    assert (task.settings.kind, task.label_names) == ("classification", ("0", "1", "2"))
    assert rows["train"]["label"][:] == [1, 0, 1, 0, 2]
    assert rows["validation"]["label"][:] == [2, 0, 1]


@pytest.mark.parametrize(
    ("labels", "kind", "names"),
    [
        (["1.0", "2.5", "3.0", "1.0"], "regression", None),
        ([f"{value}.0" for value in range(60)], "regression", None),
        (["1_0", "2_0", "1_0", "2_0"], "classification", ("1_0", "2_0")),
        (["1e3", "2", "1e3", "2"], "regression", None),
        (["v1.0", "v2.0", "v1.0", "v2.0"], "classification", ("v1.0", "v2.0")),
        (["NA", "null", "NA", "null"], "classification", ("NA", "null")),
    ],
)
def test_what_numbers_stand_for(tmp_path: Path, labels: list[str], kind: str, names: tuple[str, ...] | None) -> None:
    task, rows = table(tmp_path / "t.csv", "text,label\n" + "".join(f"text {v},{v}\n" for v in labels * 2))
    assert (task.settings.kind, task.label_names) == (kind, names)
    if kind == "regression":
        found = sorted([*rows["train"]["label"], *rows["validation"]["label"]])
        assert found == sorted(map(float, labels * 2))


def test_a_long_cell_and_a_quoted_one(tmp_path: Path) -> None:
    """Read as pandas reads them; the module csv stops at 131,072 characters."""
    texts = ["long " * 40_000, 'she said "no", twice', "two\nlines", "plain"] * 2
    frame = pandas.DataFrame({"text": texts, "label": ["a", "b"] * 4})
    _, rows = table(tmp_path / "t.csv", frame.to_csv(index=False))
    again = pandas.read_csv(tmp_path / "t.csv")["text"].tolist()
    assert sorted([*rows["train"]["sentence1"], *rows["validation"]["sentence1"]]) == sorted(again) == sorted(texts)


GOOD = '{"text": "good", "label": "a"}\n{"text": "bad", "label": "b"}\n'
MANY = "1" * 5000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t.csv",
            "text;label\ngood, really;1\nbad;0\n",
            r"line 1: cells are separated by semicolons \(;\); expected co",
        ),
        (
            "t.csv",
            "text\tlabel\ngood\t1\nbad\t0\n",
            r"separated by tabs; expected commas in \*\.csv: rename it to \*\.tsv",
        ),
        (
            "t.tsv",
            "text,label\ngood,1\nbad,0\n",
            r"separated by commas; expected tabs in \*\.tsv: rename it to \*\.csv",
        ),
        ("t.json", json.dumps([{"text": "a", "label": 1}], indent=1), "holds one JSON array; expected one object per"),
        ("t.json", json.dumps({"text": ["a"], "label": [1]}, indent=1), "holds one JSON object over several lines"),
        ("t.csv", "text,label\n\"['a', 'b']\",\"['O', 'O']\"\n", "column 'label' of .* holds written lists, such as"),
        ("t.csv", 'text,label\na,"[0, 1]"\nb,"[1, 0]"\n', "holds written lists"),
        ("t.csv", 'text,label\na,"3,5"\nb,4\nc,"0,1"\n', "numbers with a decimal comma; expected a point"),
        ("t.csv", 'text,label\n"a,1\nb,2\nc,1\n', "line 2: a quote opens a cell that line 4 still belongs to"),
        ("t.csv", 'text,label\n"Good" film,1\nb,2\n', "line 2: .*expected quotes around a cell as a whole"),
        (
            "t.jsonl",
            GOOD + '{"text": "cut \\ud83d", "label": "a"}\n',
            r"line 3: text holds half a surrogate pair \(\\ud83d at",
        ),
        ("t.jsonl", GOOD + '{"text": "x", "label": "\\udc00"}\n', "label holds half a surrogate pair"),
        ("t.jsonl", GOOD + f'{{"text": "x", "label": {MANY}}}\n', "line 3: cannot be read as JSON .*digits"),
        ("t.jsonl", GOOD + '{"text": "x", "label": ' + "[" * 100_000 + "\n", "line 3: .*too deeply nested"),
        ("t.jsonl", GOOD + '{"text": "x", "label": "a", "label": "b"}\n', "line 3: .*'label' occurs more than once"),
    ],
)
def test_what_is_wrong_with_a_table(tmp_path: Path, name: str, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table(tmp_path / name, content)


def test_a_number_of_many_digits_in_a_csv(tmp_path: Path) -> None:
    rows = "".join(f"text {number},{number}.5\n" for number in range(6))
    with pytest.raises(ConfigError, match=r"line 8: label is .*expected a number"):
        table(tmp_path / "t.csv", f"text,label\n{rows}x,{MANY}\n", kind="regression")
    with pytest.raises(ConfigError, match=r"label is '3,5' \(str\); expected a decimal point: 3\.5"):
        table(tmp_path / "t.csv", f'text,label\n{rows}x,"3,5"\n', kind="regression")


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_a_pipe_is_no_table(tmp_path: Path, name: str) -> None:
    """Which would be waited for."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name} is no regular file"):
        TASKS["table"].with_settings({"train_file": str(tmp_path / name)})


# --- pickles and archives -------------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    """Instructions of a tuple in a tuple in a tuple."""
    return b")" + b"\x85" * depth


HOSTILE = {
    "a nested tuple as a key": b"\x80\x02}" + nested(500_000) + b"K\x01s.",
    "a nested tuple as the data": b"\x80\x02}(U\x04data" + nested(500_000) + b"U\x06labels]u.",
    "a nested tuple as a shape": b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n)R(K\x01)q\x00"
    + b"h\x00h\x00\x86q\x00" * 60
    + b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR\x89U\x00tbu.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_pickle_ends_with_a_message(kind: str, tmp_path: Path) -> None:
    """In a process of its own: the first used to end the interpreter, the last has a text without end."""
    file = tmp_path / "batch"
    file.write_bytes(HOSTILE[kind])
    program = (
        "import sys, resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
        "import importlib.util as u; s = u.spec_from_file_location('p', sys.argv[1]); m = u.module_from_spec(s)\n"
        "sys.modules['p'] = m; s.loader.exec_module(m)\n"
        "try: m.read_pickled_batch(open(sys.argv[2], 'rb').read())\n"
        "except ValueError as error: print('refused', str(error)[:200])\n"
        "else: print('read')\n"
    )
    source = ROOT / "snnk_peft/tasks/_pickled_batches.py"
    done = subprocess.run(
        [sys.executable, "-c", program, source, file], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("read" if "as the data" in kind else "refused"), done.stdout


def test_a_tuple_that_is_no_array_is_no_data() -> None:
    found = read_pickled_batch(HOSTILE["a nested tuple as the data"])
    assert sorted(found) == ["data", "labels"]
    with pytest.raises(ValueError, match="data is tuple; expected an array"):
        CIFAR10._pickled(HOSTILE["a nested tuple as the data"])


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a file in an archive."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def read(path: Path) -> int:
    """Bytes of all batches in it."""
    return sum(len(content) for _, content in read_files(path, r"data_batch_\d", "data_batch_N"))


def test_an_archive_that_claims_much(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(member("data_batch_1", 64 * GIB) + bytes(10240))
    with pytest.raises(ConfigError, match=r"a\.tar claims 64\.0 GiB or more to unpack in memory; expected 2"):
        read(path)
    path.write_bytes(member("data_batch_1", GIB) + bytes(10240))
    with pytest.raises(ConfigError, match=r"not a readable tar archive \(.*; fetch it again"):
        read(path)
    path.write_bytes(member("other", 64 * GIB) + bytes(10240))
    with pytest.raises(ConfigError, match=r"a\.tar"):
        read(path)
    path.write_bytes(member("x", 64 * GIB, tarfile.XHDTYPE) + bytes(10240))
    with pytest.raises(ConfigError, match=r"not a readable tar archive"):
        read(path)


def test_what_a_few_packed_bytes_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the limit, which is lowered here to spare the time of two gibibytes."""
    monkeypatch.setattr(_folders, "LARGEST", 2**24)
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb") as stream:
        stream.write(bytes((0, 0, 8, 3)) + bytes(2**25))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(buffer.getvalue())
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes((0, 0, 8, 1, 0, 0, 0, 1, 3))))
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte\.gz: unpacks to more than"):
        read_mnist(tmp_path, ["train"])
    numbers = tmp_path / "numbers.csv.gz"
    numbers.write_bytes(gzip.compress(b"0" * 2**22))
    with pytest.raises(ConfigError, match="a line is longer than 1,048,576 characters"):
        read_numbers(numbers, 3)
    numbers.write_bytes(gzip.compress(b"1,2,3\n4,5,6\n"))
    assert read_numbers(numbers, 3).tolist() == [[1, 2, 3], [4, 5, 6]]


# --- settings -------------------------------------------------------------------------------------------------------

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "more than 100,000 values, with repetitions"),
        ("a: &a [*a]", "a value that contains itself, line 1"),
        ("a: " + "[" * 20_000, "nested too deeply"),
        (f"a: {MANY}", "digits"),
        ("a: 2026-99-99", "month must be in"),
    ],
)
def test_settings_that_stand_for_too_much(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(yaml.YAMLError, match=message):
        load_yaml(text)
    file = tmp_path / "settings.yaml"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "recipes/finetune.py", file],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "not valid YAML" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "text", ["", "a: 1\nb: [1, 2.5, null, true, 2026-11-27]\n", "x: &x {a: 1}\ny: {<<: *x, b: 2}\nz: *x\n", "- 1e-3\n"]
)
def test_other_settings_are_what_yaml_says(text: str) -> None:
    assert load_yaml(text) == yaml.safe_load(text)


def test_a_pipe_is_no_file_of_settings(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "settings.yaml")
    done = subprocess.run(
        [sys.executable, "recipes/finetune.py", tmp_path / "settings.yaml"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert "settings.yaml is no regular file" in done.stdout + done.stderr
