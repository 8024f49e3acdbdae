"""Tiny data sets of pictures in the layouts of their publishers: what tests of image tasks and their recipes read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from data import TASKS
from data.cifar import CIFAR10, CIFAR100
from PIL import Image

WNIDS = ("n01440764", "n02012849", "n03126707")
# The two cranes of ImageNet have one name.
NAMES = {"n01440764": "tench, Tinca tinca", "n02012849": "crane", "n03126707": "crane"}


@dataclass
class Pixels:
    """What is written: split -> (n, side, side[, 3]) uint8 and (n,) class ids, every class in every split."""

    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]


def draw(splits: tuple[str, str], classes: int, side: int = 32, colours: bool = True, per_class: int = 2) -> Pixels:
    """Pictures of noise; the second split has one per class."""
    rng = np.random.default_rng(0)
    labels = {split: np.tile(np.arange(classes), each) for split, each in zip(splits, (per_class, 1), strict=True)}
    shape = (side, side, 3) if colours else (side, side)
    images = {split: rng.integers(0, 256, (len(ids), *shape), np.uint8) for split, ids in labels.items()}
    return Pixels(images, labels)


def python2(value: Any) -> bytes:
    """A value as the cPickle of Python 2 and the numpy of 2009 wrote it (protocol 2), without memo."""
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(part) for item in value.items() for part in item) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(python2, value)) + b"e"
    if isinstance(value, str):
        return b"U" + bytes([len(value)]) + value.encode()
    if isinstance(value, (int, np.integer)):
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)
    content = value.tobytes()
    shape = b"".join(map(python2, value.shape)) + b"\x86"
    start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    return start + shape + dtype + b"\x89T" + struct.pack("<i", len(content)) + content + b"tb"


def pickled(value: Any) -> bytes:
    """A whole pickle."""
    return b"\x80\x02" + python2(value) + b"."


def rows(images: np.ndarray) -> np.ndarray:
    """(n, 3072): all red values, then green, then blue."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def png(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def write(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def class_folders(root: Path, data: Pixels, classes: tuple[str, ...], names: Mapping[str, str] | None = None) -> Path:
    """SPLIT/CLASS/NUMBER.png."""
    for split, images in data.images.items():
        for index, (image, label) in enumerate(zip(images, data.labels[split], strict=True)):
            write(root / (names or {}).get(split, split) / classes[label] / f"{index:04}.png", png(image))
    return root


def archive(folder: Path, kind: str = "gz") -> Path:
    """The folder as NAME.tar.KIND in a folder of its own, whose path is returned."""
    place = folder.parent / f"{folder.name}-{kind}"
    place.mkdir()
    with tarfile.open(place / f"{folder.name}.tar{kind and '.' + kind}", f"w:{kind}") as file:
        file.add(folder, folder.name)
    return place


def cifar10_python(root: Path, data: Pixels) -> Path:
    half = len(data.labels["train"]) // 2
    for name, split, part in (
        ("data_batch_1", "train", slice(half)),
        ("data_batch_2", "train", slice(half, None)),
        ("test_batch", "test", slice(None)),
    ):
        labels = data.labels[split][part]
        files = [f"{index}.png" for index in range(len(labels))]
        content = {"batch_label": name, "labels": list(labels), "data": rows(data.images[split][part])}
        write(root / "cifar-10-batches-py" / name, pickled({**content, "filenames": files}))
    write(root / "cifar-10-batches-py/batches.meta", pickled({"label_names": list(CIFAR10.classes), "num_vis": 3072}))
    return root / "cifar-10-batches-py"


def cifar10_binary(root: Path, data: Pixels) -> Path:
    for name, split in (("data_batch_1", "train"), ("test_batch", "test")):
        records = np.concatenate([data.labels[split].astype(np.uint8)[:, None], rows(data.images[split])], axis=1)
        write(root / f"cifar-10-batches-bin/{name}.bin", records.tobytes())
    return root / "cifar-10-batches-bin"


def cifar100_python(root: Path, data: Pixels) -> Path:
    for split, labels in data.labels.items():
        coarse = [label % 20 for label in labels]
        content = {"coarse_labels": coarse, "data": rows(data.images[split]), "fine_labels": list(labels)}
        write(root / "cifar-100-python" / split, pickled(content))
    return root / "cifar-100-python"


def cifar100_binary(root: Path, data: Pixels) -> Path:
    for split, labels in data.labels.items():
        ids = np.stack([labels % 20, labels], axis=1).astype(np.uint8)
        records = np.concatenate([ids, rows(data.images[split])], axis=1)
        write(root / f"cifar-100-binary/{split}.bin", records.tobytes())
    return root / "cifar-100-binary"


def idx(values: np.ndarray) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def mnist(root: Path, data: Pixels, suffix: str = ".gz") -> Path:
    for split, prefix in (("train", "train"), ("test", "t10k")):
        for name, values in (("images-idx3", data.images[split]), ("labels-idx1", data.labels[split].astype(np.uint8))):
            content = idx(values)
            write(root / f"{prefix}-{name}-ubyte{suffix}", gzip.compress(content) if suffix else content)
    return root


def kaggle_imagenet(root: Path, data: Pixels) -> Path:
    """Class folders of training pictures, flat validation pictures with a file of labels, and a file of names."""
    place = root / "ILSVRC/Data/CLS-LOC"
    class_folders(place, Pixels({"train": data.images["train"]}, data.labels), WNIDS)
    lines = [["ImageId", "PredictionString"]]
    for index, (image, label) in enumerate(zip(data.images["validation"], data.labels["validation"], strict=True)):
        name = f"ILSVRC2012_val_{index + 1:08}"
        write(place / f"val/{name}.JPEG", png(image))
        lines.append([name, f"{WNIDS[label]} 1 2 3 4 {WNIDS[0]} 5 6 7 8 "])
    with (root / "LOC_val_solution.csv").open("w", newline="") as file:
        csv.writer(file).writerows([lines[0], *reversed(lines[1:])])
    write(root / "LOC_synset_mapping.txt", "".join(f"{wnid} {name}\n" for wnid, name in NAMES.items()))
    return root


def shards(root: Path, data: Pixels, json_labels: bool = False) -> Path:
    """Two shards per split, as WebDataset lays them out."""
    root.mkdir(parents=True)
    for split, images in data.images.items():
        for number in range(2):
            with tarfile.open(root / f"pictures-{split}-{number:04}.tar", "w") as file:
                for index in range(number, len(images), 2):
                    label = int(data.labels[split][index])
                    told = json.dumps({"label": label, "filename": "x"}) if json_labels else f"{label}\n"
                    members = [("png", png(images[index])), ("json" if json_labels else "cls", told.encode())]
                    for kind, content in members:
                        info = tarfile.TarInfo(f"{index:06}.{kind}")
                        info.size = len(content)
                        file.addfile(info, io.BytesIO(content))
    return root


def hub_folder(root: Path, data: Pixels, image: str, label: str, names: tuple[str, ...]) -> Path:
    """A copy of a repository of the Hub: data/SPLIT-*.parquet, and the classes in the head of README.md."""
    import datasets

    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=list(names))})
    for split, images in data.images.items():
        columns = {
            image: [{"bytes": png(picture), "path": None} for picture in images],
            label: data.labels[split].tolist(),
        }
        (root / "data").mkdir(parents=True, exist_ok=True)
        file = root / f"data/{split}-00000-of-00001.parquet"
        datasets.Dataset.from_dict(columns, features=features).to_parquet(file)
    classes = "".join(f"          '{index}': '{name}'\n" for index, name in enumerate(names))
    write(
        root / "README.md",
        f"---\ndataset_info:\n  features:\n  - name: {image}\n    dtype: image\n  - name: {label}\n    dtype:\n"
        f"      class_label:\n        names:\n{classes}---\n",
    )
    return root


def hub_task(name: str, path: Path | str, **changes: Any) -> Any:
    """The task with its data set elsewhere."""
    task: Any = TASKS[name]
    return replace(task, hub=replace(task.hub, path=str(path), **changes))


def shard(path: Path, members: Mapping[str, bytes]) -> None:
    """A tar archive of these files, in their order."""
    with tarfile.open(path, "w") as file:
        for name, member in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(member)
            file.addfile(info, io.BytesIO(member))


KEPT = ("files", "archive", "shards", "hub")


def kept_as(kind: str, contents: Sequence[bytes], folder: Path, suffix: str = "png") -> Any:
    """Encoded pictures of cats as the training pictures of a task that keeps them in one of the ways of `KEPT`."""
    import datasets

    place, cat = folder / "x", CIFAR10.classes.index("cat")
    place.mkdir()
    if kind == "hub":
        features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=[*CIFAR10.classes])})
        cells = [{"bytes": content, "path": None} for content in contents]
        rows = datasets.Dataset.from_dict({"img": cells, "label": [cat] * len(cells)}, features=features)
        for split in ("train", "test"):
            rows.to_parquet(place / f"{split}.parquet")
        return hub_task("cifar10", place).load(cache_dir=folder / "cache")["train"]
    if kind == "shards":
        pairs = [{f"{n}.cls": str(cat).encode(), f"{n}.{suffix}": content} for n, content in enumerate(contents)]
        shard(place / "train.tar", {name: member for pair in pairs for name, member in pair.items()})
        return TASKS["imagenet1k"].with_settings({"dir": str(place)}).load(splits=["train"])["train"]
    for number, content in enumerate(contents):
        write(place / f"train/cat/{number}.{suffix}", content)
    return TASKS["cifar10"].load(archive(place) if kind == "archive" else place, splits=["train"])["train"]


# Task -> its pictures, and the layouts that it is published in: a name and what writes it, returning `data.dir`.
PICTURES: dict[str, Callable[[], Pixels]] = {
    "cifar10": lambda: draw(("train", "test"), 10),
    "cifar100": lambda: draw(("train", "test"), 100),
    "mnist": lambda: draw(("train", "test"), 10, side=28, colours=False),
    "imagenet1k": lambda: draw(("train", "validation"), 3, side=20),
    "image_folder": lambda: draw(("train", "validation"), 3, side=12),
}
LAYOUTS: dict[str, dict[str, Callable[[Path, Pixels], Path]]] = {
    "cifar10": {
        "python": cifar10_python,
        "python archive": lambda root, data: archive(cifar10_python(root, data)),
        "folder above": lambda root, data: cifar10_python(root, data).parent,
        "binary": cifar10_binary,
        "binary archive": lambda root, data: archive(cifar10_binary(root, data)),
        "class folders": lambda root, data: class_folders(root / "x", data, CIFAR10.classes),
        "class folders, archive": lambda root, data: archive(class_folders(root / "x", data, CIFAR10.classes), "xz"),
    },
    "cifar100": {
        "python": cifar100_python,
        "python archive": lambda root, data: archive(cifar100_python(root, data)),
        "binary": cifar100_binary,
        "class folders": lambda root, data: class_folders(root, data, CIFAR100.classes),
    },
    "mnist": {
        "packed": mnist,
        "unpacked": lambda root, data: mnist(root, data, ""),
        "both": lambda root, data: mnist(mnist(root / "raw", data), data, "").parent,
    },
    "imagenet1k": {
        "class folders": lambda root, data: class_folders(root, data, WNIDS, {"validation": "val"}),
        "Kaggle": kaggle_imagenet,
        "shards": lambda root, data: shards(root / "x", data),
        "shards with json": lambda root, data: shards(root / "x", data, json_labels=True),
    },
    "image_folder": {
        "train and val": lambda root, data: class_folders(root, data, ("a", "b", "b-c"), {"validation": "val"}),
        "train and test": lambda root, data: class_folders(root, data, ("a", "b", "b-c"), {"validation": "test"}),
        "shards": lambda root, data: shards(root / "x", data),
    },
}
