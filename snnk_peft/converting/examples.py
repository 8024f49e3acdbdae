"""The data given to `convert`, as batches of model inputs: texts, tables, images, or such batches.

A share of the examples is held out for the report.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from snnk_peft.arguments import in_words
from snnk_peft.bundling.report import text_room
from snnk_peft.calibrating.batches import checked, refuse_no_batches
from snnk_peft.converting.door import Opened
from snnk_peft.errors import ConfigError
from snnk_peft.tasks._files import require
from snnk_peft.tasks._image_folders import SUFFIXES
from snnk_peft.tasks._rows import read_dataset
from snnk_peft.tasks.base_image import FilePictures, converted
from snnk_peft.tasks.texts import Tokens, batches_by_length, checked_texts, drawn, read_texts

HELD_OUT, MOST_HELD_OUT = 0.15, 500  # share of all examples, and their maximum number
MOST_HELD_OUT_TOKENS = 100_000  # for texts: comparing takes two forward passes, slower than the fit if they are long
SIZE = 32  # examples per batch
LEAST = 8  # batches, if there are enough examples: whole batches are held out from the fit
# Examples read by default. Fits use some of them (pipeline.enough), but the recovery steps all: 700 of an all-MiniLM
# led to a cosine of .916 on 6,000 sentences and of .925 on 60,000.
TEXTS, IMAGES = 20_000, 640
FEW, CHARACTERS = 2500, 10_000_000  # long texts: as many as have this many characters in total, but at least FEW
ANSWERS = 1 << 25  # most logits of a batch: a language model has a vocabulary per token
LONG = 512  # tokens of a text, if neither model nor tokenizer specifies a length
EXPECTED = (
    "expected a list of texts or pairs, a file of them (.txt, .csv, .tsv, .jsonl, .parquet), a datasets.Dataset, "
    "images or a folder of them, or batches of model inputs as calibrate takes them"
)
Batches = list[dict[str, Any]]


@dataclass(frozen=True)
class Examples:
    """Batches to fit and batches to compare on, with their numbers of examples."""

    fitted: Batches
    held_out: Batches
    kind: str

    @property
    def sizes(self) -> dict[str, int]:
        return {"fitted": _count(self.fitted), "held_out": _count(self.held_out)}


def _count(batches: Batches) -> int:
    return sum(len(next(iter(batch.values()))) for batch in batches)


def examples_of(
    data: Any,
    door: Opened,
    text: str | Sequence[str] | None,
    samples: int | None,
    max_length: int | None,
    seed: int,
    size: int = SIZE,
    asked_by: str = "data",
) -> Examples:
    """Read the data.

    Args:
        data: see `snnk_peft.convert`.
        door: model and reader.
        text: column of the texts, or two of pairs; None for "text".
        samples: maximum number of examples, drawn by `seed`.
        max_length: tokens per text.
        seed: seed of the draw.
        size: maximum number of examples per batch.
        asked_by: the argument or setting that gave the data, for messages.

    Raises:
        ConfigError: unsupported or too few data, or no tokenizer or image processor.
    """
    found = _content(data, [text] if isinstance(text, str) else list(text or ["text"]), asked_by)
    if found is None:
        return _of_batches(data, door.model)
    kind, items = found
    if door.reader is None:
        raise ConfigError(f"{asked_by}: {kind}; {door.missing}")
    if (kind == "images") != (door.model.main_input_name == "pixel_values"):
        raise ConfigError(
            f"{asked_by}: {kind}; {type(door.model).__name__} reads {door.model.main_input_name}: expected "
            f"{'texts' if kind == 'images' else 'images'}"
        )
    chosen = drawn(len(items), samples or (IMAGES if kind == "images" else TEXTS), seed)
    if samples is None and kind == "texts":
        totals = accumulate(_characters(items[index]) for index in chosen)
        chosen = chosen[: max(FEW, sum(total <= CHARACTERS for total in totals))]
    if len(chosen) < 4:
        raise ConfigError(f"{asked_by} holds {len(chosen)} {kind}; expected four at least, and better a few hundred")
    held = min(MOST_HELD_OUT, max(1, round(HELD_OUT * len(chosen))))
    parts = chosen[held:], chosen[:held]
    if kind == "images":
        made = [_of_images(items, door, part, size) for part in parts]
    else:
        tokens = _tokens([items[index] for index in chosen], door, max_length)
        size = min(size, max(1, ANSWERS // (_words(door.model) * max(tokens.lengths))))
        held = max(1, sum(total <= MOST_HELD_OUT_TOKENS for total in accumulate(tokens.lengths[:held])))
        places = range(held, len(chosen)), range(held)
        made = [
            [tokens.batch(batch) for batch in batches_by_length(tokens.lengths, part, _size(len(part), size))]
            for part in places
        ]
    return Examples(made[0], made[1], kind)


def _characters(item: Any) -> int:
    return sum(map(len, item)) if isinstance(item, tuple) else len(item)


def _words(model: Any) -> int:
    """Return the number of answers per token of a language model, 1 for others."""
    head = model.get_output_embeddings()
    return 1 if head is None else int(head.weight.shape[0])


def _size(count: int, size: int) -> int:
    return min(size, max(1, count // LEAST))


def _content(data: Any, names: list[str], asked_by: str) -> tuple[str, Any] | None:
    """Return ("texts", texts or pairs), ("images", images), or None for batches."""
    if isinstance(data, (str, os.PathLike)):
        return _of_path(Path(data).expanduser(), names, asked_by)
    if hasattr(data, "column_names") or (hasattr(data, "columns") and hasattr(data, "iloc")):
        return _of_table(data, names)
    if isinstance(data, Sequence) and len(data):
        first = data[0]
        if isinstance(first, str) or _is_pair(first):
            return "texts", _checked_texts(data)
        if isinstance(first, Mapping) and first and any(isinstance(value, str) for value in first.values()):
            return "texts", _checked_texts([_of_row(row, names, number) for number, row in enumerate(data)])
        if _is_image(first):
            return "images", data
    return None


def _is_pair(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(each, str) for each in given)


def _is_image(given: Any) -> bool:
    return hasattr(given, "convert") and hasattr(given, "mode") and hasattr(given, "size")


def _of_row(row: Any, names: list[str], number: int) -> Any:
    if not isinstance(row, Mapping) or any(name not in row for name in names):
        keys = ", ".join(map(str, row)) if isinstance(row, Mapping) else in_words(row)
        raise ConfigError(f"data[{number}] holds {keys}; expected {', '.join(names)}: name the columns with text=")
    return tuple(row[name] for name in names) if len(names) > 1 else row[names[0]]


def _checked_texts(texts: Sequence[Any]) -> list[Any]:
    """Return the texts or pairs; raise ConfigError unless all are of one kind and none is empty."""
    pairs = _is_pair(texts[0])
    wrong = [
        number
        for number, each in enumerate(texts)
        if _is_pair(each) != pairs
        or not all(isinstance(part, str) and part.strip() for part in (each if pairs else [each]))
    ]
    if wrong:
        more = f" ({len(wrong)} such)" if len(wrong) > 1 else ""
        raise ConfigError(
            f"data[{wrong[0]}] is {repr(texts[wrong[0]])[:80]}{more}; expected a "
            f"{'pair of texts' if pairs else 'text'}, as the first entry is one"
        )
    return [tuple(each) for each in texts] if pairs else list(texts)


def _of_path(path: Path, names: list[str], asked_by: str) -> tuple[str, Any]:
    if path.is_dir() and not any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
        files = sorted(
            file.relative_to(path).as_posix()
            for file in path.rglob("*")
            if file.suffix.lower().removeprefix(".") in SUFFIXES and not file.name.startswith(".")
        )
        if not files:
            raise ConfigError(f"{asked_by} is {path}, a folder without images (*.{', *.'.join(SUFFIXES)}); {EXPECTED}")
        return "images", _Opening(FilePictures(path, files))
    if not path.exists() and not path.suffix:
        raise ConfigError(
            f"{asked_by} is {str(path)[:80]!r}, and there is no such file; {EXPECTED}. A text alone is [text]"
        )
    return "texts", _rows(read_texts(path, names, asked_by), names)


def _rows(columns: Mapping[str, Sequence[Any]], names: list[str]) -> list[Any]:
    return list(columns[names[0]]) if len(names) == 1 else list(zip(*(columns[name] for name in names), strict=True))


def _of_table(data: Any, names: list[str]) -> tuple[str, Any]:
    """Return the content of a datasets.Dataset or a DataFrame."""
    if isinstance(data, Mapping):
        raise ConfigError(f"data are the splits {', '.join(map(str, data))}; expected one of them: give it alone")
    columns = list(data.column_names if hasattr(data, "column_names") else data.columns)
    pictures = [name for name in ("image", "img") if name in columns]
    if pictures and names == ["text"] and "text" not in columns:
        return "images", data[pictures[0]]
    if hasattr(data, "iloc"):
        data = require("datasets").Dataset.from_pandas(data, preserve_index=False)
    return "texts", _rows(checked_texts(read_dataset("data", data, names)), names)


class _Opening(Sequence[Any]):
    """Image files, opened on access."""

    def __init__(self, pictures: FilePictures):
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: Any) -> Any:
        return self.pictures.open(index)


def _tokens(texts: Sequence[Any], door: Opened, max_length: int | None) -> Tokens:
    """Tokenise all texts."""
    reader, model = door.reader, door.model
    room = text_room(model.config)
    said = [door.max_length, getattr(reader, "model_max_length", None), room]
    longest = max_length or min([each for each in said if each is not None] + [LONG])
    if door.max_length is not None:  # the model truncates longer texts
        longest = min(longest, door.max_length)
    if room is not None and longest > room:
        raise ConfigError(f"max_length is {longest}; {type(model).__name__} has positions for {room} tokens")
    if isinstance(texts[0], tuple):
        columns = list(zip(*texts, strict=True))
    else:
        columns = [tuple(prompt + text for prompt, text in zip(cycle(door.prompts), texts, strict=False))]
    encoded = reader(*map(list, columns), truncation=True, max_length=longest, return_attention_mask=False)
    return Tokens({name: encoded[name] for name in reader.model_input_names if name in encoded}, reader)


def _of_images(images: Sequence[Any], door: Opened, chosen: Sequence[int], most: int) -> Batches:
    channels = getattr(door.model.config, "num_channels", 3)
    size = _size(len(chosen), most)
    batches = []
    for start in range(0, len(chosen), size):
        pictures = [converted(images[index], channels) for index in chosen[start : start + size]]
        batches.append({"pixel_values": door.reader(pictures, return_tensors="pt")["pixel_values"]})
    return batches


def _of_batches(data: Any, model: PreTrainedModel) -> Examples:
    """Split batches, given as for `calibrate`; every seventh is held out."""
    try:
        refuse_no_batches(data)
    except ConfigError as error:
        if isinstance(data, Mapping):  # the error says what to do
            raise
        raise ConfigError(f"data is {in_words(data)}; {EXPECTED}") from error
    with torch.random.fork_rng(devices=[]):  # a DataLoader draws a seed whenever it is read
        batches = [dict(batch) for batch in checked(model, data)]
    if len(batches) < 4:
        raise ConfigError(
            f"data holds {len(batches)} batches; expected four at least, one of them held out: smaller ones, or more"
        )
    held = set(range(len(batches) // 2 % 7, len(batches), 7)) or {0}
    parts: tuple[Batches, Batches] = ([], [])
    for number, batch in enumerate(batches):
        parts[number in held].append(batch)
    return Examples(*parts, "batches")
