"""Model cards and labels: what a saved folder says of itself."""

from __future__ import annotations

import json
import platform
import re
import shutil

import pytest
import torch
import transformers
import yaml
from data import TASKS
from huggingface_hub import ModelCard
from peft import (
    AutoPeftModel,
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    LoraConfig,
    PeftModel,
    get_peft_model,
)
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForAudioClassification,
)

from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model
from snnk_peft.errors import ConfigError
from snnk_peft.model_card import PEFT_TITLE, write_model_card
from tests.by_hand import edit_json

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


# === labels ===========================================================================================================


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
NAMES = {0: "bad", 1: "so", 2: "good"}
MANY = {index: f"kind {index}" for index in range(12)}  # as texts, "10" stands before "2"
WORDS = torch.tensor([[3, 4, 5, 6]])


def inverse(names):
    return {name: index for index, name in names.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A pretrained encoder without a head, as on the Hub."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=50, **TINY)).save_pretrained(folder)
    return folder


def classifier(base, names, cls=BertForSequenceClassification, task_type="SEQ_CLS", **options):
    model = cls.from_pretrained(base, id2label=names, label2id=inverse(names), **options)
    return get_snnk_model(model, SNNKConfig(adapter=AdapterPart(num_features=4), task_type=task_type)).eval()


@pytest.mark.parametrize(
    ("names", "problem_type", "targets"),
    [
        (NAMES, None, torch.tensor([2])),
        ({0: "price"}, "regression", torch.tensor([0.5])),
        (NAMES, "multi_label_classification", torch.tensor([[1.0, 0.0, 1.0]])),
        (MANY, None, torch.tensor([11])),
    ],
)
@pytest.mark.parametrize("task_type", ["SEQ_CLS", None])
def test_the_load_line_makes_the_classifier_that_was_saved(tmp_path, base, names, problem_type, targets, task_type):
    model = classifier(base, names, task_type=task_type, problem_type=problem_type)
    model.save_pretrained(tmp_path)
    loader = AutoPeftModelForSequenceClassification if task_type else AutoPeftModel
    again = loader.from_pretrained(tmp_path).eval()
    config = again.get_base_model().config
    assert (config.id2label, config.label2id, config.problem_type) == (names, inverse(names), problem_type)
    with torch.no_grad():
        expected, found = (one(input_ids=WORDS, labels=targets) for one in (model, again))
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_token_classes_too(tmp_path, base):
    classifier(base, NAMES, BertForTokenClassification, "TOKEN_CLS").save_pretrained(tmp_path)
    assert AutoPeftModelForTokenClassification.from_pretrained(tmp_path).config.id2label == NAMES


@pytest.mark.parametrize("cls", [ViTForImageClassification, WhisperForAudioClassification])
def test_pictures_and_sounds_too(tmp_path, cls):
    if cls is ViTForImageClassification:
        config = ViTConfig(image_size=8, patch_size=4, **TINY)
    else:
        config = WhisperConfig(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=24,
                               decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=24, num_mel_bins=8,
                               classifier_proj_size=16)  # fmt: skip
    cls(config).save_pretrained(tmp_path / "base")
    classifier(tmp_path / "base", NAMES, cls, None, ignore_mismatched_sizes=True).save_pretrained(tmp_path / "adapter")
    assert AutoPeftModel.from_pretrained(tmp_path / "adapter").config.id2label == NAMES


def test_what_the_user_says_wins(tmp_path, base):
    classifier(base, NAMES, problem_type="multi_label_classification").save_pretrained(tmp_path)
    load = AutoPeftModelForSequenceClassification.from_pretrained
    own = {0: "schlecht", 1: "geht so", 2: "gut"}
    config = load(tmp_path, id2label=own, label2id=inverse(own), problem_type="regression").config
    assert (config.id2label, config.label2id, config.problem_type) == (own, inverse(own), "regression")
    assert load(tmp_path, num_labels=3).config.id2label == NAMES
    with pytest.raises(ConfigError, match=r"num_labels=3"):
        load(tmp_path, num_labels=4)


def test_names_may_be_edited_by_hand(tmp_path, base):
    classifier(base, NAMES).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    edit_json(path, signed=True, id2label={"0": "rot", "1": "gelb", "2": "grün"})
    config = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path).config
    assert (config.id2label, config.label2id["grün"]) == ({0: "rot", 1: "gelb", 2: "grün"}, 2)
    edit_json(path, signed=True, id2label={"first": "rot"}, problem_type=3)
    with pytest.raises(ConfigError, match=r"id2label is .*'first': 'rot'(?s:.*)problem_type is 3"):
        SNNKConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("door", ["PeftModel", "load_adapter", "transformers"])
def test_another_number_of_labels_is_named(tmp_path, base, door, kept):
    classifier(base, NAMES).save_pretrained(tmp_path)
    if not kept:  # as saved by earlier versions
        edit_json(tmp_path / "adapter_config.json", lambda content: content.pop("id2label"), signed=True)
    two = BertForSequenceClassification.from_pretrained(base)
    load = {
        "PeftModel": lambda: PeftModel.from_pretrained(two, tmp_path),
        "load_adapter": lambda: two.load_adapter(tmp_path),
        "transformers": lambda: AutoModelForSequenceClassification.from_pretrained(tmp_path),
    }[door]
    with pytest.raises(ConfigError, match=r"classifier of 3 labels.* has 2\. .*num_labels=3"):
        load()


@pytest.mark.parametrize("door", ["PeftModel", "load_adapter", "transformers"])
def test_a_model_of_as_many_labels_takes_the_names_unless_it_has_its_own(tmp_path, base, door):
    classifier(base, NAMES).save_pretrained(tmp_path)
    own = {0: "a", 1: "b", 2: "c"}
    for given, expected in (({"num_labels": 3}, NAMES), ({"id2label": own, "label2id": inverse(own)}, own)):
        if door == "transformers":
            model = AutoModelForSequenceClassification.from_pretrained(tmp_path, **given)
        else:
            model = BertForSequenceClassification.from_pretrained(base, **given)
            model.load_adapter(tmp_path) if door == "load_adapter" else PeftModel.from_pretrained(model, tmp_path)
        assert (model.config.id2label, model.config.label2id) == (expected, inverse(expected))


@pytest.mark.parametrize("cls", [BertModel, BertForMaskedLM, BertForQuestionAnswering])
def test_models_without_labels_write_none(tmp_path, base, cls):
    model = get_snnk_model(cls.from_pretrained(base), SNNKConfig(adapter=AdapterPart(num_features=4)))
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (content["id2label"], content["problem_type"]) == (None, None)
    AutoPeftModel.from_pretrained(tmp_path)


def test_transformers_saves_them_too_and_names_that_do_not_fit_are_left_out(tmp_path, base):
    model = BertForSequenceClassification.from_pretrained(base, id2label=NAMES, label2id=inverse(NAMES))
    model.add_adapter(SNNKConfig(adapter=AdapterPart(num_features=4), task_type="SEQ_CLS"))
    model.save_pretrained(tmp_path)
    assert AutoPeftModelForSequenceClassification.from_pretrained(tmp_path).config.id2label == NAMES
    model.config.id2label = {0: "one too few"}
    shutil.rmtree(tmp_path)
    model.save_pretrained(tmp_path)
    assert SNNKConfig.from_pretrained(tmp_path).id2label is None
