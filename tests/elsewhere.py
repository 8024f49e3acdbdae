"""Saved bundles in a fresh process: with this package, or without it as remote code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.fresh_process import run_python

PROGRAM = """
import json, sys
package, *folders = sys.argv[1:]
if package == "with":
    import snnk_peft
else:
    sys.modules["snnk_peft"] = None
import torch, transformers
for folder in folders:
    with open(folder + "/config.json") as file:
        auto = next(name for name in json.load(file)["auto_map"] if name != "AutoConfig")
    known = torch.load(folder + "/known.pt")
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=package != "with").eval()
    with torch.no_grad():
        found = model(**known["inputs"]).logits
    torch.testing.assert_close(found, known["logits"], rtol=1e-4, atol=1e-5)
"""


def save_known(bundle: Any, inputs: dict[str, torch.Tensor], folder: Path, logits: torch.Tensor | None = None) -> Path:
    """Save a bundle with inputs and what it, or the model that it was made of, gives for them."""
    bundle.save_pretrained(folder)
    with torch.no_grad():
        known = bundle.eval()(**inputs).logits if logits is None else logits
    torch.save({"inputs": dict(inputs), "logits": known}, folder / "known.pt")
    return folder


def check_elsewhere(*folders: Path, package: bool = False) -> None:
    """Load the bundles of `save_known` in a fresh process and compare."""
    done = run_python(["-c", PROGRAM, "with" if package else "without", *map(str, folders)])
    assert done.returncode == 0, done.stderr[-3000:]
