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
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
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
from tests.folder_mutations import KINDS, mutate

SECONDS, BYTES = 20, 2 << 30
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
    most = pages * resource.getpagesize() + BYTES
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
