"""An adapter knows the weights it was trained on, and the revision of its base model."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from snnk_peft import AdapterPart, FFNPart, SNNKConfig, get_snnk_model
from snnk_peft.errors import ConfigError

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IDS = torch.randint(3, 30, (2, 6), generator=torch.Generator().manual_seed(1))
NOTE = "the adapter was trained on other weights"


def base_of(seed: int) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=20, **SIZES)).eval()


def config(**options: object) -> SNNKConfig:
    return SNNKConfig(adapter=AdapterPart(num_features=4), task_type="SEQ_CLS", **options)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    get_snnk_model(base_of(0), config()).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def fine_tuned(model: torch.nn.Module) -> torch.nn.Module:
    """Each weight by about a hundredth, as training does; the embeddings and the head alone would not be noticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 0.02 * torch.randn(parameter.shape)
            parameter += 1e-3 * torch.randn(parameter.shape)
    return model


def new_head(model: torch.nn.Module) -> torch.nn.Module:
    torch.nn.init.normal_(model.classifier.weight)
    return model


def longer(model: torch.nn.Module) -> torch.nn.Module:
    model.resize_token_embeddings(40)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("trained_in", [torch.float32, torch.bfloat16])
def test_the_same_base_in_any_precision_is_the_same(trained_in, dtype, tmp_path, caplog):
    get_snnk_model(base_of(0).to(trained_in), config()).save_pretrained(tmp_path)
    peft.PeftModel.from_pretrained(base_of(0).to(dtype), tmp_path)
    assert NOTE not in caplog.text


@pytest.mark.parametrize("change", [new_head, longer])
def test_what_the_adapter_brings_along_is_not_compared(change, adapter, caplog):
    peft.PeftModel.from_pretrained(change(base_of(0)), adapter)
    assert NOTE not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_base_of_the_same_sizes_is_told(dtype, adapter, caplog):
    loads = {
        "PEFT": lambda base: peft.PeftModel.from_pretrained(base, adapter),
        "transformers": lambda base: base.load_adapter(str(adapter)),
    }
    for other in (base_of(1), fine_tuned(base_of(0))):
        for load in loads.values():
            caplog.clear()
            load(copy.deepcopy(other).to(dtype))
            assert NOTE in caplog.text


def test_an_adapter_trained_further_belongs_to_the_new_base(adapter, tmp_path, caplog):
    peft.PeftModel.from_pretrained(base_of(1), adapter, is_trainable=True).save_pretrained(tmp_path / "further")
    caplog.clear()
    peft.PeftModel.from_pretrained(base_of(1), tmp_path / "further")
    assert NOTE not in caplog.text
    peft.PeftModel.from_pretrained(base_of(0), tmp_path / "further")
    assert NOTE in caplog.text


def test_a_config_used_again_starts_afresh(caplog):
    given = config()
    for seed in (0, 1):
        get_snnk_model(base_of(seed), given)
        peft.get_peft_model(base_of(seed), given)
    assert NOTE not in caplog.text


def test_a_second_adapter_is_compared_with_the_base_below_the_first(tmp_path, caplog):
    model = get_snnk_model(base_of(0), SNNKConfig(ffn=FFNPart(num_features=6), task_type="SEQ_CLS"))
    get_snnk_model(base_of(0), config()).save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "second")
    assert NOTE not in caplog.text


def cached(top: Path, revisions: dict[str, torch.nn.Module]) -> Path:
    """A cache of the Hub client that holds a model in several revisions as me/base; the last one is main."""
    home = top / "cache" / "models--me--base"
    (home / "refs").mkdir(parents=True)
    for index, (name, model) in enumerate(revisions.items()):
        commit = str(index) * 40
        model.save_pretrained(home / "snapshots" / commit)
        for ref in (name, "main"):
            (home / "refs" / ref).write_text(commit)
    return home.parent


@pytest.mark.parametrize("where", ["argument", "config"])
def test_the_revision_is_written_and_loaded(where, tmp_path, caplog):
    cache = cached(tmp_path, {"v1": base_of(0), "v2": base_of(1)})
    options = {"cache_dir": str(cache)}
    base = AutoModelForSequenceClassification.from_pretrained("me/base", revision="v1", **options)
    given, argument = (config(), {"revision": "v1"}) if where == "argument" else (config(revision="v1"), {})
    model = get_snnk_model(base, given, **argument).eval()
    model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["revision"] == "v1"
    loaded = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", **options)
    assert torch.allclose(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=1e-6)
    assert NOTE not in caplog.text
    main = AutoModelForSequenceClassification.from_pretrained("me/base", **options)
    peft.PeftModel.from_pretrained(main, tmp_path / "adapter")
    assert f"{NOTE} than this BertForSequenceClassification has: on me/base at revision 'v1'" in caplog.text


def test_a_revision_is_a_name():
    with pytest.raises(ConfigError, match="revision is 3; expected a branch"):
        config(revision=3)


def test_adapters_without_digests_load_as_ever(adapter, caplog):
    path = adapter / "adapter_config.json"
    content = json.loads(path.read_text())
    del content["base_digests"], content["snnk_digests"]
    path.write_text(json.dumps(content))
    peft.PeftModel.from_pretrained(base_of(1), shutil.copytree(adapter, adapter.parent / "old"))
    assert NOTE not in caplog.text
