"""One change of a folder at a time: of tensors, of JSON, of files, and between two saves. Seeded."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

VALUES = (None, True, False, -1, 0, 7, 10**9, 0.5, 1e30, "", "x", "relu", [], [3], {}, {"x": 1})
OVERSIZED = (10**7, 10**12, 2**31, 2**63, 10**30, -(10**30), 1e308, [10**12], [0] * 10_000, "x" * 100_000)
TENSORS = ("drop", "rename", "reshape", "retype", "poison", "swap", "extra tensor")
BYTES = ("flip", "cut", "append", "zero", "text", "cut text")
ENTRIES = ("value", "value", "value", "key", "no key", "new key", "oversized", "oversized", "oversized layers")
TEXTS = (
    "deep",
    "deep list",
    "digits",
    "not a number",
    "duplicate",
    "surrogate",
    "wrong type",
    "header digests",
    "huge base",
    "huge base",
)
FILES = ("extra file", "no file", "pipe", "folder", "loop", "socket", "device", "sparse", "long header")
MIXTURES = ("mixture", "mixture", "mixture", "mixture", "old config", "other config")
KINDS = (*TENSORS, *(f"unsigned {kind}" for kind in TENSORS if kind != "swap"), *BYTES, *ENTRIES, *TEXTS, *FILES)
KINDS += MIXTURES
SIZES = ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")


def jsons(folder: Path) -> list[Path]:
    """The config, the index of shards, a plan."""
    return sorted(path for path in folder.glob("*.json") if path.name != "generation_config.json")


def mutate(folder: Path, kind: str, chance: random.Random, other: Path) -> str:
    """Change one thing in the folder; returns what, or "" where there is no such thing.

    Args:
        folder: to be changed.
        kind: one of `KINDS`.
        chance: of every choice.
        other: the folder of another run with the same config.
    """
    weights, texts = sorted(folder.glob("*.safetensors")), jsons(folder)
    config = next((path for path in texts if "config" in path.name), texts[0] if texts else None)
    if kind in MIXTURES:
        return _mix(kind, folder, other, chance)
    if kind.removeprefix("unsigned ") in TENSORS:
        return _mutate_tensors(chance.choice(weights), kind, chance) if weights else ""
    if kind in ENTRIES:
        return _mutate_entry(config, kind, chance) if config else ""
    if kind in BYTES:
        found = [config] if "text" in kind else weights
        return _mutate_bytes(chance.choice(found), kind, chance) if found and found[0] else ""
    if kind == "header digests":
        return _mutate_header(chance.choice(weights), chance) if weights else ""
    if kind == "huge base":
        return _enlarge_base(config, other.parent.parent / "plain") if config and "adapter" in config.name else ""
    if kind in TEXTS:
        return _mutate_text(chance.choice(texts), kind, chance) if texts else ""
    return _mutate_file(kind, folder, chance.choice([*weights, *texts]), weights, chance)


def _mix(kind: str, folder: Path, other: Path, chance: random.Random) -> str:
    """What a copy of the wrong file, or an interrupted save, leaves: files of two runs."""
    weights = sorted(path.name for path in other.glob("*.safetensors"))
    config = next((path.name for path in jsons(other) if "config" in path.name), None)
    if config is None or not weights:
        return ""
    if kind == "mixture":
        taken = chance.sample(weights, chance.randint(1, len(weights)))
        if chance.random() < 0.3:  # their digests lost on the way
            for name in taken:
                save_file(load_file(other / name), folder / name, {"format": "pt"})
            return f"unsigned {', '.join(taken)} of another run"
    else:
        taken = [config] if kind == "other config" else [*weights, *(p.name for p in jsons(other) if "index" in p.name)]
    for name in taken:
        shutil.copyfile(other / name, folder / name)
    return f"{', '.join(taken)} of another run"


def _enlarge_base(config: Path, plain: Path) -> str:
    """The adapter names a base whose config asks for ten million layers."""
    base = shutil.copytree(plain, config.parent / "base")
    for path, entries in (
        (base / "config.json", {"num_hidden_layers": 10**7}),
        (config, {"base_model_name_or_path": str(base)}),
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return f"{config.name}: a huge base"


def _mutate_bytes(path: Path, kind: str, chance: random.Random) -> str:
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    if kind in ("text", "flip"):
        data[place] ^= 1 << chance.randrange(8)
    elif kind == "append":
        data += bytes(chance.randrange(1, 64))
    elif kind == "zero":
        data[place : place + 16] = bytes(len(data[place : place + 16]))
    else:
        del data[place:]
    path.write_bytes(bytes(data))
    return f"{path.name} at byte {place}"


def _mutate_file(kind: str, folder: Path, path: Path, weights: list[Path], chance: random.Random) -> str:
    if kind == "extra file":
        name = chance.choice(("adapter_model.bin", "pytorch_model.bin", "model.safetensors.index.json", ".x.1.tmp"))
        (folder / name).write_bytes(bytes(chance.randrange(256) for _ in range(50)))
        return name
    if kind in ("sparse", "long header"):
        if not weights:
            return ""
        path = chance.choice(weights)
        _grow(path, kind)
        return f"{path.name}: {kind}"
    exchange(path, kind)
    return f"{path.name} is {kind}"


def exchange(path: Path, kind: str) -> None:
    """Put something that is no file in the place of one."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            here = os.getcwd()
            os.chdir(path.parent)  # names of sockets are short
            try:
                made.bind(path.name)
            finally:
                os.chdir(here)


def _grow(path: Path, kind: str) -> None:
    """A header that claims more than there is, or a quarter of a gigabyte of zeros that takes no room."""
    if kind == "long header":
        path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])
        return
    with safe_open(path, "pt") as file:
        key = sorted(file.keys())[0]
        metadata = file.metadata()
    header = {"__metadata__": metadata, key: {"dtype": "F32", "shape": [1 << 26], "data_offsets": [0, 1 << 28]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        target.truncate(8 + len(text) + (1 << 28))


def _mutate_header(path: Path, chance: random.Random) -> str:
    with safe_open(path, "pt") as file:
        digests = (file.metadata() or {}).get("snnk_digests", "{}")
    texts = ("[" * 50_000, "9" * 5000, "{", "null", "[]", '{"x": 1}', digests.replace('"', "'"), '"\\ud800"', "NaN")
    text = chance.choice(texts)
    save_file(load_file(path), path, {"format": "pt", "snnk_digests": text})
    return f"{path.name}: digests are {text[:20]}"


def _mutate_text(path: Path, kind: str, chance: random.Random) -> str:
    text = path.read_text()
    content = json.loads(text)
    name = chance.choice(sorted(content))
    values = {
        "deep": '{"x":' * 100_000 + "1" + "}" * 100_000,
        "deep list": "[" * 800 + "]" * 800,
        "digits": "9" * 5000,
        "not a number": chance.choice(("NaN", "Infinity", "-Infinity", "1e999")),
        "surrogate": '"\\ud800"',
    }
    if kind in values:
        if chance.random() < 0.5:
            content.pop("snnk_digests", None)
        content[name] = "PLACE"
        path.write_text(json.dumps(content).replace('"PLACE"', values[kind]))
    elif kind == "duplicate":
        value = json.dumps(chance.choice(VALUES))
        path.write_text("{" + f"{json.dumps(name)}: {value}, " + text.strip()[1:])
    else:
        path.write_text(chance.choice(("[]", "null", "3", '"text"', "", "{}", "\x00", "{'a': 1}")))
    return f"{path.name}: {kind} at {name}"


def _mutate_tensors(weights: Path, kind: str, chance: random.Random) -> str:
    with safe_open(weights, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(weights)
    key = chance.choice(sorted(tensors))
    tensor = tensors[key]
    if kind.startswith("unsigned"):
        metadata = {"format": "pt"}
    kind = kind.removeprefix("unsigned ")
    if kind == "drop":
        del tensors[key]
    elif kind == "rename":
        place = chance.randrange(len(key))
        tensors[key[:place] + "x" + key[place + 1 :]] = tensors.pop(key)
    elif kind == "reshape":
        longer = tensor.ndim == 0 or chance.random() < 0.5
        tensors[key] = tensor.reshape(1, *tensor.shape) if longer else tensor[:-1].clone()
    elif kind == "retype":
        dtype = chance.choice((torch.int64, torch.bool, torch.int8, torch.float8_e4m3fn, torch.complex64))
        tensors[key] = tensor.to(dtype)
    elif kind == "poison":
        known = [k for k in sorted(tensors) if tensors[k].is_floating_point() and tensors[k].numel()]
        if not known:
            return ""
        key = chance.choice(known)
        tensors[key].view(-1)[0] = chance.choice((float("nan"), float("inf"), -float("inf")))
    elif kind == "swap":
        alike = [k for k in sorted(tensors) if tensors[k].shape == tensor.shape]
        other = chance.choice(alike)
        tensors[key], tensors[other] = tensors[other], tensors[key]
    else:
        key = "base_model.model.bert.embeddings.word_embeddings.weight" if "adapter" in weights.name else "bert.x"
        tensors[key] = torch.zeros(30, 16)
    save_file(tensors, weights, metadata)
    return f"{kind} {key}"


def _mutate_entry(path: Path, kind: str, chance: random.Random) -> str:
    content = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    if kind == "oversized layers":
        content.pop("snnk_digests", None)
        key = chance.choice([name for name in SIZES if name in content] or ["num_hidden_layers"])
        content[key] = chance.choice(OVERSIZED)
        path.write_text(json.dumps(content, indent=2, sort_keys=True))
        return f"{path.name}: {key} -> {str(content[key])[:40]}"
    # The digests themselves are most of the entries; one mutant in ten goes there.
    digests = content.pop("snnk_digests", None)
    if digests is not None and chance.random() < 0.1:
        content["snnk_digests"] = digests
    walk(content)
    node, key = chance.choice([p for p in places if kind in ("value", "oversized") or isinstance(p[0], dict)])
    if digests is not None and kind != "oversized":  # which is to be found without them
        content["snnk_digests"] = digests
    if kind == "value":
        old = node[key]
        near = [old + 1, old * 2] if isinstance(old, (int, float)) else [f"{old}x"] if isinstance(old, str) else []
        node[key] = chance.choice([value for value in (*VALUES, *near) if value != old or type(value) is not type(old)])
    elif kind == "oversized":
        numbers = [p for p in places if isinstance(p[0][p[1]], int) and not isinstance(p[0][p[1]], bool)]
        node, key = chance.choice(numbers or [(node, key)])
        node[key] = chance.choice(OVERSIZED)
    elif kind == "key":
        node[f"{key}x"] = node.pop(key)
    elif kind == "no key":
        del node[key]
    else:
        node[chance.choice(("hidden_act", "scaling", "dropout", "layer_norm_eps", "x"))] = chance.choice(VALUES)
    path.write_text(json.dumps(content, indent=2, sort_keys=True))
    return f"{path.name}: {kind} {key}" + (f" -> {str(node[key])[:40]}" if kind in ("value", "oversized") else "")
