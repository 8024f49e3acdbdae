"""Adapters may have any reasonable name, also one that stands in the paths of the model or of other adapters."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from torch import nn

from snnk_peft import AdapterPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.errors import ConfigError
from tests.tiny_models import inputs_for, same, tiny, trained

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{of_peft}")
    for of_peft in ("Adapter name .* should not be contained in", "Adapter .* was active", "Already found a `peft_con")
]

# Folds; segments of paths of the model, of a slot and of the base class; ends of parameters; PEFT's own words; others.
NAMES = [
    "0",
    "1",
    "2",
    "3",
    "4",
    "adapter",
    "encoder",
    "layer",
    "output",
    "attention",
    "dense",
    "bert",
    "self",
    "model",
]
NAMES += ["base_model", "word_embeddings", "readout", "stage", "feature_map", "projection", "A", "weight", "bias"]
NAMES += ["lora_A", "snnk", "snnk_", "default", "default_2", "a b", "x-y", "é", "$", "[ab]"]
REFUSED = ["a.b", "..", "a/b", "a\\b", "", "a\nb", "a(b)", "f" * 300, "modules_to_save", "snnk_slots", "base_layer"]
REFUSED += ["original_module", "__base__", "keys", "train", "type", "forward", "classifier", "myclassifier"]


def config(seed: int = 0, **options) -> SNNKConfig:
    return SNNKConfig(adapter=AdapterPart(num_features=4, placement="pfeiffer"), seed=seed, **options)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs_for(model)).logits


# A head that is a Linear, and one with modules inside.
@pytest.mark.parametrize(
    ("family", "names"), [("bert", NAMES), ("roberta", ["1", "output", "dense", "weight", "head"])]
)
def test_every_name_saves_all_its_tensors(family, names, tmp_path):
    model = get_snnk_model(tiny(family), config(), adapter_name=names[0])
    for seed, name in enumerate(names[1:], 1):
        model.add_adapter(name, config(seed))
    wanted = {}
    for name in names:
        model.set_adapter(name)
        wanted[name] = logits(trained(model, 0.1 + 0.01 * len(wanted)))
    model.save_pretrained(tmp_path)
    model.set_adapter("weight")
    same(logits(bundle(model)), wanted["weight"])
    loaded = None
    for name in names:
        folder = tmp_path if name == "default" else tmp_path / name
        if loaded is None:
            loaded = PeftModel.from_pretrained(tiny(family), folder, adapter_name=name)
        else:
            loaded.load_adapter(folder, name)
    for name in reversed(names):
        loaded.set_adapter(name)
        same(logits(loaded), wanted[name])
        loaded.delete_adapter(name) if len(loaded.peft_config) > 1 else None


@pytest.mark.parametrize("name", ["0", "encoder", "adapter", "weight", "a b", "$"])
def test_every_name_through_transformers(name, tmp_path):
    model, wanted = tiny("bert"), {}
    model.add_adapter(config(), adapter_name=name)
    model.add_adapter(config(1), adapter_name="other")
    for std, one in ((0.1, name), (0.2, "other")):
        model.set_adapter(one)
        wanted[one] = logits(trained(model, std))
    loaded = tiny("bert")
    for one in wanted:
        model.set_adapter(one)
        model.save_pretrained(tmp_path / one)
        loaded.load_adapter(str(tmp_path / one), adapter_name=one)
    for one in wanted:
        loaded.set_adapter(one)
        same(logits(loaded), wanted[one])


def state(model: nn.Module) -> dict[str, bool]:
    """Paths of everything, and whether it is trained."""
    return {path: False for path, _ in model.named_modules()} | {
        p: t.requires_grad for p, t in model.named_parameters()
    }


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_cannot_work_are_refused_before_anything_changes(name, tmp_path):
    base = tiny("bert")
    before = state(base)
    with pytest.raises(ConfigError, match="name"):
        get_snnk_model(base, config(), adapter_name=name)
    assert state(base) == before
    if name:  # transformers takes "" for "default"
        with pytest.raises(ConfigError, match="name"):
            base.add_adapter(config(), adapter_name=name)
        assert state(base) == before
        assert not base._hf_peft_config_loaded
    model = get_snnk_model(base, config())
    before = state(model)
    with pytest.raises(ConfigError, match="name"):
        model.add_adapter(name, config(1))
    assert state(model) == before
    assert list(model.peft_config) == ["default"]


def test_a_second_adapter_that_transformers_refuses_leaves_the_first():
    model = tiny("bert")
    model.add_adapter(config(), adapter_name="0")
    wanted = logits(trained(model))
    with pytest.raises(ConfigError, match="name"):
        model.add_adapter(config(1), adapter_name="a.b")
    assert list(model.peft_config) == ["0"]
    same(logits(model), wanted)


def test_a_name_that_ends_like_a_module_is_refused_only_where_that_module_is_saved():
    free = get_snnk_model(tiny("bert"), config(modules_to_save=[]), adapter_name="classifier")
    with pytest.raises(ConfigError, match="'classifier' of modules_to_save"):
        free.add_adapter("b", config())
    free.add_adapter("b", config(modules_to_save=[]))


@pytest.mark.parametrize("name", ["dense", "out_proj", "weight"])
def test_adding_an_adapter_does_not_freeze_the_head_in_training(name):
    model = get_snnk_model(tiny("roberta"), config())
    before = [path for path, tensor in model.named_parameters() if tensor.requires_grad]
    model.add_adapter(name, config(1))
    assert [path for path, tensor in model.named_parameters() if tensor.requires_grad] == before
    assert any("classifier" in path for path in before)


def test_embeddings_are_saved_beside_an_adapter_called_like_them(tmp_path):
    model = get_snnk_model(tiny("bert"), config())
    model.add_adapter("word_embeddings", config(1))
    trained(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2.0)
    wanted = logits(model)
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    same(logits(PeftModel.from_pretrained(tiny("bert"), tmp_path)), wanted)


def test_a_state_dict_is_completed_if_it_is_the_models_own(tmp_path):
    model = get_snnk_model(tiny("bert"), config(), adapter_name="0")
    model.add_adapter("layer", config(1))
    wanted = logits(trained(model))
    copied = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=copied)
    same(logits(PeftModel.from_pretrained(tiny("bert"), tmp_path / "0")), wanted)
    averaged = {key: tensor * 0.5 for key, tensor in copied.items()}
    with pytest.raises(ConfigError, match=r"not the model's own[\s\S]*Save without state_dict"):
        model.save_pretrained(tmp_path, state_dict=averaged)
