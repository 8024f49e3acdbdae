"""output_attentions=True in patched models: the weights that forward used, formed on request; and models that cannot
be patched at all, because their weights depend on more than query and key."""

from __future__ import annotations

import copy
import dataclasses

import peft
import pytest
import torch
import transformers
from torch import nn

from snnk_peft import AdapterPart, AttentionPart, SNNKConfig, bundle, get_snnk_model
from snnk_peft.attention import kernel_attention_forward
from snnk_peft.errors import UnsupportedError
from snnk_peft.families import FAMILIES, register_family
from snnk_peft.feature_map import build_feature_map
from snnk_peft.layers import kernel_attention
from snnk_peft.layers.kernel_attention import KernelAttention
from tests.attention_models import causal_model, patched
from tests.tiny_models import CLASSIFIERS, inputs_for, same, tiny, trained


def tensors(batch=2, heads=4, groups=2, queries=9, keys=9, dim=8):
    generator = torch.Generator().manual_seed(4)
    shapes = ((heads, queries), (groups, keys), (groups, keys))
    return [torch.randn(batch, h, n, dim, generator=generator, dtype=torch.float64) for h, n in shapes]


def kernel(near_field: int | None = None, maps: int = 1) -> KernelAttention:
    made = KernelAttention(
        [build_feature_map("posrf", "orf", 8, 16, seed=s) for s in range(maps)], 4, near_field=near_field
    )
    if made.blend is not None:
        made.blend.data.normal_(generator=torch.Generator().manual_seed(1))
    return made.double()


# --- the weights of one layer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("near_field", [None, 2])
@pytest.mark.parametrize("maps", [1, 2])
def test_weights_times_values_are_the_output(causal, near_field, maps):
    """More numbers per value than there are keys: no other weights give this output, which other tests derive."""
    layer, (q, k, v) = kernel(near_field, maps), tensors()
    v = torch.cat((v, torch.randn_like(v)), -1)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    weights = layer.weights(q, k, mask, causal=causal, scaling=0.3)
    assert weights.shape == (2, 4, 9, 9)
    out = layer(q, k, v, mask, causal=causal, scaling=0.3)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out, rtol=1e-10, atol=1e-12)
    assert not weights[1, ..., 6:].any()
    if causal:
        assert not weights.triu(1).any()
    ones = torch.ones(2, 4, 9, dtype=torch.float64)
    if layer.blend is not None:
        total = nn.functional.softplus(layer.blend.detach()).sum(0)
        real = mask[:, None, :]  # a padded query may see no key of its band
        torch.testing.assert_close(weights.sum(-1) * real, ones * total[:, None] * real)
    else:
        torch.testing.assert_close(weights.sum(-1), ones)


def test_long_inputs_are_refused(monkeypatch):
    monkeypatch.setattr(kernel_attention, "EXPLICIT", 8)
    layer, (q, k, _) = kernel(), tensors()
    with pytest.raises(UnsupportedError, match=r"with 9 keys.* at most 8"):
        layer.weights(q, k)
    assert layer.weights(q[:, :, :8], k[:, :, :8]).shape == (2, 4, 8, 8)
    model = patched(tiny("bert"), num_features=8)
    inputs = inputs_for(model.get_base_model(), tokens=9)
    assert model(**inputs).logits.isfinite().all()
    with pytest.raises(UnsupportedError, match="output_attentions"):
        model(**inputs, output_attentions=True)


# --- whole models ---------------------------------------------------------------------------------------------------


def check(model, inputs, layers: int, heads: int = 2, plain: int | None = None):
    """Weights of every layer, rows sum to one, the same outputs as without asking."""
    with torch.no_grad():
        expected = model(**inputs).logits
        given = model(**inputs, output_attentions=True)
    assert same(given.logits, expected)
    assert len(given.attentions) == layers
    for weights in given.attentions:
        assert weights.shape[:2] == (len(expected), heads)
        assert weights.shape[2] == weights.shape[3]
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=1e-4, atol=1e-5)
        assert weights.std(-1).max() > 0
    return given.attentions


@pytest.mark.parametrize("family", sorted(CLASSIFIERS))
@pytest.mark.parametrize("task", [None, "SEQ_CLS"])
def test_every_encoder(family, task):
    model = tiny(family)
    inputs = inputs_for(model)
    inputs.pop("attention_mask", None)
    layers = len(FAMILIES[family].layer_paths(model))
    if task and "pixel_values" in inputs:
        pytest.skip("image models take no text task")
    config = SNNKConfig(attention=AttentionPart(num_features=16), modules_to_save=[], task_type=task)
    check(get_snnk_model(model, config).eval(), inputs, layers)


def test_padding_and_bundles_and_adapters():
    model = tiny("bert")
    inputs = inputs_for(model)
    config = SNNKConfig(attention=AttentionPart(num_features=16), adapter=AdapterPart(num_features=4))
    changed = trained(get_snnk_model(model, config)).eval()
    weights = check(changed, inputs, 2)
    assert not weights[0][-1, ..., 3:].any()
    small = bundle(changed)
    for ours, theirs in zip(check(small, inputs, 2), weights, strict=True):
        assert same(ours, theirs)


def test_weights_of_the_model_are_those_of_its_kernels():
    """Hook on the attention function's inputs: what the model reports is what the layer computes from them."""
    model = patched(tiny("bert"), num_features=16)
    inputs = inputs_for(model.get_base_model())
    seen = []
    for module in model.modules():
        if isinstance(module, KernelAttention):
            module.register_forward_hook(
                lambda m, a, k, out: seen.append((m, a, k, out)),
                with_kwargs=True,
            )
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    calls = [call for call in seen if call[1][2].shape[-1] == call[1][0].shape[-1]]  # values, not unit vectors
    assert len(calls) == len(attentions) == 2
    for (_, (_, _, v, _), _, out), weights in zip(calls, attentions, strict=True):
        torch.testing.assert_close(weights @ v, out, rtol=1e-5, atol=1e-6)


def test_mixed_layers_return_softmax_weights():
    model = tiny("bert")
    inputs = inputs_for(model)
    changed = patched(copy.deepcopy(model), num_features=16, layers="top-1")
    model.set_attn_implementation("eager")
    exact = model(**inputs, output_attentions=True).attentions
    ours = check(changed, inputs, 2)
    assert same(ours[0], exact[0])
    assert not torch.allclose(ours[1], exact[1], atol=1e-6)
    with changed.disable_adapter():
        for given, wanted in zip(changed(**inputs, output_attentions=True).attentions, exact, strict=True):
            assert same(given, wanted)


def test_local_layers_return_their_band():
    model = tiny("modernbert")
    inputs = {"input_ids": inputs_for(model, tokens=30)["input_ids"]}
    changed = patched(copy.deepcopy(model), num_features=16)
    model.set_attn_implementation("eager")
    exact = model(**inputs, output_attentions=True).attentions
    ours = check(changed, inputs, 4)
    assert not ours[1][..., 0, 3:].any()
    mixed = patched(copy.deepcopy(model), num_features=16, layers=[3])
    for index in (0, 1, 2):
        assert same(mixed(**inputs, output_attentions=True).attentions[index], exact[index])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("fields", [{}, {"near_field": 3}, {"layers": "top-1"}], ids=str)
def test_causal_models(name, fields):
    model = patched(causal_model(name), num_features=16, **fields)
    ids = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(5))
    for weights in check(model, {"input_ids": ids, "use_cache": False}, 2, heads=4 if name == "llama" else 2):
        assert not weights.triu(1).any()


def test_asked_for_in_the_config():
    """A model loaded with output_attentions=True keeps returning them when it is patched."""
    model = tiny("bert", attn_implementation="eager", output_attentions=True)
    changed = patched(model, num_features=16)
    inputs = inputs_for(model)
    assert len(changed(**inputs).attentions) == 2
    assert changed(**inputs, output_attentions=False).attentions is None


def test_gradients_reach_queries_through_the_weights():
    layer, (q, k, _) = kernel(near_field=2), tensors()
    q.requires_grad_()
    layer.weights(q, k)[..., 0].sum().backward()
    assert q.grad.abs().sum() > 0
    assert layer.blend.grad.abs().sum() > 0


# --- models whose weights depend on more than query and key ---------------------------------------------------------

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
DECODER = {**TINY, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 50}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 20}
REFUSED = {
    "t5": ("T5", "Model", {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}, "bias per pair"),
    "swin": (
        "Swin",
        "Model",
        {"image_size": 16, "patch_size": 4, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2},
        "bias per pair",
    ),
    "bloom": ("Bloom", "Model", {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50}, "ALiBi"),
    "mpt": ("Mpt", "Model", {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 50}, "ALiBi"),
    "falcon": ("Falcon", "Model", {**TINY, "alibi": True}, "ALiBi"),
    "mpnet": ("MPNet", "Model", TINY, "bias per pair"),
    "deberta": ("Deberta", "Model", {**TINY, "relative_attention": True}, "bias per pair"),
    "deberta-v2": ("DebertaV2", "Model", {**TINY, "relative_attention": True}, "bias per pair"),
    "bert": ("Bert", "Model", {**TINY, "position_embedding_type": "relative_key"}, "relative positions"),
    "gemma2": ("Gemma2", "Model", {**DECODER, "attn_logit_softcapping": 50.0}, "caps q·k softly"),
    "gpt_oss": ("GptOss", "Model", {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1}, "attention sinks"),
    "bart": ("Bart", "Model", BART, "cross attention"),
    "cross": ("Bert", "Model", {**TINY, "is_decoder": True, "add_cross_attention": True}, "cross attention"),
    "gptj": ("GPTJ", "Model", {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}, "ignore the exchange"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_more_than_query_and_key_are_refused(name):
    prefix, suffix, sizes, reason = REFUSED[name]
    torch.manual_seed(0)
    model = getattr(transformers, prefix + suffix)(getattr(transformers, f"{prefix}Config")(**sizes)).eval()
    before = model.config._attn_implementation, [type(module) for module in model.modules()]
    config = SNNKConfig(attention=AttentionPart(num_features=4), modules_to_save=[])
    with pytest.raises(UnsupportedError, match=f"cannot take linear attention.*{reason}.*leave `attention` out"):
        get_snnk_model(model, config)
    if model.config.model_type not in FAMILIES:  # a user's description of the architecture does not change that
        register_family(dataclasses.replace(FAMILIES["bert"], name=model.config.model_type))
    with pytest.raises(UnsupportedError, match=reason):
        get_snnk_model(model, config)
    assert (model.config._attn_implementation, [type(module) for module in model.modules()]) == before


def test_other_parts_need_no_exchange_of_attention():
    model = transformers.BertModel(transformers.BertConfig(**TINY, position_embedding_type="relative_key"))
    assert isinstance(get_snnk_model(model, SNNKConfig(adapter=AdapterPart(num_features=4))), peft.PeftModel)


def test_gemma2_without_softcapping_takes_linear_attention():
    """A family of the user's; its sliding layers keep their band, the others are exchanged."""
    sizes = {**DECODER, "num_hidden_layers": 2, "attn_logit_softcapping": None, "sliding_window": 4}
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes)).eval()
    register_family(dataclasses.replace(FAMILIES["llama"], name="gemma2"))
    ids = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(5))
    exact = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    changed = patched(model, num_features=4096)
    assert sum(isinstance(module, KernelAttention) for module in changed.modules()) == 1
    given = changed(input_ids=ids, use_cache=False, output_hidden_states=True)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    torch.testing.assert_close(given.hidden_states[1], exact.hidden_states[1], rtol=1e-4, atol=1e-4)
    assert 0 < (given.logits - exact.logits).abs().max() < 0.1 * exact.logits.abs().max()


@pytest.mark.parametrize("name", ["position_bias", "softcap", "s_aux"])
def test_biases_at_run_time(name):
    q, k, v = tensors()
    for module in (nn.Module(), nn.Module()):
        with pytest.raises(UnsupportedError, match=name):
            kernel_attention_forward(module, q, k, v, None, **{name: torch.zeros(1)})
        module.snnk_kernel = kernel()


def test_a_mask_per_pair_at_run_time():
    model = patched(tiny("modernbert"), num_features=8)
    ids = inputs_for(model.get_base_model())["input_ids"]
    mask = {name: torch.ones(3, 1, 7, 7, dtype=torch.bool) for name in ("full_attention", "sliding_attention")}
    for given in (torch.ones(3, 1, 7, 7, dtype=torch.bool), mask):
        with pytest.raises(UnsupportedError, match="padding mask"):
            model(input_ids=ids, attention_mask=given)
