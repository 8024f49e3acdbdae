"""Three tasks of the Long Range Arena (Tay et al. 2021) whose tokens are bytes or pixels, each plus 1.

lra_text: byte-level IMDb reviews, cut to 4000 bytes: is a review positive? (Maas et al. 2011). Files as for task imdb.
Every tenth review of each class is held out of train (2500 of 25000), as there is no official validation split.

lra_image: grey CIFAR-10, read pixel by pixel: 1024 tokens, 10 classes (Krizhevsky 2009). Files as for task cifar10,
images of 32 x 32 pixels. A token is the grey value (0.299 R + 0.587 G + 0.114 B, rounded). Every tenth training image,
counted per class in the order of the files, is held out.

lra_retrieval: do two papers cite each other? Byte-level ACL Anthology pairs, 4000 bytes each. Files:
new_aan_pairs.{train,eval,test}.tsv without a header; columns label (0 or 1, possibly 0.0 or 1.0), id1, id2, text1,
text2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from data import TASKS, Sequences, SequenceTask, TsvLayout
from data._tsv import read_tsv
from data.base_sequence import byte_tokens, with_validation
from data.cifar import CIFAR10, PIXELS, SIDE
from data.imdb import data_files
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Images
from snnk_peft.tasks._files import MAX_FAULTS, capped
from snnk_peft.tasks.base_image import UnreadableImageError, converted

TEXT_LENGTH = 4000  # bytes of a review, and of each paper
HELD_OUT_EVERY = 10
PAIRS = {split: f"new_aan_pairs.{name}.tsv" for split, name in (("train",) * 2, ("validation", "eval"), ("test",) * 2)}


def read_reviews(path: Path | None, wanted: Mapping[str, int | None]) -> dict[str, Sequences]:
    """Read the splits of the official files; the archive is unpacked once, in memory."""
    assert path is not None
    reviews, missing = data_files(path, {"train" if split == "validation" else split for split in wanted})
    faults = [f"{path}: {name} is empty; expected a review" for _, _, name, text in reviews if not text] + missing
    examples = ((part, label, byte_tokens(text, TEXT_LENGTH)) for part, label, _, text in reviews)
    found = with_validation(examples, HELD_OUT_EVERY)
    if "validation" in wanted and not faults and not len(found["validation"]):
        faults.append(f"{path}: fewer than {HELD_OUT_EVERY} training reviews per class leave none for validation")
    if faults:
        raise ConfigError(faults[:MAX_FAULTS])
    return {split: found[split] for split in wanted}


def read_images(path: Path | None, wanted: Mapping[str, int | None]) -> dict[str, Sequences]:
    """Read the splits of any layout; an archive is unpacked once, in memory."""
    assert path is not None
    parts = CIFAR10.read(path, list(dict.fromkeys("test" if split == "test" else "train" for split in wanted)))
    faults: list[str] = []
    found = with_validation(_examples(parts, faults), HELD_OUT_EVERY)
    faults += [f"{path} holds no image for the {split} split" for split in wanted if not len(found[split])]
    if faults:
        raise ConfigError(capped(faults, path))
    return {split: found[split] for split in wanted}


def _examples(parts: Mapping[str, Images], faults: list[str]) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield ("train" or "test", class id, tokens (1024,)) per image; append the faults of others to `faults`."""
    for part, images in parts.items():
        for index, label in enumerate(images["label"].tolist()):
            try:
                yield part, label, byte_tokens(_grey(images, index).tobytes(), PIXELS)
            except UnreadableImageError as error:
                faults.append(str(error))


def _grey(images: Images, index: int) -> np.ndarray:
    """Return the grey values of an image, (1024,) uint8."""
    image = images.picture(index)
    if image.size != (SIDE, SIDE):
        raise UnreadableImageError(
            f"{images.name(index)}: image of {image.size[0]} x {image.size[1]} pixels; expected {SIDE} x {SIDE}"
        )
    colours = np.asarray(converted(image, 3)).reshape(PIXELS, 3).T
    return (np.array([0.299, 0.587, 0.114]) @ colours + 0.5).astype(np.uint8)


class _PairLayout(TsvLayout):
    """A layout with numeric labels, of which only 0 and 1 are valid."""

    def parse_label(self, cell: str) -> int:
        """Return 0 or 1."""
        number = super().parse_label(cell)
        if number not in (0, 1):
            raise ConfigError(f"label is {cell}; expected 0 or 1")
        return int(number)


_PAIR_LAYOUT = _PairLayout(
    text=("text1", "text2"), label="label", label_range=(0.0, 1.0), header=("label", "id1", "id2", "text1", "text2")
)


def read_pairs(path: Path | None, wanted: Mapping[str, int | None]) -> dict[str, Sequences]:
    """Read the splits of the official files."""
    assert path is not None
    missing = [str(path / PAIRS[split]) for split in wanted if not (path / PAIRS[split]).is_file()]
    if missing:
        raise ConfigError([f"{file} does not exist; expected {', '.join(PAIRS.values())}" for file in missing])
    return {split: _read_pairs(path / PAIRS[split]) for split in wanted}


def _read_pairs(file: Path) -> Sequences:
    rows = read_tsv(file, _PAIR_LAYOUT)
    first, second = ([byte_tokens(text.encode(), TEXT_LENGTH) for text in column] for column in rows.texts)
    return Sequences((first, second), np.array(rows.labels).astype(int))


for _task in (
    SequenceTask(
        name="lra_text",
        read=read_reviews,
        vocab_size=257,
        max_length=TEXT_LENGTH,
        label_names=("negative", "positive"),
    ),
    SequenceTask(name="lra_image", read=read_images, vocab_size=257, max_length=PIXELS, label_names=CIFAR10.classes),
    SequenceTask(
        name="lra_retrieval",
        read=read_pairs,
        vocab_size=257,
        max_length=TEXT_LENGTH,
        label_names=("unrelated", "citing"),
        documents=2,
    ),
):
    TASKS.register(_task.name, _task)
