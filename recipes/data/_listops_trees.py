"""Random ListOps expressions with their values, one batch of trees at a time.

The distribution is that of Nangia & Bowman (2018) with the sizes of Long Range Arena: a node at depth 1 to
max_depth - 1 is an operator with probability 1/4 and a digit otherwise, at max_depth always a digit; an operator is one
of MAX, MIN, MED, SM and has 2 to max_args arguments, both uniform; digits are uniform. Whole trees whose length falls
outside the bounds are dropped. MED is the median rounded down, SM the sum modulo 10.

Length counts tokens: one for a digit, one for an operator with its opening bracket ("[MAX"), one for "]". The
parentheses around everything in the official files are not tokens.

A tree is stored in arrays level by level: the children of a level's nodes are adjacent, in order, in the next level.
Sizes and values are summed from the leaves up, positions from the root down, so no Python loop runs over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WORDS = ("<pad>", *map(str, range(10)), "[MAX", "[MIN", "[MED", "[SM", "]")
"""Token id -> word; 0 is padding."""
DIGIT, OPERATOR, END = 1, 11, 15
"""Ids of the digit 0, of the first operator and of the closing bracket."""
OPERATOR_PROBABILITY = 0.25


@dataclass
class Level:
    """All nodes of one depth.

    Args:
        tree: (n,) index of the tree that a node belongs to.
        parent: (n,) index of its parent in the level above.
        arguments: (n,) number of its children; 0 for a digit.
    """

    tree: np.ndarray
    parent: np.ndarray
    arguments: np.ndarray


def draw_expressions(
    rng: np.random.Generator, trees: int, min_length: int, max_length: int, max_depth: int, max_args: int
) -> list[tuple[np.ndarray, int]]:
    """Draw `trees` trees; return (tokens, value) of those with min_length <= length <= max_length, in order.

    Args:
        rng: source of randomness.
        trees: number of trees to draw; with the official sizes, about one in fifty is kept.
        min_length: minimum number of tokens.
        max_length: maximum number of tokens.
        max_depth: nodes on the longest path from the root to a digit.
        max_args: maximum number of arguments of an operator.

    Returns:
        tokens: (length,) uint8 ids of `WORDS`; value: 0 to 9.
    """
    levels = _shapes(rng, trees, max_depth, max_args)
    lengths = np.zeros(trees, int)
    for level in levels:
        lengths += np.bincount(level.tree, 1 + (level.arguments > 0), minlength=trees).astype(int)
    kept = (lengths >= min_length) & (lengths <= max_length)
    levels, lengths = _only(levels, kept), lengths[kept]
    if not len(lengths):
        return []
    tokens = [
        np.where(
            level.arguments > 0,
            rng.integers(OPERATOR, END, len(level.tree)),
            rng.integers(DIGIT, OPERATOR, len(level.tree)),
        )
        for level in levels
    ]
    sizes, values = _from_the_leaves(levels, tokens)
    ends = np.cumsum(lengths)
    flat = _written(levels, tokens, sizes, ends - lengths, int(ends[-1]))
    return list(zip(np.split(flat, ends[:-1]), values.tolist(), strict=True))


def _shapes(rng: np.random.Generator, trees: int, max_depth: int, max_args: int) -> list[Level]:
    levels: list[Level] = []
    tree = parent = np.arange(trees)
    for depth in range(1, max_depth + 1):
        if not len(tree):
            break
        operator = rng.random(len(tree)) < OPERATOR_PROBABILITY if depth < max_depth else np.zeros(len(tree), bool)
        arguments = np.where(operator, rng.integers(2, max_args + 1, len(tree)), 0)
        levels.append(Level(tree, parent, arguments))
        parent = np.repeat(np.arange(len(tree)), arguments)
        tree = tree[parent]
    return levels


def _only(levels: list[Level], kept: np.ndarray) -> list[Level]:
    """Return the levels of only the kept trees, renumbered."""
    number = np.cumsum(kept) - 1
    above = number
    result = []
    for level in levels:
        stays = kept[level.tree]
        if not stays.any():
            break
        result.append(Level(number[level.tree[stays]], above[level.parent[stays]], level.arguments[stays]))
        above = np.cumsum(stays) - 1
    return result


def _from_the_leaves(levels: list[Level], tokens: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the number of tokens of every node's subtree, level by level, and the values of the roots."""
    sizes: list[np.ndarray] = []
    below_size = below_value = np.zeros(0, int)
    for level, own in zip(reversed(levels), reversed(tokens), strict=True):
        operator = level.arguments > 0
        size, value = np.ones(len(own), int), own - DIGIT
        if operator.any():
            count = level.arguments[operator]
            start = np.cumsum(count) - count
            # Sorted within each group of siblings: the ends are minimum and maximum, the middle is the median.
            ordered = below_value[np.lexsort((below_value, np.repeat(np.arange(len(count)), count)))]
            median = (ordered[start + (count - 1) // 2] + ordered[start + count // 2]) // 2
            results = (ordered[start + count - 1], ordered[start], median, np.add.reduceat(below_value, start) % 10)
            value[operator] = np.choose(own[operator] - OPERATOR, results)
            size[operator] = 2 + np.add.reduceat(below_size, start)
        below_size, below_value = size, value
        sizes.insert(0, size)
    return sizes, below_value


def _written(
    levels: list[Level], tokens: list[np.ndarray], sizes: list[np.ndarray], starts: np.ndarray, total: int
) -> np.ndarray:
    """Write all trees one after the other, each in reading order."""
    flat = np.zeros(total, np.uint8)
    place = starts
    for depth, (level, own, size) in enumerate(zip(levels, tokens, sizes, strict=True)):
        if depth:
            # After the parent's own token and all earlier siblings.
            before = np.cumsum(size) - size
            first = np.r_[True, level.parent[1:] != level.parent[:-1]]
            elder = before - before[first][np.cumsum(first) - 1]
            place = place[level.parent] + 1 + elder
        flat[place] = own
        flat[(place + size - 1)[level.arguments > 0]] = END
    return flat
