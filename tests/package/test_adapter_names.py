"""Adapters by name: saved, told apart by their base, mixed in one batch."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from snnk_peft import AdapterPart, FFNPart, PoolerPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from tests.attention_models import causal_model
from tests.by_hand import edit_json
from tests.tiny_models import inputs_for, same, tiny, trained

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{of_peft}")
    for of_peft in (
        "Adapter name .* should not be contained in",
        "Adapter .* was active",
        "Already found a `peft_con",
        "`is_gradient_checkpointing` is deprecated",
    )
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


def test_ctrl_c_while_an_adapter_is_made_leaves_the_model_without_one(monkeypatch):
    def stopped(*arguments):
        raise KeyboardInterrupt

    base = tiny("bert")
    before = state(base)
    monkeypatch.setattr("snnk_peft.tuner.model.measurements", stopped)
    with pytest.raises(KeyboardInterrupt):
        base.add_adapter(config())
    assert not base._hf_peft_config_loaded
    assert state(base) == before


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


# === the base that an adapter was made for ============================================================================


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IDS = torch.randint(3, 30, (2, 6), generator=torch.Generator().manual_seed(1))
NOTE = "the adapter was trained on other weights"


def base_of(seed: int) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=20, **SIZES)).eval()


def adapter_config(**options: object) -> SNNKConfig:
    return SNNKConfig(adapter=AdapterPart(num_features=4), task_type="SEQ_CLS", **options)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    get_snnk_model(base_of(0), adapter_config()).save_pretrained(tmp_path / "adapter")
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
    get_snnk_model(base_of(0).to(trained_in), adapter_config()).save_pretrained(tmp_path)
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
    given = adapter_config()
    for seed in (0, 1):
        get_snnk_model(base_of(seed), given)
        peft.get_peft_model(base_of(seed), given)
    assert NOTE not in caplog.text


def test_a_second_adapter_is_compared_with_the_base_below_the_first(tmp_path, caplog):
    model = get_snnk_model(base_of(0), SNNKConfig(ffn=FFNPart(num_features=6), task_type="SEQ_CLS"))
    get_snnk_model(base_of(0), adapter_config()).save_pretrained(tmp_path)
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
    given, argument = (
        (adapter_config(), {"revision": "v1"}) if where == "argument" else (adapter_config(revision="v1"), {})
    )
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
        adapter_config(revision=3)


def test_adapters_without_digests_load_as_ever(adapter, caplog):
    edit_json(adapter / "adapter_config.json", lambda content: content.pop("base_digests"))
    peft.PeftModel.from_pretrained(base_of(1), shutil.copytree(adapter, adapter.parent / "old"))
    assert NOTE not in caplog.text


# === an adapter for each row ==========================================================================================


def two(base: nn.Module, first: AdapterPart, second: AdapterPart, saved=None, other_saved=None, **options):
    """A model with trained adapters "default" and "b"."""
    model = get_snnk_model(base, SNNKConfig(adapter=first, modules_to_save=saved, **options))
    model.add_adapter("b", SNNKConfig(adapter=second, seed=1, modules_to_save=other_saved, **options))
    for std, name in ((0.2, "default"), (0.4, "b")):
        model.set_adapter(name)
        trained(model, std)
    return model.eval()


def alone(model, run):
    """The output with each adapter alone, and with none."""
    found = {}
    with torch.no_grad():
        for name in ("default", "b"):
            model.set_adapter(name)
            found[name] = run()
        with model.disable_adapter():
            found["__base__"] = run()
    return found


ADAPTERS_OF_ROWS = ["b", "__base__", "default", "b"]
PLACES = {
    "houlsby": ({}, {}),
    "parallel": ({"placement": "parallel"}, {"placement": "parallel", "num_features": 7}),
    "mixed": ({"placement": "parallel"}, {"placement": "query_value", "layers": [0]}),
}


@pytest.mark.parametrize("place", PLACES)
# The default head, one of modules inside (which PEFT cannot mix), one only for "b", and a whole layer's Linear.
@pytest.mark.parametrize(
    ("family", "saved"), [("bert", (None, None)), ("roberta", (None, None)), ("bert", ([], None)), ("vit", (None, []))]
)
@pytest.mark.parametrize("active", ["default", "b"])
def test_each_row_is_what_its_adapter_gives_alone(place, family, saved, active):
    first, second = (AdapterPart(**{"num_features": 4, **options}) for options in PLACES[place])
    model = two(tiny(family), first, second, *saved)
    batch = inputs_for(model, batch=4)
    wanted = alone(model, lambda: model(**batch).logits)
    model.set_adapter(active)
    with torch.no_grad():
        found = model(**batch, adapter_names=ADAPTERS_OF_ROWS).logits
        torch.testing.assert_close(model(**batch).logits, wanted[active])  # nothing is left behind
    for row, name in enumerate(ADAPTERS_OF_ROWS):
        torch.testing.assert_close(found[row], wanted[name][row], rtol=1e-5, atol=1e-5)
    assert (wanted["b"] - wanted["default"]).abs().max() > 1e-2


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_rows_of_generate(options):
    base = causal_model("llama", wide=False)
    model = two(base, AdapterPart(num_features=4), AdapterPart(num_features=4), task_type="CAUSAL_LM")
    ids = torch.randint(3, 50, (4, 5), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **options}
    wanted = alone(model, lambda: model.generate(input_ids=ids, **options))
    found = model.generate(input_ids=ids, adapter_names=ADAPTERS_OF_ROWS, **options)
    each = options.get("num_return_sequences", 1)
    for row, name in enumerate(ADAPTERS_OF_ROWS):
        rows = slice(row * each, (row + 1) * each)
        assert torch.equal(found[rows], wanted[name][rows])
    assert not torch.equal(wanted["b"], wanted["default"])


def test_rows_do_not_depend_on_each_other():
    model = two(tiny("bert"), AdapterPart(num_features=4), AdapterPart(num_features=4))
    batch = inputs_for(model, batch=4)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][1:] = 5
    with torch.no_grad():
        first = model(**batch, adapter_names=ADAPTERS_OF_ROWS).logits[0]
        torch.testing.assert_close(model(**changed, adapter_names=["b", "default", "b", "b"]).logits[0], first)


def test_within_disable_adapter_all_rows_are_plain():
    model = two(tiny("bert"), AdapterPart(num_features=4), AdapterPart(num_features=4))
    batch = inputs_for(model)
    with torch.no_grad(), model.disable_adapter():
        plain = model(**batch).logits
        torch.testing.assert_close(model(**batch, adapter_names=["b", "b", "default"]).logits, plain)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["default", "b", "c"], "unknown adapter 'c'"),
        (["defualt", "b", "b"], "did you mean 'default'"),
        (["default", "b"], "2 names; the batch has 3 rows"),
        (["b"], "1 names; the batch has 3 rows"),
        ([], "expected a list"),
        ("b", "expected a list"),
        ([0, "b", "b"], "expected a list"),
    ],
)
def test_names_that_fit_no_row_are_refused(names, message):
    model = two(tiny("bert"), AdapterPart(num_features=4), AdapterPart(num_features=4))
    with pytest.raises(ConfigError, match=message):
        model(**inputs_for(model), adapter_names=names)
    with pytest.raises(ConfigError, match=message):
        model(inputs_for(model)["input_ids"], adapter_names=names)


def test_training_is_refused_as_in_peft():
    model = two(tiny("bert"), AdapterPart(num_features=4), AdapterPart(num_features=4)).train()
    with pytest.raises(ConfigError, match="training mode"):
        model(**inputs_for(model), adapter_names=["b"] * 3)


@pytest.mark.parametrize("part", [{"ffn": FFNPart(num_features=6)}, {"pooler": PoolerPart(num_features=6)}])
def test_parts_that_replace_are_refused_by_name(part):
    model = get_snnk_model(tiny("bert"), SNNKConfig(adapter=AdapterPart(num_features=4)))
    model.add_adapter("b", SNNKConfig(**part))
    model.eval()
    batch = inputs_for(model)
    with pytest.raises(UnsupportedError, match=f"{next(iter(part))} .*set_adapter"):
        model(**batch, adapter_names=["default", "b", "__base__"])
    model(**batch, adapter_names=["default", "default", "__base__"])


def test_a_model_without_peft_around_it_refuses_names_for_rows():
    """transformers' models swallow keywords that they do not know: all rows would go through one adapter."""
    model = tiny("bert")
    model.add_adapter(SNNKConfig(adapter=AdapterPart(num_features=4)), "a")
    model.add_adapter(SNNKConfig(adapter=AdapterPart(num_features=5)), "b")
    batch = inputs_for(model, batch=2)
    with pytest.raises(UnsupportedError, match="expected a PeftModel"):
        model.eval()(**batch, adapter_names=["a", "b"])
    model(**batch)
