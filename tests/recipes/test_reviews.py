"""Film reviews, fetched by the real pip from a folder, and IMDb: checked and read; nothing touches a network."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import datasets
import pytest
from data import TASKS, imdb
from data import film_reviews as films

from snnk_peft.errors import ConfigError
from tests.data_files import made_up_rows, source_distribution, tar, write_archive, write_reviews

ROWS = (
    "1\t2.5\tA film  to be seen   twice.\r\n"
    "2\t-0.25\tEffective but “tepid”.\r\n"
    "3\t0\tIt is a film.\r\n"
    "4\t1.75\t'A film to be seen twice.'\r\n"
    "5\t-3.9\tNo surprises."
).encode()


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes an archive that passes for the real one."""

    def write(content: bytes, folder: str = "given") -> Path:
        path, digest = write_archive(tmp_path / folder, content)
        monkeypatch.setattr(films, "SHA256", digest)
        return path

    return write


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that looks for packages in the folder `index` and nowhere else."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("BACKEND_RAN", str(tmp_path / "ran"))
    return tmp_path / "cache" / "snnk_peft"


def test_what_is_read(archive) -> None:
    found = films.read_archive(archive(source_distribution(ROWS)))
    assert [(s.text, s.rating, films.LABELS[s.label]) for s in found] == [
        ("A film to be seen twice.", 2.5, "positive"),  # a rating of 0 has no label; an equal wording counts once
        ("Effective but “tepid”.", -0.25, "negative"),
        ("No surprises.", -3.9, "negative"),
    ]


def test_faults_of_rows_come_together_with_their_lines(archive) -> None:
    rows = b"1\t2.5\tFine.\n2\t4.5\tToo much.\n3\t1.0\n4\tgood\tFine.\n5\t1.0\t \n6\t1\ta\tb\n7\t1.0\tCaf\xe9.\n"
    path = archive(source_distribution(rows))
    with pytest.raises(ConfigError, match="not UTF-8") as caught:  # lines that cannot be read come first
        films.read_archive(path)
    assert f"{path}, {films.TEXT}, line 7" in str(caught.value)
    path = archive(source_distribution(rows[: rows.index(b"7")]))
    with pytest.raises(ConfigError) as caught:
        films.read_archive(path)
    where = f"{path}, {films.TEXT}, line "
    assert [fault.removeprefix(where)[0] for fault in caught.value.faults] == ["2", "3", "4", "5", "6"]
    assert "rating is 4.5; expected a number from -4 to 4" in str(caught.value)
    assert "rows.tsv" not in str(caught.value)


def test_another_archive_is_refused_before_it_is_read(archive, tmp_path: Path) -> None:
    path = archive(source_distribution(ROWS))
    content = path.read_bytes()
    path.write_bytes(content + b"\0")
    with pytest.raises(ConfigError, match=rf"expected {films.SHA256}.*remove it"):
        films.read_archive(path)
    with pytest.raises(ConfigError, match="does not exist"):
        films.load_sentences(tmp_path / "absent.tar.gz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (source_distribution(ROWS, inner="vaderSentiment-3.3.2/other.tar.gz"), f"holds no file {films.INNER}"),
        (source_distribution(ROWS, text="hutto_ICWSM_2014/other.txt"), f"holds no file {films.TEXT}"),
        (tar({films.INNER: b"no archive"}), "not a readable archive"),
        (source_distribution(ROWS)[:300], "not a readable archive"),
        (source_distribution(b""), "the file is empty"),
    ],
    ids=["no inner archive", "no text", "inner is none", "cut off", "empty"],
)
def test_an_archive_of_another_layout_is_refused(archive, content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        films.read_archive(archive(content))


def test_no_sentence_is_in_both_halves_and_the_split_depends_on_the_texts_alone(archive) -> None:
    rows = made_up_rows()
    train, test = films.load_sentences(archive(source_distribution(rows)))
    assert not {s.text for s in train} & {s.text for s in test}
    assert len({s.text for s in train + test}) == len(rows.splitlines()) == len(train) + len(test)
    assert len(test) == round(films.TEST_SHARE * (len(train) + len(test)))
    assert 0.35 < sum(s.label for s in test) / len(test) < 0.65
    backwards = b"\r\n".join(reversed(rows.splitlines()))
    assert films.load_sentences(archive(source_distribution(backwards))) == (train, test)
    # Repeated in other letters and with other signs around it, a sentence still stands once.
    shouted = rows + b"\r\n" + rows.upper().replace(b".\r", b"!\r")
    assert films.load_sentences(archive(source_distribution(shouted))) == (train, test)


def test_pip_fetches_once(archive, offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    content = archive(source_distribution(ROWS), "index").read_bytes()
    halves = films.load_sentences()
    assert sum(map(len, halves)) == 3
    assert [file.name for file in offline.iterdir()] == [films.ARCHIVE]
    assert (offline / films.ARCHIVE).read_bytes() == content
    monkeypatch.setattr(sys, "executable", "absent")  # what is there needs no pip
    assert films.load_sentences() == halves


def test_nothing_of_another_file_runs_and_nothing_of_it_stays(archive, offline: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    path = archive(source_distribution(ROWS), "index")
    films.fetch()
    assert (tmp_path / "ran").exists()  # pip does run the right one, to ask for its metadata
    (tmp_path / "ran").unlink()
    (offline / films.ARCHIVE).unlink()
    path.write_bytes(source_distribution(ROWS + b"\r\n6\t1\tAdded later."))
    with pytest.raises(films.DownloadError, match="DO NOT MATCH THE HASHES"):
        films.fetch()
    assert not (tmp_path / "ran").exists()
    assert not list(offline.iterdir())


def test_what_keeps_pip_from_fetching_is_told(offline: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    with pytest.raises(films.DownloadError, match=rf"Could not find a version.*put the file into {offline}"):
        films.fetch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(films.DownloadError, match="No such file"):
        films.fetch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(films.DownloadError, match="Not a directory"):
        films.fetch()


def test_as_a_task_of_the_recipes(archive, offline: Path) -> None:
    train, test = films.load_sentences(archive(source_distribution(made_up_rows()), "cache/snnk_peft"))
    data = TASKS["film_reviews"].load(max_samples={"train": 50})
    assert len(data["train"]) == 50
    assert data["validation"]["sentence1"] == [sentence.text for sentence in test]
    assert data["validation"]["label"] == [sentence.label for sentence in test]
    assert data["validation"].features["label"].names == ["negative", "positive"]
    assert set(data["train"]["sentence1"]) < {sentence.text for sentence in train}
    with pytest.raises(ConfigError, match="data_dir"):
        TASKS["film_reviews"].load(offline / "absent")


TASK = TASKS["imdb"]


def rows(data) -> dict[str, list[tuple[str, int]]]:
    return {split: list(zip(part["sentence1"], part["label"], strict=True)) for split, part in data.items()}


def test_every_review_once_with_its_label(tmp_path: Path) -> None:
    found = rows(TASK.load(write_reviews(tmp_path)))
    assert {split: len(part) for split, part in found.items()} == {"train": 36, "validation": 4, "test": 6}
    wanted = {(f"{kind} train {n} naïve", label) for label, kind in enumerate(("neg", "pos")) for n in range(20)}
    assert {*found["train"], *found["validation"]} == wanted
    assert {text.split()[1] for text, _ in found["test"]} == {"test"}
    # The files stand by class; the first rows of a split are of both.
    assert {label for _, label in found["train"][:8]} == {0, 1}
    assert TASK.validation_splits == ("validation",)
    assert TASK.label_names == ("negative", "positive")


def test_the_archive_holds_the_same(tmp_path: Path) -> None:
    write_reviews(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with tarfile.open(tmp_path / "b/aclImdb.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "a/aclImdb", "aclImdb")
    wanted = rows(TASK.load(tmp_path / "a"))
    for place in (tmp_path / "a/aclImdb", tmp_path / "b", tmp_path / "b/aclImdb.tar.xz"):
        assert rows(TASK.load(place)) == wanted


def test_so_does_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real `load_dataset`, on a local folder with the columns of the Hub's copy, which has its own row order."""
    wanted = rows(TASK.load(write_reviews(tmp_path)))
    for part in ("train", "test"):
        files = sorted((tmp_path / "aclImdb" / part).glob("[np]*/*.txt"))
        content = {"text": [f.read_text() for f in files], "label": [int(f.parent.name == "pos") for f in files]}
        (tmp_path / "hub").mkdir(exist_ok=True)
        datasets.Dataset.from_dict(content).to_parquet(tmp_path / f"hub/{part}.parquet")
    monkeypatch.setattr(imdb, "HUB", str(tmp_path / "hub"))
    assert rows(TASK.load(cache_dir=tmp_path / "cache")) == wanted
    assert rows(TASK.load(splits=["test"], cache_dir=tmp_path / "cache")) == {"test": wanted["test"]}


def test_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imdb, "HUB", "snnk-peft-tests/absent")
    for given, fault in (
        ({}, r"give data\.dir"),
        ({"data_dir": tmp_path / "none"}, "does not exist"),
        ({"data_dir": tmp_path}, "holds no aclImdb"),
        ({"data_dir": tmp_path, "splits": ["tset"]}, "did you mean 'test'"),
    ):
        with pytest.raises(ConfigError, match=fault):
            TASK.load(**given)
    write_reviews(tmp_path / "few", train=4)
    with pytest.raises(ConfigError, match="8 training reviews, one in 10 of them for validation"):
        TASK.load(tmp_path / "few")
    assert len(TASK.load(tmp_path / "few", splits=["test"])["test"]) == 6
    write_reviews(tmp_path / "bad")
    (tmp_path / "bad/aclImdb/test/pos/1_7.txt").write_text(" ")
    for file in (tmp_path / "bad/aclImdb/train/neg").iterdir():
        file.unlink()
    with pytest.raises(ConfigError) as caught:
        TASK.load(tmp_path / "bad")
    assert "test/pos/1_7.txt is empty" in str(caught.value)
    assert "no review train/neg" in str(caught.value)
