"""Key heads that keep softmax, and a far field without rotary positions: dense oracles, caches, folders."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from snnk_peft import AttentionPart, SNNKConfig, bundle, calibrate, convert, get_snnk_model
from snnk_peft.attention import RecurrentCache
from snnk_peft.converting.report import warnings_of
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.functional.rotary import Rotary
from snnk_peft.functional.rounded import as_rounded, restored, rounded
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.planning.cache_part import cache_part, within_bytes
from snnk_peft.planning.full_heads import _needs, choose_full_heads, gated, recall
from tests.attention_models import causal_model, left_padded, logits_of_pieces, patched, widened
from tests.elsewhere import check_elsewhere, save_known
from tests.tiny_families import build, heads
from tests.tiny_models import tiny

F64 = torch.float64
HYBRID: dict[str, Any] = {
    "component": "mixture", "projection": "centroids", "num_features": 6, "near_field": 3, "sinks": 2,
    "near_field_normalisation": "joint", "full_heads": [[0, 1], [1, 0]], "position_free": True, "refit_output": False,
}  # fmt: skip
RANDOM = {**HYBRID, "component": "posrf", "projection": "orf", "num_features": 16}
ROTARY = ["llama", "mistral", "gemma", "qwen2", "qwen3", "olmo2", "phi3", "gpt_neox"]


def texts(count: int = 6, length: int = 40) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 100, (2, length), generator=generator)} for _ in range(count)]


def kernels(model: Any) -> list[KernelAttention]:
    return [module for module in model.modules() if isinstance(module, KernelAttention)]


def raw(model: Any, layer: int, ids: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys (as projected, not turned) and values of a Llama's layer: (B, heads, L, d) in float64."""
    found: list[torch.Tensor] = []
    attention = model.model.layers[layer].self_attn
    hooks = [
        getattr(attention, name).register_forward_hook(lambda *call: found.append(call[2]))
        for name in ("q_proj", "k_proj", "v_proj")
    ]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [each.double().unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for each in found]


def turned(model: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """By transformers' own function."""
    cos, sin = model.model.rotary_emb(x.float(), positions[None])
    return apply_rotary_pos_emb(x, x, cos.double(), sin.double())[0]


@torch.no_grad()
def test_every_pair_of_a_layer_written_out():
    """Full heads are softmax; others softmax of near keys and sinks, and features of what is not turned beyond."""
    model = causal_model("llama")
    hybrid = get_snnk_model(copy.deepcopy(model), SNNKConfig(attention=AttentionPart(**HYBRID), modules_to_save=[]))
    calibrate(hybrid, texts(), progress=False)
    plain: Any = bundle(hybrid).eval()
    ids = texts(1, 30)[0]["input_ids"]
    q, k, v = raw(plain, 0, ids)
    length, scaling = ids.shape[1], q.shape[-1] ** -0.5
    at = torch.arange(length)
    distance = at[:, None] - at
    causal = distance >= 0
    near = causal & ((distance < 3) | (at < 2))
    turned_q, turned_k = turned(plain, q, at), turned(plain, k, at)
    far_q, far_k = turned(plain, q, torch.full_like(at, 3)), turned(plain, k, torch.zeros_like(at))
    kernel = plain.model.layers[0].self_attn.snnk_kernel.double()
    assert kernel.full_heads == (1,)
    kernel.fitted_length = 20
    fading = 2 * (torch.arange(1, length + 1, dtype=F64) / 20).clamp_min(1).log()
    pairs, outs = kernel.terms[0].pairs(), []
    for head in range(4):
        group = head // 2
        logs = (turned_q[:, head] @ turned_k[:, group].mT * scaling).masked_fill(~causal, -math.inf)
        if group != 1:
            queries = pairs[head][0].phi(far_q[:, head] * scaling**0.5)
            keys = pairs[head][1].psi(far_k[:, group] * scaling**0.5)
            products = (queries.values @ keys.values.mT).log()
            for scale in (queries.log_scale, None if keys.log_scale is None else keys.log_scale.mT):
                products = products if scale is None else products + scale
            w, c = kernel.joint.factor[0, head, :-1], kernel.joint.factor[0, head, -1]
            far = products + (far_q[:, head] @ w * scaling**0.5 + c - fading).unsqueeze(-1)
            logs = torch.where(near, logs, far).masked_fill(~causal, -math.inf)
        outs.append(logs.softmax(-1) @ v[:, group])
    expected = torch.stack(outs, 1)
    found = kernel(turned_q, turned_k, v, causal=True, scaling=scaling)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # Without its positions taken off, the far field is another one.
    kernel.joint.rotary = None
    assert (kernel(turned_q, turned_k, v, causal=True, scaling=scaling) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", ROTARY)
def test_only_distances_matter(family):
    """Positions that are all later by 7 change nothing."""
    name = next(name for name, auto in heads(family).items() if auto == "AutoModelForCausalLM")
    changes = {"num_key_value_heads": 2, "num_attention_heads": 4} if family != "gpt_neox" else {}
    model = patched(widened(build(family, name, **changes)), **{**RANDOM, "full_heads": [[0, 0]]})
    ids = texts(1, 24)[0]["input_ids"] % model.config.vocab_size
    at = torch.arange(24)[None]
    with torch.no_grad():
        here, there = (model(input_ids=ids, position_ids=p, use_cache=False).logits for p in (at, at + 7))
        for kernel in kernels(model):
            kernel.joint.rotary = None
        turning = model(input_ids=ids, position_ids=at + 7, use_cache=False).logits
    torch.testing.assert_close(here, there, rtol=2e-4, atol=2e-4)
    assert (turning - there).abs().max() > 1e-6


@pytest.mark.parametrize(("free", "bits"), [(False, None), (True, None), (True, 8), (True, 4)])
@pytest.mark.parametrize("sizes", [[12], [5, 7], [1] * 12, [4, 1, 1, 6]])
@torch.no_grad()
def test_pieces_equal_the_whole(sizes, free, bits):
    """Padding on the left, chunks and single tokens, in the recurrent cache and in a growing one."""
    model = patched(causal_model("llama"), **{**RANDOM, "position_free": free, "cache_bits": bits})
    batch = left_padded()
    mask = batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    whole = model(**batch, position_ids=positions, use_cache=False).logits
    for cache in (RecurrentCache(model), DynamicCache(config=model.config)):
        found, counted = logits_of_pieces(model, batch, sizes, cache), mask.bool()
        torch.testing.assert_close(found[counted], whole[counted], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_generation_is_that_of_a_growing_cache():
    model = patched(causal_model("llama"), **RANDOM)
    batch = left_padded()
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    for further in ({}, {"num_beams": 3}):
        own = model.generate(**batch, **options, **further)
        assert torch.equal(own, model.generate(**batch, **options, **further, use_cache=False))
    cache = RecurrentCache(model)
    model.generate(**batch, **options, past_key_values=cache)
    state = cache.layers[0].state
    assert state.keys.whole.shape[1:3] == (1, 12 + 19)  # one key head keeps all; the last token is not attended to
    again = copy.deepcopy(cache)
    torch.testing.assert_close(again.layers[0].state.keys.whole, state.keys.whole)
    assert again.nbytes == cache.nbytes


@torch.no_grad()
def test_what_all_see_is_softmax():
    """A window as wide as the text leaves nothing far."""
    model = causal_model("llama")
    batch = texts(1, 20)[0]
    wanted = model(**batch).logits
    found = patched(copy.deepcopy(model), **{**RANDOM, "near_field": 20})(**batch).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_folders_keep_it(tmp_path: Path):
    model: Any = get_snnk_model(
        causal_model("llama"), SNNKConfig(attention=AttentionPart(**HYBRID, cache_bits=8), modules_to_save=[])
    )
    calibrate(model, texts(), progress=False)
    inputs = texts(1, 30)[0]
    with torch.no_grad():
        wanted = model.eval()(**inputs, use_cache=False).logits
    plain: Any = bundle(model)
    with torch.no_grad():
        torch.testing.assert_close(plain(**inputs, use_cache=False).logits, wanted)
    check_elsewhere(save_known(plain, inputs, tmp_path / "bundle"))
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(causal_model("llama"), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs, use_cache=False).logits, wanted)


@torch.no_grad()
def test_behind_the_fitted_length_it_is_no_worse_than_a_window():
    """Fitted to 30 tokens, on 120: no warning, and nearer to the original than near keys and sinks alone."""
    original = causal_model("llama")
    model = get_snnk_model(
        copy.deepcopy(original), SNNKConfig(attention=AttentionPart(**{**HYBRID, "full_heads": []}), modules_to_save=[])
    )
    calibrate(model, texts(length=30), progress=False)
    long = texts(1, 120)[0]
    wanted = original(**long).logits.log_softmax(-1)

    def divergence() -> float:
        found = model.eval()(**long, use_cache=False).logits.log_softmax(-1)
        return float((wanted.exp() * (wanted - found)).sum(-1)[:, 30:].mean())

    whole = divergence()
    for kernel in kernels(model):
        kernel.joint.factor[..., -1] = -1e4
    assert whole < divergence()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"full_heads": [[0, 5]]}, r"names \[0, 5\]; expected key heads 0 to 1 of layers that become linear: 0, 1"),
        ({"full_heads": [[0, 0], [0, 0]]}, "names a head twice"),
        ({"full_heads": [0]}, r"holds 0; expected pairs"),
        ({"full_heads": [[0, 0], [0, 1], [1, 0], [1, 1]]}, "nothing would become linear"),
        ({"near_field_normalisation": "blend", "sinks": 0}, "without a near field under one normalisation"),
    ],
)
def test_faults(fields, message):
    with pytest.raises(ConfigError, match=message):
        patched(causal_model("llama"), **{**RANDOM, **fields})


def test_models_that_cannot():
    with pytest.raises(UnsupportedError, match="is no decoder"):
        patched(tiny("bert"), **RANDOM)
    model = causal_model("llama")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}
    with pytest.raises(UnsupportedError, match="rope_type 'dynamic'"):
        patched(model, **RANDOM)


def test_a_layer_may_be_full_and_learned_positions_stay():
    model = patched(causal_model("llama"), **{**RANDOM, "full_heads": [[0, 0], [0, 1]]})
    assert len(kernels(model)) == 1
    gpt2 = patched(causal_model("gpt2"), **{**RANDOM, "full_heads": [[0, 0]]})
    assert all(kernel.joint.rotary is None for kernel in kernels(gpt2))


def test_partial_rotary_and_far_positions():
    """A rotation of the first numbers only, exact at a million tokens."""
    theta = [1.0, 0.01]
    rotary, x = Rotary(theta, 5), torch.randn(1, 1, 3, 6, dtype=F64)
    at = torch.tensor([[0, 1000, 1_000_000]])
    found = rotary.keys(x.float(), at)
    angles = -(at[0, :, None].double() * torch.tensor(theta, dtype=F64))
    by = torch.polar(torch.ones_like(angles), angles)
    expected = torch.complex(x[0, 0, :, :2], x[0, 0, :, 2:4]) * by
    torch.testing.assert_close(found[0, 0, :, :2].double(), expected.real, rtol=0, atol=1e-6)
    torch.testing.assert_close(found[0, 0, :, 2:4].double(), expected.imag, rtol=0, atol=1e-6)
    torch.testing.assert_close(found[0, 0, :, 4:], x[0, 0, :, 4:].float())


def test_the_head_that_recalls_is_chosen():
    """A Llama's attention whose one key head matters and sees all keys: its gate gains most, by finite differences."""
    model = causal_model("llama")
    ids = texts(1, 100)[0]["input_ids"]
    modules: Any = [layer.self_attn for layer in model.model.layers]
    gates = torch.full((2, 2), 0.5, requires_grad=True)
    found = _needs(model, modules, gates, ids, 8, 4, 1)

    @torch.no_grad()
    def divergence(open_gates: torch.Tensor) -> float:
        wanted = model(input_ids=ids, use_cache=False).logits[:, 8:].double().log_softmax(-1)
        with gated(model, modules, open_gates, 4, 1):
            given = model(input_ids=ids, use_cache=False).logits[:, 8:].double().log_softmax(-1)
        return float((wanted.exp() * (wanted - given)).sum(-1).mean())

    for place in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        more, less = torch.full((2, 2), 0.5), torch.full((2, 2), 0.5)
        more[place], less[place] = 0.51, 0.49
        slope = (divergence(more) - divergence(less)) / 0.02
        assert float(found[place]) == pytest.approx(-slope, rel=0.05, abs=1e-3)
    assert divergence(torch.ones(2, 2)) < 1e-9  # open gates are the original
    assert divergence(torch.zeros(2, 2)) > 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_choosing_leaves_the_model_as_it_was(family):
    neox = partial(build, "gpt_neox", "GPTNeoXForCausalLM", vocab_size=100)
    model = (neox() if family == "gpt_neox" else causal_model(family)).train()
    batches = [{"input_ids": torch.randint(3, 100, (2, 700), generator=torch.Generator().manual_seed(0))}]
    room = {"near_field": 8, "progress": False}
    model.config.max_position_embeddings = 400  # the tokens of what comes back; Llama's tables have no end
    if family == "gpt2":
        with pytest.raises(ConfigError, match="the model reads 64"):
            choose_full_heads(causal_model(family), batches, 0.3, **room)
        return
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = [set(vars(module)) for module in model.modules()]
    chosen = choose_full_heads(model, batches, 0.5, **room)
    assert len(chosen) == 2
    assert chosen == choose_full_heads(model, batches, 0.5, **room)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    patched(model, **{**RANDOM, "full_heads": chosen})
    for share in (0, 1, 1.5, "all"):
        with pytest.raises(ConfigError, match="share is"):
            choose_full_heads(model, batches, share, **room)
    with pytest.raises(ConfigError, match=r"Give longer texts, .* or take a narrower near_field"):
        choose_full_heads(model, texts(), 0.5, progress=False)
    for other in (tiny("bert"), build("llama", "LlamaModel"), build("llama", "LlamaForSequenceClassification")):
        with pytest.raises(UnsupportedError, match="is no decoder"):
            choose_full_heads(other, batches, 0.5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [64, 40, 8])
def test_rounding_is_to_the_nearest_of_evenly_spaced_numbers(bits, dim):
    """By NumPy, group by group; the gradient is that of what was rounded."""
    x = torch.randn(2, 3, 5, dim, generator=torch.Generator().manual_seed(0)) * 10
    x[0, 0, 0] = 7.0  # no spread
    found = restored(rounded(x, bits), bits, torch.float32)
    size = dim if bits == 8 else min(32, dim)
    for begin in range(0, dim, size):
        group = x[..., begin : begin + size].numpy().astype(np.float64)
        low = group.min(-1, keepdims=True).astype(np.float16).astype(np.float64)
        step = ((group.max(-1, keepdims=True) - low) / (2**bits - 1)).astype(np.float16).astype(np.float64)
        codes = np.clip(np.rint((group - low) / np.maximum(step, 1e-30)), 0, 2**bits - 1)
        np.testing.assert_allclose(found[..., begin : begin + size], low + step * codes, rtol=1e-3, atol=0.02)
        spread = float((group.max(-1) - group.min(-1)).max())
        assert abs(found[..., begin : begin + size].numpy() - group).max() < spread / (2**bits - 1)
    leaf = x.clone().requires_grad_()
    as_rounded(leaf, bits).square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * found)


@torch.no_grad()
def test_rounded_caches_are_smaller():
    model = patched(causal_model("llama", wide=False), **RANDOM)
    sizes = {}
    for bits in (None, 8, 4):
        for kernel in kernels(model):
            kernel.cache_bits = bits
        cache = RecurrentCache(model)
        model(input_ids=torch.randint(3, 100, (1, 100)), past_key_values=cache)
        state = cache.layers[0].state
        sizes[bits] = sum(each.nbytes for side in (state.keys, state.values) for each in (side.rounded or [side.whole]))
    assert sizes == {None: 2 * 100 * 32, 8: 2 * 100 * 12, 4: 2 * 100 * 8}  # 8 numbers; codes, low and step


@pytest.mark.parametrize(
    ("costs", "needs", "room", "chosen"),
    [
        ([10, 20, 50], [[5, 1], [4, 3], [0, 2]], 30, [[0, 0], [1, 0], [2, 1]]),
        # A whole layer costs as much as three heads of others, and 3/30 is more than 1/30.
        ([10, 20, 50], [[5, 1], [4, 3], [0, 2]], 60, [[0, 0], [1, 0], [2, 1], [1, 1]]),
        ([10, 20, 50], [[5, 1], [4, 4], [0, 0.1]], 50, [[0, 0], [1, 0], [1, 1]]),
        ([10, 30], [[3], [9], [1]], 45, [[1, 0], [0, 0]]),
        ([10, 30], [[3], [9], [1]], 19, []),
        ([30, 30, 30], [[3, 9]], 1, [[0, 1], [0, 0]]),  # full heads cost nothing
    ],
)
def test_heads_with_the_greatest_need_per_byte(costs, needs, room, chosen):
    assert within_bytes(room, needs, costs) == chosen


def test_windows_widen_behind_an_eighth_of_the_heads():
    """Bytes by hand, of 32 heads of 8 over 4,000 tokens."""
    model = build(
        "llama", "LlamaForCausalLM", vocab_size=100, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4
    )
    model.config.max_position_embeddings = 4000
    batches = [{"input_ids": torch.randint(3, 100, (1, 1500), generator=torch.Generator().manual_seed(0))}]
    token, whole, sums, found = 4 * 8, 4000 * 2 * (8 + 4), 16 * 9 * 4, []
    for share in (0.06, 0.12, 0.2, 0.5):
        part = cache_part(model, batches, share, progress=False)
        linear = sums + (part.near_field + 4) * token
        counts = [sum(layer == index for layer, _ in part.full_heads) for index in range(8)]
        kept = sum(4 * 4000 * token if n == 4 else n * whole + (4 - n) * linear for n in counts)
        room = share * 32 * 4000 * token
        assert room - whole < kept <= room
        found.append((part.near_field, len(part.full_heads)))
    assert found[0][0] == 64
    assert 64 < found[2][0] <= 256
    assert found[2][1] >= 4


def test_convert_keeps_a_share_of_the_cache():
    """Bytes as promised, the original untouched; recall told by the report's divergence."""
    model = causal_model("llama")
    model.config.max_position_embeddings = 1000
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(3, 100, (1, 400), generator=generator)} for _ in range(10)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = convert(model, batches, cache=0.5, recover=0, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not kernels(model)
    assert 0 < done.report.figures["divergence"] < 5
    assert all(0 <= done.report.models[name]["recall"] <= 1 for name in ("original", "converted"))
    assert "recall" in str(done.report)
    assert all(kernel.cache_bits == (8 if kernel.full_heads else None) for kernel in kernels(done.model))
    done.model.bfloat16()
    model.bfloat16()
    cache, whole = RecurrentCache(done.model), DynamicCache(config=model.config)
    ids = torch.randint(3, 100, (1, 1000), generator=generator)
    with torch.no_grad():
        done.model(input_ids=ids, past_key_values=cache)
        model(input_ids=ids, past_key_values=whole)
    every = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)
    beside = 2 * 1000 * 9  # position and mask of each token, in each layer
    assert 0.3 * every < cache.nbytes - beside < 0.5 * every
    for wrong, message in (({"cache": 0.01}, "of 1000 tokens. Expected more"), ({"cache": 2}, "cache is 2")):
        with pytest.raises(ConfigError, match=message):
            convert(model, batches, recover=0, progress=False, **wrong)
    with pytest.raises(ConfigError, match="beside a budget or quality; expected one of them"):
        convert(model, batches, cache=0.5, quality=0.9)


def test_recall_is_told_and_its_loss_is_warned_of():
    """A model that copies what came `period` tokens before: all of it is recalled, and nothing by a window."""

    class Copies(torch.nn.Module):
        config = SimpleNamespace(max_position_embeddings=2048)

        def __init__(self, reach: int):
            super().__init__()
            self.reach, self.weight = reach, torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
            """Most likely is what followed the last earlier occurrence of the last three tokens within reach."""
            row = input_ids[0].tolist()
            logits = torch.zeros(1, len(row), 100)
            for i in range(3, len(row)):
                earlier = [j for j in range(max(3, i - self.reach), i) if row[j - 2 : j + 1] == row[i - 2 : i + 1]]
                if earlier:
                    logits[0, i, row[earlier[-1] + 1]] = 1.0
            return SimpleNamespace(logits=logits)

    batches = [{"input_ids": torch.randint(3, 100, (1, 700), generator=torch.Generator().manual_seed(0))}]
    original, window = recall(Copies(10_000), batches), recall(Copies(60), batches)
    assert original == 1.0
    assert window == 0.0
    found = warnings_of({"recall": 0.5}, [], {"recall": 0.9})
    assert "0.50 is predicted, by the original 0.90" in found[0]
    assert not warnings_of({"recall": 0.89}, [], {"recall": 0.9})
    assert recall(Copies(9), texts(1, 40)) is None


@pytest.mark.parametrize("bits", [None, 4])
@torch.no_grad()
def test_weights_are_those_of_the_rounded_keys(bits):
    """Times the values as they are, they give what the layer gives but for the values' rounding; rows sum to one."""
    model = patched(causal_model("llama"), **{**RANDOM, "cache_bits": bits})
    inputs = texts(1, 20)[0]
    found = model(**inputs, output_attentions=True, use_cache=False).attentions[0]
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 4, 20), rtol=1e-5, atol=1e-5)
    kernel, (q, k, v) = kernels(model)[0], (torch.randn(1, n, 9, 8) for n in (4, 2, 2))
    weights = kernel.weights(q, k, causal=True)
    out = kernel(q, k, v, causal=True)
    own = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(own, out, rtol=1e-4, atol=1e-4 if bits is None else 0.5)
    with pytest.raises(UnsupportedError, match="for causal attention"):
        kernel(q, k, v)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_steps_read_the_projection_of_the_linear_heads(family):
    """Also where the config counts no key heads apart; the maps are moved by the steps."""
    name = next(name for name, auto in heads(family).items() if auto == "AutoModelForCausalLM")
    model = widened(
        build(family, name, num_attention_heads=4, **({} if family == "opt" else {"num_key_value_heads": 2}))
    )
    fields = {**HYBRID, "full_heads": [[0, 1]], "refit_output": True, "layers": [0]}
    batches = [{"input_ids": each["input_ids"] % 50} for each in texts(length=20)]
    rows = []
    for steps in (0, 4):
        hybrid = get_snnk_model(copy.deepcopy(model), SNNKConfig(attention=AttentionPart(**fields), modules_to_save=[]))
        calibrate(hybrid, batches, steps=steps, progress=False)
        rows.append(kernels(hybrid)[0].maps()[0].projection.weight.detach().clone())
    assert not torch.equal(*rows)
