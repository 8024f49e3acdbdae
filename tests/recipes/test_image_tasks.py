"""Image tasks: every published layout gives the pixels and labels that were written; all bad input is named."""

from __future__ import annotations

import ast
import dataclasses
import gzip
import io
import os
import pickle
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import data
import datasets
import image_layouts as layouts
import numpy as np
import pytest
from data import TASKS
from image_layouts import KEPT, LAYOUTS, NAMES, PICTURES, WNIDS, Pixels, draw, hub_task, kept_as, png, shard, write
from PIL import Image
from recipe_world import faults_of

import snnk_peft.tasks
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Images, ImageTask
from snnk_peft.tasks.base_image import UnreadableImageError
from snnk_peft.tasks.image_folder import ImageFolderTask

EVERY = [(task, layout) for task, written in LAYOUTS.items() for layout in written]


def settled(name: str, folder: Path, **settings: Any) -> ImageTask:
    """The task, with the classes of the folder if it has none of its own."""
    task = TASKS[name].with_settings({"dir": str(folder), **settings})
    assert isinstance(task, ImageTask)
    return task


def load(name: str, folder: Path, **arguments: Any) -> dict[str, Images]:
    return settled(name, folder).load(folder, **arguments)  # type: ignore[return-value]


def content(images: Images) -> list[tuple[int, bytes]]:
    """(class id, pixels) of every example, sorted: layouts differ in their order."""
    return sorted((int(images["label"][at]), np.asarray(images.picture(at)).tobytes()) for at in range(len(images)))


def written(data: Pixels, split: str) -> list[tuple[int, bytes]]:
    pairs = zip(data.labels[split].tolist(), data.images[split], strict=True)
    return sorted((label, image.tobytes()) for label, image in pairs)


# --- layouts ----------------------------------------------------------------------------------------------------------


def test_every_image_task_has_a_layout_to_be_tested_on():
    registered = {name for name in TASKS if TASKS[name].modality == "image"} - {"digits"}
    assert registered == set(LAYOUTS) == set(PICTURES)


@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_a_layout_gives_what_was_written(name: str, layout: str, tmp_path: Path):
    data = PICTURES[name]()
    folder = LAYOUTS[name][layout](tmp_path / "x", data)
    task = settled(name, folder)
    found, again = task.load(folder), task.load(folder)
    assert list(found) == list(task.splits) == list(data.images)
    for split, images in found.items():
        assert content(images) == written(data, split)
        assert images.fingerprint() == again[split].fingerprint()
        assert str(tmp_path) in images.name(0)
        part = images.select([2, 0])
        assert len(part) == 2
        assert np.asarray(part.picture(0)).tobytes() == np.asarray(images.picture(2)).tobytes()
        assert part["label"].tolist() == images["label"][[2, 0]].tolist()
        assert part.fingerprint() != images.select([0, 2]).fingerprint()
        copy = pickle.loads(pickle.dumps(part))  # what a worker of a loader gets
        assert np.asarray(copy.picture(1)).tobytes() == np.asarray(images.picture(0)).tobytes()
    assert found["train"].fingerprint() != found[task.splits[1]].fingerprint()
    alone = task.load(folder, splits=[task.splits[1]])
    assert list(alone) == [task.splits[1]]
    assert len(task.load(folder, max_samples={"train": 3})["train"]) == 3


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist"])
def test_pixels_of_all_layouts_have_one_fingerprint_where_they_are_arrays(name: str, tmp_path: Path):
    data = PICTURES[name]()
    arrays = [layout for layout in LAYOUTS[name] if "class" not in layout]
    found = {
        load(name, LAYOUTS[name][layout](tmp_path / layout.replace(" ", "_"), data))["test"].fingerprint()
        for layout in arrays
    }
    assert len(found) == 1
    changed = dataclasses.replace(data, images={split: images ^ 1 for split, images in data.images.items()})
    other = load(name, LAYOUTS[name][arrays[0]](tmp_path / "changed", changed))["test"]
    assert other.fingerprint() not in found


def test_lra_image_reads_what_cifar10_reads(tmp_path: Path):
    data = PICTURES["cifar10"]()
    tokens = [
        sorted(ids.tobytes() for ids in TASKS["lra_image"].load(folder, splits=["test"])["test"].tokens[0])
        for folder in (layouts.cifar10_python(tmp_path, data), layouts.cifar10_binary(tmp_path, data))
    ]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 10


# --- python batches ---------------------------------------------------------------------------------------------------


def test_the_written_batches_are_pickles(tmp_path: Path):
    """The stand-in of the official files is what Python reads as such."""
    data = PICTURES["cifar100"]()
    found = pickle.loads((layouts.cifar100_python(tmp_path, data) / "train").read_bytes(), encoding="latin1")
    assert found["fine_labels"] == data.labels["train"].tolist()
    assert np.array_equal(found["data"], layouts.rows(data.images["train"]))


class Command:
    """Pickled, an order to run a program."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


class Evaluated(Command):
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"open({str(self.marker)!r}, 'w').close()",)


def instance_opcode(marker: Path) -> bytes:
    return b"(S'touch " + str(marker).encode() + b"'\nios\nsystem\n."


MALICIOUS = {
    **{f"system, protocol {p}": lambda marker, p=p: pickle.dumps(Command(marker), p) for p in range(6)},
    **{f"eval, protocol {p}": lambda marker, p=p: pickle.dumps({"data": Evaluated(marker)}, p) for p in (0, 2, 4)},
    "instance": instance_opcode,
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_a_malicious_batch_does_not_run(kind: str, tmp_path: Path):
    marker, folder = tmp_path / "marker", layouts.cifar10_python(tmp_path, PICTURES["cifar10"]())
    batch = MALICIOUS[kind](marker)
    pickle.loads(batch)
    assert marker.exists()  # it would run
    marker.unlink()
    write(folder / "data_batch_2", batch)
    faults = faults_of(lambda: TASKS["cifar10"].load(folder))
    assert len(faults) == 1
    assert "data_batch_2: " in faults[0]
    assert "official files do" in faults[0]
    assert not marker.exists()
    with pytest.raises(ConfigError):
        TASKS["lra_image"].load(folder)
    assert not marker.exists()


def batch(**entries: Any) -> bytes:
    data = {"labels": [1, 2], "data": np.zeros((2, 3072), np.uint8), **entries}
    return layouts.pickled({key: value for key, value in data.items() if value is not None})


OBJECTS = (
    b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x01\x85"
    b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb\x89](K\x05etb"
)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (batch()[:-4000], "expected 6144 bytes"),
        (batch()[:40], "no newline found"),
        (b"", "exhausted"),
        (b"\x80\x02}.x", None),
        (b"\x80\x02K\x01.", "holds a int; expected a dict"),
        (b"\x80\x02tR.", "not a well-formed pickle"),
        (b"\x80\x02}(U\x04datah\x63u.", "not a well-formed pickle"),
        (layouts.pickled({"labels": [1]}).replace(b"](K\x01e", b"]}b"), "not a well-formed pickle"),
        (batch(labels=[1, 2, 3]), "2 images and 3 labels"),
        (batch(labels=[1, 10]), "image 1: class 10 (1 such); expected 0 to 9"),
        (batch(labels=["1", "2"]), "labels is not a list of class ids"),
        (batch(labels=None), "no labels; found data"),
        (batch(labels=None, fine_labels=[1, 2]), "no labels; found data, fine_labels"),
        (batch(data=[1, 2]), "expected an array (n, 3072)"),
        (batch(data=np.zeros((2, 3071), np.uint8)), "expected an array (n, 3072)"),
        (batch().replace(b"M\x00\x0c\x86", b"M\x01\x0c\x86"), "an array of shape"),
        (batch().replace(b"U\x02u1", b"U\x02f8"), "dtype 'f8'; expected uint8"),
        (b"\x80\x02}(U\x04data" + OBJECTS + b"u.", "dtype 'O8'; expected uint8"),
    ],
)
def test_damaged_python_batches(damaged: bytes, message: str | None, tmp_path: Path):
    folder = layouts.cifar10_python(tmp_path, PICTURES["cifar10"]())
    write(folder / "data_batch_1", damaged)
    write(folder / "data_batch_2", b"also damaged")
    faults = faults_of(lambda: TASKS["cifar10"].load(folder))
    assert len(faults) == 2  # both files are named
    assert f"{folder}: cifar-10-batches-py/data_batch_1" in faults[0]
    assert (message or "no data and no labels") in faults[0]
    assert list(TASKS["cifar10"].load(folder, splits=["test"])) == ["test"]


def test_arrays_by_columns(tmp_path: Path):
    data = draw(("train", "test"), 10)
    values = np.arange(6144).astype(np.uint8).reshape(2, 3072)
    content = batch(data=values).replace(b"b\x89T", b"b\x88T")
    folder = layouts.cifar10_python(tmp_path, data)
    write(folder / "data_batch_1", content)
    (folder / "data_batch_2").unlink()
    expected = pickle.loads(content, encoding="latin1")["data"]  # what Python says is the truth here
    first = np.asarray(TASKS["cifar10"].load(folder)["train"].picture(0))
    assert np.array_equal(layouts.rows(first[None])[0], expected[0])


def test_damaged_binary_batches(tmp_path: Path):
    folder = layouts.cifar100_binary(tmp_path, PICTURES["cifar100"]())
    for name, size in (("train.bin", -1), ("test.bin", 0)):
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])
    faults = faults_of(lambda: TASKS["cifar100"].load(folder))
    assert "train.bin: 614799 bytes; expected a multiple of 3074" in faults[0]
    assert "test.bin: 0 bytes" in faults[1]
    layouts.cifar100_binary(tmp_path, PICTURES["cifar100"]())
    content = bytearray((folder / "train.bin").read_bytes())
    content[1] = 100
    (folder / "train.bin").write_bytes(content)
    assert "image 0: class 100 (1 such); expected 0 to 99" in faults_of(lambda: TASKS["cifar100"].load(folder))[0]
    layouts.cifar100_python(tmp_path, PICTURES["cifar100"]())
    faults = faults_of(lambda: TASKS["cifar100"].load(tmp_path, splits=["test"]))
    assert "holds 2 files of the batch test; expected one" in faults[0]


def test_a_damaged_archive(tmp_path: Path):
    for kind in ("gz", "xz", "bz2"):
        place = layouts.archive(layouts.cifar10_binary(tmp_path / kind, PICTURES["cifar10"]()), kind)
        file = next(place.iterdir())
        whole = file.read_bytes()
        for damaged in (whole[: len(whole) // 2], whole[:5000] + bytes(500) + whole[5500:], b"\x00" * 9):
            file.write_bytes(damaged)
            assert "not a readable tar archive" in faults_of(lambda: TASKS["cifar10"].load(place))[0]


# --- MNIST ------------------------------------------------------------------------------------------------------------


def test_damaged_idx_files(tmp_path: Path):
    data = PICTURES["mnist"]()
    folder = layouts.mnist(tmp_path, data)
    images, labels = layouts.idx(data.images["train"]), layouts.idx(data.labels["train"].astype(np.uint8))

    def fault_of(name: str, content: bytes) -> str:
        layouts.mnist(tmp_path, data)
        write(folder / name, content)
        faults = faults_of(lambda: TASKS["mnist"].load(folder))
        assert len(faults) == 1
        assert str(folder) in faults[0]
        return faults[0]

    train = "train-images-idx3-ubyte.gz"
    assert "begins with 00 00 08 01; expected 00 00 08 03" in fault_of(train, gzip.compress(labels))
    assert "expected 20 x 28 x 28: the file was truncated" in fault_of(train, gzip.compress(images[:-1]))
    assert "expected 20 x 28 x 28" in fault_of(train, gzip.compress(images + b"x"))
    assert "begins with 00 00 08 03" in fault_of(train, gzip.compress(images[:11]))
    assert train in fault_of(train, gzip.compress(images)[:-9])
    assert "ot a gzipped file" in fault_of(train, b"not packed")
    fewer = layouts.idx(data.labels["train"][:-1].astype(np.uint8))
    assert "20 train images and 19 labels" in fault_of("train-labels-idx1-ubyte.gz", gzip.compress(fewer))
    wrong = labels[:-1] + bytes([12])
    assert "image 19: class 12 (1 such)" in fault_of("train-labels-idx1-ubyte.gz", gzip.compress(wrong))
    for name in ("train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz"):
        (folder / name).unlink()
    faults = faults_of(lambda: TASKS["mnist"].load(folder))
    assert ["train-labels-idx1" in faults[0], "t10k-images-idx3" in faults[1]] == [True, True]
    (tmp_path / "x").mkdir()
    assert "holds no {train,t10k}-{images" in faults_of(lambda: TASKS["mnist"].load(tmp_path / "x"))[0]


# --- class folders ----------------------------------------------------------------------------------------------------


def test_faults_of_class_folders_of_known_classes(tmp_path: Path):
    task, data = TASKS["cifar10"], PICTURES["cifar10"]()
    assert "does not exist" in faults_of(lambda: task.load(tmp_path / "absent"))[0]
    assert "holds no data_batch_N" in faults_of(lambda: task.load(tmp_path))[0]
    (tmp_path / "note.txt").write_text("x")
    assert "neither a folder nor a tar archive" in faults_of(lambda: task.load(tmp_path / "note.txt"))[0]
    root = layouts.class_folders(tmp_path / "x", data, layouts.CIFAR10.classes)
    shutil.move(root / "train/cat", root / "train/cats")
    for file in (root / "test/dog").iterdir():
        file.rename(file.with_suffix(".txt"))
    faults = faults_of(lambda: task.load(root))
    assert len(faults) == 2
    assert "unknown class 'cats'; did you mean 'cat'? Expected: airplane, automobile" in faults[0]
    assert f"{root / 'test/dog'} holds no picture; expected files *.{{png,jpg" in faults[1]
    place = layouts.archive(root)
    assert "unknown class 'cats'" in faults_of(lambda: task.load(place))[0]
    shutil.rmtree(root / "train")
    shutil.move(root / "test", root / "train")
    assert f"{root} has no folder test (test split)" in faults_of(lambda: task.load(root))[-1]
    shutil.rmtree(root / "train")
    write(root / "train/1.png", png(data.images["train"][0]))
    (root / "test").mkdir()
    faults = faults_of(lambda: task.load(root))
    assert f"{root / 'train'} holds no class folder, but pictures; expected train/CLASS/" in faults[0]
    assert f"{root / 'test'} holds no class folder; expected" in faults[1]


def test_what_file_managers_leave_behind_is_no_picture(tmp_path: Path):
    root = layouts.class_folders(tmp_path / "x", PICTURES["cifar10"](), layouts.CIFAR10.classes)
    for name in (
        "train/cat/.DS_Store",
        "train/cat/._0003.png",
        "train/.ipynb_checkpoints/0.png",
        "train/cat/Thumbs.db",
    ):
        write(root / name, b"x")
    write(root / "train/cat/more/x.PNG", png(np.zeros((4, 4, 3), np.uint8)))
    assert len(TASKS["cifar10"].load(root)["train"]) == 21
    assert len(TASKS["cifar10"].load(layouts.archive(root))["train"]) == 21


def test_own_pictures(tmp_path: Path):
    data = draw(("train", "validation"), 3, side=8, per_class=10)
    root = layouts.class_folders(tmp_path / "birds", data, ("tit", "crow", "owl"))
    task = settled("image_folder", root)
    assert task.label_names == ("crow", "owl", "tit")
    assert (task.title, task.source) == ("birds", "the pictures in the folder birds")
    assert task.notes == (f"3 classes are found in {root}: crow, owl, tit (data.labels)",)
    assert task.inferred == {"labels": ["crow", "owl", "tit"]}
    again = settled("image_folder", root, **task.inferred)
    assert again.notes == ()
    assert again.load()["train"].fingerprint() == task.load()["train"].fingerprint()
    ordered = settled("image_folder", root, labels=["tit", "crow", "owl"])
    assert content(ordered.load()["train"]) == written(data, "train")
    model = {"id2label": {"0": "tit", "2": "owl", "1": "crow"}}
    of_model = TASKS["image_folder"].with_settings({"dir": str(root)}, model)
    assert of_model.label_names == ("tit", "crow", "owl")
    shutil.rmtree(root / "train")  # a model's classes are known; its pictures for training need not be there
    of_model = TASKS["image_folder"].with_settings({"dir": str(root)}, model)
    assert content(of_model.load(splits=["validation"])["validation"]) == written(data, "validation")
    fewer = TASKS["image_folder"].with_settings({"dir": str(root)}, {"id2label": {"0": "tit", "1": "crow"}})
    assert "unknown class 'owl'" in faults_of(lambda: fewer.load(splits=["validation"]))[0]


@pytest.mark.parametrize("flat", [False, True])
def test_pictures_to_evaluate_on_are_held_back(flat: bool, tmp_path: Path):
    data = draw(("train", "validation"), 3, side=8, per_class=10)
    root = layouts.class_folders(tmp_path, Pixels({"train": data.images["train"]}, data.labels), ("a", "b", "c"))
    root = root / "train" if flat else root
    task = settled("image_folder", root, hold_out=0.3)
    assert "30% of the training pictures are held back" in task.notes[1]
    found, again = task.load(), settled("image_folder", root, hold_out=0.3).load(splits=["validation"])
    assert [np.bincount(images["label"]).tolist() for images in found.values()] == [[7] * 3, [3] * 3]
    assert sorted(content(found["train"]) + content(found["validation"])) == written(data, "train")
    assert again["validation"].fingerprint() == found["validation"].fingerprint()
    other = settled("image_folder", root, hold_out=0.3, split_seed=1).load()
    assert other["validation"].fingerprint() != found["validation"].fingerprint()


def test_faults_of_own_pictures(tmp_path: Path):
    task = TASKS["image_folder"]
    assert "classes are not known before with_settings" in faults_of(lambda: task.load(tmp_path))[0]
    assert "data.dir is missing" in faults_of(lambda: task.with_settings({}))[0]
    assert "does not exist" in faults_of(lambda: settled("image_folder", tmp_path / "absent"))[0]
    (tmp_path / "x.zip").write_bytes(b"x")
    assert "is a file; unpack it" in faults_of(lambda: settled("image_folder", tmp_path / "x.zip"))[0]
    assert "holds no folders of training pictures" in faults_of(lambda: settled("image_folder", tmp_path))[0]
    write(tmp_path / "train/a/1.png", png(np.zeros((4, 4), np.uint8)))
    assert "holds the class a only" in faults_of(lambda: settled("image_folder", tmp_path))[0]
    write(tmp_path / "train/b/1.png", png(np.zeros((4, 4), np.uint8)))
    (tmp_path / "train/c").mkdir()
    (tmp_path / "train/d").mkdir()
    faults = faults_of(lambda: load("image_folder", tmp_path))
    assert [name in fault for name, fault in zip(("c holds no", "d holds no"), faults, strict=True)] == [True, True]
    (tmp_path / "train/c").rmdir()
    (tmp_path / "train/d").rmdir()
    assert "none can be held back (no class has two)" in faults_of(lambda: load("image_folder", tmp_path))[0]
    (tmp_path / "val").mkdir()
    assert "val holds no class folder" in faults_of(lambda: load("image_folder", tmp_path))[0]
    settings = {"labels": ["a", "a"], "hold_out": 1.5, "train_file": "x.csv"}
    assert len(task.check(settings)) == 3
    assert len(faults_of(lambda: settled("image_folder", tmp_path, labels=["a"], hold_out=0.0))) == 2


# --- ImageNet ---------------------------------------------------------------------------------------------------------


def test_names_of_imagenet_classes(tmp_path: Path):
    data = PICTURES["imagenet1k"]()
    plain = settled("imagenet1k", LAYOUTS["imagenet1k"]["class folders"](tmp_path / "a", data))
    assert plain.label_names == WNIDS
    folder = layouts.kaggle_imagenet(tmp_path / "b", data)
    named = settled("imagenet1k", folder)
    assert named.label_names == ("tench, Tinca tinca", "crane (n02012849)", "crane (n03126707)")
    assert len(set(NAMES.values())) == 2
    # A run's record, or its model, finds the folders again by those names; WNIDs do as well.
    for labels in (named.label_names, WNIDS):
        again = settled("imagenet1k", folder, labels=list(labels))
        assert again.load()["validation"].fingerprint() == named.load()["validation"].fingerprint()
    assert settled("imagenet1k", layouts.shards(tmp_path / "c", data)).num_labels == 1000
    write(tmp_path / "c/LOC_synset_mapping.txt", "".join(f"{wnid} {name}\n" for wnid, name in NAMES.items()))
    shards = settled("imagenet1k", tmp_path / "c")
    assert shards.label_names == named.label_names
    assert content(shards.load()["train"]) == written(data, "train")


def test_faults_of_imagenet_folders(tmp_path: Path):
    data = PICTURES["imagenet1k"]()
    folder = layouts.kaggle_imagenet(tmp_path / "x", data)
    solution = folder / "LOC_val_solution.csv"
    lines = solution.read_text().splitlines()
    solution.write_text("\n".join([lines[0], lines[1].replace("n0", "m0"), "ILSVRC2012_val_00000009,n01440764 1"]))
    faults = faults_of(lambda: load("imagenet1k", folder))
    assert f"{solution}, line 2: class 'm03126707'; expected one of n01440764, n02012849" in faults[0]
    assert "line 3: " in faults[1]
    assert "has no image ILSVRC2012_val_00000009" in faults[1]
    assert len(faults) == 5
    assert "val_00000001.JPEG" in "".join(faults)
    assert "does not give its class" in faults[2]
    solution.unlink()
    assert "add it, or move the images" in faults_of(lambda: load("imagenet1k", folder))[0]
    shutil.rmtree(folder / "ILSVRC/Data/CLS-LOC/val")
    assert "has no folder val or validation" in faults_of(lambda: load("imagenet1k", folder))[0]
    write(folder / "LOC_synset_mapping.txt", "n01440764\n\nn02012849 crane\n")
    assert "'n01440764' has no name" in faults_of(lambda: settled("imagenet1k", folder))[0]
    write(folder / "LOC_synset_mapping.txt", b"n01440764 \xff\n")
    assert "is not UTF-8" in faults_of(lambda: settled("imagenet1k", folder))[0]
    (folder / "LOC_synset_mapping.txt").unlink()
    (folder / "ILSVRC/Data/CLS-LOC/train/cat").mkdir()
    assert "'cat' is not a class; expected a WNID" in faults_of(lambda: settled("imagenet1k", folder))[0]


# --- shards -----------------------------------------------------------------------------------------------------------


def test_faults_of_shards(tmp_path: Path):
    root = layouts.shards(tmp_path / "x", PICTURES["imagenet1k"]())
    task = settled("imagenet1k", root)
    first, second = root / "pictures-train-0000.tar", root / "pictures-train-0001.tar"
    picture = png(np.zeros((4, 4, 3), np.uint8))

    def faults() -> list[str]:
        return faults_of(lambda: task.load(root))

    whole = first.read_bytes()
    first.write_bytes(whole[:1000])
    second.write_bytes(b"x" * 2000)
    assert [str(path) in fault for path, fault in zip((first, second), faults(), strict=True)] == [True, True]
    first.write_bytes(whole)
    shard(second, {"a.jpg": picture, "b.cls": b"1", "c.jpg": picture, "c.cls": b"2"})
    assert len(faults()) == 2
    assert "has no label; expected" in "".join(faults())
    assert "has a label but no picture" in "".join(faults())
    for name, told in (("a.cls", b"cat"), ("a.json", b"{"), ("a.json", b'{"label": "cat"}'), ("a.json", b"[]")):
        shard(second, {"a.jpg": picture, name: told})
        assert name in faults()[0]
        assert "class id" in faults()[0]
    shard(second, {"a.jpg": picture, "a.png": picture, "a.cls": b"1"})
    assert "two pictures" in faults()[0]
    for wrong in (b"1000", b"-1"):
        shard(second, {"a.jpg": picture, "a.cls": wrong})
        assert f"class {wrong.decode()} (1 such); expected 0 to 999" in faults()[0]
    # .cls counts where .json is there too; other members are passed over
    shard(second, {"a.json": b'{"label": 5}', "a.jpg": picture, "a.cls": b"2", "a.txt": b"x", "notes": b"y"})
    assert sorted(task.load(root)["train"]["label"].tolist())[-1] == 2
    second.rename(root / "more.tar")
    assert "its name says no split; expected one of train, val, validation" in faults()[0]
    (root / "more.tar").rename(root / "train-val.tar")
    assert "train and validation" in faults()[0]
    for file in root.glob("*.tar"):
        (root / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert "is compressed, so it has no random access" in faults()[0]


# --- unreadable pictures ----------------------------------------------------------------------------------------------


def sixteen_bits() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(stream, "PNG")
    return stream.getvalue()


@pytest.mark.parametrize("kept", KEPT)
def test_an_unreadable_picture_is_named_when_it_is_opened(kept: str, tmp_path: Path):
    good = png(np.full((4, 4, 3), 7, np.uint8))
    found = kept_as(kept, [good, b"", b"no picture", good[:-30], sixteen_bits()], tmp_path)
    assert np.asarray(found.picture(0)).max() == 7
    for index, message in ((1, "cannot be decoded"), (2, "cannot be decoded"), (3, "cannot be"), (4, "mode 'I;16'")):
        with pytest.raises(UnreadableImageError, match=message) as caught:
            found.picture(index)
        assert str(caught.value).startswith(found.name(index))


# --- the Hub ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "path", "columns"),
    [
        ("cifar10", "uoft-cs/cifar10", ("img", "label")),
        ("cifar100", "uoft-cs/cifar100", ("img", "fine_label")),
        ("mnist", "ylecun/mnist", ("image", "label")),
        ("imagenet1k", "ILSVRC/imagenet-1k", ("image", "label")),
    ],
)
def test_the_layout_of_the_hub(name: str, path: str, columns: tuple[str, str], tmp_path: Path):
    assert TASKS[name].hub_path == path
    data = PICTURES[name]()
    names = TASKS[name].label_names or ("tench, Tinca tinca", "crane", "crane bird")
    published = tuple("cra" if label == "crab" else label for label in names)  # as the Hub spells it
    task = hub_task(name, layouts.hub_folder(tmp_path / "hub", data, *columns, published)).with_settings({})
    assert task.label_names == names
    found = task.load(cache_dir=tmp_path / "cache")
    for split, images in found.items():
        assert content(images) == written(data, split)
        assert images.fingerprint() == task.load(cache_dir=tmp_path / "cache")[split].fingerprint()
        assert images.fingerprint() != images.select([1, 0]).fingerprint()
        assert f"split {split!r}, row 1" in images.name(1)
        copy = pickle.loads(pickle.dumps(images))
        assert np.array_equal(np.asarray(copy.picture(1)), np.asarray(images.picture(1)))


def test_faults_of_the_hub(tmp_path: Path):
    data, names = PICTURES["mnist"](), TASKS["mnist"].label_names
    cache = tmp_path / "cache"
    folder = layouts.hub_folder(tmp_path / "a", data, "image", "label", names)
    faults = faults_of(lambda: hub_task("mnist", folder, image="img", label="lable").load(cache_dir=cache))
    assert "unknown column 'img'" in faults[0]
    assert "unknown column 'lable'; did you mean 'label'?" in faults[1]
    other = layouts.hub_folder(tmp_path / "b", data, "image", "label", tuple("1234567890"))
    faults = faults_of(lambda: hub_task("mnist", other).load(cache_dir=cache))
    assert "classes are 1, 2, 3, 4, 5, 6, 7, 8, 9, 0; expected 0, 1, 2" in faults[0]
    shutil.rmtree(tmp_path / "b")
    other = layouts.hub_folder(
        tmp_path / "b", Pixels({"train": data.images["train"]}, data.labels), "image", "label", names
    )
    assert "unknown split 'test'" in faults_of(lambda: hub_task("mnist", other).load(cache_dir=cache))[0]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    cells = [{"bytes": png(image), "path": None} for image in data.images["test"][:2]]
    for labels, message in (([1, None], "1 rows have no label"), ([1, -1], "image 1: class -1 (1 such)")):
        rows = datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features)
        rows.to_parquet(tmp_path / "b/data/test-00000-of-00001.parquet")
        assert message in faults_of(lambda: hub_task("mnist", other).load(cache_dir=cache))[-1]


def test_without_the_hub_the_remedy_is_named(tmp_path: Path):
    fault = faults_of(lambda: TASKS["cifar100"].load(cache_dir=tmp_path))[0]
    assert "uoft-cs/cifar100 could not be loaded from the Hub: " in fault
    assert "To work offline, give data.dir (data_dir=...): cifar-100-python" in fault
    fault = faults_of(lambda: TASKS["imagenet1k"].with_settings({}))[0]
    assert "accepted its terms: do so at https://huggingface.co/datasets/ILSVRC/imagenet-1k, then run `hf auth" in fault
    labelled = TASKS["imagenet1k"].with_settings({"labels": ["a", "b"]})
    assert "ILSVRC/imagenet-1k" in faults_of(lambda: labelled.load(cache_dir=tmp_path))[0]


# --- the registry -----------------------------------------------------------------------------------------------------


def test_tasks_import_nothing_but_numpy_when_they_are_discovered():
    """transformers, which the package imports, has Pillow loaded where it is installed: so the files are read."""
    known = sys.stdlib_module_names | {"numpy", "snnk_peft", "data"}
    files = {file for package in (snnk_peft.tasks, data) for file in Path(package.__file__).parent.glob("*.py")}
    assert len(files) > 30
    for file in files:
        for node in ast.parse(file.read_text()).body:
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {str(name).partition(".")[0] for name in modules} <= known, f"{file.name}, line {node.lineno}"
            assert "pickle" not in modules, file.name


def test_image_tasks_are_consistent(tmp_path: Path):
    for name in LAYOUTS:
        task = settled(name, next(iter(LAYOUTS[name].values()))(tmp_path / name, PICTURES[name]()))
        assert task.name == name
        assert task.metrics == ("accuracy",)
        assert hash(task) == hash(dataclasses.replace(task))
        assert task.num_labels == len(set(task.label_names))
        assert task.problem_type == "single_label_classification"
        ids = np.arange(task.num_labels)
        assert task.compute(np.eye(task.num_labels), ids)["score"] == 1.0
        assert task.check({"train_file": None, **task.inferred}) == []
        assert "set task=table" in task.check({"train_file": "x.csv"})[0]
        assert isinstance(task, ImageFolderTask) == bool(task.inferred)


# --- real files -------------------------------------------------------------------------------------------------------


def test_real_cifar10_batch(shared_dir: Path):
    file = shared_dir / "data/cifar10/cifar-10-python-first4000.tar.xz"
    found = TASKS["cifar10"].load(file, splits=["train"])["train"]
    assert len(found) == 4000
    assert found["label"][:8].tolist() == [6, 9, 9, 4, 1, 1, 2, 7]
    with tarfile.open(file) as archive:
        stream = archive.extractfile("cifar-10-batches-py/data_batch_1")
        assert stream is not None
        truth = pickle.load(stream, encoding="latin1")  # the file is trusted here
    assert found["label"].tolist() == truth["labels"]
    for index in (0, 1234, 3999):
        expected = truth["data"][index].reshape(3, 32, 32).transpose(1, 2, 0)
        assert np.array_equal(np.asarray(found.picture(index)), expected)


def test_real_mnist(shared_dir: Path):
    found = TASKS["mnist"].load(shared_dir / "data/mnist")
    assert {split: len(images) for split, images in found.items()} == {"train": 60000, "test": 10000}
    assert found["train"]["label"][:5].tolist() == [5, 0, 4, 1, 9]
    assert np.bincount(found["test"]["label"]).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    # Every pixel: the mean and deviation that the set is known for.
    pixels = np.stack([np.asarray(found["train"].picture(at)) for at in range(60000)]) / 255
    assert (round(pixels.mean(), 4), round(pixels.std(), 4)) == (0.1307, 0.3081)


def test_real_imagenet_pictures(shared_dir: Path, tmp_path: Path):
    source = shared_dir / "data/imagenet/one_per_class_256"
    for split in ("train", "val"):
        (tmp_path / split).symlink_to(source)
    task = settled("imagenet1k", tmp_path)
    assert task.num_labels == 100
    found = task.load()
    assert found["train"]["label"].tolist() == list(range(100))
    assert all(min(found["validation"].picture(at).size) > 30 for at in range(100))
    assert "none can be held back" in faults_of(lambda: load("image_folder", source))[0]
