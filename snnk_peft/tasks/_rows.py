"""Rows of user tables, each with its line or row number.

CSV, TSV and JSON lines are read here, because `datasets` keeps no line numbers and pandas, which it uses, treats texts
such as "NA" as missing. Parquet files, `save_to_disk` folders and the Hub are read by `datasets`.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snnk_peft.errors import ConfigError
from snnk_peft.registry import did_you_mean
from snnk_peft.tasks import _cells as cell
from snnk_peft.tasks._files import capped, decode, listed, require

_CELLS = {".csv": ",", ".tsv": "\t"}
_NAMES = {",": "','", "\t": "tabs"}
_SEPARATORS = {"';'": ";", "tabs": "\t", "'|'": "|", "','": ","}
_WHOLE = "expected whole characters: write the file with ensure_ascii=False"
_JSON = (".jsonl", ".ndjson", ".json")


@dataclass
class Rows:
    """Columns of one table.

    Args:
        source: the file or split, for messages.
        unit: unit of `numbers`, "line" or "row".
        numbers: line of each row (the first line of a row that spans several), or its position; from 1.
        columns: name -> one value per row; None for a missing value.
        typed: whether numbers and texts are distinguished, unlike in CSV.
        class_names: column -> the source's own names for the ids in it.
        faults: (number, message) for rows that could not be read and are in no column.
    """

    source: str
    unit: str
    numbers: list[int]
    columns: dict[str, list[Any]]
    typed: bool = True
    class_names: dict[str, list[str]] = field(default_factory=dict)
    faults: list[tuple[int, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.numbers)

    def messages(self, faults: Sequence[tuple[int, str]]) -> list[str]:
        """Return messages for these and the reading faults, in order: up to ten, and the number of others."""
        numbered = sorted([*self.faults, *faults])
        return capped([f"{self.source}, {self.unit} {number}: {text}" for number, text in numbered], self.source)


def read_table(path: Path, columns: Sequence[str]) -> Rows:
    """Read the requested columns of a file (.csv, .tsv, .jsonl, .parquet) or a data set saved by `save_to_disk`.

    CSV and TSV: UTF-8, a header line, cells in double quotes if they contain separators, quotes or line endings.

    Raises:
        ConfigError: no such file, an unsupported format, a missing column, bytes that are not UTF-8, or no rows.
    """
    kind = path.suffix.lower()
    if path.is_dir():
        saved = _saved(path)
        if not hasattr(saved, "features"):
            raise ConfigError(
                f"{path} holds the splits {', '.join(saved)}; expected one table: give it as data.dataset"
            )
        rows = _of_dataset(str(path), saved, columns)
    elif not path.exists():
        raise ConfigError(f"{path} does not exist; expected a table (.csv, .tsv, .jsonl, .parquet)")
    elif kind in (*_CELLS, *_JSON, ".parquet") and not path.is_file():
        raise ConfigError(f"{path} is a pipe or a device; expected a regular file: write its content into one")
    elif kind in _CELLS:
        rows = _of_lines(path, columns, lambda lines: _cells(path, lines, _CELLS[kind], columns), typed=False)
    elif kind in _JSON:
        rows = _of_lines(path, columns, lambda lines: _objects(path, lines), typed=True)
    elif kind == ".parquet":
        rows = _of_dataset(str(path), _parquet(path), columns)
    else:
        raise ConfigError(f"{path}: files {kind or 'without a suffix'} are not read; expected {_kinds()}")
    return _checked(rows)


def read_split(name: str, config: str | None, split: str, columns: Sequence[str], cache_dir: str | None) -> Rows:
    """Read the requested columns of one split of a data set: a `save_to_disk` folder, or a name for `load_dataset`.

    Raises:
        ConfigError: no such data set, split or column, the Hub unreachable, or no rows.
    """
    hf, folder = require("datasets"), Path(name).expanduser()
    if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
        saved = _saved(folder)
        saved = {"train": saved} if hasattr(saved, "features") else saved
    else:
        try:
            saved = hf.load_dataset(name, config, cache_dir=cache_dir)
        except (ConnectionError, hf.exceptions.DatasetNotFoundError, ValueError) as error:
            raise ConfigError(
                f"data.dataset {name!r} ({config}) could not be loaded: {error}. Expected a folder of save_to_disk or "
                "a data set on the Hub; to work offline, give data.train_file"
            ) from error
    if split not in saved:
        held = "" if split == "train" else "; data.eval_split=train holds back a part of that"
        raise ConfigError(f"{name}: {did_you_mean('split', split, list(saved))}{held}")
    return read_dataset(f"{name}, split {split}", saved[split], columns)


def read_dataset(source: str, dataset: Any, columns: Sequence[str]) -> Rows:
    """Read the requested columns of a `datasets.Dataset`; ConfigError for a missing column or no rows."""
    return _checked(_of_dataset(source, dataset, columns))


def _of_lines(
    path: Path, columns: Sequence[str], parse: Callable[[list[str]], Iterator[tuple[int, Any]]], typed: bool
) -> Rows:
    """Build rows from `parse`, which yields (line, mapping of a row or message of a fault)."""
    lines, faults = decode(path)
    if faults:
        raise ConfigError(capped(faults, path))
    rows = Rows(str(path), "line", [], {name: [] for name in columns}, typed)
    names: dict[str, None] = {}
    for number, row in parse(lines):
        if isinstance(row, str):
            rows.faults.append((number, row))
            continue
        names.update(dict.fromkeys(row))
        rows.numbers.append(number)
        for name, values in rows.columns.items():
            values.append(row.get(name))
            if typed and cell.is_torn(values[-1]):
                rows.faults.append((number, f"{name} holds half of a surrogate pair (\\ud800 to \\udfff); {_WHOLE}"))
    if rows.numbers:
        _check_columns(rows.source, columns, list(names))
    return rows


def _cells(path: Path, lines: list[str], separator: str, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    first = next((line for line in lines if line.strip()), "")
    if (fault := _separator_fault(first, separator, columns)) is not None:
        raise ConfigError(f"{path}, line {lines.index(first) + 1}: {fault}")
    before_limit = csv.field_size_limit(max(1, max(map(len, lines), default=0), sum(map(len, lines)) + len(lines)))
    try:
        yield from _csv_rows(path, lines, separator)
    finally:
        csv.field_size_limit(before_limit)


def _separator_fault(line: str, separator: str, columns: Sequence[str]) -> str | None:
    """Return a message for a header whose columns are separated by another character."""
    mine = _header(line, separator)
    for name, other in _SEPARATORS.items():
        theirs = _header(line, other)
        if other != separator and len(theirs) > 1 and len(mine) < 2 and not set(columns) <= set(mine):
            return (
                f"the columns are separated by {name}; expected {_NAMES[separator]}. Write the table with those: "
                f"pandas.read_csv(path, sep={other!r}).to_csv(new_path, sep={separator!r}, index=False)"
            )
    return None


def _header(line: str, separator: str) -> list[str]:
    return [name.strip() for name in next(csv.reader([line], delimiter=separator))]


def _csv_rows(path: Path, lines: list[str], separator: str) -> Iterator[tuple[int, Any]]:
    reader = csv.reader([line + "\n" for line in lines], delimiter=separator, strict=True)
    header: list[str] | None = None
    before = 0
    try:
        for cells in reader:
            number, before = before + 1, reader.line_num
            if header is None and not any(name.strip() for name in cells):
                continue
            if header is None:
                header = [name.strip() for name in cells]
                if double := [name for name, count in Counter(header).items() if count > 1 and name]:
                    raise ConfigError(
                        f"{path}, line {number}: column {double[0]!r} occurs more than once; rename one of them"
                    )
            elif cells and len(cells) != len(header):
                yield number, f"{len(cells)} cells; expected {len(header)} ({listed(header)})"
            elif cells:
                yield number, dict(zip(header, cells, strict=True))
    except csv.Error as error:  # the rest cannot be read
        yield (
            before + 1,
            f"{error}; expected quotes around a cell as a whole, those inside it doubled, as csv.writer and "
            "DataFrame.to_csv write them",
        )


def _objects(path: Path, lines: list[str]) -> Iterator[tuple[int, Any]]:
    if (kind := _one_value(lines)) is not None:
        raise ConfigError(
            f"{path}, line 1: the file is one JSON {kind}; expected JSON lines, one object {{...}} per line, as "
            "DataFrame.to_json(path, orient='records', lines=True) writes them"
        )
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            yield number, f"not valid JSON ({error.msg} at position {error.pos + 1}); expected one object per line"
            continue
        except RecursionError:
            yield number, "brackets inside brackets, too deep to be read; expected one flat object per line"
            continue
        except ValueError as error:
            yield number, f"{str(error).split(';')[0]}; expected one object per line, keys once, numbers of few digits"
            continue
        yield number, row if isinstance(row, dict) else f"{type(row).__name__}; expected one object {{...}} per line"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        double = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"key {double!r} occurs more than once")
    return entries


def _one_value(lines: list[str]) -> str | None:
    """Describe a file that is a single JSON value (an array, or an object over several lines), or return None."""
    full = [line for line in lines if line.strip()]
    if not full or full[0].lstrip()[0] not in "[{":
        return None
    kind = "array" if full[0].lstrip()[0] == "[" else "object"
    try:
        first = json.loads(full[0])
    except json.JSONDecodeError:
        # Opened on the first line and closed on the last, which JSON lines rule out: there, each line is complete.
        last = full[-1].strip()
        return f"{kind} over several lines" if len(full) > 1 and last[-1] == "]}"[kind == "object"] else None
    except (ValueError, RecursionError):
        return None
    return kind if isinstance(first, list) and first and isinstance(first[0], dict) else None


def _parquet(path: Path) -> Any:
    hf, parquet, arrow = require("datasets"), require("pyarrow.parquet"), require("pyarrow")
    try:
        return hf.Dataset(parquet.read_table(path))  # from_parquet would keep a copy in the cache
    except arrow.ArrowException as error:
        raise ConfigError(f"{path}: not a readable Parquet file ({error})") from error


def _saved(folder: Path) -> Any:
    try:
        return require("datasets").load_from_disk(str(folder))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} is a folder, but not one that save_to_disk has written; expected that or {_kinds()}"
        ) from error


def _of_dataset(source: str, dataset: Any, columns: Sequence[str]) -> Rows:
    _check_columns(source, columns, dataset.column_names)
    try:
        values = {name: list(dataset[name]) for name in columns}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: a text is not UTF-8 ({error}); write the table again from its source") from error
    rows = Rows(source, "row", list(range(1, len(dataset) + 1)), values)
    for name in columns:
        feature: Any = dataset.features[name]
        if (names := getattr(getattr(feature, "feature", feature), "names", None)) is not None:
            rows.class_names[name] = list(names)
    return rows


def _check_columns(source: str, wanted: Sequence[str], present: Sequence[str]) -> None:
    faults = [f"{source}: {did_you_mean('column', name, list(present))}" for name in wanted if name not in present]
    if faults:
        named = "data.text, data.text_pair and data.label name the columns, text= in convert()"
        raise ConfigError([*faults[:-1], f"{faults[-1]}. {named}"])


def _checked(rows: Rows) -> Rows:
    """Check that there are rows, and that no column holds lists written as text."""
    if not rows.numbers:
        raise ConfigError(rows.messages([]) or f"{rows.source} holds no row; expected a header line and rows, or rows")
    written = [
        f"{rows.source}: the cells of {name!r} hold lists written as text, such as {cell.start(present[0])}; expected "
        "real lists (.jsonl, .parquet: DataFrame.to_json(path, orient='records', lines=True)), or words "
        "between spaces, labels between commas"
        for name, values in rows.columns.items()
        if (present := [value for value in values if not cell.missing(value)])
        and all(map(cell.is_written_list, present))
    ]
    if written:
        raise ConfigError(written)
    return rows


def _kinds() -> str:
    return f"a file {', '.join([*_CELLS, *_JSON[:1], '.parquet'])}"
