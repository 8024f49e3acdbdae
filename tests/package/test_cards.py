"""Model cards: an adapter folder has ours, and a card says on what, and on how many rows, a model was trained."""

from __future__ import annotations

import platform
import re

import pytest
import transformers
import yaml
from data import TASKS
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    Trainer,
    TrainingArguments,
)

from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model
from snnk_peft.model_card import PEFT_TITLE, write_model_card

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def tiny(cls=BertForSequenceClassification):
    return cls(BertConfig(vocab_size=50, **SIZES))


def test_this_is_the_card_that_peft_writes(tmp_path):
    """If PEFT changes its template, ours would no longer take its place: look at `PEFT_TITLE` then."""
    get_peft_model(tiny(), LoraConfig(target_modules=["query"])).save_pretrained(tmp_path)
    assert PEFT_TITLE in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("cls", "task_type", "loader"),
    [
        (BertForSequenceClassification, None, "AutoPeftModelForSequenceClassification"),
        (BertForSequenceClassification, "SEQ_CLS", "AutoPeftModelForSequenceClassification"),
        (BertModel, None, "AutoPeftModel\n"),
        (BertForMaskedLM, None, "AutoPeftModel\n"),
        (BertModel, "FEATURE_EXTRACTION", "AutoPeftModel\n"),
    ],
)
def test_an_adapter_folder_has_our_card(tmp_path, cls, task_type, loader):
    model = get_snnk_model(tiny(cls), SNNKConfig(adapter=AdapterPart(num_features=4), task_type=task_type))
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert PEFT_TITLE not in card.text
    assert "More Information Needed" not in card.text
    assert card.data.library_name == "peft"
    assert "snnk" in card.data.tags
    for text in ("import snnk_peft", f"from peft import {loader}", '"num_features": 4', "adapter_model.safetensors"):
        assert text in card.text


def test_named_adapters_have_their_own_cards_and_edited_cards_stay(tmp_path):
    model = get_snnk_model(tiny(), SNNKConfig(adapter=AdapterPart(num_features=4)))
    model.add_adapter("other", SNNKConfig(adapter=AdapterPart(num_features=5)))
    model.save_pretrained(tmp_path)
    assert '"num_features": 4' in (tmp_path / "README.md").read_text()
    assert '"num_features": 5' in (tmp_path / "other/README.md").read_text()
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# My adapter\n\nIt was hard work.\n")
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "It was hard work." in text
    assert "license: mit" in text


def test_a_config_alone_gets_no_card(tmp_path):
    SNNKConfig(adapter=AdapterPart(num_features=4)).save_pretrained(str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["adapter_config.json"]


def test_a_card_tells_the_data_and_the_rows(tmp_path):
    examples = {"train": 3668, "validation": 408}
    card = write_model_card(tmp_path, data="MRPC of GLUE", dataset="nyu-mll/glue", examples=examples).read_text()
    assert "MRPC of GLUE.\nTrained on 3,668 rows.\nEvaluated on validation: 408 rows." in card
    assert "## Data\n\nNot recorded." in write_model_card(tmp_path).read_text()


def test_tasks_name_their_real_data():
    assert TASKS["mrpc"].source == "MRPC (nyu-mll/glue, mrpc)"
    docs = TASKS["stdlib_docs"]
    assert docs.hub_path is None  # nobody finds Python's docstrings in GLUE
    assert docs.source.endswith(f"of the standard library of Python {platform.python_version()}")


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "BertForMultipleChoice", "BertForPreTraining", "WhisperForAudioClassification"]
)
def test_a_card_loads_a_model_by_the_auto_class_that_leads_to_it(tmp_path, name):
    cls = getattr(transformers, name)
    text = write_model_card(tmp_path, model_class=name).read_text()
    (auto,) = set(re.findall(r"\bAutoModel\w*", text))
    found = getattr(transformers, auto)._model_mapping[cls.config_class]
    assert found is cls or (isinstance(found, tuple) and cls in found)
    assert "feature-extraction" not in text


def front_matter(folder):
    return yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---")[1])


def saved_by(door, base):
    """A function that saves one adapter through a door."""
    config = SNNKConfig(adapter=AdapterPart(num_features=4), task_type="SEQ_CLS")
    model = get_snnk_model(BertForSequenceClassification.from_pretrained(base), config)
    if door == "PeftModel":
        return model.save_pretrained
    training = TrainingArguments("unused", report_to="none", use_cpu=True)

    def save(folder):
        trainer = Trainer(model, training)
        trainer.args.output_dir = str(folder)
        trainer.save_model(str(folder))
        trainer.create_model_card()

    return save


@pytest.mark.parametrize("door", ["PeftModel", "Trainer"])
def test_a_card_keeps_its_header_however_often_it_is_saved(tmp_path, door):
    tiny().save_pretrained(tmp_path / "base")
    save = saved_by(door, tmp_path / "base")
    for _ in range(3):
        save(tmp_path / "adapter")
        header = front_matter(tmp_path / "adapter")
        assert {"snnk", "snnk_peft"} <= set(header["tags"])
        assert "base_model" not in header
        assert str(tmp_path) not in (tmp_path / "adapter/README.md").read_text()


def test_what_people_write_into_a_card_stays_through_every_save(tmp_path):
    tiny().save_pretrained(tmp_path / "base")
    save = saved_by("PeftModel", tmp_path / "base")
    card = tmp_path / "adapter/README.md"
    save(tmp_path / "adapter")
    tags = "tags:\n- mine\n- snnk\n- snnk_peft\n"
    text = f"---\nlicense: mit  # asked\nbase_model: org/name\n{tags}library_name: peft\n---\n# Mine\n"
    card.write_text(text)
    save(tmp_path / "adapter")
    assert card.read_text() == text
    card.write_text(text.replace("- snnk\n", "").replace("org/name", str(tmp_path / "base")) + "More.\n")
    for _ in range(2):
        save(tmp_path / "adapter")
        header = front_matter(tmp_path / "adapter")
        assert (header["license"], set(header["tags"])) == ("mit", {"mine", "snnk", "snnk_peft"})
        assert "base_model" not in header
        assert card.read_text().endswith("# Mine\nMore.\n")
    card.write_text("No header.\n")
    save(tmp_path / "adapter")
    assert set(front_matter(tmp_path / "adapter")["tags"]) == {"snnk", "snnk_peft"}
    assert card.read_text().endswith("No header.\n")


@pytest.mark.parametrize("written", [b"---\ntitle: a: b\n---\nMine\n", b"---\n- a\n---\nMine\n", b"# Caf\xe9\n"])
def test_a_card_that_cannot_be_read_does_not_keep_an_adapter_from_being_saved(tmp_path, written):
    model = get_snnk_model(tiny(), SNNKConfig(adapter=AdapterPart(num_features=4)))
    (tmp_path / "README.md").write_bytes(written)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == written
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_a_base_model_on_the_hub_stays_in_the_card(tmp_path):
    base = tiny()
    base.name_or_path = base.config._name_or_path = "org/name"
    model = get_snnk_model(base, SNNKConfig(adapter=AdapterPart(num_features=4)))
    model.add_adapter("other", SNNKConfig(adapter=AdapterPart(num_features=5)))
    for _ in range(3):
        model.save_pretrained(tmp_path)
        for folder in (tmp_path, tmp_path / "other"):
            assert front_matter(folder)["base_model"] == "org/name"
    model.save_pretrained(tmp_path / "one", selected_adapters=["other"])  # PEFT puts a card above it
    assert {"snnk", "snnk_peft"} <= set(front_matter(tmp_path / "one")["tags"])
