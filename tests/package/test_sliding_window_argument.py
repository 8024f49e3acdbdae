"""Models whose attention modules have no window of their own, and pass one to the attention function."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from snnk_peft import bundle
from snnk_peft.errors import UnsupportedError
from snnk_peft.families import FAMILIES, register_family
from snnk_peft.families.base import ModelFamily
from snnk_peft.parts.attention.masks import band_width
from tests.package.test_attention import TOKENS, causal_model, patched

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64, **TOKENS}
MODELS = {"mistral": "Mistral", "phi3": "Phi3", "starcoder2": "Starcoder2"}
WINDOW = 20  # longer than what bundles are probed with


def model_with(name: str, window: int | None = WINDOW):
    if name not in FAMILIES:
        places = {"query": "self_attn.q_proj", "value": "self_attn.v_proj"} if name != "phi3" else {}
        register_family(
            ModelFamily(
                name=name,
                layers="{base}.layers",
                attention="self_attn",
                attention_adapter="self_attn.o_proj",
                ffn_in="mlp",
                activation="mlp",
                ffn_out="mlp",
                ffn_adapter="mlp",
                ffn_norm="post_attention_layernorm",
                causal=True,
                gated=True,
                **places,
            )
        )
    torch.manual_seed(0)
    config = getattr(transformers, f"{MODELS[name]}Config")(**SIZES, sliding_window=window)
    return getattr(transformers, f"{MODELS[name]}ForCausalLM")(config).eval()


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_narrow_window_is_refused(name):
    plain = model_with(name)
    model = patched(copy.deepcopy(plain), num_features=16)
    free = patched(model_with(name, None), num_features=16)
    short, long = tokens(WINDOW), tokens(WINDOW + 1)
    with torch.no_grad():
        for loaded in (model, bundle(copy.deepcopy(model))):
            # A window as wide as the input is none.
            torch.testing.assert_close(loaded(input_ids=short).logits, free(input_ids=short).logits)
            for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(long)}):
                with pytest.raises(UnsupportedError, match=f"window of {WINDOW} tokens and there are 21 keys"):
                    loaded(input_ids=long, **options)
            for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
                with pytest.raises(UnsupportedError, match=f"window of {WINDOW} tokens"):
                    loaded.generate(input_ids=short, max_new_tokens=4, do_sample=False, **options)
        with model.disable_adapter():
            torch.testing.assert_close(model(input_ids=long).logits, plain(input_ids=long).logits)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_the_message_advises(name):
    """A near field, other layers, or no window."""
    long = tokens(30)
    for model in (
        patched(model_with(name), num_features=16, near_field=WINDOW),
        patched(model_with(name, None), num_features=16),
    ):
        text = model.generate(input_ids=long, max_new_tokens=6, do_sample=False)
        without = model.generate(input_ids=long, max_new_tokens=6, do_sample=False, use_cache=False)
        assert torch.equal(text, without)
    model = model_with(name)
    model.config.sliding_window = None
    patched(model, num_features=16)(input_ids=long)


def test_a_window_that_stays_in_the_config():
    """Models like qwen2_moe put it into their masks alone."""
    module = causal_model("llama").model.layers[0].self_attn
    assert band_width(module, {}, 100) is None
    assert band_width(module, {"sliding_window": 5}, 100) == 5
    module.config.sliding_window = 50
    assert band_width(module, {}, 50) is None
    assert band_width(module, {"sliding_window": None}, 100) is None
    with pytest.raises(UnsupportedError, match="does not pass to its attention function"):
        band_width(module, {}, 51)
