"""YAML that is read: what is in it may be small, and what it stands for may not.

An alias (*name) repeats what its anchor (&name) marks, and repeated repetitions grow without end: nine lines can say a
list of 10⁹ words. Each node is counted as often as it is repeated, before anything is built.
"""

from __future__ import annotations

from typing import Any

import yaml

MOST = 100_000  # values, repeated ones counted each time


def load_yaml(text: str) -> Any:
    """The content of a YAML document.

    Raises:
        yaml.YAMLError: no YAML, nested too deeply, or more than `MOST` values.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return None
        if _count(root, {}) > MOST:
            raise yaml.YAMLError(f"more than {MOST:,} values, with repetitions (*name)")
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error
    except ValueError as error:  # a date that is none, a number of 5,000 digits
        raise yaml.YAMLError(str(error).split(";")[0]) from error


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Values in a node; `known` has those of others, 0 while one is counted."""
    if id(node) in known:
        if known[id(node)] == 0:
            raise yaml.YAMLError(f"a value that contains itself, line {node.start_mark.line + 1}")
        return known[id(node)]
    known[id(node)] = 0
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    known[id(node)] = found = 1 + sum(_count(part, known) for part in parts)
    return found
