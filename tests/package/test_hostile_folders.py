"""Folders made to do harm: everything that is read from one is refused by name, at once, and without much memory.

`mutate_folders.py` looks for more of them; those here were found before they were refused.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from snnk_peft import AdapterPart, FFNPart, SNNKConfig, get_snnk_model
from snnk_peft.digests import content_faults, open_tensors
from snnk_peft.errors import ConfigError
from snnk_peft.heads.statistics import HeadStatistics
from snnk_peft.planning.result import Plan
from tests.mutate_folders import Folders, _by_code_file
from tests.tensor_sizes import LargestTensor
from tests.tiny_models import tiny

SECONDS = 20
DEEP, DEEPER, DIGITS = "[" * 800 + "]" * 800, "[" * 100_000, "9" * 5000


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def copied(folders: Folders, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folders.top / name, tmp_path / name))


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    """An error after some seconds."""

    def stop(number: int, frame: Any) -> None:
        raise AssertionError("this does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(load: Callable[[], Any], message: str) -> None:
    with no_hang(), pytest.raises((ValueError, OSError), match=message) as caught:
        pytest.fail(f"loaded: {load()}")
    assert not isinstance(caught.value, UnicodeError)


def readers(folders: Folders, name: str, folder: Path) -> list[Callable[[], Any]]:
    return [lambda load=load: load(folder) for _, load in folders.doors(name)]


def edit(path: Path, **entries: Any) -> None:
    """Change entries; without digests, which would find the change."""
    content = {**json.loads(path.read_text()), **entries}
    content.pop("snnk_digests", None)
    path.write_text(json.dumps(content))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def sock(path: Path) -> None:
    path.unlink()
    made = socket.socket(socket.AF_UNIX)
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    made.bind(path.name)
    os.chdir(here)
    made.close()


FILES = {
    "adapter-adapter": ["adapter_config.json", "adapter_model.safetensors"],
    "bundle-adapter": ["config.json", "model.safetensors"],
    "statistics": ["statistics.safetensors"],
    "plan": ["plan.json"],
}
EVERY_FILE = [(name, file) for name, files in FILES.items() for file in files]


@pytest.mark.parametrize("exchange", [pipe, loop, directory, device, sock])
@pytest.mark.parametrize(("name", "file"), EVERY_FILE)
def test_what_is_no_file_is_not_opened(name, file, exchange, folders, copied):
    folder = copied(name)
    exchange(folder / file)
    for read in readers(folders, name, folder):
        # An Auto class takes a folder whose adapter_config.json is no file for a model without a config.
        refused(read, file.partition(".")[0] + "|Should have a `model_type`")


TEXTS = [DEEP, DEEPER, DIGITS, "NaN", '"\\ud800"', "[3]", "null", "{", ""]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:8] or "nothing")
@pytest.mark.parametrize("name", ["adapter-adapter", "bundle-adapter", "plan"])
def test_jsons_that_are_none(name, text, folders, copied):
    folder = copied(name)
    (folder / FILES[name][0]).write_text(text)
    for read in readers(folders, name, folder):
        refused(read, FILES[name][0])


@pytest.mark.parametrize("value", [DEEP, DIGITS[:100], "[" * 70 + "]" * 70], ids=lambda text: text[:3])
@pytest.mark.parametrize("name", ["adapter-adapter", "bundle-adapter", "plan"])
def test_values_that_no_other_program_reads(name, value, folders, copied):
    folder = copied(name)
    path = folder / FILES[name][0]
    edit(path, seed="PLACE")
    path.write_text(path.read_text().replace('"PLACE"', value))
    for read in readers(folders, name, folder):
        refused(read, "nested|bits")


@pytest.mark.parametrize("text", [DEEPER, DIGITS, "null", '{"x": 1}', '"\\ud800"'], ids=lambda text: text[:8])
def test_digests_that_are_none_fit_no_tensor(text, copied):
    path = copied("bundle-adapter") / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, {"format": "pt", "snnk_digests": text})
    with open_tensors(path) as file:
        assert len(content_faults(path, file)) >= len(tensors)


@pytest.mark.parametrize("text", [DEEPER, DIGITS, "null", "{}", '{"kind": "classes", "origin": 3}'])
def test_statistics_whose_header_is_none(text, copied):
    path = copied("statistics") / "statistics.safetensors"
    save_file(load_file(path), path, {"snnk_head_statistics": text})
    refused(lambda: HeadStatistics.load(path), "snnk_head_statistics of .*statistics.safetensors")


def test_statistics_allocate_no_more_than_they_hold(copied):
    path = copied("statistics") / "statistics.safetensors"
    tensors = load_file(path)
    tensors["feature_mean"] = torch.zeros(100_000, dtype=torch.float64)
    save_file(tensors, path, {"snnk_head_statistics": '{"kind": "classes", "origin": {}}'})
    with LargestTensor(10_000_000):
        refused(lambda: HeadStatistics.load(path), r"gram is .*; expected \(100000, 100000\)")


@pytest.mark.parametrize("name", ["bundle-adapter", "sharded-adapter", "head"])
@pytest.mark.parametrize(
    ("entry", "value"),
    [("num_hidden_layers", 10**7), ("num_hidden_layers", 3000), ("vocab_size", 10**18), ("hidden_size", 10**12)],
)
def test_a_config_asks_for_no_more_than_the_weights_hold(name, entry, value, folders, copied):
    folder = copied(name)
    edit(folder / "config.json", **{entry: value})
    for read in readers(folders, name, folder):
        with LargestTensor(10_000_000):
            refused(read, r"config\.json|model.*safetensors")


@pytest.mark.parametrize("door", ["Auto class", "AutoPeftModel"])
def test_a_base_model_asks_for_no_more_than_its_weights_hold(door, folders, copied):
    folder, base = copied("adapter-adapter"), copied("plain")
    edit(base / "config.json", num_hidden_layers=10**7)
    edit(folder / "adapter_config.json", base_model_name_or_path=str(base))
    refused(lambda: dict(folders.doors("adapter-adapter"))[door](folder), r"num_hidden_layers is 10000000; the weights")


@pytest.mark.parametrize("weight_map", [None, [], {"x": 3}, {"x": None}])
def test_an_index_that_is_none(weight_map, folders, copied):
    folder = copied("sharded-adapter")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for read in readers(folders, "sharded-adapter", folder):
        refused(read, r"model\.safetensors\.index\.json has no weight_map")


def test_configs_of_other_models_are_read_as_ever(folders):
    assert AutoConfig.from_pretrained(folders.top / "plain").num_hidden_layers == 2
    AutoModelForSequenceClassification.from_pretrained(folders.top / "plain")


def test_sizes_of_a_plan_have_limits(folders, copied):
    """Of a bundle's: its modules are described before they are compared with the weights."""
    folder = copied("bundle-replaced")
    content = json.loads((folder / "config.json").read_text())
    plan = content["snnk_plan"]
    path = next(path for path, spec in plan["modules"].items() if spec["kind"] == "linear")
    for size in (10**10, 10**30):
        plan["modules"][path] |= {"in": size, "out": size}
        edit(folder / "config.json", snnk_plan=plan)
        for load in (AutoModelForSequenceClassification.from_pretrained, _by_code_file):
            refused(lambda load=load: load(folder), "expected an integer >= 1|bits")


def test_an_adapter_is_compared_by_shape_before_its_values_are_read(folders, copied):
    folder = copied("adapter-adapter")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    key = next(iter(tensors))
    text = json.dumps({key: {"dtype": "F32", "shape": [1 << 26], "data_offsets": [0, 1 << 28]}}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (1 << 28))
    base = copy.deepcopy(folders.base)
    with LargestTensor(1 << 20):
        refused(lambda: peft.PeftModel.from_pretrained(base, folder), "does not fit BertFor")


def test_plans_carry_digests(folders, copied, caplog):
    folder = copied("plan")
    content = json.loads((folder / "plan.json").read_text())
    content["config"]["parts"][0]["num_features"] = 7
    (folder / "plan.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"config\.parts is .*, which is not what was saved"):
        Plan.load(folder)
    del content["snnk_digests"]
    (folder / "plan.json").write_text(json.dumps(content))
    assert Plan.load(folder).config.parts[0].num_features == 7
    assert "plan.json carries no digests" in caplog.text


@pytest.mark.parametrize(("entry", "value"), [("id2label", 3), ("label2id", [1]), ("auto_map", {"AutoConfig": True})])
def test_entries_that_people_may_edit_are_what_transformers_takes_them_for(entry, value, folders, copied):
    folder = copied("bundle-adapter")
    edit(folder / "config.json", **{entry: value})
    refused(lambda: AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False), entry)


OTHER = [("predicted", float("nan")), ("settings", 1.5), ("curve", {}), ("of", None)]


@pytest.mark.parametrize(("name", "value"), OTHER)
def test_a_plan_of_other_kinds_of_entries(tmp_path, name, value):
    config = SNNKConfig(parts=[FFNPart(num_features=4)])
    told = {"predicted": {"cost": 0.5, "error": 0.1}, "candidates": [], "curve": [], "settings": {}}
    plan = Plan(config=config, of="macs", budget=0.5, **told)
    plan.save(tmp_path, picture=False)
    assert Plan.load(tmp_path).budget == 0.5
    content = json.loads((tmp_path / "plan.json").read_text())
    del content["snnk_digests"]  # with them, any change is refused
    (tmp_path / "plan.json").write_text(json.dumps({**content, name: value}))
    with pytest.raises(ConfigError, match=name):
        Plan.load(tmp_path)


def test_a_base_that_is_no_more_where_it_was(tmp_path):
    tiny("bert").save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    config = SNNKConfig(adapter=AdapterPart(num_features=4), task_type="SEQ_CLS")
    get_snnk_model(base, config).save_pretrained(tmp_path / "a")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"base_model_name_or_path is .*which is not there; .*PeftModel\.from_pre"):
        peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "a")


@pytest.mark.parametrize("kind", [float("inf"), ["SNNK"], "SNNQ", None])
def test_a_method_that_is_none(tmp_path, kind):
    tiny("bert").save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    config = SNNKConfig(adapter=AdapterPart(num_features=4), task_type="SEQ_CLS")
    get_snnk_model(base, config).save_pretrained(tmp_path / "a")
    content = json.loads((tmp_path / "a/adapter_config.json").read_text())
    del content["snnk_digests"]
    (tmp_path / "a/adapter_config.json").write_text(json.dumps({**content, "peft_type": kind}))
    with pytest.raises(ConfigError, match="peft_type is"):
        peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match="peft_type is"):
        peft.PeftModel.from_pretrained(tiny("bert"), tmp_path / "a")
