"""Entities in tagged sentences (IOB2: B-PER I-PER O), and the F1 of finding them.

An entity is a type with a first and a last word. It begins at B-x, and at I-x behind O, behind another type or at the
beginning of a sentence, as in the evaluation of CoNLL 2003 (Tjong Kim Sang and De Meulder 2003).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_TAG = re.compile(r"O|[BI]-.+")


def is_iob(labels: Sequence[str]) -> bool:
    """Whether the labels are IOB2 tags: O, B-x and I-x, with at least one B-x."""
    return all(_TAG.fullmatch(label) for label in labels) and any(label.startswith("B-") for label in labels)


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first word, last word) of every entity of one sentence."""
    found: set[tuple[str, int, int]] = set()
    kind, first = "", 0
    for at, tag in enumerate([*tags, "O"]):
        if kind and tag != f"I-{kind}":
            found.add((kind, first, at - 1))
            kind = ""
        if not kind and tag != "O":
            kind, first = tag[2:], at
    return found


def entity_f1(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Harmonic mean of precision and recall over all entities of all sentences; 0 where no entity is right.

    Args:
        predictions: one list of tags per sentence.
        references: the true tags, as many.
    """
    pairs = [(entities(mine), entities(true)) for mine, true in zip(predictions, references, strict=True)]
    right = sum(len(mine & true) for mine, true in pairs)
    total = sum(len(mine) + len(true) for mine, true in pairs)
    return 2 * right / total if right else 0.0
