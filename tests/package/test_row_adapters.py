"""`model(x, adapter_names=[...])`: each row is what the model gives with its adapter alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from snnk_peft import AdapterPart, FFNPart, PoolerPart, SNNKConfig, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from tests.tiny_models import inputs_for, tiny, trained

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


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


NAMES = ["b", "__base__", "default", "b"]
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
        found = model(**batch, adapter_names=NAMES).logits
        torch.testing.assert_close(model(**batch).logits, wanted[active])  # nothing is left behind
    for row, name in enumerate(NAMES):
        torch.testing.assert_close(found[row], wanted[name][row], rtol=1e-5, atol=1e-5)
    assert (wanted["b"] - wanted["default"]).abs().max() > 1e-2


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
def test_rows_of_generate(options):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes))
    model = two(base, AdapterPart(num_features=4), AdapterPart(num_features=4), task_type="CAUSAL_LM")
    ids = torch.randint(3, 50, (4, 5), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **options}
    wanted = alone(model, lambda: model.generate(input_ids=ids, **options))
    found = model.generate(input_ids=ids, adapter_names=NAMES, **options)
    each = options.get("num_return_sequences", 1)
    for row, name in enumerate(NAMES):
        rows = slice(row * each, (row + 1) * each)
        assert torch.equal(found[rows], wanted[name][rows])
    assert not torch.equal(wanted["b"], wanted["default"])


def test_rows_do_not_depend_on_each_other():
    model = two(tiny("bert"), AdapterPart(num_features=4), AdapterPart(num_features=4))
    batch = inputs_for(model, batch=4)
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][1:] = 5
    with torch.no_grad():
        first = model(**batch, adapter_names=NAMES).logits[0]
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
