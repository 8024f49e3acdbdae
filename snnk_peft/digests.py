"""Detect damaged files: a digest of every tensor in a safetensors header, and of every entry of a JSON file.

    header of *.safetensors      __metadata__: {"snnk_digests": {tensor name: digest of dtype, shape and bytes}}
    (adapter_)config.json        "snnk_digests": {entry: digest of its value,
                                                  weights file: digest of the digests in its header}

A damaged or swapped value can then be named, and a config is tied to its weights. Digests stay with their file through
copies, caches and uploads. Files without them (older, or written by other programs) load with a note. This module is
part of the code file of every bundle; stamps.py writes the digests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from snnk_peft.errors import ConfigError
from snnk_peft.json_files import parse_json, read_json

DIGESTS = "snnk_digests"
WEIGHTS_END = ".safetensors"
NOT_FINITE = " not finite"  # after the digest of a tensor with NaN or infinity: only these need to be searched
SHOWN_FAULTS = 6  # named in a message; a wrong base model has hundreds
# Floating types that convert to any model's; 8-bit ones need scales, which none of our files have.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]

notes = logging.getLogger("snnk_peft")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return 32 hexadecimal digits that identify the dtype, shape and content of a tensor."""
    content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    # Processors have instructions for SHA-256, which makes it by far the fastest cryptographic hash.
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    digest.update(content)
    return digest.hexdigest()[:32]


def start_digests(file: Any) -> Future[dict[str, str]]:
    """Compute the digests of an open file's tensors by name, in a background thread."""
    tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(lambda: {key: tensor_digest(tensor) for key, tensor in tensors.items()})
    finally:
        pool.shutdown(wait=False)


def value_digest(value: Any) -> str:
    """Return 16 hexadecimal digits that identify a JSON value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def open_tensors(path: str | os.PathLike[str]) -> Any:
    """Open a safetensors file for reading; ConfigError, naming it, if it is not one."""
    if not str(path).endswith(WEIGHTS_END):
        raise ConfigError(f"{path}: only safetensors files are read; convert it, or save the model again")
    if not os.path.isfile(path):  # opening a pipe would block until someone writes
        raise ConfigError(f"{path} is no file; expected a safetensors file. Copy or download it again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} is truncated or corrupted ({error}); expected a whole safetensors file. Copy or download it again"
        ) from error


def layout_of(file: Any) -> Layout:
    """Return shape and dtype of each tensor in an open file; 8-bit floats and the like are read to get their dtype."""
    names = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
    found = {}
    for key in file.keys():  # noqa: SIM118 - no mapping
        part = file.get_slice(key)
        dtype = names.get(part.get_dtype())
        found[key] = (tuple(part.get_shape()), file.get_tensor(key).dtype if dtype is None else dtype)
    return found


def layout_faults(found: Layout, expected: Layout) -> list[str]:
    """List the tensors in both layouts that differ in shape, or whose dtype cannot be converted to the model's."""
    faults = []
    for key in sorted(found.keys() & expected.keys()):
        (shape, dtype), (wanted, kind) = found[key], expected[key]
        if shape != wanted:
            faults.append(f"{key} has shape {shape}; the model needs {wanted}")
        elif dtype not in FLOATS if kind.is_floating_point else dtype != kind:
            floats = "a floating type of 16 to 64 bits" if kind.is_floating_point else str(kind)
            faults.append(f"{key} has dtype {dtype}; the model needs {floats}")
    return faults


def content_faults(
    path: str | os.PathLike[str],
    file: Any,
    digests: Future[dict[str, str]] | None = None,
    config: Path | None = None,
) -> list[str]:
    """List the tensors of an open file that hold NaN or infinity, or differ from what was saved.

    `digests` come from `start_digests`, or None to compute them now; `config` is the JSON file that may name these
    weights.
    """
    saved, tied = saved_digests(file), None if config is None else _weights_in(config)
    keys, known = list(file.keys()), saved is not None or bool(tied)
    found, faults = (digests or start_digests(file)).result() if known else {}, []
    if not known:
        notes.warning("%s carries no digests of its tensors, so damaged values would not be noticed", path)
    for key in keys:
        if saved is None:
            finite = is_finite(file.get_tensor(key))
            found |= {key: found[key] + NOT_FINITE} if known and not finite else {}
        else:
            finite = saved.get(key) != found[key] + NOT_FINITE
            if finite and saved.get(key) != found[key]:
                faults.append(f"{key} is not what was saved: its digest differs. Copy or download the file again")
        if not finite:
            faults.append(f"{key} holds NaN or infinity; save the model from before its training diverged")
    faults += [f"{key} was saved in this file and is missing" for key in saved or () if key not in keys]
    return faults + ([] if config is None else _tie_faults(path, found if saved is None else saved, config, tied))


def _tie_faults(
    path: str | os.PathLike[str], digests: Mapping[str, str], config: Path, tied: Mapping[str, str] | None
) -> list[str]:
    """List the faults if the config was not saved with these weights."""
    if not tied:
        if digests and tied is not None:
            notes.warning("%s carries no digest of %s: whether they belong together is not known", config, path)
        return []
    remedy = f"Copy both from one folder, or save again; if it is meant, remove {DIGESTS!r} from {config.name}"
    name = Path(path).name
    if name not in tied:
        return [f"{config} was saved with {', '.join(sorted(tied))}, not with {name}. {remedy}"]
    if tied[name] != value_digest(digests):
        return [f"{config} was saved with other weights than those in {name}, or saving was interrupted. {remedy}"]
    return []


def _weights_in(config: Path) -> dict[str, str] | None:
    """Return the weights files named in a config, and their digests; None if there is no config."""
    named = {name: digest for name, digest in read_digests(config).items() if name.endswith(WEIGHTS_END)}
    return named if config.is_file() else None


def read_digests(config: Path) -> dict[str, str]:
    """Return the digests in a config; empty if it has none or cannot be read, which is reported elsewhere."""
    try:
        content = read_json(config)
    except ConfigError:
        content = None
    saved = content.get(DIGESTS) if isinstance(content, dict) else None
    return saved if isinstance(saved, dict) else {}


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all entries of a tensor are finite."""
    return tensor.dtype not in FLOATS or bool(tensor.isfinite().all())


def saved_digests(file: Any) -> Mapping[str, str] | None:
    """Return the digests in the header of an open file, by tensor."""
    text = (file.metadata() or {}).get(DIGESTS)
    if text is None:
        return None
    try:
        saved = parse_json(text, DIGESTS)
    except ConfigError:
        saved = None
    # Damaged digests match no tensor.
    whole = isinstance(saved, dict) and all(isinstance(digest, str) for digest in saved.values())
    return saved if whole else {}


def refuse(path: object, what: str, faults: list[str]) -> None:
    """Raise ConfigError about a file if there are faults, listing the first few."""
    if faults:
        more = [f"... and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []
        raise ConfigError([f"{path} {what}", *faults[:SHOWN_FAULTS], *more])


def entry_faults(content: Mapping[str, Any], saved: object, free: Collection[str] | None = None) -> list[str]:
    """List the entries of a JSON file that differ from their digests.

    Those in `free` are exempt; with None, further entries are allowed.
    """
    if not isinstance(saved, Mapping):
        return [f"{DIGESTS} is {saved!r}; expected the digests of the other entries"]
    found = entries_of(content, {*(free or ()), DIGESTS})
    faults = [
        f"{key} is {str(found[key])[:100]!r}, which is not what was saved" if key in found else f"{key} is missing"
        for key, digest in saved.items()
        if not key.endswith(WEIGHTS_END) and (key not in found or value_digest(found[key]) != digest)
    ]
    if free is not None:
        faults += [f"{key} was not saved" for key in found if key not in saved]
    return faults[:SHOWN_FAULTS]


def entries_of(content: Mapping[str, Any], free: Collection[str]) -> dict[str, Any]:
    """Return the entries by name; those of an inner mapping by "outer.inner"."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if key not in free:
            inner = isinstance(value, Mapping) and len(value) > 0
            found |= {f"{key}.{name}": entry for name, entry in value.items()} if inner else {key: value}
    return found
