"""RecurrentCache: generation in constant memory, equal to generation without a cache."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from snnk_peft import AttentionPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.attention import RecurrentCache
from snnk_peft.components import COMPONENTS
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.feature_map import build_feature_map
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.recurrent_attention import continue_attention
from snnk_peft.parts.attention.cache import RecurrentByDefault, RecurrentLayer
from tests.fresh_process import run_python
from tests.package.test_attention import causal_model, left_padded, patched, sharpened
from tests.tiny_models import trained

FAMILIES = ["llama", "gpt2"]
VARIANTS = [
    {"num_features": 16},
    {"num_features": 16, "near_field": 3, "per_head": True},
    {"num_features": 16, "near_field": 1},
    {"layers": "top-1"},
    {"layers": "bottom-1", "near_field": 4},
    {"num_features": 16, "near_field": 3, "near_field_normalisation": "joint", "sinks": 2, "per_head": True},
]
GREEDY = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture
def llama():
    return patched(causal_model("llama"), num_features=16)


def linear(cache) -> list[bool]:
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
    state, parts = None, []
    for piece in zip(*(t.split(sizes, -2) for t in (q, k, v)), mask.split(sizes, -1), strict=True):
        part, state = continue_attention(kernel, *piece, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, -2), whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1, 3])
def test_padding_has_no_scale(size):
    """Features of long keys are tiny: beside a scale taken from padding they would be rounded to zero."""
    kernel = KernelAttention([build_feature_map("posrf", "orf", 8, 8)], 1)
    q, v = torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    k = 20 * torch.randn(8) + 0.1 * torch.randn(1, 1, 6, 8)
    mask = torch.tensor([[False, False, False, True, True, True]])
    whole = kernel(q, k, v, mask, causal=True)
    state, parts = None, []
    for piece in zip(*(t.split(size, -2) for t in (q, k, v)), mask.split(size, -1), strict=True):
        part, state = continue_attention(kernel, *piece, state)
        parts.append(part)
    assert (state.sums[0].log_weight < -100).all()
    assert whole[:, :, 3:].abs().min() > 0
    torch.testing.assert_close(torch.cat(parts, -2), whole, rtol=1e-4, atol=1e-5)
    after = continue_attention(kernel, q[:, :, :1], k[:, :, :1], v[:, :, :1], mask[:, :1], state)[1]
    assert torch.equal(after.sums[0].values, state.sums[0].values)  # padding in between leaves the sums alone


def test_scaling_of_one_layer():
    kernel = KernelAttention([build_feature_map("posrf", "orf", 4, 8)], 2)
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ConfigError, match="scaling is -1"):
        continue_attention(kernel, q, q, q, scaling=-1.0)
    torch.testing.assert_close(
        continue_attention(kernel, q, q, q, scaling=2.0)[0], kernel(q, q, q, causal=True, scaling=2.0)
    )


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


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_does_not_depend_on_its_batch(name):
    model = patched(causal_model(name), num_features=16, near_field=3)
    inputs = left_padded()
    alone = model.generate(**{key: value[1:2, 5:] for key, value in inputs.items()}, **GREEDY)[0]
    both = model.generate(**inputs, **GREEDY)[1, 5:]
    assert torch.equal(alone, both[: len(alone)])


def test_generate_uses_it_by_itself(llama):
    inputs = left_padded()
    asked = {**GREEDY, "return_dict_in_generate": True}
    cache = llama.generate(**inputs, **asked).past_key_values
    assert linear(cache) == [True, True]
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
    assert linear(mixed.generate(**inputs, **asked).past_key_values) == [False, True]


def test_task_types_of_peft_generate_alike():
    part = AttentionPart(num_features=16)
    model = get_snnk_model(causal_model("gpt2"), SNNKConfig(attention=part, modules_to_save=[], task_type="CAUSAL_LM"))
    made = model.eval().generate(**left_padded(), **GREEDY, return_dict_in_generate=True)
    assert linear(made.past_key_values) == [True, True]
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
@pytest.mark.parametrize("fields", [{"num_features": 16, "near_field": 3}, {"layers": "top-1"}], ids=str)
def test_chunked_prefill(name, fields):
    """By hand, and by generate; chunks that hold nothing but padding included."""
    model = patched(causal_model(name), **fields)
    inputs = left_padded()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        whole = model(**inputs, position_ids=positions, use_cache=False).logits
        cache, parts, end = RecurrentCache(model), [], 0
        for size in (2, 1, 5, 4):
            begin, end = end, end + size
            parts.append(
                model(
                    input_ids=ids[:, begin:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, begin:end],
                    past_key_values=cache,
                ).logits
            )
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], rtol=1e-4, atol=1e-4)
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


def test_a_copied_cache_shares_a_prompt(llama):
    prompt = left_padded()["input_ids"][:1]
    cache = RecurrentCache(llama)
    with torch.no_grad():
        llama(input_ids=prompt, past_key_values=cache)
    for token in (5, 6):
        ids = torch.cat((prompt, torch.tensor([[token]])), 1)
        found = llama.generate(input_ids=ids, past_key_values=copy.deepcopy(cache), **GREEDY)
        assert torch.equal(found, llama.generate(input_ids=ids, **GREEDY, use_cache=False))
    assert cache.get_seq_length() == 12


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


@pytest.mark.parametrize("component", ["posrf", "trigrf", "elu", "saderf"])
def test_components(component):
    """Those that adapt to all tokens refuse causal attention, with the cache as without."""
    model = patched(causal_model("llama", wide=False), component=component, num_features=16)
    ids = left_padded()["input_ids"]
    if COMPONENTS[component].adapts:
        with pytest.raises(UnsupportedError, match="would see the future"):
            model.generate(input_ids=ids, **GREEDY)
        return
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        cache = RecurrentCache(model)
        parts = [model(input_ids=part, past_key_values=cache).logits for part in ids.split(5, -1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


# --- bundles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_bundle_generates_with_and_without_the_package(name, tmp_path):
    model = trained(patched(causal_model(name), num_features=16, near_field=3, layers="top-1"), std=1.0)
    inputs = left_padded()
    settings = {**GREEDY, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **settings).sequences
    small = bundle(model)
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for loaded in (small, again):
        made = loaded.generate(**inputs, **settings)
        assert torch.equal(made.sequences, expected)
        assert linear(made.past_key_values) == [False, True]
    assert torch.equal(again.generate(**inputs, **GREEDY, past_key_values=RecurrentCache(again)), expected)
    torch.save({"inputs": inputs, "expected": expected}, tmp_path / "expected.pt")
    program = f"""
import sys, torch, transformers
sys.modules["snnk_peft"] = None
model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
given = torch.load({str(tmp_path / "expected.pt")!r})
for beams in (1, 2):
    settings = dict(max_new_tokens=10, do_sample=False, num_beams=beams, return_dict_in_generate=True)
    made = model.generate(**given["inputs"], **settings)
    without = model.generate(**given["inputs"], **settings, use_cache=False).sequences
    assert torch.equal(made.sequences, without)
    assert beams > 1 or torch.equal(made.sequences, given["expected"])
    print(type(made.past_key_values).__name__, *(type(layer).__name__ for layer in made.past_key_values.layers))
"""
    done = run_python(["-c", program])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == ["RecurrentCache DynamicLayer RecurrentLayer"] * 2


# --- what cannot work -----------------------------------------------------------------------------------------------


def test_cropping_is_refused_with_a_way_out(llama):
    cache = RecurrentCache(llama)
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(UnsupportedError, match="DynamicCache"):
        cache.crop(-1)
    ids = {"input_ids": left_padded()["input_ids"][:1]}
    assistant = causal_model("llama")
    for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(UnsupportedError, match="assisted decoding"):
            llama.generate(**ids, **GREEDY, **options)
        growing = DynamicCache(config=llama.config)
        found = llama.generate(**ids, **GREEDY, **options, past_key_values=growing)
        assert torch.equal(found, llama.generate(**ids, **GREEDY))


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


# --- the recipe -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_recipe_trains_bundles_and_generates(root, tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich", reason="pip install snnk-peft[recipes]")
    pytest.importorskip("matplotlib", reason="pip install snnk-peft[recipes]")
    monkeypatch.syspath_prepend(str(root / "recipes"))
    from papers.programs import tiny_llama

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    out = tmp_path / "run"
    assert tiny_llama.main(["--text", str(text), "--steps", "5", "--output", str(out), "--near-field", "4"]) == 0
    figures = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    assert figures["bits_per_byte"]["after"] < figures["bits_per_byte"]["before"] - 1
    assert figures["reload_parity_error"] < 1e-5
    assert figures["cache"] == "RecurrentCache"
    assert figures["sample"].startswith("Return the ")
    sizes = {name: [row["cache_bytes"] for row in rows.values()] for name, rows in figures["decoding"].items()}
    assert sizes["recurrent"][0] == sizes["recurrent"][1] < sizes["growing"][0] < sizes["growing"][1]
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert {entry.name for entry in tmp_path.iterdir()} == {"text.txt", "run"}
    for arguments, messages in (
        (["--output", str(out), "--steps", "0"], ["replace it with --overwrite", "--steps is 0"]),
        (["--output", str(tmp_path), "--overwrite"], ["holds more than a run: run, text.txt"]),
        (["--output", str(tmp_path / "new"), "--text", str(tmp_path / "none")], ["cannot be read"]),
        ([], ["--output is missing"]),
    ):
        assert tiny_llama.main(arguments) == 2
        errors = capsys.readouterr().err
        assert all(message in errors for message in messages)
