"""Write digests: of tensors into a weights file, of entries and weights into a config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from snnk_peft.digests import (
    DIGESTS,
    NOT_FINITE,
    WEIGHTS_END,
    entries_of,
    is_finite,
    open_tensors,
    read_digests,
    saved_digests,
    tensor_digest,
    value_digest,
)
from snnk_peft.saved_folder import whole_file


def stamp_together(config: Path, free: Collection[str], weights: Iterable[Path], before: Path | None = None) -> None:
    """Write digests into files that were saved together, tying them to each other.

    Args:
        config: a JSON file.
        free: entries without digests, which users may edit.
        weights: safetensors files.
        before: the config that this one replaces. If its entries are equal, the other weights files it names are
            variants (float16) of the same model.
    """
    ties = {path.name: stamp_tensors(path) for path in sorted(weights)}
    stamp_entries(config, free, ties)
    others = {} if before is None else _ties_of_the_same(config, before)
    if others:
        stamp_entries(config, free, others | ties)


def _ties_of_the_same(config: Path, before: Path) -> dict[str, str]:
    new, old = (read_digests(path) for path in (config, before))
    new, old = ({name: value for name, value in each.items() if name != "dtype"} for each in (new, old))
    own, theirs = ({name: v for name, v in each.items() if not name.endswith(WEIGHTS_END)} for each in (new, old))
    return {name: v for name, v in old.items() if name.endswith(WEIGHTS_END)} if own == theirs else {}


def stamp_tensors(path: Path) -> str:
    """Write the digests of a safetensors file's tensors into its header unless it has them.

    Return their joint digest.
    """
    with open_tensors(path) as file:
        if (saved := saved_digests(file)) is not None:
            return value_digest(saved)
        digests = {key: tensor_digest(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 - no mapping
        digests |= {key: digests[key] + NOT_FINITE for key in digests if not is_finite(file.get_tensor(key))}
    with whole_file(path) as temporary:
        with path.open("rb") as source, temporary.open("wb") as target:
            header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
            header["__metadata__"] = {**header.get("__metadata__", {}), DIGESTS: json.dumps(digests)}
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)  # tensors stay aligned
            target.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(source, target, 1 << 20)
        shutil.copymode(path, temporary)
    return value_digest(digests)


def stamp_entries(path: Path, free: Collection[str], weights: Mapping[str, str] | None = None) -> None:
    """Write the digests of a JSON file's entries, and of the files saved with it, by name, into the file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    digests = {key: value_digest(value) for key, value in entries_of(content, {*free, DIGESTS}).items()}
    content[DIGESTS] = digests | dict(weights or {})
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
