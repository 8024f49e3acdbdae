"""A saved bundle in other processes, through the Hub, damaged, beside the package; its report; what is folded."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForSequenceClassification,
    BertTokenizer,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from snnk_peft import AdapterPart, FFNPart, PoolerPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.attention import NAME, RecurrentCache, kernel_attention_forward, padding_mask
from snnk_peft.bundling.report import BundleReport, Folded, group
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.layers.slots import Slot
from snnk_peft.model_card import hub_id, template, write_model_card
from tests.attention_models import causal_model, left_padded, patched
from tests.by_hand import edit_json
from tests.fresh_process import ForkServer, run_python
from tests.hub_stand_in import HubStandIn
from tests.tiny_models import inputs_for, same, tiny, trained

BLOCK = "import sys; sys.modules['snnk_peft'] = None\n"
WORDS = ["good", "bad", "film", "the", "a", "was", "really", "not"]


def make_bundle(**options):
    model = tiny("bert", id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1})
    parts = {
        "adapter": AdapterPart(num_features=8),
        "ffn": FFNPart(num_features=8, projection="orf", component="relu"),
        "pooler": PoolerPart(num_features=8),
    }
    return bundle(trained(get_snnk_model(model, SNNKConfig(**parts, **options))))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two folders, with matrices and seeds only, with a tokenizer, and expected outputs next to them."""
    top = tmp_path_factory.mktemp("bundles")
    vocabulary = top / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    tokenizer = BertTokenizer(vocab=str(vocabulary))
    for name, keep in (("full", True), ("seeds", False)):
        model = make_bundle(save_projection=keep)
        model.save_pretrained(top / name)
        tokenizer.save_pretrained(top / name)
        inputs = inputs_for(model)
        with torch.no_grad():
            torch.save({"inputs": inputs, "logits": model(**inputs).logits}, top / f"{name}.pt")
    return top


def run(code: str, folder: Path, *, package: bool = True) -> subprocess.CompletedProcess:
    """Run Python code in a process of its own from the first import on, in `folder`, with its own caches."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HF_ENDPOINT")}
    env |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    if package:
        env["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    code = code if package else BLOCK + code
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


LOAD = """
import torch
from transformers import AutoModelForSequenceClassification, pipeline
for name in ("full", "seeds"):
    model = AutoModelForSequenceClassification.from_pretrained(name, **OPTIONS)
    known = torch.load(f"{name}.pt")
    with torch.no_grad():
        given = model(**known["inputs"]).logits
    torch.testing.assert_close(given, known["logits"], rtol=1e-5, atol=1e-6)
    assert type(model).__name__ == "SnnkBertForSequenceClassification"
    result = pipeline("text-classification", name, **OPTIONS)("the film was really not bad", top_k=None)
    assert {entry["label"] for entry in result} == {"positive", "negative"}, result
"""


def test_with_the_package(saved):
    code = "import snnk_peft\nOPTIONS = {}" + LOAD
    # With the package, its own classes are used even if remote code is allowed.
    code += "\nmodel = AutoModelForSequenceClassification.from_pretrained('full', trust_remote_code=True)"
    code += "\nassert type(model).__module__ == 'snnk_peft.bundling.classes'"
    code += "\nassert model.bundle_report.parity_error < 1e-5"
    done = run(code, saved)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_without_the_package_as_remote_code(saved):
    code = "OPTIONS = {'trust_remote_code': True}" + LOAD
    code += """
import sys
assert sys.modules["snnk_peft"] is None
assert type(model).__module__.startswith("transformers_modules")
model.save_pretrained("again")
again = AutoModelForSequenceClassification.from_pretrained("again", trust_remote_code=True)
with torch.no_grad():
    torch.testing.assert_close(again(**known["inputs"]).logits, known["logits"], rtol=1e-5, atol=1e-6)
# Damage is refused here as well.
from safetensors.torch import load_file, save_file
tensors = load_file("again/model.safetensors")
key = next(key for key in tensors if key.endswith("checksum"))
tensors[key][0] ^= 1
save_file(tensors, "again/model.safetensors", {"format": "pt"})
try:
    AutoModelForSequenceClassification.from_pretrained("again", trust_remote_code=True)
except ValueError as error:
    assert "checksum" in str(error), error
else:
    raise AssertionError("a wrong checksum was accepted")
"""
    done = run(code, saved, package=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_fails_closed_without_either(saved):
    code = """
from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline
for load in (
    lambda: AutoModelForSequenceClassification.from_pretrained("full"),
    lambda: AutoModelForSequenceClassification.from_pretrained("full", trust_remote_code=False),
    lambda: AutoConfig.from_pretrained("full"),
    lambda: pipeline("text-classification", "full"),
):
    try:
        load()
    except ValueError as error:
        assert "trust_remote_code=True" in str(error), error
    else:
        raise AssertionError("loaded without its code")
"""
    done = run_python(["-c", BLOCK + code], cwd=saved)
    assert done.returncode == 0, done.stderr[-3000:]


# In this process


def copy_of(saved: Path, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / name, tmp_path / name))


def test_folder_contents(saved):
    names = {path.name for path in (saved / "full").iterdir()}
    assert {"config.json", "model.safetensors", "modeling_snnk_bundle.py", "README.md"} <= names
    assert "adapter_config.json" not in names
    config = json.loads((saved / "full" / "config.json").read_text())
    assert config["id2label"] == {"0": "negative", "1": "positive"}
    assert config["architectures"] == ["SnnkBertForSequenceClassification"]
    assert config["model_type"] == "snnk_bert"
    assert config["auto_map"]["AutoModelForSequenceClassification"].startswith("modeling_snnk_bundle.")
    sizes = [(saved / name / "model.safetensors").stat().st_size for name in ("full", "seeds")]
    assert sizes[1] < sizes[0]
    code = (saved / "full" / "modeling_snnk_bundle.py").read_text()
    assert "from snnk_peft" not in code
    assert "import peft" not in code


def test_half_precision_and_another_head_class(saved):
    known = torch.load(saved / "full.pt")
    model = AutoModelForSequenceClassification.from_pretrained(saved / "full", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    with torch.no_grad():
        given = model(**known["inputs"]).logits.float()
    assert (given - known["logits"]).abs().max() < 0.1 * known["logits"].abs().max()
    with pytest.raises(ConfigError, match="SnnkBertForSequenceClassification and cannot be loaded as SnnkBertModel"):
        AutoModel.from_pretrained(saved / "full")


def change(folder: Path, edit) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})  # without digests, and not named in the config: strictness alone
    edit_json(folder / "config.json")
    return folder


@pytest.mark.parametrize("where", ["weights", "config"])
def test_another_draw_is_refused(saved, tmp_path, where):
    folder = copy_of(saved, "seeds", tmp_path)
    if where == "weights":

        def flip(tensors):
            key = next(key for key in tensors if key.endswith("checksum"))
            tensors[key][0] ^= 1

        change(folder, flip)
    else:
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
        edit_json(path)  # with its digests, the change itself is named: test_loading.py
    with pytest.raises(ConfigError, match="checksum of the redrawn projection"):
        AutoModelForSequenceClassification.from_pretrained(folder)


def test_an_adapter_folder_is_not_overwritten(tmp_path):
    model = get_snnk_model(tiny("bert"), SNNKConfig(adapter=AdapterPart(num_features=4)))
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        bundle(model).save_pretrained(tmp_path)


# Model cards


def test_card_template_is_the_one_in_the_package(root):
    assert (root / "model_cards" / "template.md").read_text() == template()


def test_card_of_a_bundle(saved, tmp_path):
    card = ModelCard.load(saved / "full" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-classification"
    assert "snnk_peft" in card.data.tags
    report = AutoModelForSequenceClassification.from_pretrained(saved / "full").bundle_report
    for text in ("import snnk_peft", f"{report.bytes_after:,}", '"num_features": 8', "trust_remote_code=True"):
        assert text in card.text
    # A card that is already there stays.
    folder = copy_of(saved, "full", tmp_path)
    (folder / "README.md").write_text("mine")
    AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(folder)
    assert (folder / "README.md").read_text() == "mine"


def test_card_with_everything_and_of_an_adapter(tmp_path):
    path = write_model_card(
        tmp_path,
        base_model="google-bert/bert-base-uncased",
        model_class="BertForSequenceClassification",
        config={"adapter": {"num_features": 16}},
        metrics={"accuracy": 0.91234},
        training={"lr": 0.001},
        tags=["glue"],
        dataset="nyu-mll/glue",
        license="apache-2.0",
    )
    card = ModelCard.load(path)
    assert card.data.base_model == "google-bert/bert-base-uncased"
    assert card.data.metrics == ["accuracy"]
    assert "| accuracy | 0.9123 |" in card.text
    (tmp_path / "adapter_config.json").write_text("{}")
    write_model_card(tmp_path, model_class="BertForSequenceClassification")
    card = ModelCard.load(path)
    assert card.data.library_name == "peft"
    assert "AutoPeftModelForSequenceClassification" in card.text
    assert "import snnk_peft" in card.text
    assert hub_id(str(tmp_path)) is None
    assert hub_id("../model") is None


# Through the Hub

PUSH = """
import snnk_peft
from transformers import AutoModelForSequenceClassification, AutoTokenizer
model = AutoModelForSequenceClassification.from_pretrained("full")
print(model.push_to_hub("me/tiny-snnk", commit_message="first", tags=["test"], token="hf_x"))
AutoTokenizer.from_pretrained("full").push_to_hub("me/tiny-snnk", token="hf_x")
print(model.push_to_hub("me/tiny-snnk", commit_message="second", token="hf_x"))
model.save_pretrained("pushed", push_to_hub=True, repo_id="me/other", token="hf_x", commit_message="third")
"""

PULL = """
import torch
from transformers import AutoModelForSequenceClassification, pipeline
known = torch.load("full.pt")
model = AutoModelForSequenceClassification.from_pretrained("me/tiny-snnk", **OPTIONS)
with torch.no_grad():
    torch.testing.assert_close(model(**known["inputs"]).logits, known["logits"], rtol=1e-5, atol=1e-6)
assert pipeline("text-classification", "me/tiny-snnk", **OPTIONS)("the film")[0]["label"] in ("positive", "negative")
"""


@contextlib.contextmanager
def online(hub: HubStandIn, folder: Path) -> Iterator[ForkServer]:
    """Fresh processes whose Hub is the stand-in, with an empty cache."""
    server = ForkServer(
        HF_ENDPOINT=hub.url,
        HF_HUB_OFFLINE="",
        HF_HUB_DISABLE_XET="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        HF_HOME=str(folder / "hf"),
    )
    yield server
    server.close()


@pytest.mark.slow
def test_push_to_the_hub_and_load_back(saved, tmp_path):
    with HubStandIn() as hub, online(hub, tmp_path) as server:
        done = server.run(["-c", PUSH], cwd=saved)
        assert done.returncode == 0, done.stderr[-3000:]
        assert hub.commits[0] == "first"
        assert hub.commits[-2:] == ["second", "third"]
        assert set(hub.repos["me/other"]) == {path.name for path in (saved / "pushed").iterdir()}
        files = hub.repos["me/tiny-snnk"]
        assert {"config.json", "model.safetensors", "modeling_snnk_bundle.py", "README.md", "tokenizer.json"} <= set(
            files
        )
        assert files["model.safetensors"] == (saved / "full" / "model.safetensors").read_bytes()
        card = files["README.md"].decode()
        assert "import snnk_peft" in card
        assert "- test" in card
        for package in (True, False):
            shutil.copy(saved / "full.pt", tmp_path)
            start = "import snnk_peft\nOPTIONS = {}" if package else BLOCK + "OPTIONS = {'trust_remote_code': True}"
            done = server.run(["-c", start + PULL], cwd=tmp_path)
            assert done.returncode == 0, done.stderr[-3000:]
        assert not hub.unknown, hub.unknown


# === the report =======================================================================================================


@pytest.fixture(scope="module")
def report() -> BundleReport:
    config = SNNKConfig(adapter=AdapterPart(num_features=4, layers=[0, 1, 3]), ffn=FFNPart(num_features=4))
    return bundle(get_snnk_model(tiny("bert", num_hidden_layers=4), config)).bundle_report


def test_equal_lines_are_one_line(report):
    text = str(report)
    assert "bert.encoder.layer.{0-1,3}.attention.output.dropout" in text
    assert "3 × Dropout" in text
    assert text.count("attention.output.dropout") == 1
    assert len(text.splitlines()) < len(report.folded) + 8


def test_every_folded_module_is_still_told(report):
    told = group(report.folded)
    assert sum(alike.count for alike in told) == len(report.folded)
    assert len(told) < len(report.folded)
    for alike in told:
        same = [
            entry for entry in report.folded if (entry.before, entry.after) == (alike.folded.before, alike.folded.after)
        ]
        assert alike.folded in same


def test_what_differs_in_anything_stays_apart():
    one = Folded(["a.0.b"], "Linear", "x", 8, 4)
    others = [
        Folded(["a.1.c"], "Linear", "x", 8, 4),
        Folded(["a.1.b"], "Dropout", "x", 8, 4),
        Folded(["a.1.b"], "Linear", "y", 8, 4),
        Folded(["a.1.b"], "Linear", "x", 9, 4),
        Folded(["a.1.b", "a.1.d"], "Linear", "x", 8, 4),
        Folded(["pooler"], "Linear", "x", 8, 4),
    ]
    for other in others:
        assert [alike.count for alike in group([one, other])] == [1, 1]
    merged = group([one, Folded(["a.10.b"], "Linear", "x", 8, 4), Folded(["a.2.b"], "Linear", "x", 8, 4)])
    assert [(alike.paths, alike.count) for alike in merged] == [(["a.{0,2,10}.b"], 3)]
    assert [alike.paths for alike in group([one])] == [["a.0.b"]]


def test_the_card_shows_the_same_lines(report, tmp_path):
    card = write_model_card(tmp_path, report=report).read_text()
    assert "`bert.encoder.layer.{0-1,3}.attention.output.dropout`" in card
    assert card.count("attention.output.dropout") == 1


# === the code file beside the package =================================================================================


def test_code_file_and_package_side_by_side(tmp_path):
    model = patched(causal_model("llama"), num_features=16)
    inputs = left_padded()
    expected = model(**inputs).logits
    small = bundle(copy.deepcopy(model))
    small.save_pretrained(tmp_path)
    cls = get_class_from_dynamic_module("modeling_snnk_bundle.SnnkLlamaForCausalLM", str(tmp_path))
    assert cls.__module__ != type(small).__module__
    remote = cls.from_pretrained(tmp_path)
    assert AttentionInterface()[NAME] is kernel_attention_forward
    assert AttentionMaskInterface()[NAME] is padding_mask
    own = AttentionInterface()[remote.config._attn_implementation]
    assert own.__module__ == cls.__module__ != kernel_attention_forward.__module__
    for each in (model, small, remote):
        torch.testing.assert_close(each(**inputs).logits, expected)
    text = small.generate(**inputs, max_new_tokens=6, do_sample=False)
    for cache in ({}, {"past_key_values": RecurrentCache(remote)}):
        assert same(remote.generate(**inputs, **cache, max_new_tokens=6, do_sample=False), text)


# === what is switched on is folded ====================================================================================


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_two_adapters_in_one_place_act_in_their_order(order):
    part = {"placement": "pfeiffer", "init": "random"}
    config = SNNKConfig(adapter=AdapterPart(num_features=6, **part), modules_to_save=[])
    model = get_snnk_model(tiny("bert"), config, adapter_name="a")
    other = AdapterPart(num_features=9, component="sin", **part)
    model.add_adapter("b", SNNKConfig(adapter=other, modules_to_save=[], seed=1))
    for name in ("a", "b"):
        model.set_adapter(name)
        trained(model, std=1.0)
    model.base_model.set_adapter(order)
    inputs = inputs_for(model.get_base_model())
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        torch.testing.assert_close(bundle(model)(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
        model.base_model.set_adapter(order[::-1])
        assert not torch.allclose(model(**inputs).logits, expected, rtol=1e-3, atol=1e-3)


def test_a_saved_module_that_is_switched_off_is_bundled_as_it_was():
    model = trained(get_snnk_model(tiny("bert"), SNNKConfig(pooler=PoolerPart(num_features=8)))).eval()
    inputs = inputs_for(model.get_base_model())
    classifier = model.get_base_model().classifier
    with torch.no_grad():
        on = model(**inputs).logits
        classifier.enable_adapters(False)
        off = model(**inputs).logits
        assert not torch.allclose(on, off, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(bundle(model)(**inputs).logits, off, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("placement", "slot"), [("parallel", "BesideExpansion"), ("query_value", "BesideLinear")], ids=lambda value: value
)
def test_two_slots_that_must_be_alone_are_refused(placement, slot):
    """Both outputs are sums, but there is one plain form for one of them."""
    configs = [SNNKConfig(adapter=AdapterPart(num_features=4, placement=placement), modules_to_save=[]) for _ in "ab"]
    model = get_snnk_model(tiny("bert"), configs[0], adapter_name="a")
    model.add_adapter("b", configs[1])
    model.base_model.set_adapter(["a", "b"])
    with pytest.raises(UnsupportedError, match=f"2 active adapters put a {slot} here; activate one of them with set_a"):
        bundle(model)
    model.set_adapter("b")
    assert bundle(model).bundle_report.parity_error < 1e-5


class Doubled(Slot):
    """2 · module(x), which has a plain form, but not between modules that are multiplied into one another."""

    def forward(self, base, x, *args, **kwargs):
        return 2 * base(x, *args, **kwargs)

    def fold(self, place):
        place.put(nn.Sequential(place.module, nn.Identity()))


@pytest.mark.parametrize("place", ["dense", "intermediate_act_fn"])
@pytest.mark.parametrize(
    "parts",
    [{"ffn": FFNPart(num_features=6)}, {"adapter": AdapterPart(num_features=4, placement="parallel")}],
    ids=["ffn", "parallel"],
)
def test_a_slot_between_modules_that_fold_together_is_refused(parts, place):
    model = get_snnk_model(tiny("bert"), SNNKConfig(**parts))
    path = f"bert.encoder.layer.0.intermediate.{place}"
    model.get_submodule(f"base_model.model.{path}").add_slot("default", Doubled())
    with pytest.raises(UnsupportedError, match=f"{path}: a Doubled slot has no folded form in this place"):
        bundle(model)
