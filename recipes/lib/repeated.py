"""Examples that are trained on and scored as well, or that have two labels: what is said about them, with counts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from snnk_peft.repeats import label_note, repeat_note

MOST_PICTURES = 100_000
"""Pictures whose content is compared; reading those of larger sets takes longer than a note is worth."""


def repeat_notes(task: Any, train: Any, splits: Mapping[str, Any], labelled: bool = True) -> list[str]:
    """Sentences about examples of `splits` that are among those of `train`, and about examples with two labels.

    Args:
        task: of texts or of pictures, which are compared by their content.
        train: the examples that are fitted.
        splits: name -> the examples that are scored.
        labelled: whether the labels of `train` mean something.
    """
    every = {"train": train, **splits}
    number = sum(map(len, every.values()))
    if task.modality == "image" and number > MOST_PICTURES:
        return [
            f"{number:,} pictures were not compared with each other (up to {MOST_PICTURES:,} are): whether some that "
            "are scored were trained on is not known"
        ]
    keys = {name: _keys(task, rows) for name, rows in every.items()}
    found = [repeat_note(name, keys[name], "train", keys["train"]) for name in splits]
    if labelled and task.label_names is not None:
        labels = [tuple(label) if isinstance(label, list) else int(label) for label in train["label"][:]]
        found.append(label_note("train", keys["train"], labels))
    return [note for note in found if note is not None]


def _keys(task: Any, rows: Any) -> list[Hashable]:
    if task.modality == "image":
        digests = [rows.digest(index) for index in range(len(rows))]
        return [(index, None) if digest is None else digest for index, digest in enumerate(digests)]
    columns = [rows[name][:] for name in ("words", "sentence1", "sentence2") if name in rows.column_names]
    return [
        tuple(tuple(part) if isinstance(part, list) else part for part in row) for row in zip(*columns, strict=True)
    ]
