"""What released versions wrote loads, and gives what it gave: the folders that tests/fixtures/make.py packed.

A release that cannot read one of them any more says so here: the test then expects the refusal, with the version that
wrote the folder and what to do.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import snnk_peft
from snnk_peft import ClosedFormHead, HeadFeatures, HeadStatistics, Plan, get_snnk_model
from snnk_peft.bundling.classes import FREE_ENTRIES
from snnk_peft.config import FREE
from snnk_peft.digests import DIGESTS
from snnk_peft.errors import ConfigError
from snnk_peft.stamps import stamp_entries
from tests.fresh_process import run_python
from tests.releases import RELEASES
from tests.tiny_models import same

ROOT = Path(__file__).resolve().parents[2]
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


def having(pattern: str) -> list[Any]:
    """The releases that have something of this name."""
    return [pytest.param(release, id=release.name) for release in RELEASES if list(release.glob(pattern))]


def folders(kind: str) -> list[Any]:
    """(release, name) of every folder kind_name."""
    found = [(release, folder) for release in RELEASES for folder in sorted(release.glob(f"{kind}_*"))]
    return [
        pytest.param(release, folder.name.removeprefix(f"{kind}_"), id=f"{release.name}-{folder.name}")
        for release, folder in found
    ]


def test_the_newest_folder_has_everything():
    newest = {each.name for each in RELEASES[-1].iterdir()}
    assert newest >= {f"{kind}_{name}" for kind in ("adapter", "bundle") for name in ("seeds", "attention", "parts")}
    assert newest >= {"bundle_head", "head.safetensors", "plan", "run"}


@pytest.mark.parametrize(("release", "name"), folders("adapter"))
@torch.no_grad()
def test_adapter(release, name):
    inputs, expected = known(release)
    base = AutoModelForSequenceClassification.from_pretrained(release / "base").eval()
    before = base(**inputs).logits
    assert (before - expected[f"{name}.logits"]).abs().max() > 0.01
    model = PeftModel.from_pretrained(base, release / f"adapter_{name}").eval()
    assert same(model(**inputs).logits, expected[f"{name}.logits"])


FUTURE = {
    "adapter_parts": ("adapter_config.json", lambda entries: entries["parts"].append({"part": "of_tomorrow"})),
    "adapter_seeds": ("adapter_config.json", lambda entries: entries["ffn"].update(of_tomorrow=1)),
    "bundle_parts": ("config.json", lambda entries: first(entries["snnk_plan"]["modules"]).update(kind="of_tomorrow")),
    "bundle_seeds": ("config.json", lambda entries: first(entries["snnk_plan"]["modules"]).update(of_tomorrow=1)),
    "plan": ("plan.json", lambda entries: entries["candidates"][0].update(of_tomorrow=1)),
}


def first(entries: dict[str, Any]) -> Any:
    return next(iter(entries.values()))


@pytest.mark.parametrize("name", FUTURE)
def test_what_a_later_release_wrote_is_refused(name, tmp_path):
    """With what it is that is not known here, and that the package is older."""
    file, change = FUTURE[name]
    folder = shutil.copytree(RELEASES[-1] / name, tmp_path / "folder")
    entries = json.loads((folder / file).read_text())
    change(entries)
    (folder / file).write_text(json.dumps(entries))
    kept = {key: value for key, value in entries[DIGESTS].items() if key.endswith(".safetensors")}
    stamp_entries(folder / file, FREE_ENTRIES if name.startswith("bundle") else FREE, kept)
    load = {
        "adapter": lambda: PeftModel.from_pretrained(
            AutoModelForSequenceClassification.from_pretrained(RELEASES[-1] / "base"), folder
        ),
        "bundle": lambda: AutoModelForSequenceClassification.from_pretrained(folder),
        "plan": lambda: Plan.load(folder),
    }[name.partition("_")[0]]
    with pytest.raises(ConfigError, match=r"(?s)of_tomorrow.*(update the package|a newer snnk_peft wrote it)"):
        load()


@pytest.mark.parametrize("release", having("plan"))
def test_plan(release):
    found = Plan.load(release / "plan")
    written = json.loads((release / "plan/plan.json").read_text())
    # What plans of release 0.2.0 did not keep.
    unknown = {"place": None, "kind": None, "between": False}
    candidates = [{**unknown, **candidate} for candidate in written["candidates"]]
    written = {"kinds": [], **written, "candidates": candidates}
    assert {key: written[key] for key in found.to_dict()} == json.loads(json.dumps(found.to_dict()))
    base = AutoModelForSequenceClassification.from_pretrained(release / "base")
    assert get_snnk_model(base, found.config).peft_config["default"].target_modules


@pytest.mark.parametrize("release", having("head.safetensors"))
@torch.no_grad()
def test_statistics_of_a_head(release):
    inputs, expected = known(release)
    statistics = HeadStatistics.load(release / "head.safetensors")
    views = [tuple(view) for view in statistics.origin["features"]["views"]]
    base = AutoModelForSequenceClassification.from_pretrained(release / "base")
    head = ClosedFormHead(base, HeadFeatures(views), names=statistics.names)
    head.merge(statistics)
    fitted = head.fit()
    scores = fitted.scores(head.vectors(inputs))
    logits = expected["head.logits"].double()
    # They are the scores times the temperature, but for what is the same for all classes.
    differences = (scores[:, 1] - scores[:, 0], logits[:, 1] - logits[:, 0])
    torch.testing.assert_close(*(each / each.norm() for each in differences), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize(("release", "name"), folders("bundle"))
def test_bundle(release, name):
    run_bundle(release, name, "import snnk_peft; OPTIONS = {}", "snnk_peft.bundling.classes")


@pytest.mark.parametrize("release", having("bundle_seeds/*.py"))
def test_bundle_without_this_package(release):
    start = "import sys; sys.modules['snnk_peft'] = None; OPTIONS = {'trust_remote_code': True}"
    run_bundle(release, "seeds", start, "transformers_modules.")


def run_bundle(release: Path, name: str, start: str, module: str) -> None:
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
