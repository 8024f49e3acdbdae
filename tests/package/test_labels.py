"""Label names travel with an adapter: the load line of its card makes the classifier that it was saved with."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import (
    AutoPeftModel,
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    PeftModel,
)
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForAudioClassification,
)

from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model
from snnk_peft.errors import ConfigError

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
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
    BertModel(BertConfig(vocab_size=50, **SIZES)).save_pretrained(folder)
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
        config = ViTConfig(image_size=8, patch_size=4, **SIZES)
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
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"id2label": {"0": "rot", "1": "gelb", "2": "grün"}}))
    config = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path).config
    assert (config.id2label, config.label2id["grün"]) == ({0: "rot", 1: "gelb", 2: "grün"}, 2)
    path.write_text(json.dumps(content | {"id2label": {"first": "rot"}, "problem_type": 3}))
    with pytest.raises(ConfigError, match=r"id2label is .*'first': 'rot'(?s:.*)problem_type is 3"):
        SNNKConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("door", ["PeftModel", "load_adapter", "transformers"])
def test_another_number_of_labels_is_named(tmp_path, base, door, kept):
    classifier(base, NAMES).save_pretrained(tmp_path)
    if not kept:  # as saved by earlier versions
        path = tmp_path / "adapter_config.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in content.items() if key != "id2label"}))
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
