"""MkDocs hooks. Formulas become MathML; tables come from registries, options and stored results at every build.

A line "*Here `make docs` puts the table `NAME`.*", which says so where pages are read as they are, becomes what
`TABLES[NAME]` returns, from `reference_tables.py` or `result_tables.py` beside this file; `written_pages.py` has the
pages that are written as a whole.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import reference_tables
import result_tables
import written_pages

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

TABLES = {**reference_tables.TABLES, **result_tables.TABLES, **written_pages.TABLES}
TABLE = re.compile(r"^\*Here `make docs` puts the table `(\w+)`\.\*$", re.MULTILINE)
FORMULA = re.compile(r"^\$\$(.+?)\$\$", re.DOTALL)
# Code and formulas; indented lines are code, too, of docstrings.
APART = re.compile(r"(^```.*?^```|^ {4}[^\n]*|`[^`\n]+`|\$\$.+?\$\$)", re.DOTALL | re.MULTILINE)
LETTER = "[A-Za-z\u0391-\u03a9\u03b1-\u03c9‖]"
SCRIPTS = (
    (
        re.compile(rf"_\{{([^{{}}]+)\}}|(?<=(?<![A-Za-z_]){LETTER})_([A-Za-z0-9]{{1,3}})(?![a-z0-9_])"),
        r"<sub>\1\2</sub>",
    ),
    (re.compile(r"\^\{([^{}]+)\}|\^\(([^()]+)\)|\^(-?\d+(?:\.\d+)?|-?[\w½])(?![\w^])"), r"<sup>\1\2\3</sup>"),
)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and the pictures that they show."""
    from mkdocs.structure.files import File

    for path, text in written_pages.pages().items():
        files.append(File.generated(config, path, content=text))
    for path, picture in written_pages.pictures().items():
        files.append(File.generated(config, path, content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables in; $$...$$ becomes MathML, which browsers render without a script, and x_i^{2} in a line HTML."""
    pieces = APART.split(TABLE.sub(lambda found: TABLES[found[1]](), markdown))
    pieces[::2] = [with_scripts(piece) for piece in pieces[::2]]
    pieces[1::2] = [FORMULA.sub(lambda found: as_mathml(found[1]), piece) for piece in pieces[1::2]]
    return "".join(pieces)


def with_scripts(text: str) -> str:
    """x_i, e^{x·y}, e^(x·y) and m^-½ with subscripts and superscripts."""
    for pattern, form in SCRIPTS:
        text = pattern.sub(form, text)
    return text


def as_mathml(formula: str) -> str:
    """A displayed formula in LaTeX as MathML."""
    from latex2mathml.converter import convert

    return str(convert(formula.strip(), display="block"))
