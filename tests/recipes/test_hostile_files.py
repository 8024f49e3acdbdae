"""Files that claim more than they hold, expand without end, or are no files: refused in a line, within 2 GB."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from data import TASKS
from PIL import Image
from recipe_world import RECIPES

from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base_image import UnreadableImageError
from snnk_peft.yaml_files import parse_yaml
from tests.fresh_process import run_python

pytestmark = pytest.mark.slow

GIGABYTE = 1 << 30
LOAD = """
import resource, sys
sys.path.append(sys.argv[3])
from snnk_peft.errors import ConfigError
from data import TASKS
import numpy, PIL.Image
before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (before + (2 << 30),) * 2)
try:
    task = TASKS[sys.argv[1]].with_settings({"dir": sys.argv[2]})
    task.load(sys.argv[2], splits=["train"])
except ConfigError as error:
    print(error)
    sys.exit(3)
"""


def refusal(task: str, path: Path) -> str:
    """The message of a process of its own, which may take 2 GB more than the libraries and five minutes."""
    done = run_python(["-c", LOAD, task, str(path), str(RECIPES)], timeout=300)
    assert done.returncode == 3, (done.returncode, done.stderr[-2000:])
    assert str(path) in done.stdout
    return done.stdout


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def nested(depth: int, twice: bool) -> bytes:
    """A pickle of a dict with a key of tuples in tuples: one of one, or of two that are the same."""
    step = b"2\x86" if twice else b"\x85"
    return b"\x80\x02})" + depth * (b"q\x00h\x00\x86" if twice else step) + b"K\x01s."


BATCHES = {
    "deep key": nested(1_000_000, False),
    "doubled key": nested(90, True),
    "deep value": b"\x80\x02}X\x04\x00\x00\x00data)" + 1_000_000 * b"\x85" + b"s.",
    "doubled value": b"\x80\x02}(X\x04\x00\x00\x00data)" + 90 * b"q\x00h\x00\x86" + b"X\x06\x00\x00\x00labels]u.",
    "shape": b"\x80\x02}(X\x04\x00\x00\x00datacnumpy.core.multiarray\n_reconstruct\n)R("
    b"K\x01))\x85J\xff\xff\xff\x7f\x86cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R\x89X\x00\x00\x00\x00tbX\x06\x00\x00\x00labels]u.",
    "long text": b"\x80\x02}X\xff\xff\xff\x7fdata",
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_pictures_ends_in_a_line(kind: str, tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(BATCHES[kind])
    assert "data_batch_1: " in refusal("cifar10", tmp_path)


def zeros(size: int) -> bytes:
    """As many zeros, packed by gzip; members of an archive of gzip may follow each other."""
    part = gzip.compress(bytes(1 << 24), 9)
    return part * (size >> 24)


EIGHT, MANY = 8 * GIGABYTE, 64 * GIGABYTE
IDX = {"images-idx3": 3, "labels-idx1": 1}  # and how many sizes stand in the header
LINE = b"1" + 54 * b",1" + b"\n"
# What claims or expands to more than memory holds: the task, and the content of each file, or the size of a sparse one.
CLAIMS: dict[str, tuple[str, dict[str, Any]]] = {
    "member": ("cifar10", {"x.tar": lambda: header("data_batch_1", MANY) + bytes(1024)}),
    "long name": ("cifar10", {"x.tar": lambda: header("name", MANY, tarfile.GNUTYPE_LONGNAME) + bytes(1024)}),
    "packed member": ("cifar10", {"x.tar.gz": lambda: gzip.compress(header("data_batch_1", EIGHT)) + zeros(EIGHT)}),
    "packed other member": ("cifar10", {"x.tar.gz": lambda: gzip.compress(header("readme", EIGHT)) + zeros(EIGHT)}),
    "sparse file": ("cifar10", {"data_batch_1": EIGHT}),
    "idx": ("mnist", {f"train-{name}-ubyte.gz": lambda: zeros(EIGHT) for name in IDX}),
    "idx header": (
        "mnist",
        {f"train-{name}-ubyte": lambda n=n: bytes((0, 0, 8, n)) + n * b"\xff\xff\xff\xff" for name, n in IDX.items()},
    ),
    "label of a shard": ("image_folder", {"train.tar": lambda: header("a.cls", MANY) + bytes(1024)}),
    "columns in one line": ("covertype", {"covtype.data.gz": lambda: zeros(EIGHT)}),
    "columns in lines": (
        "covertype",
        {"covtype.data.gz": lambda: gzip.compress(LINE) + gzip.compress(LINE * 150_000, 9) * 500},
    ),
}


@pytest.mark.parametrize("kind", CLAIMS)
def test_what_claims_too_much_is_refused(kind: str, tmp_path: Path) -> None:
    task, files = CLAIMS[kind]
    for name, content in files.items():
        (tmp_path / name).write_bytes(b"" if isinstance(content, int) else content())
        if isinstance(content, int):
            os.truncate(tmp_path / name, content)
    archive = next(tmp_path.glob("x.*"), None)
    assert refusal(task, archive or tmp_path)


def test_a_bomb_of_a_picture_a_pipe_and_a_loop_of_links(tmp_path: Path) -> None:
    folder = tmp_path / "train/cat"
    folder.mkdir(parents=True)
    stream = io.BytesIO()
    Image.new("1", (1, 1)).save(stream, "BMP")
    bomb = bytearray(stream.getvalue())
    bomb[18:26] = 2 * (60_000).to_bytes(4, "little")
    (folder / "a.bmp").write_bytes(bomb)
    os.mkfifo(folder / "b.png")
    (folder / "c.png").symlink_to(folder / "c.png")
    (folder / "d.png").symlink_to("/dev/zero")
    for name in ("loop", "again"):
        (folder / name).symlink_to(folder)
    found = TASKS["cifar10"].load(tmp_path, splits=["train"])["train"]
    assert [found.name(index).rpartition("/")[2] for index in range(len(found))] == ["a.bmp", "b.png", "c.png", "d.png"]
    for index, told in enumerate(("decompression bomb", "a pipe; expected", "symbolic links", "a device; expected")):
        with pytest.raises(UnreadableImageError, match=told):
            found.picture(index)
    assert found.fingerprint()


LETTERS = "abcdefghijklmnopqrstuvwxyz"
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise(LETTERS))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "aliases stand for more than"),
        ("a: &a [*a]", "aliases stand for more than"),
        ("a: " + 50_000 * "[", "too deep"),
        ("a: " + 5000 * "9", "not valid YAML: Exceeds the limit"),
        ("a: 2001-99-99", "not valid YAML: month must be"),
    ],
)
def test_yaml_is_read_within_bounds(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"x.yaml: .*{told}"):
        parse_yaml(text, "x.yaml")
    assert parse_yaml("a: &a {b: 1}\nc: {<<: *a, d: 2}", "x.yaml") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}
