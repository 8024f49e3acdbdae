"""Docstrings of Python's standard library, classified by area: a real data set that comes with every Python.

Sentence -> one of six areas (text and formats, data types, operating system, ...). The sentences are read from the
*sources* of the running Python, so nothing is imported, downloaded or stored. Three rules keep the task honest:

1. Names that reveal the label are replaced by "…": those of the sentence's own module (with its submodules)
   and of every class and function in it, everything that looks like code, and the words of the areas' names (in every
   area, so that a gap reveals nothing). A function whose name is an ordinary word ("read", "close") gives nothing
   away: it is kept if the docstrings of most areas use the word.
2. The split is by module: no module (a package with its submodules counts as one) has sentences in both halves.
3. The draw depends only on the texts (order of their SHA-256), so a given Python version always gives the same data.

Example:
    >>> from snnk_peft.tasks.stdlib_docs import AREAS, load_sentences
    >>> train, test = load_sentences()
    >>> len(AREAS), {sentence.module for sentence in train} & {sentence.module for sentence in test}
    (6, set())
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from snnk_peft.errors import ConfigError

# Only modules that every distribution of CPython >= 3.10 ships and that no release up to 3.13 has removed.
AREA_MODULES: dict[str, str] = {
    "text and formats": "base64 bz2 codecs configparser copyreg csv dbm difflib encodings gettext gzip html json "
    "locale lzma netrc pickle pickletools plistlib quopri re shelve shlex sqlite3 string stringprep struct tarfile "
    "textwrap tomllib wave xml zipfile",
    "data types": "bisect calendar collections colorsys copy datetime decimal enum fractions functools graphlib heapq "
    "numbers operator pprint random reprlib secrets statistics types uuid weakref zoneinfo",
    "operating system": "argparse cmd curses filecmp fileinput fnmatch genericpath getopt getpass glob io linecache "
    "logging ntpath optparse os pathlib platform posixpath pty shutil stat tempfile tty",
    "concurrency": "asyncio concurrent contextvars multiprocessing queue sched selectors signal subprocess threading",
    "internet": "email ftplib http imaplib ipaddress mailbox mimetypes poplib smtplib socket socketserver ssl urllib "
    "webbrowser wsgiref xmlrpc",
    "language and tools": "__future__ abc ast bdb cProfile code codeop compileall contextlib ctypes dataclasses dis "
    "doctest importlib inspect keyword modulefinder opcode pdb pkgutil profile pstats py_compile pyclbr pydoc runpy "
    "site symtable sysconfig tabnanny timeit tokenize trace traceback tracemalloc typing unittest venv warnings "
    "zipapp zipimport",
}
AREAS: tuple[str, ...] = tuple(AREA_MODULES)

# The pure-Python parts of public modules, whose sentences are assigned to the public module.
PRIVATE_HALVES = {
    "_collections_abc": "collections",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "_strptime": "datetime",
    "_threading_local": "threading",
    "_weakrefset": "weakref",
    "sre_compile": "re",
    "sre_parse": "re",
}

# The words of the areas' names and closely related ones; a plural is treated as its singular.
KEYWORDS: str = "text string format data type operating system os concurrency concurrent internet network language tool"

ORDINARY_AREAS = 4  # a word used in the docstrings of this many areas is ordinary
MODULE_LIMIT = 150  # sentences: no single module may dominate its area
AREA_LIMIT = 900
TEST_SHARE = 0.3  # of an area's sentences; one module fills at most half of it
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
class Sentence:
    """One example.

    Attributes:
        text: the sentence, with give-away names replaced by "…".
        area: index into `AREAS`, the label.
        module: the public top-level module it comes from.
    """

    text: str
    area: int
    module: str


def load_sentences(stdlib: str | Path | None = None) -> tuple[list[Sentence], list[Sentence]]:
    """Read the data set from the sources of the standard library (about three seconds, no network).

    Args:
        stdlib: folder of the standard library's sources; by default, that of the running Python.

    Returns:
        (train, test), each in a fixed, shuffled order. No module and no sentence is in both.

    Raises:
        ConfigError: the folder lacks the sources (some minimal installations ship bytecode only).
    """
    root = Path(stdlib or sysconfig.get_path("stdlib"))
    docs = {
        area: {module: read_module(module_sources(root, module)) for module in modules.split()}
        for area, modules in AREA_MODULES.items()
    }
    if empty := [area for area, modules in docs.items() if not any(doc.sentences for doc in modules.values())]:
        raise ConfigError(
            f"no docstrings of the areas {', '.join(empty)} under {root}; expected the .py sources of the standard "
            f"library there. Install Python with its sources, or pass the folder that holds them"
        )
    ordinary = ordinary_words(docs)
    train: list[Sentence] = []
    test: list[Sentence] = []
    seen: set[tuple[str, ...]] = set()
    for label, area in enumerate(AREAS):
        sentences = {module: _of_module(module, doc, ordinary, label, seen) for module, doc in docs[area].items()}
        room = TEST_SHARE * sum(map(len, sentences.values()))
        halves: tuple[list[Sentence], list[Sentence]] = ([], [])
        for module in sorted(sentences, key=_digest):  # first fit: a module too large for the test half goes to train
            size = len(sentences[module])
            in_test = size <= room / 2 and len(halves[1]) + size <= room
            halves[in_test].extend(sentences[module])
        train += _shuffled(halves[0])[: round(AREA_LIMIT * (1 - TEST_SHARE))]
        test += _shuffled(halves[1])[: round(AREA_LIMIT * TEST_SHARE)]
    return _shuffled(train), _shuffled(test)


def module_sources(root: Path, module: str) -> list[Path]:
    """Return all source files of a public module under `root`: file or package, and private pure-Python parts."""
    files: list[Path] = []
    for name in [module, *(private for private, public in PRIVATE_HALVES.items() if public == module)]:
        files += sorted((root / name).rglob("*.py")) if (root / name).is_dir() else [root / f"{name}.py"]
    return [file for file in files if file.is_file() and not {"test", "tests"} & set(file.relative_to(root).parts)]


def ordinary_words(docs: Mapping[str, Mapping[str, ModuleDocs]]) -> frozenset[str]:
    """Return the words used in at least `ORDINARY_AREAS` of the areas of `docs` (area -> module -> docstrings)."""
    used = Counter[str]()
    for modules in docs.values():
        used.update({word for doc in modules.values() for sentence in doc.sentences for word in words(sentence)})
    return frozenset(word for word, areas in used.items() if areas >= ORDINARY_AREAS)


def give_away_names(module: str, docs: ModuleDocs, ordinary: frozenset[str]) -> frozenset[str]:
    """Return the lower-case names that no sentence of `module` may contain."""
    return frozenset(KEYWORDS.split()) | {module.strip("_").lower()} | docs.modules | (docs.definitions - ordinary)


def _of_module(
    module: str, docs: ModuleDocs, ordinary: frozenset[str], label: int, seen: set[tuple[str, ...]]
) -> list[Sentence]:
    """Return at most `MODULE_LIMIT` sentences of one module whose words are not in `seen`, and update `seen`."""
    names = give_away_names(module, docs, ordinary)
    sentences = []
    for text in (without(names, sentence) for sentence in docs.sentences):
        if is_prose(text) and (key := tuple(words(text))) not in seen:
            seen.add(key)
            sentences.append(Sentence(text, label, module))
    return _shuffled(sentences)[:MODULE_LIMIT]


def _shuffled(sentences: list[Sentence]) -> list[Sentence]:
    return sorted(sentences, key=lambda sentence: _digest(sentence.text))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class ModuleDocs:
    """Docstrings and names of one module.

    Attributes:
        sentences: sentences of all module, class and function docstrings, in source order, without code.
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
    """Yield the module, class or function itself and all those inside it, in source order."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # expressions, most of a tree, hold no definitions
            yield from _scopes(child)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and gaps."""
    return _WORD.findall(text.lower())


def singulars(word: str) -> set[str]:
    """Return the word and its possible singulars: directories -> directory, classes -> class, files -> file."""
    return {word, word.removesuffix("s"), word.removesuffix("es"), re.sub("ies$", "y", word)}


def without(names: frozenset[str], sentence: str) -> str:
    """Replace every word of a sentence that is one of the lower-case `names`, or a plural of one, by "…"."""

    def cut(match: re.Match[str]) -> str:
        return match[0] if names.isdisjoint(singulars(match[0].lower())) else GAP

    return re.sub(rf"{GAP}(?:[\s.,/*-]*{GAP})+", GAP, _WORD.sub(cut, sentence))


def is_prose(text: str) -> bool:
    """Return True if a sentence has 7 to 48 words, is mostly letters, starts like one and is not mostly gaps."""
    found_words = words(text)
    letters = sum(character.isalpha() or character.isspace() for character in text)
    return (
        MIN_WORDS <= len(found_words) <= MAX_WORDS
        and (text[0].isupper() or text[0] in f"{GAP}\"'(")
        and letters >= 0.85 * len(text)
        and 3 * text.count(GAP) <= len(found_words)
        and not re.search(r"[=<>{}\[\]|\\@#\t]", text)
    )


def _sentences(docstring: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        if re.search(r">>>|::|[-=+~]{3,}|\w =|\w {2,}\w", paragraph):  # doctest, literal block, table, code
            continue
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            yield _CODE.sub(GAP, _BULLET.sub("", sentence.strip()))
