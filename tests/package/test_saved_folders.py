"""Folders are saved whole or not at all, config and weights belong together, and what does harm is refused."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from snnk_peft import AdapterPart, ClosedFormHead, FFNPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.digests import content_faults, open_tensors
from snnk_peft.errors import ConfigError
from snnk_peft.heads.statistics import HeadStatistics
from snnk_peft.planning.result import Plan
from tests.by_hand import edit_json
from tests.fresh_process import run_python
from tests.mutate_folders import IDS, Folders, _by_code_file, exchange, logits
from tests.tensor_sizes import LargestTensor
from tests.tiny_models import tiny

ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KINDS = ["adapter", "bundle", "head"]


def changed(model: Any) -> Any:
    """The same model from another run."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))


def made(kind: str, folders: Folders) -> Any:
    """A model that can be saved."""
    if kind == "adapter":
        base = BertForSequenceClassification.from_pretrained(folders.top / "plain").eval()
        return get_snnk_model(base, folders.configs["replaced"])
    if kind == "bundle":
        return bundle(get_snnk_model(copy.deepcopy(folders.base), folders.configs["replaced"]))
    head = ClosedFormHead(folders.base, names=["even", "odd"])
    ids = torch.randint(3, 30, (40, 6), generator=torch.Generator().manual_seed(0))
    head.add([{"input_ids": ids, "labels": ids[:, 1] % 2}])
    head.fit()
    return head.bundle()


def doors(folders: Folders, kind: str, folder: Path) -> dict[str, Callable[[], Any]]:
    if kind == "adapter":
        base = copy.deepcopy(folders.base)
        config = folders.configs["replaced"]
        return {
            "PEFT": lambda: peft.PeftModel.from_pretrained(copy.deepcopy(base), folder),
            "config=": lambda: peft.PeftModel.from_pretrained(copy.deepcopy(base), folder, config=copy.copy(config)),
            "Auto class": lambda: AutoModelForSequenceClassification.from_pretrained(folder),
        }
    pooled = "modeling_snnk_bundle.SnnkPooledBertForSequenceClassification"
    by_code = (lambda: _by_code_file(folder, pooled)) if kind == "head" else (lambda: _by_code_file(folder))
    return {
        "Auto class": lambda: AutoModelForSequenceClassification.from_pretrained(folder),
        "code file": by_code,
    }


def weights_and_config(folder: Path) -> tuple[Path, Path]:
    adapter = (folder / ADAPTER).exists()
    return folder / (WEIGHTS if adapter else "model.safetensors"), folder / (ADAPTER if adapter else "config.json")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_another_run_are_refused(kind, folders, tmp_path):
    model = made(kind, folders)
    model.save_pretrained(tmp_path / "a")
    changed(model).save_pretrained(tmp_path / "b")
    wanted = logits(model.eval())
    for label, load in doors(folders, kind, tmp_path / "b").items():
        assert torch.allclose(logits(load()), wanted, atol=1e-5), label
    weights, _ = weights_and_config(tmp_path / "b")
    shutil.copyfile(weights, tmp_path / "a" / weights.name)
    for label, load in doors(folders, kind, tmp_path / "a").items():
        with pytest.raises(ValueError, match="was saved with other weights") as caught:
            pytest.fail(f"{label}: {load()}")
        assert type(caught.value).__name__ == "ConfigError", label


def test_weights_that_lost_their_digests_are_compared_too(folders, tmp_path):
    model = made("adapter", folders)
    model.save_pretrained(tmp_path / "a")
    changed(model).save_pretrained(tmp_path / "b")
    save_file(load_file(tmp_path / "b" / WEIGHTS), tmp_path / "a" / WEIGHTS, {"format": "pt"})
    with pytest.raises(ConfigError, match="was saved with other weights"):
        peft.PeftModel.from_pretrained(copy.deepcopy(folders.base), tmp_path / "a")


def test_shards_and_their_index_belong_to_one_save(folders, tmp_path):
    model = made("bundle", folders)
    for name, size in (("a", "6KB"), ("c", "10KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
    model.save_pretrained(tmp_path / "whole")
    changed(model).save_pretrained(tmp_path / "b", max_shard_size="6KB")
    shards = sorted(path.name for path in (tmp_path / "a").glob("model-*"))
    assert len(shards) > 2
    assert len(list((tmp_path / "c").glob("model-*"))) == 2
    mixtures = {
        "one shard of another save": [("b", shards[1])],
        "all shards of another save": [("b", name) for name in shards],
        "a whole file of another save": [("whole", "model.safetensors")],
        "index and shards of another split": [
            ("c", path.name) for path in (tmp_path / "c").iterdir() if path.name.startswith("model")
        ],
    }
    for label, files in mixtures.items():
        folder = Path(shutil.copytree(tmp_path / "a", tmp_path / label))
        for source, name in files:
            shutil.copyfile(tmp_path / source / name, folder / name)
        for load in doors(folders, "bundle", folder).values():
            with pytest.raises(ValueError, match="was saved with") as caught:
                pytest.fail(f"{label}: {load()}")
            assert type(caught.value).__name__ == "ConfigError", label
    for load in doors(folders, "bundle", tmp_path / "b").values():
        assert torch.allclose(logits(load()), logits(model), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_without_digests_beside_weights_with_them_is_told(kind, folders, tmp_path, caplog):
    made(kind, folders).save_pretrained(tmp_path)
    weights, config = weights_and_config(tmp_path)
    edit_json(config)
    with caplog.at_level(logging.WARNING, "snnk_peft"):
        next(iter(doors(folders, kind, tmp_path).values()))()
    assert f"{config} carries no digest of {weights}" in caplog.text


@pytest.mark.parametrize("order", [("10KB", "50GB"), ("50GB", "10KB"), ("6KB", "10KB")])
def test_saving_over_another_split_leaves_only_the_new_weights(order, folders, tmp_path):
    """transformers takes one file before an index, and removes neither."""
    model = made("bundle", folders)
    model.save_pretrained(tmp_path, max_shard_size=order[0])
    changed(model).save_pretrained(tmp_path, max_shard_size=order[1])
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.allclose(logits(loaded), logits(model), atol=1e-6)


def test_variants_stand_side_by_side_and_belong_to_one_config(folders, tmp_path):
    model = made("bundle", folders)
    model.save_pretrained(tmp_path)
    copy.deepcopy(model).half().save_pretrained(tmp_path, variant="fp16")
    for options in ({}, {"variant": "fp16"}):
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32, **options)
        assert torch.allclose(logits(loaded), logits(model), atol=1e-2)
    other = copy.deepcopy(model)
    other.config.layer_norm_eps = 0.5
    other.save_pretrained(tmp_path, variant="fp16")
    with pytest.raises(ConfigError, match="was saved with"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


SAVED_AGAIN = """
import sys, torch
from pathlib import Path
sys.modules["snnk_peft"] = None
from transformers import AutoModelForSequenceClassification
first, *rest = map(Path, sys.argv[1:])
model = AutoModelForSequenceClassification.from_pretrained(first, trust_remote_code=True)
with torch.no_grad():
    model.classifier.bias += 1
ids = torch.arange(3, 15).view(2, 6)
wanted = model.eval()(input_ids=ids).logits
for folder, options in zip([first, *rest], [{}, {"max_shard_size": "6KB"}]):
    model.save_pretrained(folder, **options)
    again = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
    assert torch.allclose(again(input_ids=ids).logits, wanted, atol=1e-5)
print("saved")
"""


def test_bundles_saved_again_without_the_package_load(folders, tmp_path):
    """What the classes of the code file write has no digests; over an older folder, none may be left."""
    made("bundle", folders).save_pretrained(tmp_path / "first")
    assert "saved" in run_python(["-c", SAVED_AGAIN, str(tmp_path / "first"), str(tmp_path / "second")]).stdout


@pytest.mark.parametrize("kind", ["adapter", "bundle"])
def test_checkpoints_of_the_trainer_load(kind, folders, tmp_path):
    model = made(kind, folders)
    rows = [{"input_ids": row, "labels": torch.tensor(index % 2)} for index, row in enumerate(IDS)]
    options = {"max_steps": 2, "save_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(tmp_path), learning_rate=0.01, **options)
    Trainer(model, arguments, train_dataset=rows).train()
    load = doors(folders, kind, tmp_path / "checkpoint-2")["Auto class"]
    assert torch.allclose(logits(load()), logits(model.eval()), atol=1e-5)
    Trainer(
        model, TrainingArguments(output_dir=str(tmp_path), **{**options, "max_steps": 3}), train_dataset=rows
    ).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_config_saved_alone_is_not_tied_to_weights_that_were_there(folders, tmp_path, caplog):
    made("adapter", folders).save_pretrained(tmp_path)
    SNNKConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert WEIGHTS not in json.loads((tmp_path / ADAPTER).read_text())["snnk_digests"]


# Full disks and killed processes


def _save_limited(model: Any, folder: Path, limit: int) -> str:
    """Save in a forked process whose files have at most `limit` bytes; what it raised."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            model.save_pretrained(folder)
        except Exception as error:
            os.write(write, f"{type(error).__name__}: {error}"[:4000].encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_leaves_what_was_there(kind, folders, tmp_path):
    """A limit on the size of files stands for the disk: at 300 bytes no weights fit, at 6,000 not every file does."""
    folder, model = tmp_path / "new" / "model", made(kind, folders)
    for limit in (300, 6000):
        assert f"ConfigError: {folder} cannot be written" in _save_limited(model, folder, limit)
        assert not folder.parent.exists()
    model.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for limit in (300, 6000):
        assert f"ConfigError: {folder} cannot be written" in _save_limited(changed(model), folder, limit)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_rename_leaves_the_old_folder_the_new_one_or_one_that_is_refused(kind, folders, tmp_path):
    model = made(kind, folders)
    model.save_pretrained(tmp_path / "before")
    before = logits(model.eval())
    after = logits(changed(model))
    moves = 0
    outcomes = set()
    while True:
        folder = Path(shutil.copytree(tmp_path / "before", tmp_path / f"killed-{moves}"))
        killed = _save_killed(model, folder, moves)
        outcomes.add(_what_loads(doors(folders, kind, folder)["Auto class"], before, after))
        if not killed:
            break
        moves += 1
    assert {"old", "new"} <= outcomes <= {"old", "new", "refused"}
    assert not list(folder.glob(".*")), "what killed saves left stays"


def _what_loads(load: Callable[[], Any], before: torch.Tensor, after: torch.Tensor) -> str:
    try:
        found = logits(load())
    except ConfigError as error:
        return "refused" if "saving was interrupted" in str(error) else str(error)
    known = {"old": before, "new": after}
    return next((name for name in known if torch.allclose(found, known[name], atol=1e-5)), "a mixture")


def _save_killed(model: Any, folder: Path, moves: int) -> bool:
    """Save in a forked process that dies before its rename number `moves`; whether it died."""
    child = os.fork()
    if child == 0:
        rename, left = os.replace, [moves]

        def replace(*args: Any) -> None:
            if ".saving." in str(args[0]) and Path(args[1]).parent == folder:
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1
            rename(*args)

        os.replace = replace
        model.save_pretrained(folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_adapters_are_not_saved_as_pickles(folders, tmp_path):
    with pytest.raises(ConfigError, match="safe_serialization is False"):
        made("adapter", folders).save_pretrained(tmp_path / "new", safe_serialization=False)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_in_the_place_of_the_folder_is_named(kind, folders, tmp_path):
    (tmp_path / "file").write_text("something")
    with pytest.raises(ConfigError, match=r"file cannot be written"):
        made(kind, folders).save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "something"


# === folders made to do harm ==========================================================================================


SECONDS = 20
DEEP, DEEPER, DIGITS = "[" * 800 + "]" * 800, "[" * 100_000, "9" * 5000


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


FILES = {
    "adapter-adapter": ["adapter_config.json", "adapter_model.safetensors"],
    "bundle-adapter": ["config.json", "model.safetensors"],
    "statistics": ["statistics.safetensors"],
    "plan": ["plan.json"],
}
EVERY_FILE = [(name, file) for name, files in FILES.items() for file in files]


@pytest.mark.parametrize("kind", ["pipe", "loop", "folder", "device", "socket"])
@pytest.mark.parametrize(("name", "file"), EVERY_FILE)
def test_what_is_no_file_is_not_opened(name, file, kind, folders, copied):
    folder = copied(name)
    exchange(folder / file, kind)
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
    edit_json(path, seed="PLACE")
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
    edit_json(folder / "config.json", **{entry: value})
    for read in readers(folders, name, folder):
        with LargestTensor(10_000_000):
            refused(read, r"config\.json|model.*safetensors")


@pytest.mark.parametrize("door", ["Auto class", "AutoPeftModel"])
def test_a_base_model_asks_for_no_more_than_its_weights_hold(door, folders, copied):
    folder, base = copied("adapter-adapter"), copied("plain")
    edit_json(base / "config.json", num_hidden_layers=10**7)
    edit_json(folder / "adapter_config.json", base_model_name_or_path=str(base))
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
        edit_json(folder / "config.json", snnk_plan=plan)
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
    edit_json(folder / "plan.json", lambda content: content["config"]["parts"][0].update(num_features=7), signed=True)
    with pytest.raises(ConfigError, match=r"config\.parts is .*, which is not what was saved"):
        Plan.load(folder)
    edit_json(folder / "plan.json")
    assert Plan.load(folder).config.parts[0].num_features == 7
    assert "plan.json carries no digests" in caplog.text


@pytest.mark.parametrize(("entry", "value"), [("id2label", 3), ("label2id", [1]), ("auto_map", {"AutoConfig": True})])
def test_entries_that_people_may_edit_are_what_transformers_takes_them_for(entry, value, folders, copied):
    folder = copied("bundle-adapter")
    edit_json(folder / "config.json", **{entry: value})
    refused(lambda: AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False), entry)


OTHER = [("predicted", float("nan")), ("settings", 1.5), ("curve", {}), ("of", None)]


@pytest.mark.parametrize(("name", "value"), OTHER)
def test_a_plan_of_other_kinds_of_entries(tmp_path, name, value):
    config = SNNKConfig(parts=[FFNPart(num_features=4)])
    told = {"predicted": {"cost": 0.5, "error": 0.1}, "candidates": [], "curve": [], "settings": {}}
    plan = Plan(config=config, of="macs", budget=0.5, **told)
    plan.save(tmp_path, picture=False)
    assert Plan.load(tmp_path).budget == 0.5
    edit_json(tmp_path / "plan.json", **{name: value})
    with pytest.raises(ConfigError, match=name):
        Plan.load(tmp_path)


@pytest.fixture
def beside_its_base(tmp_path):
    """A folder "a", the adapter of a model in the folder "base"."""
    tiny("bert").save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    config = SNNKConfig(adapter=AdapterPart(num_features=4), task_type="SEQ_CLS")
    get_snnk_model(base, config).save_pretrained(tmp_path / "a")
    return tmp_path


def test_a_base_that_is_no_more_where_it_was(beside_its_base):
    (beside_its_base / "base").rename(beside_its_base / "elsewhere")
    with pytest.raises(ConfigError, match=r"base_model_name_or_path is .*which is not there; .*PeftModel\.from_pre"):
        peft.AutoPeftModelForSequenceClassification.from_pretrained(beside_its_base / "a")


@pytest.mark.parametrize("kind", [float("inf"), ["SNNK"], "SNNQ", None])
def test_a_method_that_is_none(beside_its_base, kind):
    edit_json(beside_its_base / "a/adapter_config.json", peft_type=kind)
    with pytest.raises(ConfigError, match="peft_type is"):
        peft.AutoPeftModelForSequenceClassification.from_pretrained(beside_its_base / "a")
    with pytest.raises(ConfigError, match="peft_type is"):
        peft.PeftModel.from_pretrained(tiny("bert"), beside_its_base / "a")
