"""MkDocs hooks. Formulas become MathML; tables come from registries, options and stored results at every build.

A line `<!-- table: NAME -->` on a page becomes what `TABLES[NAME]` returns, from `reference_tables.py` or
`result_tables.py` beside this file. The errata and the pages of the studies are written as a whole.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import reference_tables
import result_tables

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

TABLES = {**reference_tables.TABLES, **result_tables.TABLES}
TABLE = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
FORMULA = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def pages() -> dict[str, str]:
    """Pages that are written as a whole: path below docs/ -> Markdown."""
    return {"errata.md": reference_tables.errata(), **result_tables.study_pages()}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and the pictures that they show."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    for path, picture in result_tables.pictures().items():
        files.append(File.generated(config, path, content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables in, and $$...$$ outside code as MathML, which browsers render without a script."""
    pieces = CODE.split(TABLE.sub(lambda found: TABLES[found[1]](), markdown))
    pieces[::2] = [FORMULA.sub(lambda found: as_mathml(found[1]), piece) for piece in pieces[::2]]
    return "".join(pieces)


def as_mathml(formula: str) -> str:
    """A displayed formula in LaTeX as MathML."""
    from latex2mathml.converter import convert

    return str(convert(formula.strip(), display="block"))
