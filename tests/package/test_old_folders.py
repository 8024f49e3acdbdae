"""What released versions wrote loads, and gives what it gave: the folders that tests/fixtures/make.py made.

A release that cannot read one of them any more says so here: the test then expects the refusal, with the version that
wrote the folder and what to do.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import snnk_peft
from tests.fresh_process import run_python
from tests.tiny_models import same

ROOT = Path(__file__).resolve().parents[2]
RELEASES = sorted((ROOT / "tests/fixtures").glob("release_*"))
PROGRAM = ROOT / "recipes/finetune.py"


@pytest.fixture(params=RELEASES, ids=lambda folder: folder.name)
def release(request):
    return request.param


def known(release: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs, and everything that is expected by name."""
    tensors = load_file(release / "expected.safetensors")
    inputs = {name.removeprefix("inputs."): value for name, value in tensors.items() if name.startswith("inputs.")}
    return inputs, tensors


def test_this_version_has_a_folder():
    name = f"release_{snnk_peft.__version__.replace('.', '_')}"
    assert name in {folder.name for folder in RELEASES}, "run `python -m tests.fixtures.make`, commit what it writes"


@pytest.mark.parametrize("name", ["seeds", "attention"])
@torch.no_grad()
def test_adapter(release, name):
    inputs, expected = known(release)
    base = AutoModelForSequenceClassification.from_pretrained(release / "base").eval()
    before = base(**inputs).logits
    assert (before - expected[f"{name}.logits"]).abs().max() > 0.01
    model = PeftModel.from_pretrained(base, release / f"adapter_{name}").eval()
    assert same(model(**inputs).logits, expected[f"{name}.logits"])


BUNDLE = """
import sys
from safetensors.torch import load_file
import torch
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], **OPTIONS)
expected = load_file(sys.argv[2])
inputs = {name.removeprefix("inputs."): value for name, value in expected.items() if name.startswith("inputs.")}
with torch.no_grad():
    torch.testing.assert_close(model(**inputs).logits, expected[sys.argv[3]], rtol=1e-5, atol=1e-6)
print(type(model).__module__)
"""


@pytest.mark.parametrize(
    ("name", "start", "module"),
    [
        ("seeds", "import snnk_peft; OPTIONS = {}", "snnk_peft.bundling.classes"),
        ("attention", "import snnk_peft; OPTIONS = {}", "snnk_peft.bundling.classes"),
        (
            "seeds",
            "import sys; sys.modules['snnk_peft'] = None; OPTIONS = {'trust_remote_code': True}",
            "transformers_modules.",
        ),
    ],
    ids=["package", "package-attention", "code-file"],
)
def test_bundle(release, name, start, module):
    arguments = [str(release / f"bundle_{name}"), str(release / "expected.safetensors"), f"{name}.logits"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(["-c", start + BUNDLE, *arguments], env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(module)


def test_run_is_resumed_to_its_end(release, tmp_path):
    for package in ("accelerate", "datasets", "matplotlib", "rich", "yaml", "sklearn"):
        pytest.importorskip(package, reason="pip install snnk-peft[recipes]")
    folder = shutil.copytree(release, tmp_path / "release")
    start = sorted((folder / "run/checkpoints").glob("step-*"))[-1]
    before = load_file(start / "model.safetensors")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python([str(PROGRAM), "run.yaml", "--resume"], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "run/metrics.json").is_file()
    end = sorted((folder / "run/checkpoints").glob("step-*"))[-1]
    assert end.name > start.name
    after = load_file(end / "model.safetensors")
    expected = {k.removeprefix("run."): value for k, value in known(release)[1].items() if k.startswith("run.")}
    assert after.keys() == expected.keys()
    for name, value in after.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
    assert max((after[name] - before[name]).abs().max().item() for name in after) > 1e-3
