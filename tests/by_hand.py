"""What people do to the JSON files of a saved folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit_json(
    path: Path, change: Callable[[dict[str, Any]], object] | None = None, *, signed: bool = False, **entries: Any
) -> None:
    """Change a file, by a function of its content or entry by entry.

    Args:
        path: of the file.
        change: changes the content in place.
        signed: leave its digests there, which name the change themselves; without them, only its harm can be found.
        **entries: new values.
    """
    content = json.loads(path.read_text())
    if change is not None:
        change(content)
    content |= entries
    if not signed:
        content.pop("snnk_digests", None)
    path.write_text(json.dumps(content))
