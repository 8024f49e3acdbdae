"""Prose sentences of the docstrings under a folder of Python sources, with the names cut out that tell where they stand.

The sources are parsed with `ast`; nothing is imported or run. A cut name leaves a "…".
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

GAP = "…"
MIN_WORDS, MAX_WORDS = 7, 48

# Function words that are also names of functions somewhere; they tell nothing.
_ORDINARY = frozenset("all and any for from get has not set the with".split())
_CODE = re.compile(
    r"`[^`]*`"  # quoted code
    r"|\b\w+(?:\.\w+)*\([^()]*\)"  # a call
    r"|\b(?!(?:e\.g|i\.e)\b)[A-Za-z_]\w*(?:\.\w+)+"  # a dotted name
    r"|\b\w*_\w*\b"  # an underscored name
    r"|\b[a-z]+[A-Z]\w*|\b[A-Z]+[a-z]+[A-Z]\w*|\b[A-Z]{2,}[a-z]\w+"  # camelCase, CamelCase, JSONDecoder
)
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[A-Z\"'(])")
_BULLET = re.compile(r"^(?:[-*o+]|\d+[.)]|\([a-z0-9]\))\s+")
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose(files: list[Path], names: frozenset[str]) -> list[str]:
    """Sentences of all module, class and function docstrings of one module's files, in source order.

    Args:
        files: the module's sources.
        names: further words to cut out, in lower case; a plural counts as its singular. The names of the files and of
            every class and function in them are always cut, and so is everything that looks like code: quoted, dotted,
            underscored, CamelCase, or called.

    Returns:
        Sentences of 7 to 48 words that are mostly letters; one that is mostly gaps is left out.

    Raises:
        SyntaxError: a file is not valid Python for the running version.
    """
    trees = [ast.parse(file.read_text(encoding="utf-8"), str(file)) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names |= {file.stem.strip("_").lower() for file in files}
    defined = {node.name.lstrip("_").lower() for node in nodes if isinstance(node, _DEFINITIONS)}
    names |= {name for name in defined if len(name) > 2}  # shorter ones are ordinary words ("is", "of") or tell nothing
    names -= _ORDINARY
    texts = []
    for node in nodes:
        if isinstance(node, (ast.Module, *_DEFINITIONS)):
            texts += [_without(names, text) for text in _sentences(ast.get_docstring(node, clean=False) or "")]
    return [text for text in texts if _is_prose(text)]


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and gaps."""
    return _WORD.findall(text.lower())


def _sentences(docstring: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        if re.search(r">>>|::|[-=+~]{3,}|\w =|\w {2,}\w", paragraph):  # doctest, literal block, table, code
            continue
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            yield _BULLET.sub("", sentence.strip())


def _without(names: frozenset[str], sentence: str) -> str:
    def cut(match: re.Match[str]) -> str:
        word = match[0].lower()
        return GAP if word in names or word.removesuffix("s") in names else match[0]

    text = _WORD.sub(cut, _CODE.sub(GAP, sentence))
    return re.sub(rf"{GAP}(?:[\s.,/*-]*{GAP})+", GAP, text)


def _is_prose(text: str) -> bool:
    found = words(text)
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return (
        MIN_WORDS <= len(found) <= MAX_WORDS
        and (text[0].isupper() or text[0] in f"{GAP}\"'(")
        and letters >= 0.85 * len(text)
        and 3 * text.count(GAP) <= len(found)
        and not re.search(r"[=<>{}\[\]|\\@#\t]", text)
    )
