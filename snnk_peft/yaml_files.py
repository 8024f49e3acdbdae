"""Bounded reading of YAML written by users: a few lines of aliases can expand to more than any memory holds."""

from __future__ import annotations

from typing import Any

import yaml

from snnk_peft.errors import ConfigError

MOST = 100_000
"""Values of a file, those behind aliases counted each time they are used."""


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text, called `where` in messages.

    Raises:
        ConfigError: invalid YAML, brackets nested too deeply, or aliases that expand to more than `MOST` values.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is not None and _size(root, {}) > MOST:
            raise ConfigError(f"{where}: its aliases stand for more than {MOST:,} values; write out what is meant")
        return None if root is None else loader.construct_document(root)
    except RecursionError as error:
        raise ConfigError(f"{where}: brackets inside brackets, too deep to be read") from error
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


def _size(node: Any, known: dict[int, int]) -> int:
    """Count the values in a node, following aliases; more than `MOST` for a node that contains itself."""
    if id(node) not in known:
        known[id(node)] = MOST + 1  # until counted
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
        known[id(node)] = 1 + sum(_size(part, known) for part in flat)
    return known[id(node)]
