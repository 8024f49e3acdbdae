"""ModernBERT: global layers become linear, local ones keep their band; adapters and pooler; padding; bundles."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import PeftModel
from transformers import ModernBertConfig, ModernBertForSequenceClassification
from transformers.masking_utils import sliding_window_bidirectional_mask_function

from snnk_peft import AdapterPart, AttentionPart, FFNPart, PoolerPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families import FAMILIES
from snnk_peft.functional.near_field import banded_softmax_attention
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.adapter import Behind
from snnk_peft.parts.attention import softmax
from snnk_peft.parts.attention.interface import NAME, pairwise_mask
from snnk_peft.tuner.slot_layer import SlotLayer
from tests.fresh_process import run_python
from tests.tiny_models import inputs_for, same, tiny, trained

LOCAL = [1, 2]  # of the tiny model's four layers


def sharp(**changes):
    """A tiny model whose attention is far from uniform, so that a wrong band shows."""
    model = tiny("modernbert", **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.attn.Wqkv.weight.mul_(20)
    return model


def patched(model, **fields):
    fields = {"num_features": 16, **fields}
    return get_snnk_model(model, SNNKConfig(attention=AttentionPart(**fields), modules_to_save=[])).eval()


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
        ours = global_as_softmax(patched(copy.deepcopy(model)))(**inputs, output_hidden_states=True)
    for given, wanted in zip(ours.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(given[keep], wanted[keep], rtol=1e-4, atol=1e-5)
    assert same(ours.logits, expected.logits)


def test_the_band_matters():
    """A token that no local layer can reach changes nothing before the next global layer."""
    model = sharp(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2)
    changed = patched(model)
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


def test_many_features_approach_softmax():
    model = tiny("modernbert")
    inputs = inputs_for(model, tokens=20)
    with torch.no_grad():
        exact = model(**inputs).logits
        error = [
            (patched(copy.deepcopy(model), num_features=m)(**inputs).logits - exact).abs().max() for m in (4, 4096)
        ]
    assert 0 < error[1] < error[0] / 3


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


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"ffn": FFNPart()}, "ffn: leave this part out.* is gated"),
        ({"adapter": AdapterPart(placement="parallel")}, "use 'houlsby' or 'pfeiffer'.* is gated"),
        ({"adapter": AdapterPart(placement="query_value")}, "has no Linear that makes the query alone; use 'houlsby'"),
    ],
)
def test_parts_that_have_no_place(part, message):
    with pytest.raises(UnsupportedError, match=message):
        get_snnk_model(tiny("modernbert"), SNNKConfig(**part))


def test_softmax_comes_back():
    model = sharp()
    inputs = inputs_for(model)
    exact, before = model(**inputs).logits, model.config._attn_implementation
    changed = patched(model)
    assert not torch.allclose(changed(**inputs).logits, exact, atol=1e-4)
    with changed.disable_adapter():
        torch.testing.assert_close(changed(**inputs).logits, exact, rtol=1e-4, atol=1e-5)
    plain = changed.unload()
    assert plain.config._attn_implementation == before
    assert same(plain(**inputs).logits, exact)


# --- bundles --------------------------------------------------------------------------------------------------------


def test_bundle_reloads_with_and_without_the_package(tmp_path):
    model = patched(sharp(), near_field=2)
    inputs = inputs_for(model.get_base_model(), tokens=30)
    expected = model(**inputs).logits
    small = bundle(model)
    assert same(small(**inputs).logits, expected)
    small.save_pretrained(tmp_path)
    torch.save({"inputs": inputs, "logits": expected.detach()}, tmp_path / "expected.pt")
    for first, name in (("import snnk_peft", NAME), ("sys.modules['snnk_peft'] = None", ".modeling_snnk_bundle")):
        program = f"""
import sys, torch, transformers
{first}
model = transformers.AutoModelForSequenceClassification.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
given = torch.load({str(tmp_path / "expected.pt")!r})
torch.testing.assert_close(model(**given["inputs"]).logits, given["logits"], rtol=1e-5, atol=1e-5)
print(model.config._attn_implementation)
"""
        done = run_python(["-c", program])
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.split()[-1].endswith(name)


@pytest.mark.slow
@pytest.mark.parametrize("bundled", [False, True])
def test_compiles_in_one_graph(bundled):
    model = patched(sharp(), near_field=2)
    inputs = inputs_for(model.get_base_model(), tokens=30)
    if bundled:
        model = bundle(model)
    torch._dynamo.reset()  # graphs of other tests would make this one for all lengths
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_autocast_at_large_norms():
    model = tiny("modernbert")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.attn.Wqkv.weight.mul_(100)
    changed = patched(model, near_field=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert changed(**inputs_for(model, tokens=30)).logits.isfinite().all()
