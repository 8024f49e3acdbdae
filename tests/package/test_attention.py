"""Linear attention in whole models: against softmax, with padding, in training; local layers keep their band."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from peft import PeftModel
from transformers import (
    ModernBertConfig,
    ModernBertForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
)
from transformers.masking_utils import sliding_window_bidirectional_mask_function

from snnk_peft import AdapterPart, AttentionPart, PoolerPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import FAMILIES
from snnk_peft.feature_map import build_feature_map
from snnk_peft.functional.near_field import banded_softmax_attention
from snnk_peft.layers.kernel_attention import KernelAttention, continue_attention
from snnk_peft.parts.adapter import Behind
from snnk_peft.parts.attention import softmax
from snnk_peft.parts.attention.interface import NAME, padding_mask, pairwise_mask
from snnk_peft.tuner.slot_layer import SlotLayer
from tests.attention_models import causal_model, left_padded, patched, sharpened
from tests.tiny_models import CLASSIFIERS, inputs_for, same, tiny, trained

CAUSAL = ("llama", "gpt2")


# --- encoders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*sorted(CLASSIFIERS), "llama", "gpt2"])
def test_many_features_approach_softmax_and_few_do_not(family):
    model, inputs = (causal_model(family, wide=False), left_padded()) if family in CAUSAL else (sharpened(family), None)
    inputs = inputs or inputs_for(model)
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


@pytest.mark.parametrize("family", ["bert", "modernbert", "vit"])
def test_softmax_comes_back(family):
    model = sharpened(family)
    inputs = inputs_for(model)
    exact = model(**inputs).logits
    before = model.config._attn_implementation
    changed = patched(model, num_features=8)
    assert not torch.allclose(changed(**inputs).logits, exact, atol=1e-6)
    with changed.disable_adapter():
        torch.testing.assert_close(changed(**inputs).logits, exact, rtol=1e-5, atol=1e-5)
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
@pytest.mark.parametrize("name", ["bert", "llama", "modernbert"])
def test_compiles_in_one_graph(name, bundled):
    model = patched(causal_model(name) if name == "llama" else sharpened(name), num_features=8, near_field=2)
    inputs = inputs_for(model.get_base_model())
    if name == "llama":
        inputs["use_cache"] = False
    if bundled:
        model = bundle(model)
    torch._dynamo.reset()  # graphs of other tests would make this one for all lengths
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_autocast_at_large_norms(family):
    model = patched(sharpened(family, 40), num_features=16, near_field=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**inputs_for(model.get_base_model(), tokens=30)).logits.isfinite().all()


# --- decoders -------------------------------------------------------------------------------------------------------

VARIANTS = [{"num_features": 16}, {"num_features": 16, "near_field": 3, "per_head": True}, {"layers": "top-1"}]


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


def test_temperature():
    kernel = KernelAttention([build_feature_map("posrf", "orf", 4, 8)], 2)
    q = torch.randn(1, 2, 3, 4)
    for attend, scaling in ((kernel, 0.0), (partial(continue_attention, kernel), -1.0)):
        with pytest.raises(ConfigError, match=f"scaling is {scaling}"):
            attend(q, q, q, scaling=scaling)
    whole = kernel(q, q, q, causal=True, scaling=2.0)
    torch.testing.assert_close(continue_attention(kernel, q, q, q, scaling=2.0)[0], whole)


# === ModernBERT: global layers become linear, local ones keep their band ==============================================


def sharp(**changes):
    """A tiny model whose attention is far from uniform, so that a wrong band shows."""
    model = tiny("modernbert", **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.attn.Wqkv.weight.mul_(20)
    return model


def kernels(model) -> list[int]:
    layers = model.get_base_model().model.layers
    return [i for i, layer in enumerate(layers) if any(isinstance(m, KernelAttention) for m in layer.modules())]


def global_as_softmax(model):
    """The patched model with its linear layers taken out again, but all else as it is: softmax behind our interface."""
    model.base_model.disable_adapter_layers()
    assert model.config._attn_implementation == NAME
    return model


# --- which layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", [0, 3]), ("top-1", [3]), ("bottom-1", [0]), ("top-2", [0, 3]), ([3], [3]), ([0, 3], [0, 3])],
    ids=str,
)
def test_layers_that_see_everything_are_counted(layers, expected):
    assert kernels(patched(tiny("modernbert"), layers=layers)) == expected


def test_a_local_layer_can_be_named_with_a_near_field():
    assert kernels(patched(tiny("modernbert"), layers=[1, 3], near_field=3)) == [1, 3]
    with pytest.raises(ConfigError, match=r"layer 1, which attends to a band of 3 tokens .* set near_field=3"):
        patched(tiny("modernbert"), layers=[1, 3])
    with pytest.raises(ConfigError, match=r"'top-3'; the model has 2 layers that attend to all tokens"):
        patched(tiny("modernbert"), layers="top-3")
    with pytest.raises(ConfigError, match="the model has 4 layers"):
        patched(tiny("modernbert"), layers=[4])
    only_local = tiny("modernbert", layer_types=["sliding_attention"] * 4)
    with pytest.raises(UnsupportedError, match="all 4 layers attend to a band of 3 tokens"):
        patched(only_local)


# --- local layers are what they were --------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [7, 30], ids=["one product", "blocks"])
def test_layers_left_alone_give_the_original_outputs(tokens):
    """All layers softmax behind our attention function: the model's own hidden states, layer by layer."""
    model = sharp()
    inputs = inputs_for(model, tokens=tokens)
    keep = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True)
        ours = global_as_softmax(patched(copy.deepcopy(model), num_features=16))(**inputs, output_hidden_states=True)
    for given, wanted in zip(ours.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(given[keep], wanted[keep], rtol=1e-4, atol=1e-5)
    assert same(ours.logits, expected.logits)


def test_the_band_matters():
    """A token that no local layer can reach changes nothing before the next global layer."""
    model = sharp(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2)
    changed = patched(model, num_features=16)
    inputs = inputs_for(model, batch=1, tokens=30)["input_ids"]
    other = inputs.clone()
    other[:, 20] = 5 if int(inputs[0, 20]) != 5 else 6
    with torch.no_grad():
        first, second = (changed(input_ids=ids, output_hidden_states=True).hidden_states[1] for ids in (inputs, other))
    moved = ((first - second).abs().amax(-1)[0] > 0).nonzero().flatten().tolist()
    assert moved == [18, 19, 20, 21, 22]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_block_form_and_mask_form_of_a_band_agree(causal, masked):
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    generator = torch.Generator().manual_seed(3)
    for tokens, in_blocks in ((24, False), (25, True)):  # eight windows
        q, k, v = (torch.randn(2, heads, tokens, 8, generator=generator).double() for heads in (4, 2, 2))
        mask = torch.ones(2, tokens, dtype=torch.bool)
        if masked:
            mask[1, 20:] = False
        options = {"scaling": 0.5, "causal": causal, "window": 3}
        out, none = softmax.softmax_attention(module, q, k, v, mask, **options)
        explicit, weights = softmax.softmax_attention(module, q, k, v, mask, **options, weights_wanted=True)
        banded = banded_softmax_attention(q, k, v, 3, mask, causal=causal, scaling=0.5).transpose(1, 2)
        assert none is None
        assert torch.equal(out, banded) == in_blocks
        for row, kept in enumerate((tokens, 20 if masked else tokens)):
            torch.testing.assert_close(out[row, :kept], banded[row, :kept], rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(out[row, :kept], explicit[row, :kept], rtol=1e-10, atol=1e-10)
            far = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs() >= 3
            assert not weights[row, :, :kept][:, far[:kept]].any()


def test_our_band_is_that_of_transformers():
    """ModernBERT hands its attention function one more than config.sliding_window, whose distance is inclusive."""
    config = ModernBertConfig(local_attention=6, num_hidden_layers=2, hidden_size=8, num_attention_heads=2)
    attention = ModernBertForSequenceClassification(config).model.layers[1].attn
    seen = sliding_window_bidirectional_mask_function(config.sliding_window)
    positions = torch.arange(12)
    wanted = seen(0, 0, positions[:, None], positions)
    x = torch.zeros(1, 1, 12, 4)
    assert torch.equal(pairwise_mask(None, x, x, False, attention.sliding_window)[0, 0], wanted)


def test_a_local_layer_in_training_drops_weights():
    model = patched(sharp(attention_dropout=0.5), layers=[0])
    inputs = inputs_for(model.get_base_model(), tokens=30)
    model.train()
    assert not torch.allclose(model(**inputs).logits, model(**inputs).logits)


# --- padding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("fields", [{}, {"layers": [0, 1, 3], "near_field": 3}], ids=["global", "near field"])
def test_padding_changes_nothing(fields, pooling):
    model = patched(sharp(classifier_pooling=pooling), **fields)
    inputs = inputs_for(model.get_base_model(), tokens=30)
    kept = int(inputs["attention_mask"][-1].sum())
    with torch.no_grad():
        padded = model(**inputs).logits[-1]
        cut = model(input_ids=inputs["input_ids"][-1:, :kept]).logits[0]
    torch.testing.assert_close(padded, cut, rtol=1e-5, atol=1e-5)


# --- other parts ----------------------------------------------------------------------------------------------------


def test_adapters_beside_attention_and_a_pooler():
    model = sharp()
    config = SNNKConfig(
        attention=AttentionPart(num_features=8, near_field=2),
        adapter=AdapterPart(num_features=4),
        pooler=PoolerPart(num_features=8),
    )
    changed = trained(get_snnk_model(model, config)).eval()
    inputs = inputs_for(model)
    small = bundle(changed)
    torch.testing.assert_close(small(**inputs).logits, changed(**inputs).logits, rtol=1e-4, atol=1e-5)
    changed.train()
    changed(**inputs).logits.square().sum().backward()
    learned = {name: p.grad for name, p in changed.named_parameters() if p.requires_grad}
    assert sum("attn.out_drop" in name or ".attn.base_layer.out_drop" in name for name in learned) >= 4
    assert all(grad is not None and grad.isfinite().all() for grad in learned.values())


def afters(model) -> list[Behind]:
    """The sequential adapters in use."""
    layers = [module for module in model.modules() if isinstance(module, SlotLayer)]
    return [slot for layer in layers for slot in layer.active_slots() if isinstance(slot, Behind)]


@pytest.mark.parametrize("family", ["modernbert", "vit", "distilbert"])
def test_an_adapter_inside_exchanged_attention(family, tmp_path):
    """The adapter's place lies inside the attention module: saved, loaded, joined by a second one, taken out again."""
    model = tiny(family)
    inputs = inputs_for(model)
    exact = model(**inputs).logits
    config = SNNKConfig(attention=AttentionPart(num_features=8), adapter=AdapterPart(num_features=4))
    changed = trained(get_snnk_model(model, config)).eval()
    expected = changed(**inputs).logits
    changed.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny(family), tmp_path).eval()
    assert same(again(**inputs).logits, expected)
    changed.add_adapter("other", SNNKConfig(adapter=AdapterPart(num_features=6), modules_to_save=[]))
    changed.set_adapter("other")
    assert all(slot.adapter.stage.feature_map.num_features == 6 for slot in afters(changed))
    assert len(afters(changed)) == 2 * len(FAMILIES[family].layer_paths(model))
    assert not torch.allclose(changed(**inputs).logits, expected, atol=1e-4)
    changed.set_adapter("default")
    assert same(changed(**inputs).logits, expected)
    small = bundle(again)
    torch.testing.assert_close(small(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    plain = again.unload()
    assert not [module for module in plain.modules() if isinstance(module, SlotLayer)]
    assert list(plain.state_dict()) == list(tiny(family).state_dict())
    assert exact.shape == plain(**inputs).logits.shape
