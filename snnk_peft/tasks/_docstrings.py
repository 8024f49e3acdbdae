"""Sentences of the docstrings in Python sources, and names cut out of them.

The sources are parsed with `ast`; nothing is imported or run. A cut name leaves a "…".
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GAP = "…"
MIN_WORDS, MAX_WORDS = 7, 48

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

Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ModuleDocs:
    """What one module says about itself.

    Attributes:
        sentences: of all module, class and function docstrings, in source order, code cut out of them.
        modules: lower-case names of the source files.
        definitions: lower-case names of all classes and functions, without underscores at the ends.
    """

    sentences: list[str]
    modules: frozenset[str]
    definitions: frozenset[str]


def read_module(files: list[Path]) -> ModuleDocs:
    """Parse the sources of one module; SyntaxError if a file is not valid for the running Python."""
    nodes = [node for file in files for node in _scopes(ast.parse(file.read_text(encoding="utf-8"), str(file)))]
    return ModuleDocs(
        sentences=[text for node in nodes for text in _sentences(ast.get_docstring(node, clean=False) or "")],
        modules=frozenset(file.stem.strip("_").lower() for file in files),
        definitions=frozenset(node.name.strip("_").lower() for node in nodes if not isinstance(node, ast.Module)),
    )


def _scopes(node: ast.AST) -> Iterator[Scope]:
    """The module, class or function itself and all those inside it, in source order."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # expressions, most of a tree, hold no definitions
            yield from _scopes(child)


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and gaps."""
    return _WORD.findall(text.lower())


def singulars(word: str) -> set[str]:
    """The word itself and what it could be the plural of: directories -> directory, classes -> class, files -> file."""
    return {word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}


def without(names: frozenset[str], sentence: str) -> str:
    """The sentence with every word that is one of the lower-case `names`, or a plural of one, replaced by "…"."""

    def cut(match: re.Match[str]) -> str:
        return match[0] if names.isdisjoint(singulars(match[0].lower())) else GAP

    return re.sub(rf"{GAP}(?:[\s.,/*-]*{GAP})+", GAP, _WORD.sub(cut, sentence))


def is_prose(text: str) -> bool:
    """Whether a sentence has 7 to 48 words, is mostly letters, starts like a sentence and is not mostly gaps."""
    found = words(text)
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return (
        MIN_WORDS <= len(found) <= MAX_WORDS
        and (text[0].isupper() or text[0] in f"{GAP}\"'(")
        and letters >= 0.85 * len(text)
        and 3 * text.count(GAP) <= len(found)
        and not re.search(r"[=<>{}\[\]|\\@#\t]", text)
    )


def _sentences(docstring: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        if re.search(r">>>|::|[-=+~]{3,}|\w =|\w {2,}\w", paragraph):  # doctest, literal block, table, code
            continue
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            yield _CODE.sub(GAP, _BULLET.sub("", sentence.strip()))
