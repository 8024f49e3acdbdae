"""Which keys a token may see: documents packed into a row, windows that models pass on, masks; or a refusal."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import DataCollatorWithFlattening
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

from snnk_peft import bundle
from snnk_peft.attention import RecurrentCache
from snnk_peft.errors import UnsupportedError
from snnk_peft.families import FAMILIES, register_family
from snnk_peft.feature_map import build_feature_map
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.masks import attend_per_document, band_width
from tests.attention_models import SIZES, TOKENS, causal_model, left_padded, patched, sharpened, windowed
from tests.tiny_models import inputs_for, trained

LENGTHS = [5, 1, 2, 9, 3]
VARIANTS = [
    {"num_features": 16},
    {"num_features": 16, "near_field": 3, "per_head": True},
    {"num_features": 16, "layers": "top-1"},
    {"num_features": 16, "layers": "bottom-1", "near_field": 2},
]


def documents() -> list[torch.Tensor]:
    ids = torch.randint(3, 100, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(5))
    return list(ids.split(LENGTHS, 1))


def packed() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.cat(documents(), 1),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
    }


def one_by_one(model) -> torch.Tensor:
    return torch.cat([model(input_ids=ids, use_cache=False).logits for ids in documents()], 1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_documents_are_kept_apart(name, fields):
    """Rows that are packed differently, by their positions alone."""
    plain = causal_model(name)
    model = trained(patched(copy.deepcopy(plain), **fields), std=1.0)
    row = packed()
    rows = {
        key: torch.cat((value, value.roll(5, 1))) for key, value in row.items()
    }  # the second begins inside a document
    with torch.no_grad():
        apart = one_by_one(model)
        assert torch.allclose(model(**row, use_cache=False).logits, apart, rtol=1e-4, atol=1e-4)
        found = model(**rows, use_cache=False).logits
        leaking = model(input_ids=row["input_ids"], use_cache=False).logits
        with model.disable_adapter():
            exact = model(**row, use_cache=False).logits
        torch.testing.assert_close(exact, plain(**row, use_cache=False).logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(exact, one_by_one(plain), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0], apart[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1, 5:], apart[0, :-5], rtol=1e-4, atol=1e-4)
    assert (leaking - apart)[:, LENGTHS[0] :].abs().max() > 0.1


def test_gradients_and_bundles():
    model = trained(patched(causal_model("llama"), num_features=16, near_field=3))
    row = packed()
    weights = [p for p in model.parameters() if p.requires_grad]
    grads = []
    for logits in (model(**row, use_cache=False).logits, one_by_one(model)):
        grads.append(torch.autograd.grad(logits.square().mean(), weights))
    for found, expected in zip(*grads, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    small = bundle(model)
    with torch.no_grad():
        torch.testing.assert_close(small(**row, use_cache=False).logits, one_by_one(small), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("component", ["posrf", "saderf"])  # saderf adapts to an example: here, to a document
def test_ends_of_documents_given_to_an_encoder(component):
    model = patched(sharpened("bert"), component=component, num_features=16, near_field=2, layers="top-1")
    ids = inputs_for(model.get_base_model(), batch=1, tokens=12)["input_ids"]
    ends = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(4), torch.arange(1), torch.arange(7)])[None]
    base = model.get_base_model().bert
    with torch.no_grad():
        found = base(input_ids=ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends).last_hidden_state
        parts = [base(input_ids=part).last_hidden_state for part in ids.split([4, 1, 7], 1)]
    torch.testing.assert_close(found, torch.cat(parts, 1), rtol=1e-4, atol=1e-5)


def test_the_collator_of_transformers():
    model = patched(causal_model("llama"), num_features=16, layers="top-1")
    features = [{"input_ids": ids[0].tolist()} for ids in documents()]
    for flash in (False, True):
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)(features)
        with torch.no_grad():
            expected = one_by_one(model)
            found = model(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    alone = {"input_ids": batch["input_ids"], "cu_seq_lens_q": batch["cu_seq_lens_q"]}
    with torch.no_grad():
        found = model(**alone, position_ids=batch["position_ids"]).logits  # with a cache, which tells no documents
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for wrong in (
        {"input_ids": batch["input_ids"].expand(2, -1)},
        {"cu_seq_lens_q": batch["cu_seq_lens_q"][:-1]},
        {"cu_seq_lens_k": batch["cu_seq_lens_q"] + 1},
        {"attention_mask": (torch.arange(sum(LENGTHS)) > 2)[None].long()},
    ):
        with pytest.raises(UnsupportedError, match="cu_seq_lens_q is"):
            model(**{**alone, **wrong})


@pytest.mark.parametrize("window", [1, 2, 4])
def test_windows_within_documents(window):
    plain = windowed(window)
    model = patched(windowed(window), num_features=16, layers=[1], near_field=window)
    row = packed()
    with torch.no_grad():
        for one in (model, plain):
            torch.testing.assert_close(one(**row, use_cache=False).logits, one_by_one(one), rtol=1e-4, atol=1e-4)
        with model.disable_adapter():
            torch.testing.assert_close(
                model(**row, use_cache=False).logits, plain(**row, use_cache=False).logits, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_cannot_be_kept_apart_is_refused(name):
    model = patched(causal_model(name), num_features=16)
    row = packed()
    with torch.no_grad():
        for given in ({}, {"past_key_values": RecurrentCache(model)}):  # transformers looks for no documents then
            with pytest.raises(UnsupportedError, match="use_cache=False"):
                model(**row, **given)
        with pytest.raises(UnsupportedError, match="one document per row"):
            model(**row, use_cache=False, output_attentions=True)
        mask = torch.ones_like(row["input_ids"])
        model(**row, attention_mask=mask)  # one text with positions of its own
        positions = torch.arange(7, 27)[None]
        model(input_ids=row["input_ids"], position_ids=positions)
        positions[:, 5:] -= 5
        with pytest.raises(UnsupportedError, match="use_cache=False"):
            model(input_ids=row["input_ids"], position_ids=positions)
        model.generate(**left_padded(), max_new_tokens=2)


MASKS_OF_PAIRS = [
    {"or_mask_function": lambda b, h, q, k: k < 3},
    {"and_mask_function": lambda b, h, q, k: k > 1},
    {"block_sequence_ids": torch.tensor([[0, 0, 1, 1, -1, -1]] * 2)},
    {},
]


@pytest.mark.parametrize("asked", MASKS_OF_PAIRS, ids=["or", "and", "blocks", "chunks"])
def test_masks_of_pairs_are_refused(asked):
    """What gemma3 and paligemma ask for (images seen from both sides, prefixes), and llama4 (chunks)."""
    config = patched(causal_model("llama"), num_features=16).get_base_model().config
    config.attention_chunk_size = 3
    given = {"config": config, "attention_mask": None, "past_key_values": None, "inputs_embeds": torch.zeros(2, 6, 32)}
    assert create_causal_mask(**given) is None
    create = create_causal_mask if asked else create_chunked_causal_mask
    with pytest.raises(UnsupportedError, match="no prefix"):
        create(**given, **asked)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_every_shape(causal):
    """The definition: one document after the other."""
    torch.manual_seed(3)
    kernel = KernelAttention([build_feature_map("posrf", "orf", 4, 8)], 4, near_field=2).double()
    numbers = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2], [7, 7, 7, 7, 7, 7, 7, 7, 7], [1, 0, 1, 0, 0, 0, 0, 5, 5]])
    q, k, v = (torch.randn(3, heads, 9, 4, dtype=torch.float64) for heads in (4, 2, 2))

    def attend(q, k, v, mask=None):
        return kernel(q, k, v, mask, causal=causal).transpose(1, 2)

    found = attend_per_document(attend, numbers, q, k, v)
    cuts = [[3, 1, 5], [9], [1, 1, 1, 4, 2]]
    for row, lengths in enumerate(cuts):
        parts = zip(*(t[row : row + 1].split(lengths, 2) for t in (q, k, v)), strict=True)
        torch.testing.assert_close(found[row : row + 1], torch.cat([attend(*part) for part in parts], 1))


# === models that pass a window to the attention function ==============================================================


MODELS = {"mistral": "Mistral", "phi3": "Phi3", "starcoder2": "Starcoder2"}
WINDOW = 20  # longer than what bundles are probed with


def model_with(name: str, window: int | None = WINDOW):
    if name not in FAMILIES:  # built as Llama, as far as attention goes
        places = dict.fromkeys(("ffn_in", "activation", "ffn_out", "ffn_adapter"), "mlp") | {"ffn_up": None}
        register_family(replace(FAMILIES["llama"], name=name, **places))
    torch.manual_seed(0)
    config = getattr(transformers, f"{MODELS[name]}Config")(
        **SIZES, **TOKENS, intermediate_size=64, max_position_embeddings=64, sliding_window=window
    )
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
