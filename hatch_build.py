"""What PyPI shows of README.md: no picture, and words instead of links to files, since it has none of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"<!-- picture: begin -->\n.*?<!-- picture: end -->\n\n", re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]+\)")


class ReadmeOfPyPI(MetadataHookInterface):
    """Fills the dynamic field `readme` of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = LINK.sub(r"\1", PICTURE.sub("", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
