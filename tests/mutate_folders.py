"""Damaged folders: seeded mutants of everything that is saved and read back, loaded through every door.

    python tests/mutate_folders.py --count 1600 --seed 0

A mutant may load and compute what the original computes, or be refused: by this package, or by a library that names the
file or the entry. What people did to an unsigned config (its digests taken out) may have another output, with a note.
Another output without one, an error that names neither, a load that does not end, and one that asks for more than two
gigabytes are what must not happen. Where no line of this package ran before the error, it is counted as the library's
own ("theirs"): transformers' Auto classes with a list as `model_type`, for instance.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import logging
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as transformers_logging

import snnk_peft
from snnk_peft import (
    AdapterPart,
    AttentionPart,
    ClosedFormHead,
    FFNPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    get_snnk_model,
)
from snnk_peft.heads.fitted import FittedHead
from snnk_peft.heads.statistics import HeadStatistics
from snnk_peft.planning.result import Candidate, Plan

SECONDS, MOST_BYTES = 20, 2 << 30
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PARTS: dict[str, dict[str, Any]] = {
    "adapter": {"adapter": AdapterPart(num_features=4, init="paper")},
    "seeds": {"adapter": AdapterPart("cos", num_features=4), "save_projection": False},
    "replaced": {"ffn": FFNPart("relu", "orf", 6, linear_path=True), "pooler": PoolerPart(num_features=6)},
    "attention": {"attention": AttentionPart(num_features=6, near_field=2)},
}
BARE = (KeyError, TypeError, AttributeError, IndexError, AssertionError, NameError, ArithmeticError, RecursionError)
BARE += (MemoryError,)
IDS = torch.randint(3, 30, (2, 6), generator=torch.Generator().manual_seed(1))


# === one change of a folder at a time ================================================================================

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
CONFIG_SIZES = ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")


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
        key = chance.choice([name for name in CONFIG_SIZES if name in content] or ["num_hidden_layers"])
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


# === originals, and what becomes of mutants ==========================================================================


class Hang(BaseException):
    """A load that took too long; no Exception, so that nobody handles it."""


class Folders:
    """The originals: a base model, adapters of it, bundles, heads, statistics, a plan, and what they compute.

    Args:
        top: an empty folder.
    """

    def __init__(self, top: Path):
        torch.manual_seed(0)
        self.base = BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=20, **SIZES)).eval()
        self.base.save_pretrained(top / "plain")
        self.plain = logits(self.base)
        self.configs: dict[str, SNNKConfig] = {}
        self.expected: dict[str, torch.Tensor] = {}
        self.top = top
        for name, parts in PARTS.items():
            base = BertForSequenceClassification.from_pretrained(top / "plain").eval()
            self.configs[name] = SNNKConfig(**parts, task_type="SEQ_CLS")
            model = get_snnk_model(base, self.configs[name])
            self._save(name, model, top / "other")  # another run of the same config
            self._save(name, model, top)
            self.expected[f"adapter-{name}"] = self.expected[f"bundle-{name}"] = logits(model)
        self.expected["sharded-adapter"] = self.expected["bundle-adapter"]
        for home, flipped in ((top / "other", True), (top, False)):
            self._save_head(home, flipped)
        self._save_plan(top / "plan")

    def _save(self, name: str, model: Any, home: Path) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.3 * torch.randn(parameter.shape)
        model.eval().save_pretrained(home / f"adapter-{name}")
        bundle(model).save_pretrained(home / f"bundle-{name}")
        if name == "adapter":
            bundle(model).save_pretrained(home / "sharded-adapter", max_shard_size="8KB")

    def _save_head(self, home: Path, flipped: bool) -> None:
        head = ClosedFormHead(self.base, names=["even", "odd"])
        ids = torch.randint(3, 30, (60, 6), generator=torch.Generator().manual_seed(0))
        head.add([{"input_ids": ids, "labels": (ids[:, 1] + flipped) % 2}])
        self.expected["statistics"] = head.fit().weight
        model = head.bundle()
        model.save_pretrained(home / "head")
        self.expected["head"] = logits(model)
        (home / "statistics").mkdir()
        head.save(home / "statistics" / "statistics.safetensors")

    def _save_plan(self, folder: Path) -> None:
        config = SNNKConfig(parts=[FFNPart(num_features=6, layers=[0])])
        candidates = [
            Candidate(layer, "ffn", f"{size} rows", 0.1, 0.2, 0.3, size == 6) for layer, size in ((0, 6), (1, 4))
        ]
        predicted = {"cost": 0.5, "speed_up": 2.0, "error": 0.1, "measured": 0.6}
        Plan(config, "macs", 0.5, predicted, candidates, [{"cost": 1.0, "error": 0.0}]).save(folder, picture=False)
        self.expected["plan"] = _numbers(Plan.load(folder))

    def doors(self, name: str) -> list[tuple[str, Callable[[Path], Any]]]:
        """How a folder of this name can be loaded: a label, and a function that returns the model."""
        if name == "statistics":
            return [("HeadStatistics.load", _by_statistics)]
        if name == "plan":
            return [("Plan.load", lambda folder: _numbers(Plan.load(folder)))]
        if name == "head":
            pooled = "modeling_snnk_bundle.SnnkPooledBertForSequenceClassification"
            return [("Auto class", _by_auto_class), ("code file", lambda folder: _by_code_file(folder, pooled))]
        if not name.startswith("adapter"):
            return [("Auto class", _by_auto_class), ("code file", _by_code_file)]
        base = copy.deepcopy(self.base)
        self.touched = base
        fresh = copy.deepcopy(self.configs[name.removeprefix("adapter-")])
        return [
            ("PeftModel.from_pretrained", lambda folder: peft.PeftModel.from_pretrained(base, folder)),
            ("config=", lambda folder: peft.PeftModel.from_pretrained(base, folder, config=fresh)),
            ("transformers' load_adapter", lambda folder: (base.load_adapter(str(folder)), base)[1]),
            ("PEFT's load_adapter", self._second),
            ("Auto class", _by_auto_class),
            ("AutoPeftModel", peft.AutoPeftModelForSequenceClassification.from_pretrained),
        ]

    def _second(self, folder: Path) -> Any:
        model = get_snnk_model(self.touched, SNNKConfig(adapter=AdapterPart(num_features=2), modules_to_save=[]))
        model.load_adapter(folder, "second")
        model.set_adapter("second")
        return model


def logits(model: Any) -> torch.Tensor:
    """The outputs by which models are compared."""
    with torch.no_grad():
        return model(input_ids=IDS).logits


def _numbers(plan: Plan) -> torch.Tensor:
    """A plan as numbers: the bytes of its text."""
    return torch.frombuffer(bytearray(json.dumps(plan.to_dict(), sort_keys=True).encode()), dtype=torch.uint8).float()


def _by_statistics(folder: Path) -> torch.Tensor:
    return FittedHead(HeadStatistics.load(folder / "statistics.safetensors")).weight


def _by_auto_class(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False)  # and nobody is asked


def _by_code_file(folder: Path, name: str = "modeling_snnk_bundle.SnnkBertForSequenceClassification") -> Any:
    cls = get_class_from_dynamic_module(name, str(folder))
    return cls.from_pretrained(folder)


class Notes(logging.Handler):
    """What the package said, as copies of its code in bundles do."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.said.append(record.getMessage())


def judge(
    folders: Folders, name: str, door: str, load: Callable[[Path], Any], folder: Path, what: str, notes: Notes
) -> str:
    """equal, refused, library, noted, theirs, or what must not happen: different, bare, hang, memory, half loaded."""
    notes.said.clear()
    signal.alarm(SECONDS)
    try:
        found = load(folder)
        found = found if isinstance(found, torch.Tensor) else logits(found)
        expected = folders.expected[name]
        if found.shape == expected.shape and torch.allclose(found, expected.to(found), rtol=1e-4, atol=1e-5):
            return "equal"
        return (
            "noted" if any("carries no digest" in said for said in notes.said) else f"different: {found.flatten()[:3]}"
        )
    except Hang:
        return "hang"
    except Exception as error:
        text = f"{error} {error.__cause__}"
        # By name: the code file has its own copies of these classes.
        outcome = "refused" if type(error).__name__ in ("ConfigError", "UnsupportedError") else "library"
        named = what.replace(":", " ").split()[1:3]
        words = [str(folder), folder.name, "config.json", ".safetensors", *named, *(n.replace("_", " ") for n in named)]
        if isinstance(error.__cause__, MemoryError) or "allocate memory" in text or "bad_alloc" in text:
            outcome = f"memory {type(error).__name__}: {text[:150]}"
        elif outcome == "library" and (isinstance(error, BARE) or not any(word in text for word in words)):
            package = Path(snnk_peft.__file__).parent
            ours = any(
                "snnk" in Path(frame.filename).name or package in Path(frame.filename).parents
                for frame in traceback.extract_tb(error.__traceback__)
            )
            outcome = f"bare {type(error).__name__}: {text[:150]}" if ours else "theirs"
    finally:
        signal.alarm(0)
    has_base = name.startswith("adapter") and door != "PEFT's load_adapter"
    if has_base and not torch.equal(logits(folders.touched), folders.plain):
        return "half loaded"
    return outcome


def run(count: int, seed: int, top: Path, report: Callable[[str], None] = lambda line: None) -> dict[str, int]:
    """Make and load `count` mutants; how often each outcome was seen.

    Args:
        count: how many.
        seed: of every choice.
        top: an empty folder.
        report: called with a line about every outcome that must not happen.
    """

    def stop(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    outcomes: dict[str, int] = collections.Counter()
    notes = Notes()
    logging.getLogger("snnk_peft").addHandler(notes)
    try:
        folders = Folders(top)
        index = -1
        while sum(outcomes.values()) < count:
            index += 1
            chance = random.Random(f"{seed}:{index}")
            name = chance.choice(sorted(folders.expected))
            folder = top / f"mutant-{index}"
            shutil.copytree(top / name, folder)
            what = mutate(folder, chance.choice(KINDS), chance, top / "other" / name)
            door, load = chance.choice(folders.doors(name))
            if what:
                outcome = judge(folders, name, door, load, folder, what, notes)
                outcomes[outcome.split()[0].rstrip(":")] += 1
                if outcome not in ("equal", "refused", "library", "noted", "theirs"):
                    report(f"{index}: {name} through {door}, {what}: {outcome}")
            shutil.rmtree(folder)
    finally:
        logging.getLogger("snnk_peft").removeHandler(notes)
        signal.signal(signal.SIGALRM, before)
        torch.set_num_threads(threads)
    return dict(outcomes)


def _limit_memory() -> None:
    """No load may map two gigabytes more than there are now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("snnk_peft").propagate = False
    _limit_memory()
    with tempfile.TemporaryDirectory(prefix="mutants-") as top:
        outcomes = run(arguments.count, arguments.seed, Path(top), lambda line: print(line, flush=True))
    print(json.dumps(outcomes, indent=2))
    return 0 if set(outcomes) <= {"equal", "refused", "library", "noted", "theirs"} else 1


if __name__ == "__main__":
    sys.exit(main())
