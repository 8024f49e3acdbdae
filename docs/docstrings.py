"""A griffe extension: docstrings, which say `Example:` here, as griffe reads Google style."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class Examples(griffe.Extension):
    """`Example:` would become a box in which `>>>` quotes; `Examples:` shows Python."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that is read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub("Examples:", obj.docstring.value)
