"""Caches of other kinds than the recurrent one: static, with sliding windows, offloaded, quantized."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache
from transformers.masking_utils import causal_mask_function as causal

from snnk_peft import bundle
from snnk_peft.attention import RecurrentCache
from snnk_peft.errors import UnsupportedError
from snnk_peft.families import FAMILIES, register_family
from snnk_peft.families.base import ModelFamily
from snnk_peft.parts.attention.interface import padding_mask
from tests.package.test_attention import TOKENS, causal_model, left_padded, patched
from tests.tiny_models import trained

GREEDY = {"max_new_tokens": 10, "do_sample": False}
STATIC = {**GREEDY, "cache_implementation": "static"}
VARIANTS = [
    {"num_features": 16},
    {"num_features": 16, "near_field": 3},
    {"num_features": 16, "near_field": 3, "near_field_normalisation": "joint", "sinks": 2},
    {"num_features": 16, "layers": [0]},
    {"num_features": 16, "layers": [1], "near_field": 3},
]


def windowed(window: int | None = 4, **changes):
    """A tiny model that attends to a band in all layers, and keeps no more than that in its caches."""
    if "mistral" not in FAMILIES:
        register_family(
            ModelFamily(
                name="mistral",
                layers="{base}.layers",
                attention="self_attn",
                attention_adapter="self_attn.o_proj",
                ffn_in="mlp.gate_proj",
                activation="mlp.act_fn",
                ffn_out="mlp.down_proj",
                ffn_adapter="mlp.down_proj",
                ffn_norm="post_attention_layernorm",
                causal=True,
                gated=True,
            )
        )
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.MistralConfig(**sizes, **TOKENS, intermediate_size=64, sliding_window=window, **changes)
    model = transformers.MistralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() == 2 else 1)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_static_caches_give_the_same_text(name, fields):
    """Greedy and beam search, a batch padded on the left, prefill in chunks, a cache made by hand."""
    plain = causal_model(name)
    model = patched(copy.deepcopy(plain), **fields)
    inputs = left_padded()
    expected = model.generate(**inputs, **GREEDY, use_cache=False)
    made = model.generate(**inputs, **STATIC, return_dict_in_generate=True)
    assert type(made.past_key_values) is StaticCache
    assert torch.equal(made.sequences, expected)
    assert torch.equal(model.generate(**inputs, **STATIC, prefill_chunk_size=5), expected)
    cache = StaticCache(config=model.config, max_cache_len=40)
    assert torch.equal(model.generate(**inputs, **GREEDY, past_key_values=cache), expected)
    beams = model.generate(**inputs, **GREEDY, num_beams=2, use_cache=False)
    assert torch.equal(model.generate(**inputs, **STATIC, num_beams=2), beams)
    with model.disable_adapter():
        assert torch.equal(model.generate(**inputs, **STATIC), plain.generate(**inputs, **STATIC))


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_logits_of_pieces_in_a_static_cache(fields):
    model = patched(causal_model("llama"), **fields)
    inputs = left_padded()
    real = inputs["attention_mask"].bool()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(**inputs, position_ids=positions, use_cache=False).logits
        for mask_length in (12, 30):  # of what is known so far, or of all slots
            cache = StaticCache(config=model.config, max_cache_len=30)
            parts, end = [], 0
            for size in (6, 1, 4, 1):
                begin, end = end, end + size
                known = torch.nn.functional.pad(inputs["attention_mask"], (0, 18), value=1)
                parts.append(
                    model(
                        input_ids=inputs["input_ids"][:, begin:end],
                        attention_mask=known[:, : min(mask_length, end) if mask_length == 12 else 30],
                        position_ids=positions[:, begin:end],
                        past_key_values=cache,
                    ).logits
                )
            torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], rtol=1e-4, atol=1e-4)
        cache = StaticCache(config=model.config, max_cache_len=30)
        first = model(input_ids=inputs["input_ids"][:1], past_key_values=cache).logits  # no mask at all
    torch.testing.assert_close(first, whole[:1], rtol=1e-4, atol=1e-4)


def test_bundles_with_static_caches(tmp_path):
    model = trained(patched(causal_model("llama"), num_features=16, near_field=3, layers="top-1"), std=1.0)
    inputs = left_padded()
    expected = model.generate(**inputs, **GREEDY, use_cache=False)
    bundle(model).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(**inputs, **STATIC), expected)


@pytest.mark.parametrize("size", [1, 3])
def test_weights_with_a_static_cache(size):
    model = patched(causal_model("llama"), num_features=16, layers="top-1")
    ids = left_padded()["input_ids"]
    with torch.no_grad():
        whole = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
        cache = StaticCache(config=model.config, max_cache_len=30)
        model(input_ids=ids[:, :-size], past_key_values=cache)
        last = model(input_ids=ids[:, -size:], past_key_values=cache, output_attentions=True).attentions
    for found, expected in zip(last, whole, strict=True):
        torch.testing.assert_close(found, expected[:, :, -size:], rtol=1e-4, atol=1e-5)


def test_softmax_layers_with_a_window_and_every_cache():
    """Sliding caches drop the first keys, static ones roll them out: the mask must follow."""
    plain = windowed()
    model = patched(windowed(), num_features=16, layers=[1], near_field=4)
    inputs = left_padded()
    inputs["attention_mask"][2, :10] = 0  # padding that is dropped with the keys it is about
    exact = plain.generate(**inputs, **GREEDY)
    for options in (GREEDY, STATIC, {**STATIC, "prefill_chunk_size": 3}, {**GREEDY, "num_beams": 2}):
        with model.disable_adapter():
            assert torch.equal(model.generate(**inputs, **options), plain.generate(**inputs, **options)), options
    with model.disable_adapter():
        assert torch.equal(model.generate(**inputs, **STATIC), exact)
    expected = model.generate(**inputs, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    assert torch.equal(model.generate(**inputs, **GREEDY, prefill_chunk_size=5), expected)
    assert torch.equal(model.generate(**inputs, **GREEDY, past_key_values=RecurrentCache(model)), expected)
    assert torch.equal(model.generate(**inputs, **GREEDY, past_key_values=DynamicCache()), expected)
    for options in (STATIC, {**GREEDY, "past_key_values": DynamicCache(config=model.config)}):
        with pytest.raises(UnsupportedError, match="RecurrentCache"):
            model.generate(**inputs, **options)


def test_a_quantized_cache_holds_all_keys():
    model = patched(causal_model("llama"), num_features=16, layers="top-1")
    inputs = left_padded()
    with torch.no_grad():
        whole = model(**inputs, use_cache=False).logits[:, -1]
        cache = QuantizedCache(backend="fp8", config=model.config)
        for begin, end in ((0, 7), (7, 11), (11, 12)):
            last = model(
                input_ids=inputs["input_ids"][:, begin:end],
                attention_mask=inputs["attention_mask"][:, :end],
                past_key_values=cache,
            ).logits[:, -1]
    assert (last - whole)[[0, 2]].abs().max() < 0.1 * whole.abs().max()  # keys and values are rounded to 3 bits


def test_masks_speak_of_all_tokens_up_to_the_last_query():
    assert padding_mask(2, 3, 3, mask_function=causal) is None
    assert padding_mask(2, 1, 4, q_offset=3, mask_function=causal) is None
    static = padding_mask(2, 3, 9, q_offset=torch.tensor(2), mask_function=causal)
    assert static.tolist() == [[True] * 5] * 2
    sliding = padding_mask(1, 1, 4, 9, 6, causal, torch.tensor([[0] * 7 + [1] * 3]))
    assert sliding.tolist() == [[False] * 7 + [True] * 3]
