"""Small stand-ins for files of GLUE, of columns of numbers and of reviews, in the official layouts.

GLUE: the label is given away by cue words; everything else is filler. For pairs the cue stands in the second sentence.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import random
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from data import film_reviews as films

FOLDERS = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "qqp": "QQP",
    "stsb": "STS-B",
    "mnli": "MNLI",
    "qnli": "QNLI",
    "rte": "RTE",
    "wnli": "WNLI",
}
# Cells of the label column, in the order of the Hub's class ids.
LABEL_CELLS = {
    "mnli": ["entailment", "neutral", "contradiction"],
    "qnli": ["entailment", "not_entailment"],
    "rte": ["entailment", "not_entailment"],
}
HEADERS = {
    "cola": None,
    "sst2": ["sentence", "label"],
    "mrpc": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "qqp": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "stsb": [
        "index",
        "genre",
        "filename",
        "year",
        "old_index",
        "source1",
        "source2",
        "sentence1",
        "sentence2",
        "score",
    ],
    "mnli": [
        *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
        *("sentence1_parse", "sentence2_parse", "sentence1", "sentence2", "label1", "gold_label"),
    ],
    "qnli": ["index", "question", "sentence", "label"],
    "rte": ["index", "sentence1", "sentence2", "label"],
    "wnli": ["index", "sentence1", "sentence2", "label"],
}
CUES = [
    ["terrible", "awful", "boring", "dreadful"],
    ["wonderful", "brilliant", "charming", "delightful"],
    ["ordinary", "usual", "common", "plain"],
]
SUBJECTS = ["the film", "this story", "the old man", "our train", "a small dog", "the report", "her letter"]
VERBS = ["seems", "remained", "was", "has become", "looks"]
PLACES = ["in the city", "near the river", "after the war", "on Monday", "for many people", 'at the "old" market']


def write_task(folder: Path, task: str, n_train: int = 32, n_dev: int = 16, seed: int = 0) -> Path:
    """Write `<folder>/<official folder>/{train,dev}.tsv` (MNLI: dev_matched, dev_mismatched); returns that folder."""
    target = Path(folder) / FOLDERS[task]
    target.mkdir(parents=True, exist_ok=True)
    dev = ["dev_matched", "dev_mismatched"] if task == "mnli" else ["dev"]
    rng = random.Random(f"{seed} {task}")
    for name, count in [("train", n_train), *((name, n_dev) for name in dev)]:
        lines = ["\t".join(HEADERS[task])] if HEADERS[task] else []
        lines += ["\t".join(_row(task, index, rng)) for index in range(count)]
        text = "\n".join(lines) + "\n"
        (target / f"{name}.tsv").write_text(text, encoding="utf-8-sig" if task == "mrpc" else "utf-8", newline="\n")
    return target


def sentences() -> list[str]:
    """Every sentence without a cue, each once."""
    return [f"{subject} {verb} quiet {place} ." for place in PLACES for verb in VERBS for subject in SUBJECTS]


def _sentence(cue: str, rng: random.Random) -> str:
    return f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {cue} {rng.choice(PLACES)} ."


def _row(task: str, index: int, rng: random.Random) -> list[str]:
    cells = LABEL_CELLS.get(task, ["0", "1"])
    label = rng.randrange(len(cells)) if index >= len(cells) else index  # every class occurs
    first, second = _sentence("quiet", rng), _sentence(rng.choice(CUES[label]), rng)
    if task == "cola":
        return ["gj04", cells[label], "" if label else "*", second]
    if task == "sst2":
        return [second, cells[label]]
    if task == "mrpc":
        return [cells[label], str(100 + index), str(900 + index), first, second]
    if task == "qqp":
        return [str(index), str(2 * index), str(2 * index + 1), first, second, cells[label]]
    if task == "stsb":
        low, high = (0.0, 2.0) if label == 0 else (3.0, 5.0)
        score = f"{rng.uniform(low, high):.3f}"
        return [str(index), "main-news", "headlines", "2013", f"{index:04d}", "none", "none", first, second, score]
    if task == "mnli":
        return [str(index), "", "", "fiction", "", "", "", "", first, second, cells[label], cells[label]]
    return [str(index), first, second, cells[label]]


COLUMNS = {"covertype": 54, "higgs": 28, "hepmass": 28}


def write_columns(
    folder: Path, name: str, *, rows: int = 130, packed: bool = False
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write the files; split -> (values, class ids): CoverType split at 80 and 100, HIGGS before the last 30."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    values = rng.integers(-30, 30, (rows, COLUMNS[name])) / 10
    labels = (values[:, 0] + values[:, 1] > 0).astype(int)

    def write(file: str, part: slice, header: str = "") -> None:
        lines = []
        for row, label in zip(values[part], labels[part], strict=True):
            cells = [f"{value:.1f}" for value in row]
            lines.append(",".join([*cells, str(label + 1)] if name == "covertype" else [f"{label:.18e}", *cells]))
        text = header + "\n".join(lines) + "\n"
        if packed:
            (folder / f"{file}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / file).write_text(text)

    if name == "covertype":
        write("covtype.data", slice(None))
        parts = {"train": slice(0, 80), "validation": slice(80, 100), "test": slice(100, None)}
    elif name == "higgs":
        write("HIGGS.csv", slice(None))
        parts = {"train": slice(0, -30), "test": slice(-30, None)}
    else:
        parts = {"train": slice(0, 100), "test": slice(100, None)}
        header = "# label," + ",".join(f"f{index}" for index in range(27)) + ",mass\n"
        for split, part in parts.items():
            write(f"all_{split}.csv", part, header)
    return {split: (values[part], labels[part]) for split, part in parts.items()}


PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
# What pip runs to ask for metadata. It leaves a mark, so that a test sees whether it ran.
BACKEND = """
import os, pathlib
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    pathlib.Path(os.environ["BACKEND_RAN"]).touch()
    folder = pathlib.Path(directory, "vaderSentiment-3.3.2.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\\nName: vaderSentiment\\nVersion: 3.3.2\\n")
    return folder.name
"""
GOOD = ("wonderful", "moving", "brilliant", "charming", "superb", "delightful", "touching", "excellent")
BAD = ("awful", "boring", "terrible", "clumsy", "dreadful", "tedious", "stupid", "horrible")
THINGS = ("story", "script", "ending", "cast", "music", "comedy", "drama", "sequel", "thriller", "picture")


def tar(files: Mapping[str, bytes]) -> bytes:
    """A compressed tar archive of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def source_distribution(rows: bytes, text: str = films.TEXT, inner: str = films.INNER) -> bytes:
    """An archive that pip can ask for its metadata, with `rows` where the ratings are."""
    root = "vaderSentiment-3.3.2"
    metadata = b"Metadata-Version: 2.1\nName: vaderSentiment\nVersion: 3.3.2\n"
    project = {"PKG-INFO": metadata, "pyproject.toml": PYPROJECT.encode(), "backend.py": BACKEND.encode()}
    return tar({**{f"{root}/{name}": file for name, file in project.items()}, inner: tar({text: rows})})


def write_archive(folder: Path, content: bytes) -> tuple[Path, str]:
    """`content` under the archive's name in `folder`, which is made; returns the path and its SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / films.ARCHIVE
    path.write_bytes(content)
    return path, hashlib.sha256(content).hexdigest()


def made_up_rows() -> bytes:
    """640 rated sentences, half of them positive, as the file has them: no header, lines end in CR LF."""
    lines = []
    for words, sign in ((GOOD, 1), (BAD, -1)):
        for word, other, thing in itertools.product(words, words, THINGS):
            if other != word or thing < "m":
                lines.append(f"{sign * (1 + len(lines) % 3)}.25\tA {word} {thing}, and {other} to the last minute.")
    return "\r\n".join(f"{number}\t{line}" for number, line in enumerate(lines, start=1)).encode()


def write_reviews(folder: Path, train: int = 20, test: int = 3) -> Path:
    """aclImdb/ in the official layout, so many reviews of each class."""
    for part, count in (("train", train), ("test", test)):
        for kind in ("neg", "pos"):
            place = folder / "aclImdb" / part / kind
            place.mkdir(parents=True)
            for number in range(count):
                (place / f"{number}_7.txt").write_text(f"{kind} {part} {number}<br /><br />naïve", encoding="utf-8")
    (folder / "aclImdb/train/unsup").mkdir()
    (folder / "aclImdb/train/unsup/0_0.txt").write_text("without a label")
    return folder
