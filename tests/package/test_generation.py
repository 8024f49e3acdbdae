"""Generation with recurrent, static, sliding and quantized caches and with assistants is generation without a cache."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache
from transformers.masking_utils import causal_mask_function as causal

from snnk_peft import AttentionPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.attention import RecurrentCache
from snnk_peft.errors import UnsupportedError
from snnk_peft.feature_map import build_feature_map
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention, continue_attention
from snnk_peft.parts.attention.cache import RecurrentByDefault, RecurrentLayer
from snnk_peft.parts.attention.interface import padding_mask
from tests.attention_models import causal_model, in_pieces, left_padded, logits_of_pieces, patched, sharpened, windowed
from tests.tiny_models import trained

FAMILIES = ["llama", "gpt2"]
JOINT = {"num_features": 16, "near_field": 3, "near_field_normalisation": "joint", "sinks": 2}
HYBRID = {**JOINT, "full_heads": [[0, 1], [1, 0]], "cache_bits": 8, "position_free": True}
VARIANTS = [
    {"num_features": 16},
    {"num_features": 16, "near_field": 3, "per_head": True},
    {"num_features": 16, "near_field": 1},
    {"layers": "top-1"},
    {"layers": "bottom-1", "near_field": 4},
    {"num_features": 16, "near_field": 3, "near_field_normalisation": "joint", "sinks": 2, "per_head": True},
    HYBRID,
]
GREEDY = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture
def llama():
    return patched(causal_model("llama"), num_features=16)


def are_linear(cache) -> list[bool]:
    return [isinstance(layer, RecurrentLayer) for layer in cache.layers]


# --- the recurrent form of one layer --------------------------------------------------------------------------------


@pytest.mark.parametrize("near_field", [None, 1, 3, 50])
@pytest.mark.parametrize("sizes", [[1] * 9, [4, 5], [3, 1, 1, 4], [9]], ids=str)
@pytest.mark.parametrize("component", ["posrf", "trigrf", "relu"])  # own scale of keys, none, none and not positive
def test_pieces_equal_the_whole(near_field, sizes, component):
    torch.manual_seed(1)
    projection = "gaussian"
    kernel = KernelAttention([build_feature_map(component, projection, 4, 8)], 4, near_field=near_field).double()
    if near_field:
        trained(kernel, std=1.0)
    q, k, v = (torch.randn(2, heads, 9, 4, dtype=torch.float64) for heads in (4, 2, 2))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = mask[0, 6] = False
    whole = kernel(q, k, v, mask, causal=True)
    found, _ = in_pieces(kernel, (q, k, v), sizes, mask)
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1, 3])
def test_padding_has_no_scale(size):
    """Features of long keys are tiny: beside a scale taken from padding they would be rounded to zero."""
    kernel = KernelAttention([build_feature_map("posrf", "orf", 8, 8)], 1)
    q, v = torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    k = 20 * torch.randn(8) + 0.1 * torch.randn(1, 1, 6, 8)
    mask = torch.tensor([[False, False, False, True, True, True]])
    whole = kernel(q, k, v, mask, causal=True)
    found, state = in_pieces(kernel, (q, k, v), [size] * (6 // size), mask)
    assert (state.sums[0].log_weight < -100).all()
    assert whole[:, :, 3:].abs().min() > 0
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
    after = continue_attention(kernel, q[:, :, :1], k[:, :, :1], v[:, :, :1], mask[:, :1], state)[1]
    assert torch.equal(after.sums[0].values, state.sums[0].values)  # padding in between leaves the sums alone


# --- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_equal_to_generation_without_a_cache(name, fields):
    """Greedy, sampling, beam search; a batch padded on the left."""
    model = patched(causal_model(name), **fields)
    inputs = left_padded()
    modes = [
        {},
        {"do_sample": True, "top_k": 20},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"num_return_sequences": 2, "do_sample": True},
    ]
    for mode in modes:
        found = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            given = {"past_key_values": RecurrentCache(model)} if use_cache else {}
            found.append(model.generate(**inputs, **{**GREEDY, **mode}, use_cache=use_cache, **given))
        assert torch.equal(*found), mode
        assert found[0].shape[1] > 12


def test_generate_uses_it_by_itself(llama):
    inputs = left_padded()
    asked = {**GREEDY, "return_dict_in_generate": True}
    cache = llama.generate(**inputs, **asked).past_key_values
    assert are_linear(cache) == [True, True]
    assert cache.get_seq_length() == 12 + 10 - 1
    growing = DynamicCache(config=llama.config)
    assert llama.generate(**inputs, **asked, past_key_values=growing).past_key_values is growing
    assert growing.layers[0].keys.shape[2] == 21
    with llama.disable_adapter():
        plain = llama.generate(**inputs, **asked)
    assert type(plain.past_key_values) is DynamicCache
    assert torch.equal(plain.sequences, causal_model("llama").generate(**inputs, **GREEDY))
    assert not torch.equal(plain.sequences, llama.generate(**inputs, **GREEDY))
    mixed = patched(causal_model("llama"), layers="top-1")
    assert are_linear(mixed.generate(**inputs, **asked).past_key_values) == [False, True]


def test_task_types_of_peft_generate_alike():
    part = AttentionPart(num_features=16)
    model = get_snnk_model(causal_model("gpt2"), SNNKConfig(attention=part, modules_to_save=[], task_type="CAUSAL_LM"))
    made = model.eval().generate(**left_padded(), **GREEDY, return_dict_in_generate=True)
    assert are_linear(made.past_key_values) == [True, True]
    assert torch.equal(made.sequences, model.generate(**left_padded(), **GREEDY, use_cache=False))


def test_copies_and_unloading(llama):
    twin = copy.deepcopy(llama)
    assert twin.get_base_model().prepare_inputs_for_generation.model is twin.get_base_model()
    again = pickle.loads(pickle.dumps(bundle(llama)))
    assert torch.equal(again.generate(**left_padded(), **GREEDY), llama.generate(**left_padded(), **GREEDY))
    embeds = {"inputs_embeds": llama.get_input_embeddings()(left_padded()["input_ids"])}
    assert torch.equal(
        llama.generate(**embeds, attention_mask=left_padded()["attention_mask"], **GREEDY),
        llama.generate(**left_padded(), **GREEDY)[:, 12:],
    )
    plain = llama.unload()
    assert not isinstance(plain.prepare_inputs_for_generation, RecurrentByDefault)
    assert type(plain.generate(**left_padded(), **GREEDY, return_dict_in_generate=True).past_key_values) is DynamicCache


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("fields", [{"num_features": 16, "near_field": 3}, {"layers": "top-1"}, HYBRID], ids=str)
def test_chunked_prefill(name, fields):
    """By hand, and by generate; chunks that hold nothing but padding included."""
    model = patched(causal_model(name), **fields)
    inputs = left_padded()
    real = inputs["attention_mask"].bool()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(**inputs, position_ids=positions, use_cache=False).logits
    found = logits_of_pieces(model, inputs, [2, 1, 5, 4], RecurrentCache(model))
    torch.testing.assert_close(found[real], whole[real], rtol=1e-4, atol=1e-4)
    expected = model.generate(**inputs, **GREEDY, use_cache=False)
    assert torch.equal(model.generate(**inputs, **GREEDY, prefill_chunk_size=4), expected)


def test_bytes_are_constant():
    model = patched(causal_model("llama"), num_features=16, near_field=3)
    sizes = []
    for length in (8, 40, 100):
        cache = RecurrentCache(model)
        model.generate(input_ids=torch.full((2, length), 7), past_key_values=cache, **GREEDY)
        sizes.append(cache.nbytes)
    # 2 layers, batch 2: M and log Z of 2 heads (16 × 8 + 16 numbers); 2 keys and values of 8 numbers, 2 flags.
    assert sizes == [2 * 2 * ((2 * (16 * 8 + 16) + 2 * 2 * 2 * 8) * 4 + 2)] * 3
    mixed = RecurrentCache(patched(causal_model("llama"), layers="top-1"))
    assert mixed.nbytes == 0


def test_conversation_with_a_kept_cache_and_a_second_start(llama):
    ids = left_padded()["input_ids"][:1]
    cache = RecurrentCache(llama)
    first = llama.generate(input_ids=ids, past_key_values=cache, **GREEDY)
    turn = torch.cat((first, torch.tensor([[9, 8, 7]])), 1)
    second = llama.generate(input_ids=turn, past_key_values=cache, **GREEDY)
    assert torch.equal(second, llama.generate(input_ids=turn, **GREEDY, use_cache=False))
    assert torch.equal(llama.generate(input_ids=ids, **GREEDY), first)  # starts afresh
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    assert torch.equal(llama.generate(input_ids=ids, past_key_values=cache, **GREEDY), first)


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_feature_maps_are_formed_once_per_conversation(fields, monkeypatch):
    """And anew where weights may have changed: behind reset(), in a copy, and wherever a gradient could be wanted."""
    model, ids = patched(causal_model("llama"), **fields), torch.arange(6, 18)[None]
    formed = []
    logarithms = AttentionTerm.logarithms
    monkeypatch.setattr(AttentionTerm, "logarithms", lambda *given: formed.append(1) or logarithms(*given))
    terms = [term for term in model.modules() if isinstance(term, AttentionTerm)]

    def tokens(cache) -> torch.Tensor:
        formed.clear()
        return torch.cat([model(input_ids=one, past_key_values=cache).logits for one in ids.split(1, -1)], 1)

    cache = RecurrentCache(model)
    with torch.no_grad():
        first = tokens(cache)
        assert len(formed) == len(terms)
        copied = copy.deepcopy(cache)
        for parameter in (p for term in terms for p in [*term.parameters(), *term.buffers()]):
            parameter.mul_(1.5)
        cache.reset()
        assert (tokens(cache) - first).abs().max() > 1e-4
        torch.testing.assert_close(tokens(RecurrentCache(model)), model(input_ids=ids, use_cache=False).logits)
        formed.clear()
        model(input_ids=ids, past_key_values=pickle.loads(pickle.dumps(copied)))
        assert len(formed) == len(terms)
    tokens(RecurrentCache(model))
    assert len(formed) == len(terms) * ids.shape[1]


def test_examples_are_repeated_and_selected():
    model = patched(causal_model("gpt2"), num_features=16, near_field=3)
    ids = left_padded()["input_ids"]
    step = torch.tensor([[4], [5], [6], [7]])
    with torch.no_grad():
        cache = RecurrentCache(model)
        model(input_ids=ids, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 2, 3]))
        cache.reorder_cache(torch.tensor([0, 2, 1, 1]))
        found = model(input_ids=step, past_key_values=cache).logits[:, -1]
        rows = ids[[2, 1, 0, 0]]
        expected = model(input_ids=torch.cat((rows, step), 1), use_cache=False).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_autocast_keeps_sums_in_full_precision():
    model = patched(causal_model("llama", wide=False), num_features=16, near_field=3)
    inputs = left_padded()
    cache = RecurrentCache(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole = model(**inputs, use_cache=False).logits
        model(
            input_ids=inputs["input_ids"][:, :8], attention_mask=inputs["attention_mask"][:, :8], past_key_values=cache
        )
        last = model(
            input_ids=inputs["input_ids"][:, 8:], attention_mask=inputs["attention_mask"], past_key_values=cache
        )
    state = cache.layers[0].state
    assert {tensor.dtype for tensor in state.sums[0]} == {torch.float32}
    assert state.band.values.dtype == torch.bfloat16
    torch.testing.assert_close(last.logits, whole[:, 8:], rtol=0, atol=0.02 * whole.abs().max().item())


def test_components_that_adapt_to_all_tokens_are_refused():
    model = patched(causal_model("llama", wide=False), component="saderf", num_features=16)
    for use_cache in (True, False):
        with pytest.raises(UnsupportedError, match="would see the future"):
            model.generate(input_ids=left_padded()["input_ids"], **GREEDY, use_cache=use_cache)


# --- what cannot work -----------------------------------------------------------------------------------------------


def test_cropping_is_refused_with_a_way_out(llama):
    cache = RecurrentCache(llama)
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(UnsupportedError, match="DynamicCache"):
        cache.crop(-1)


def test_adapters_must_not_change_under_a_cache(llama):
    cache = RecurrentCache(llama)
    ids = left_padded()["input_ids"]
    first = llama.generate(input_ids=ids, past_key_values=cache, **GREEDY)
    with llama.disable_adapter():
        with pytest.raises(UnsupportedError, match="no layer of LlamaForCausalLM has linear attention"):
            RecurrentCache(llama)
        with pytest.raises(UnsupportedError, match="adapter is now disabled"):
            llama.generate(input_ids=first, past_key_values=cache, **GREEDY)
    llama.add_adapter("other", SNNKConfig(attention=AttentionPart(num_features=16), seed=5, modules_to_save=[]))
    llama.eval().set_adapter("other")
    cache = RecurrentCache(llama)
    llama.generate(input_ids=ids, past_key_values=cache, **GREEDY)
    llama.set_adapter("default")
    with pytest.raises(UnsupportedError, match="another adapter"):
        llama.generate(input_ids=torch.cat((ids, first), 1), past_key_values=cache, **GREEDY)


def test_keys_that_never_arrive_are_noticed(llama):
    cache = RecurrentCache(llama)
    base = llama.get_base_model()
    base.set_attn_implementation("sdpa")
    base(input_ids=left_padded()["input_ids"], past_key_values=cache)
    with pytest.raises(UnsupportedError, match="never attended to"):
        base(input_ids=left_padded()["input_ids"], past_key_values=cache)


def test_models_without_linear_attention_are_refused():
    with pytest.raises(UnsupportedError, match=r"expected a model\s+patched"):
        RecurrentCache(causal_model("gpt2"))
    encoder = patched(sharpened("bert"), num_features=8).get_base_model()
    assert "prepare_inputs_for_generation" not in vars(encoder)


def test_bidirectional_layers_are_refused(llama):
    cache = RecurrentCache(llama)
    llama.get_base_model().model.layers[0].self_attn.base_layer.is_causal = False
    with pytest.raises(UnsupportedError, match="needs causal attention"):
        llama(input_ids=left_padded()["input_ids"], past_key_values=cache)


# === caches of other kinds ============================================================================================

STATIC = {**GREEDY, "cache_implementation": "static"}
STATIC_VARIANTS = [
    {"num_features": 16},
    {"num_features": 16, "near_field": 3},
    JOINT,
    HYBRID,
    {"num_features": 16, "layers": [0]},
    {"num_features": 16, "layers": [1], "near_field": 3},
]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("fields", STATIC_VARIANTS, ids=str)
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


@pytest.mark.parametrize("fields", STATIC_VARIANTS, ids=str)
def test_logits_of_pieces_in_a_static_cache(fields):
    model = patched(causal_model("llama"), **fields)
    inputs = left_padded()
    real = inputs["attention_mask"].bool()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(**inputs, position_ids=positions, use_cache=False).logits
        for slots in (None, 30):
            cache = StaticCache(config=model.config, max_cache_len=30)
            found = logits_of_pieces(model, inputs, [6, 1, 4, 1], cache, slots)
            torch.testing.assert_close(found[real], whole[real], rtol=1e-4, atol=1e-4)
        cache = StaticCache(config=model.config, max_cache_len=30)
        first = model(input_ids=inputs["input_ids"][:1], past_key_values=cache).logits  # no mask at all
    torch.testing.assert_close(first, whole[:1], rtol=1e-4, atol=1e-4)


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


# === assistants, and caches that are pickled and copied ===============================================================


# No text ends early: padding behind an end, in a row that goes on later, is a matter of masks and not of caches.
ENDLESS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
ASSISTANTS = [{"num_features": 16}, {"num_features": 16, "near_field": 3, "layers": "top-1"}, HYBRID]


@pytest.mark.parametrize("fields", ASSISTANTS, ids=str)
def test_a_linear_model_assists(fields):
    """Tokens that are not accepted are taken back from the assistant's cache, so it must keep its keys."""
    ids = left_padded()["input_ids"][:1]
    model = patched(causal_model("llama"), **fields)
    growing = {"past_key_values": DynamicCache(config=model.config)}
    for main, options in ((causal_model("llama"), {}), (patched(causal_model("llama"), num_features=32), growing)):
        expected = main.generate(input_ids=ids, **ENDLESS)
        for assistant in (model.get_base_model(), bundle(copy.deepcopy(model))):
            given = copy.deepcopy(options)
            assert torch.equal(main.generate(input_ids=ids, **ENDLESS, assistant_model=assistant, **given), expected)
    made = model.generate(input_ids=ids, **ENDLESS, return_dict_in_generate=True)
    assert any(are_linear(made.past_key_values))  # by itself it has the recurrent one


def test_an_assistant_with_a_window():
    """The cache that generate makes for it would drop keys that a linear layer sees."""
    main = causal_model("llama")
    ids = left_padded()["input_ids"][:1]
    expected = main.generate(input_ids=ids, **ENDLESS)
    for layers in ("all", [1]):
        model = patched(windowed(4), num_features=16, near_field=4, layers=layers)
        assert torch.equal(main.generate(input_ids=ids, **ENDLESS, assistant_model=model.get_base_model()), expected)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": causal_model("llama")}])
def test_the_remedy_of_the_message_works(options):
    model = patched(causal_model("llama"), num_features=16)
    ids = left_padded()["input_ids"][:1]
    with pytest.raises(
        UnsupportedError,
        match=r"(?s)assisted decoding.*past_key_values=transformers\.DynamicCache\(config=model\.config\)",
    ):
        model.generate(input_ids=ids, **ENDLESS, **options)
    growing = DynamicCache(config=model.config)
    found = model.generate(input_ids=ids, **ENDLESS, **options, past_key_values=growing)
    assert torch.equal(found, model.generate(input_ids=ids, **ENDLESS))


def stored(cache: RecurrentCache) -> RecurrentCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("fields", ASSISTANTS, ids=str)
@pytest.mark.parametrize("way", [lambda cache: pickle.loads(pickle.dumps(cache)), stored, copy.deepcopy])
def test_a_copy_continues_the_text(fields, way):
    model = trained(patched(causal_model("llama"), **fields), std=1.0)
    inputs = left_padded()
    cache = RecurrentCache(model)
    empty = way(cache)
    first = model.generate(**inputs, **ENDLESS, past_key_values=cache)
    assert torch.equal(model.generate(**inputs, **ENDLESS, past_key_values=empty), first)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, first.shape[1] - 12), value=1)
    again = way(way(cache))
    assert (again.nbytes, again.get_seq_length()) == (cache.nbytes, cache.get_seq_length())
    expected = model.generate(input_ids=first, attention_mask=mask, **ENDLESS, past_key_values=cache)
    assert expected.shape[1] > first.shape[1]
    found = model.generate(input_ids=first, attention_mask=mask, **ENDLESS, past_key_values=again)
    assert torch.equal(found, expected)


def test_a_pickled_cache_knows_what_made_it(tmp_path):
    """Loaded elsewhere, it goes on with equal feature maps and with no others."""
    model = patched(causal_model("llama"), num_features=16)
    small = bundle(copy.deepcopy(model))
    small.save_pretrained(tmp_path)
    ids = left_padded()["input_ids"]
    first = small.generate(input_ids=ids, **ENDLESS, past_key_values=(cache := RecurrentCache(small)))
    written = pickle.dumps(cache)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for loaded in (small, again):
        found = loaded.generate(input_ids=first, **ENDLESS, past_key_values=pickle.loads(written))
        assert torch.equal(found, small.generate(input_ids=first, **ENDLESS, use_cache=False))
    other = patched(causal_model("llama"), num_features=16)
    other.add_adapter("other", SNNKConfig(attention=AttentionPart(num_features=16), seed=5, modules_to_save=[]))
    other.eval().set_adapter("other")
    with pytest.raises(UnsupportedError, match="another adapter"):
        other.generate(input_ids=first, **ENDLESS, past_key_values=pickle.loads(written))
    cache.reset()
    assert pickle.loads(pickle.dumps(cache)).get_seq_length() == 0
    # An empty one holds no sums of anybody's feature maps.
    expected = other.generate(input_ids=first, **ENDLESS, use_cache=False)
    assert torch.equal(other.generate(input_ids=first, **ENDLESS, past_key_values=cache), expected)
