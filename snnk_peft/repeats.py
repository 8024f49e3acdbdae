"""Warnings, with counts, about rows that occur in two sets, or with two labels.

A row is any hashable object, such as a text or a digest that `rows` computes from a batch. The score on fitted rows
says nothing about new ones, and no classifier can be right about a row with two labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch

LABELS = ("label", "labels")


def rows(batch: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a digest of every row of a batch, without padding and labels; none for a batch without tensors (n, ...)."""
    tensors = (value for name, value in batch.items() if name not in LABELS and isinstance(value, torch.Tensor))
    main = next((value.detach().cpu() for value in tensors if value.ndim >= 2), None)
    if main is None:
        return
    mask = batch.get("attention_mask")
    masked = isinstance(mask, torch.Tensor) and mask.shape == main.shape
    for index, row in enumerate(main):
        kept = row[mask[index].cpu().bool()] if masked else row  # type: ignore[index]
        yield hashlib.sha256(kept.contiguous().view(torch.uint8).numpy().tobytes()).digest()


def count_repeated(given: Iterable[Hashable], fitted: Set[Hashable]) -> int:
    """Count the given rows that are also among the fitted ones."""
    return sum(row in fitted for row in given)


def repeat_note(name: str, given: Iterable[Hashable], fitted_name: str, fitted: Iterable[Hashable]) -> str | None:
    """Return a sentence about rows that are both scored and fitted; None if there are none."""
    given = list(given)
    repeated = count_repeated(given, set(fitted))
    if not repeated:
        return None
    return (
        f"{repeated} of {len(given)} rows of {name} are also among those of {fitted_name}: their score is that of "
        "known rows. Leave them out of one of the two"
    )


def label_note(name: str, given: Iterable[Hashable], labels: Iterable[Hashable]) -> str | None:
    """Return a sentence about rows that occur with different labels; None if there are none."""
    found: dict[Hashable, list[Hashable]] = {}
    for row, label in zip(given, labels, strict=True):
        found.setdefault(row, []).append(label)
    several = [given_labels for given_labels in found.values() if len(set(given_labels)) > 1]
    if not several:
        return None
    return (
        f"{len(several)} of the {len(found)} different rows of {name} occur with more than one label "
        f"({sum(map(len, several))} of {sum(map(len, found.values()))} rows): no model is right about all of them. "
        "Correct the labels, or leave one of each"
    )
