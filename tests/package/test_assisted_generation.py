"""Generation with an assistant, on either side; recurrent caches that are pickled and copied."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from snnk_peft import AttentionPart, SNNKConfig, bundle
from snnk_peft.attention import RecurrentCache
from snnk_peft.errors import UnsupportedError
from tests.package.test_attention import causal_model, left_padded, patched
from tests.package.test_recurrent_cache import linear
from tests.package.test_static_cache import windowed
from tests.tiny_models import trained

# No text ends early: padding behind an end, in a row that goes on later, is a matter of masks and not of caches.
GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
VARIANTS = [{"num_features": 16}, {"num_features": 16, "near_field": 3, "layers": "top-1"}]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_a_linear_model_assists(fields):
    """Tokens that are not accepted are taken back from the assistant's cache, so it must keep its keys."""
    ids = left_padded()["input_ids"][:1]
    model = patched(causal_model("llama"), **fields)
    growing = {"past_key_values": DynamicCache(config=model.config)}
    for main, options in ((causal_model("llama"), {}), (patched(causal_model("llama"), num_features=32), growing)):
        expected = main.generate(input_ids=ids, **GREEDY)
        for assistant in (model.get_base_model(), bundle(copy.deepcopy(model))):
            given = copy.deepcopy(options)
            assert torch.equal(main.generate(input_ids=ids, **GREEDY, assistant_model=assistant, **given), expected)
    made = model.generate(input_ids=ids, **GREEDY, return_dict_in_generate=True)
    assert any(linear(made.past_key_values))  # by itself it has the recurrent one


def test_an_assistant_with_a_window():
    """The cache that generate makes for it would drop keys that a linear layer sees."""
    main = causal_model("llama")
    ids = left_padded()["input_ids"][:1]
    expected = main.generate(input_ids=ids, **GREEDY)
    for layers in ("all", [1]):
        model = patched(windowed(4), num_features=16, near_field=4, layers=layers)
        assert torch.equal(main.generate(input_ids=ids, **GREEDY, assistant_model=model.get_base_model()), expected)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": causal_model("llama")}])
def test_the_remedy_of_the_message_works(options):
    model = patched(causal_model("llama"), num_features=16)
    ids = left_padded()["input_ids"][:1]
    with pytest.raises(UnsupportedError, match=r"past_key_values=transformers\.DynamicCache\(config=model\.config\)"):
        model.generate(input_ids=ids, **GREEDY, **options)
    growing = DynamicCache(config=model.config)
    found = model.generate(input_ids=ids, **GREEDY, **options, past_key_values=growing)
    assert torch.equal(found, model.generate(input_ids=ids, **GREEDY))


def stored(cache: RecurrentCache) -> RecurrentCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize("way", [lambda cache: pickle.loads(pickle.dumps(cache)), stored, copy.deepcopy])
def test_a_copy_continues_the_text(fields, way):
    model = trained(patched(causal_model("llama"), **fields), std=1.0)
    inputs = left_padded()
    cache = RecurrentCache(model)
    empty = way(cache)
    first = model.generate(**inputs, **GREEDY, past_key_values=cache)
    assert torch.equal(model.generate(**inputs, **GREEDY, past_key_values=empty), first)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, first.shape[1] - 12), value=1)
    again = way(way(cache))
    assert (again.nbytes, again.get_seq_length()) == (cache.nbytes, cache.get_seq_length())
    expected = model.generate(input_ids=first, attention_mask=mask, **GREEDY, past_key_values=cache)
    assert expected.shape[1] > first.shape[1]
    found = model.generate(input_ids=first, attention_mask=mask, **GREEDY, past_key_values=again)
    assert torch.equal(found, expected)


def test_a_pickled_cache_knows_what_made_it(tmp_path):
    """Loaded elsewhere, it goes on with equal feature maps and with no others."""
    model = patched(causal_model("llama"), num_features=16)
    small = bundle(copy.deepcopy(model))
    small.save_pretrained(tmp_path)
    ids = left_padded()["input_ids"]
    first = small.generate(input_ids=ids, **GREEDY, past_key_values=(cache := RecurrentCache(small)))
    written = pickle.dumps(cache)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for loaded in (small, again):
        found = loaded.generate(input_ids=first, **GREEDY, past_key_values=pickle.loads(written))
        assert torch.equal(found, small.generate(input_ids=first, **GREEDY, use_cache=False))
    other = patched(causal_model("llama"), num_features=16)
    other.add_adapter("other", SNNKConfig(attention=AttentionPart(num_features=16), seed=5, modules_to_save=[]))
    other.eval().set_adapter("other")
    with pytest.raises(UnsupportedError, match="another adapter"):
        other.generate(input_ids=first, **GREEDY, past_key_values=pickle.loads(written))
    cache.reset()
    assert pickle.loads(pickle.dumps(cache)).get_seq_length() == 0
