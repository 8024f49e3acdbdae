"""AttentionPart: linear attention in whole models, against softmax, padding, generation, bundling, reloading."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MPNetConfig,
    MPNetForSequenceClassification,
)

from snnk_peft import AdapterPart, AttentionPart, FFNPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.feature_map import build_feature_map
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.interface import NAME, padding_mask, pairwise_mask
from tests.fresh_process import run_python
from tests.tiny_models import CLASSIFIERS, inputs_for, same, tiny, trained

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 100}
LLAMA = LlamaConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    max_position_embeddings=128,
    **TOKENS,
)
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.0, **TOKENS)


def causal_model(name: str, wide: bool = True):
    torch.manual_seed(0)
    model = LlamaForCausalLM(copy.deepcopy(LLAMA)) if name == "llama" else GPT2LMHeadModel(copy.deepcopy(GPT2))
    if wide:  # fresh weights are so small that all attention is uniform
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(6)
    return model.eval()


def left_padded() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (3, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def patched(model, **fields):
    return get_snnk_model(model, SNNKConfig(attention=AttentionPart(**fields), modules_to_save=[])).eval()


# --- encoders -------------------------------------------------------------------------------------------------------


def sharpened(family: str):
    """A tiny model whose attention is not uniform."""
    model = tiny(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and any(
                word in name for word in ("query", "key", "q_lin", "k_lin", "q_proj", "k_proj", "Wqkv")
            ):
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("family", sorted(CLASSIFIERS))
def test_many_features_approach_softmax_and_few_do_not(family):
    model = sharpened(family)
    inputs = inputs_for(model)
    with torch.no_grad():
        exact = model(**inputs).logits
        errors = []
        for count in (4, 4096):
            changed = patched(copy.deepcopy(model), num_features=count)
            errors.append((changed(**inputs).logits - exact).abs().max().item())
    assert 0 < errors[1] < errors[0] / 3


@pytest.mark.parametrize("family", sorted(set(CLASSIFIERS) - {"vit", "deit"}))
@pytest.mark.parametrize("fields", [{}, {"near_field": 2, "per_head": True}, {"component": "saderf"}], ids=str)
def test_padding_is_truncation(family, fields):
    model = patched(sharpened(family), num_features=16, **fields)
    inputs = inputs_for(model.get_base_model())
    kept = int(inputs["attention_mask"][-1].sum())
    with torch.no_grad():
        padded = model(**inputs).logits[-1]
        cut = model(input_ids=inputs["input_ids"][-1:, :kept]).logits[0]
        alone = model(**{name: value[-1:] for name, value in inputs.items()}).logits[0]
    torch.testing.assert_close(padded, cut, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_softmax_comes_back(family):
    model = sharpened(family)
    inputs = inputs_for(model)
    exact = model(**inputs).logits
    before = model.config._attn_implementation
    changed = patched(model, num_features=8)
    assert not torch.allclose(changed(**inputs).logits, exact, atol=1e-6)
    with changed.disable_adapter():
        torch.testing.assert_close(changed(**inputs).logits, exact)
    plain = changed.unload()
    assert plain.config._attn_implementation == before
    assert same(plain(**inputs).logits, exact)
    assert not [key for key in plain.state_dict() if "snnk" in key]
    assert not [module for module in plain.modules() if hasattr(module, "snnk_owner")]


def test_some_layers_keep_softmax():
    """Layer 0 linear, layer 1 softmax with the mask it needs: exactly the softmax model where the linear one agrees."""
    model = sharpened("bert")
    inputs = inputs_for(model)
    exact = model(**inputs).logits
    errors = {}
    for layers in ("bottom-1", "top-1", "all"):
        changed = patched(copy.deepcopy(model), num_features=8192, layers=layers)
        assert sum(isinstance(m, KernelAttention) for m in changed.modules()) == (2 if layers == "all" else 1)
        errors[layers] = (changed(**inputs).logits - exact).abs().max().item()
    assert max(errors.values()) < 0.05 * exact.abs().max()


def test_two_adapters_and_training():
    model = sharpened("bert")
    model.config.hidden_dropout_prob = 0.0
    config = SNNKConfig(attention=AttentionPart(num_features=8, projection="gmm"), adapter=AdapterPart(num_features=4))
    changed = get_snnk_model(model, config)
    changed.add_adapter("other", SNNKConfig(attention=AttentionPart(num_features=16), seed=3, modules_to_save=[]))
    inputs = inputs_for(model)
    changed.eval()
    first = changed(**inputs).logits
    changed.set_adapter("other")
    second = changed(**inputs).logits
    assert not torch.allclose(first, second, atol=1e-6)
    changed.set_adapter("default")
    assert same(changed(**inputs).logits, first)
    changed.train()
    changed(**inputs).logits.square().sum().backward()
    learned = [p for name, p in changed.named_parameters() if name.endswith(("root", "mean")) and p.requires_grad]
    assert len(learned) == 4
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in learned)


@pytest.mark.slow
@pytest.mark.parametrize("bundled", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_compiles_in_one_graph(name, bundled):
    model = patched(sharpened("bert") if name == "bert" else causal_model(name), num_features=8, near_field=2)
    inputs = inputs_for(model.get_base_model())
    if name == "llama":
        inputs["use_cache"] = False
    if bundled:
        model = bundle(model)
    torch._dynamo.reset()  # graphs of other tests would make this one for all lengths
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


def test_autocast_at_large_norms():
    model = sharpened("bert")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.mul_(10)
    changed = patched(model, num_features=16)
    with torch.autocast("cpu", torch.bfloat16):
        assert changed(**inputs_for(model)).logits.isfinite().all()


# --- decoders -------------------------------------------------------------------------------------------------------

VARIANTS = [{"num_features": 16}, {"num_features": 16, "near_field": 3, "per_head": True}, {"layers": "top-1"}]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_generation_with_a_cache_equals_generation_without(name, fields):
    """Greedy and beam search, with left padding, in a batch."""
    model = patched(causal_model(name), **fields)
    inputs = left_padded()
    for options in ({}, {"num_beams": 3}):
        settings = {"max_new_tokens": 10, "do_sample": False, **options}
        cached = model.generate(**inputs, **settings)
        assert torch.equal(cached, model.generate(**inputs, **settings, use_cache=False))
        assert cached.shape[1] > 12
    alone = {key: value[1:2, 5:] for key, value in inputs.items()}
    one = model.generate(**alone, max_new_tokens=10, do_sample=False)
    both = model.generate(**inputs, max_new_tokens=10, do_sample=False)[1, 5:]
    length = one.shape[1]
    assert torch.equal(one[0], both[:length])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_left_padding_is_truncation(name, fields):
    model = patched(causal_model(name), **fields)
    inputs = left_padded()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        padded = model(**inputs, position_ids=positions).logits[1, 5:]
        cut = model(input_ids=inputs["input_ids"][1:2, 5:]).logits[0]
    torch.testing.assert_close(padded, cut, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_causal_attention_sees_no_future(name):
    model = patched(causal_model(name), num_features=16, near_field=2)
    ids = left_padded()["input_ids"]
    changed = ids.clone()
    changed[:, 8:] = 7
    with torch.no_grad():
        first, second = model(input_ids=ids).logits, model(input_ids=changed).logits
    torch.testing.assert_close(first[:, :8], second[:, :8], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(first[:, 8:], second[:, 8:])


def test_causal_rows_survive_large_keys_behind_them():
    """At many times the norms of BERT, the scales of two keys of a sequence are hundreds apart in the exponent."""
    kernel = KernelAttention([build_feature_map("posrf", "orf", 8, 32)], 2)
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind()
    for sizes in (torch.linspace(1, 30, 20), torch.linspace(30, 1, 20)):
        keys = k * sizes[:, None]
        out = kernel(q, keys, v, causal=True)
        torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
        for end in (5, 12):
            torch.testing.assert_close(
                out[:, :, :end], kernel(q[:, :, :end], keys[:, :, :end], v[:, :, :end], causal=True)
            )
        mask = (torch.arange(20) >= 6)[None]
        whole = kernel(q, keys, v, mask, causal=True)
        for first in (3, 6, 9):  # more keys than queries; the keys before them padding or not
            torch.testing.assert_close(
                kernel(q[:, :, first:], keys, v, mask, causal=True)[:, :, 6 - min(first, 6) :],
                whole[:, :, max(first, 6) :],
            )
            assert (whole[:, :, 6:].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_causal_attention_approaches_softmax(name):
    model = causal_model(name, wide=False)
    inputs = left_padded()
    with torch.no_grad():
        exact = model(**inputs).logits[0]
        error = [
            (patched(copy.deepcopy(model), num_features=m)(**inputs).logits[0] - exact).abs().max().item()
            for m in (4, 4096)
        ]
    assert error[1] < error[0] / 5


def test_components_that_see_everything_are_refused_where_attention_is_causal():
    model = patched(causal_model("llama"), component="oprf")
    with pytest.raises(UnsupportedError, match="would see the future"):
        model(**left_padded())


# --- bundles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "auto"), [("bert", AutoModelForSequenceClassification), ("llama", AutoModelForCausalLM)]
)
@pytest.mark.parametrize(
    "fields", [{"num_features": 16, "layers": "top-1"}, {"near_field": 3, "per_head": True}], ids=str
)
def test_bundle_reloads_with_and_without_the_package(name, auto, fields, tmp_path):
    model = patched(sharpened("bert") if name == "bert" else causal_model("llama"), **fields)
    if fields.get("near_field"):
        trained(model, std=1.0)  # the weights of the two fields
    base = model.get_base_model()
    inputs = left_padded() if name == "llama" else inputs_for(base)
    expected = model(**inputs).logits
    small = bundle(model)
    torch.testing.assert_close(small(**inputs).logits, expected)
    assert "linear attention" in small.bundle_report.folded[0].after
    assert small.bundle_report.parity_error < 1e-5
    small.save_pretrained(tmp_path)
    again = auto.from_pretrained(tmp_path)
    assert again.config._attn_implementation == NAME
    assert same(again(**inputs).logits, small(**inputs).logits)
    torch.save({"inputs": inputs, "logits": small(**inputs).logits.detach()}, tmp_path / "expected.pt")
    program = f"""
import sys, torch, transformers
sys.modules["snnk_peft"] = None
model = transformers.{auto.__name__}.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
given = torch.load({str(tmp_path / "expected.pt")!r})
torch.testing.assert_close(model(**given["inputs"]).logits, given["logits"], rtol=1e-5, atol=1e-6)
print(model.config._attn_implementation)
"""
    done = run_python(["-c", program])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1].endswith(".modeling_snnk_bundle")
    if name == "llama":
        settings = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(again.generate(**inputs, **settings), model.generate(**inputs, **settings))


def test_adapter_checkpoint(tmp_path):
    model = trained(patched(sharpened("bert"), near_field=2), std=1.0)
    inputs = inputs_for(model.get_base_model())
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(sharpened("bert"), tmp_path).eval()
    assert same(again(**inputs).logits, expected)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_masks_that_cannot_be_honoured():
    assert padding_mask(2, 4, 4) is None
    short = padding_mask(2, 4, 6, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    assert short.tolist() == [[False, True, True, True, True, True], [True] * 6]
    with pytest.raises(UnsupportedError, match=r"\(2, 1, 4, 4\)"):
        padding_mask(2, 4, 4, attention_mask=torch.ones(2, 1, 4, 4))
    model = patched(sharpened("bert"), num_features=8)
    with pytest.raises(UnsupportedError, match="padding mask"):
        model(input_ids=torch.ones(2, 4, dtype=torch.long), attention_mask=torch.ones(2, 4, 4))
    mask = pairwise_mask(torch.tensor([[False, True, True]]), torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), True)
    assert mask[0, 0].tolist() == [[True, True, True], [False, True, False], [False, True, True]]


def test_models_that_ignore_the_switch_are_refused():
    torch.manual_seed(0)
    config = MPNetConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    model = MPNetForSequenceClassification(config)
    with pytest.raises(UnsupportedError, match="does not call its attention through"):
        patched(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"near_field": 0}, "near_field is 0"),
        ({"projection": "landmark"}, "no pretrained weight"),
        ({"component": "poisrf"}, "needs rows drawn from 'poisson'"),
        ({"component": "urf", "projection": "sgq", "num_features": 33}, "unequal feature weights"),
    ],
)
def test_bad_parts(fields, message):
    with pytest.raises(ConfigError, match=message):
        patched(sharpened("bert"), **fields)


def test_other_parts_do_not_fit_a_gated_decoder():
    for part in ({"ffn": FFNPart()}, {"adapter": AdapterPart(placement="parallel")}):
        with pytest.raises(UnsupportedError, match="is gated"):
            get_snnk_model(causal_model("llama"), SNNKConfig(**part))


def test_adapters_beside_grouped_queries():
    """Keys and values have fewer heads than queries: the two adapters of a layer have outputs of different lengths."""
    base, inputs = causal_model("llama"), left_padded()
    expected = base(**inputs).logits
    model = get_snnk_model(base, SNNKConfig(adapter=AdapterPart(placement="query_value")))
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=0)
    shapes = {tuple(p.shape) for n, p in model.named_parameters() if "readout.A" in n}
    hidden, head = LLAMA.hidden_size, LLAMA.hidden_size // LLAMA.num_attention_heads
    assert shapes == {(hidden, 16), (head * LLAMA.num_key_value_heads, 16)}
    assert len({rows for rows, _ in shapes}) == 2
    trained(model)
    changed = model(**inputs).logits
    assert (changed - expected).abs().max() > 1e-3
    torch.testing.assert_close(bundle(model)(**inputs).logits, changed, rtol=1e-4, atol=1e-5)


def test_temperature():
    kernel = KernelAttention([build_feature_map("posrf", "orf", 4, 8)], 2)
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ConfigError, match="scaling is 0"):
        kernel(q, q, q, scaling=0.0)
