"""Imports packages of the optional `recipes` extra when they are first needed, with a remedy when one is absent."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str) -> ModuleType:
    """Import `module` (dotted name); ImportError with the pip command if its package is not installed."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ImportError(
            f"this needs the package {package!r}, which is not installed: pip install snnk-peft[recipes]"
        ) from error
