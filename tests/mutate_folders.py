"""Damaged folders: seeded mutants of adapters and bundles, loaded through every door.

    python tests/mutate_folders.py --count 1000 --seed 0

A mutant may load and compute what the original computes, or be refused: by this package, or by a library that names the
file or the entry. Another output, an error that names neither, and a load that does not end are what must not happen.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from snnk_peft import AdapterPart, AttentionPart, FFNPart, PoolerPart, SNNKConfig, bundle, get_snnk_model

SECONDS = 20
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PARTS: dict[str, dict[str, Any]] = {
    "adapter": {"adapter": AdapterPart(num_features=4, init="paper")},
    "seeds": {"adapter": AdapterPart("cos", num_features=4), "save_projection": False},
    "replaced": {"ffn": FFNPart("relu", "orf", 6, linear_path=True), "pooler": PoolerPart(num_features=6)},
    "attention": {"attention": AttentionPart(num_features=6, near_field=2)},
}
KINDS = ("flip", "cut", "append", "zero", "drop", "rename", "reshape", "retype", "poison", "swap", "extra tensor")
KINDS += ("unsigned drop", "unsigned rename", "unsigned reshape", "unsigned retype", "unsigned poison")
KINDS += ("value", "value", "value", "key", "no key", "new key", "text", "cut text", "extra file", "no file")
VALUES = (None, True, False, -1, 0, 7, 10**9, 0.5, 1e30, "", "x", "relu", [], [3], {}, {"x": 1})
BARE = (KeyError, TypeError, AttributeError, IndexError, AssertionError, NameError, ArithmeticError)
IDS = torch.randint(3, 30, (2, 6), generator=torch.Generator().manual_seed(1))


class Hang(BaseException):
    """A load that took too long; no Exception, so that nobody handles it."""


class Folders:
    """The originals: a base model, adapters of it, bundles, and what they compute.

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
        for name, parts in PARTS.items():
            base = BertForSequenceClassification.from_pretrained(top / "plain").eval()
            self.configs[name] = SNNKConfig(**parts, task_type="SEQ_CLS")
            model = get_snnk_model(base, self.configs[name])
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter += 0.3 * torch.randn(parameter.shape)
            model.eval().save_pretrained(top / f"adapter-{name}")
            bundle(model).save_pretrained(top / f"bundle-{name}")
            self.expected[f"adapter-{name}"] = self.expected[f"bundle-{name}"] = logits(model)
        self.top = top

    def doors(self, name: str) -> list[tuple[str, Callable[[Path], Any]]]:
        """How a folder of this name can be loaded: a label, and a function that returns the model."""
        if name.startswith("bundle"):
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


def _by_auto_class(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False)  # and nobody is asked


def _by_code_file(folder: Path, name: str = "modeling_snnk_bundle.SnnkBertForSequenceClassification") -> Any:
    cls = get_class_from_dynamic_module(name, str(folder))
    return cls.from_pretrained(folder)


def mutate(folder: Path, kind: str, chance: random.Random) -> str:
    """Change one thing in the folder; returns what."""
    weights = next(path for path in folder.glob("*model.safetensors"))
    config = next(path for path in (folder / "adapter_config.json", folder / "config.json") if path.exists())
    if kind in ("value", "key", "no key", "new key"):
        return _mutate_json(config, kind, chance)
    if kind in ("text", "cut text", "flip", "cut", "append", "zero"):
        path = config if "text" in kind else weights
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
    if kind == "no file":
        chance.choice((weights, config)).unlink()
        return "a file is gone"
    if kind == "extra file":
        name = chance.choice(("adapter_model.bin", "pytorch_model.bin", "model.safetensors.index.json", ".x.1.tmp"))
        (folder / name).write_bytes(bytes(chance.randrange(256) for _ in range(50)))
        return name
    return _mutate_tensors(weights, kind, chance)


def _mutate_tensors(weights: Path, kind: str, chance: random.Random) -> str:
    from safetensors import safe_open

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
        tensors[key] = tensor.reshape(1, *tensor.shape) if chance.random() < 0.5 else tensor[:-1].clone()
    elif kind == "retype":
        dtype = chance.choice((torch.int64, torch.bool, torch.int8, torch.float8_e4m3fn, torch.complex64))
        tensors[key] = tensor.to(dtype)
    elif kind == "poison":
        key = chance.choice([k for k in sorted(tensors) if tensors[k].is_floating_point() and tensors[k].numel()])
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


def _mutate_json(path: Path, kind: str, chance: random.Random) -> str:
    content = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    # The digests themselves are most of the entries; one mutant in ten goes there.
    digests = content.pop("snnk_digests")
    if chance.random() < 0.1:
        content["snnk_digests"] = digests
    walk(content)
    node, key = chance.choice([place for place in places if kind == "value" or isinstance(place[0], dict)])
    content["snnk_digests"] = digests
    if kind == "value":
        old = node[key]
        near = [old + 1, old * 2] if isinstance(old, (int, float)) else [f"{old}x"] if isinstance(old, str) else []
        node[key] = chance.choice([value for value in (*VALUES, *near) if value != old or type(value) is not type(old)])
    elif kind == "key":
        node[f"{key}x"] = node.pop(key)
    elif kind == "no key":
        del node[key]
    else:
        node[chance.choice(("hidden_act", "scaling", "dropout", "layer_norm_eps", "x"))] = chance.choice(VALUES)
    path.write_text(json.dumps(content, indent=2, sort_keys=True))
    return f"{kind} {key}" + (f" -> {node[key]!r}" if kind == "value" else "")


def judge(folders: Folders, name: str, door: str, load: Callable[[Path], Any], folder: Path, what: str) -> str:
    """equal, refused, library, or what must not happen: different, bare, hang, half loaded."""
    signal.alarm(SECONDS)
    try:
        found = logits(load(folder))
        alike = torch.allclose(found, folders.expected[name], rtol=1e-4, atol=1e-5)
        return "equal" if alike else f"different by {float((found - folders.expected[name]).abs().max()):.1e}"
    except Hang:
        return "hang"
    except Exception as error:
        text = str(error)
        # By name: the code file has its own copies of these classes.
        outcome = "refused" if type(error).__name__ in ("ConfigError", "UnsupportedError") else "library"
        words = [str(folder), folder.name, "config.json", ".safetensors", *what.replace(":", " ").split()[1:2]]
        if outcome == "library" and (isinstance(error, BARE) or not any(word in text for word in words)):
            outcome = f"bare {type(error).__name__}: {text[:150]}"
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
    try:
        folders = Folders(top)
        for index in range(count):
            chance = random.Random(f"{seed}:{index}")
            name = chance.choice(sorted(folders.expected))
            folder = top / f"mutant-{index}"
            shutil.copytree(top / name, folder)
            what = mutate(folder, chance.choice(KINDS), chance)
            door, load = chance.choice(folders.doors(name))
            outcome = judge(folders, name, door, load, folder, what)
            outcomes[outcome.split()[0]] += 1
            if outcome not in ("equal", "refused", "library"):
                report(f"{index}: {name} through {door}, {what}: {outcome}")
            shutil.rmtree(folder)
    finally:
        signal.signal(signal.SIGALRM, before)
        torch.set_num_threads(threads)
    return dict(outcomes)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("snnk_peft").setLevel("ERROR")
    with tempfile.TemporaryDirectory(prefix="mutants-") as top:
        outcomes = run(arguments.count, arguments.seed, Path(top), lambda line: print(line, flush=True))
    print(json.dumps(outcomes, indent=2))
    return 0 if set(outcomes) <= {"equal", "refused", "library"} else 1


if __name__ == "__main__":
    sys.exit(main())
