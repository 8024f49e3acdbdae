"""Near and far field under one normalisation, against the weights of single pairs; and behind the fitted length."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

from snnk_cli.timing import operations
from snnk_peft import AttentionPart, SNNKConfig, build_feature_map, bundle, calibrate, get_snnk_model
from snnk_peft.attention import RecurrentCache
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.kernel_attention import KernelAttention, continue_attention
from tests.attention_models import causal_model, left_padded, patched, sharpened
from tests.elsewhere import check_elsewhere, save_known
from tests.tensor_sizes import LargestTensor
from tests.tiny_models import inputs_for, tiny, trained

F64 = torch.float64
HEADS, GROUPS, DIM, LENGTH, SCALING = 6, 2, 4, 13, 0.6
JOINT = {"near_field": 3, "near_field_normalisation": "joint", "sinks": 2}
# Component, projection, number of maps (one for all, per key head, per query head), whether keys have their own.
MAPS = [
    ("posrf", "orf", 1, False),
    ("hyprf", "gaussian", GROUPS, False),
    ("gerf", "orf", 1, False),
    ("mixture", "free", 1, True),
    ("mixture", "free", HEADS, True),
]


def kernel_of(component: str, projection: str, count: int, apart: bool, near_field: int = 3, sinks: int = 2):
    def maps() -> list:
        return [build_feature_map(component, projection, DIM, 8) for _ in range(count)]

    term = AttentionTerm(maps(), maps() if apart else None)
    kernel = KernelAttention([term], HEADS, near_field=near_field, joint=True, sinks=sinks).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return kernel


def tensors(length: int = LENGTH, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    heads = ((HEADS, DIM), (GROUPS, DIM), (GROUPS, 5))
    q, k, v = (torch.randn(2, count, length, dim, generator=generator, dtype=F64) for count, dim in heads)
    return [size * q, size * k, v]


def a_mask(length: int = LENGTH) -> torch.Tensor:
    """Padding on the left, on the right and in between."""
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, 6] = mask[0, -2:] = mask[1, :4] = False
    return mask


def definition(kernel: KernelAttention, q, k, v, mask, causal: bool) -> torch.Tensor:
    """Pair by pair: e^{q·k} for near keys, the product of the features and the factor for others."""
    feature_pairs = kernel.terms[0].pairs()
    width, sinks = kernel.near_field, kernel.joint.sinks
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=F64)
    for b in range(len(q)):
        first = [j for j in range(k.shape[2]) if mask[b, j]][:sinks]
        for h in range(HEADS):
            group = h * GROUPS // HEADS
            place = {1: 0, GROUPS: group, HEADS: h}[len(feature_pairs)]
            statistics = ({}, {})
            if feature_pairs[place][0].component.adapts:
                own = q[b, group * 3 : group * 3 + 3].flatten(0, 1), k[b, group]
                counts = mask[b].repeat(3), mask[b]
                found = feature_pairs[place][0].component.statistics(*(t * SCALING**0.5 for t in own), *counts)
                statistics = found, found
            queries, keys = (
                feature_map.phi if second == 0 else feature_map.psi
                for second, feature_map in enumerate(feature_pairs[place])
            )
            phi = queries(q[b, h] * SCALING**0.5, *([statistics[0]] if statistics[0] else []))
            psi = keys(k[b, group] * SCALING**0.5, *([statistics[1]] if statistics[1] else []))
            logs = [(f.values.double().log() + (0 if f.log_scale is None else f.log_scale)) for f in (phi, psi)]
            factor = kernel.joint.factor[0, h]
            for i in range(LENGTH):
                own_factor = factor[:-1] @ q[b, h, i] * SCALING**0.5 + factor[-1]
                seen, terms = [], []
                for j in range(LENGTH):
                    if not mask[b, j] or (causal and j > i):
                        continue
                    near = abs(i - j) < width or j in first
                    exact = SCALING * q[b, h, i] @ k[b, group, j]
                    terms.append(exact if near else (logs[0][i] + logs[1][j]).logsumexp(-1) + own_factor)
                    seen.append(j)
                if seen:
                    out[b, h, i] = torch.stack(terms).softmax(-1) @ v[b, group, seen]
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("maps", MAPS, ids=str)
def test_the_definition(maps, causal):
    kernel, given, mask = kernel_of(*maps), tensors(), a_mask()
    with torch.no_grad():
        found = kernel(*given, mask, causal=causal, scaling=SCALING)
        torch.testing.assert_close(found, definition(kernel, *given, mask, causal), rtol=1e-9, atol=1e-9)


def test_a_component_that_adapts_to_all_tokens():
    kernel, given, mask = kernel_of("oprf", "orf", 1, False), tensors(), torch.ones(2, LENGTH, dtype=torch.bool)
    with torch.no_grad():
        found = kernel(*given, mask, scaling=SCALING)
        torch.testing.assert_close(found, definition(kernel, *given, mask, False), rtol=1e-8, atol=1e-8)
    with pytest.raises(UnsupportedError, match="would see the future"):
        kernel(*given, mask, causal=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("width", "sinks"), [(LENGTH, 0), (40, 3), (1, LENGTH)])
def test_what_is_near_as_a_whole_is_softmax(width, sinks, causal):
    kernel, (q, k, v), mask = kernel_of("posrf", "orf", 1, False, width, sinks), tensors(), a_mask()
    pairs = mask[:, None, None].expand(-1, 1, LENGTH, -1)
    if causal:
        pairs = pairs & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    scores = (q @ k.repeat_interleave(3, 1).mT * SCALING).masked_fill(~pairs, -math.inf)
    exact = scores.softmax(-1).nan_to_num() @ v.repeat_interleave(3, 1)
    found = kernel(q, k, v, mask, causal=causal, scaling=SCALING)
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)
    assert found[1, :, :4].abs().max() == 0 or not causal  # rows without a key


def test_several_terms_share_the_far_field():
    """Twice the same map is that map."""
    once = kernel_of("posrf", "orf", 1, False)
    term = once.terms[0]
    twice = KernelAttention([term, copy.deepcopy(term)], HEADS, near_field=3, joint=True, sinks=2).double()
    with torch.no_grad():
        once.joint.factor.zero_()
    given, mask = tensors(), a_mask()
    torch.testing.assert_close(twice(*given, mask, causal=True), once(*given, mask, causal=True))


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [4, 9], [1, 7, 1, 4], [2, 3, 8]], ids=str)
@pytest.mark.parametrize("maps", [MAPS[1], MAPS[4]], ids=str)
def test_pieces_equal_the_whole(maps, sizes):
    """Token by token, in pieces, and as the last queries of longer keys (a growing cache)."""
    kernel, (q, k, v), mask = kernel_of(*maps), tensors(), a_mask()
    with torch.no_grad():
        whole = kernel(q, k, v, mask, causal=True)
        state, parts, bytes_kept = None, [], set()
        for piece in zip(*(t.split(sizes, -2) for t in (q, k, v)), mask.split(sizes, -1), strict=True):
            part, state = continue_attention(kernel, *piece, state)
            parts.append(part)
            kept = [*state.sums[0], *state.band[:3], *state.sinks[:3]]  # no positions
            bytes_kept.add(sum(tensor.untyped_storage().nbytes() for tensor in kept))
        torch.testing.assert_close(torch.cat(parts, -2), whole, rtol=1e-10, atol=1e-10)
        assert len(bytes_kept) == 1
        last = kernel(q[:, :, -sizes[-1] :], k, v, mask, causal=True)
        torch.testing.assert_close(last, whole[:, :, -sizes[-1] :], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_half_precision_and_large_norms(dtype, causal):
    """Scores of some hundreds: nothing overflows, and what is rounded are the numbers that were given."""
    kernel, mask = kernel_of("mixture", "free", HEADS, True), a_mask()
    for size in (1.0, 12.0):
        given = [t.to(dtype) for t in tensors(size=size)]
        exact = definition(kernel, *(t.double() for t in given), mask, causal)
        with torch.no_grad():
            single = copy.deepcopy(kernel).float()
            found = single(*given, mask, causal=causal, scaling=SCALING)
        assert found.dtype == dtype
        tolerance = {torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        assert (found.double() - exact).norm() < tolerance * exact.norm()


def test_memory_is_linear():
    sizes = []
    for length in (256, 1024):
        kernel = kernel_of("mixture", "free", HEADS, True, near_field=16)
        with torch.no_grad(), LargestTensor() as largest:
            kernel(*tensors(length), causal=True)
            kernel(*tensors(length))
        sizes.append(largest.numel)
    assert sizes[1] <= 4.1 * sizes[0]
    assert sizes[1] < 2 * HEADS * 1024 * 1024 / 4


def test_gradients():
    kernel, (q, k, v) = kernel_of("mixture", "free", HEADS, True), tensors()
    for causal in (True, False):
        kernel.zero_grad()
        given = [t[:1, :, :7].clone().requires_grad_() for t in (q, k, v)]
        assert torch.autograd.gradcheck(lambda *t, causal=causal: kernel(*t, causal=causal), given, fast_mode=True)
        kernel(*given, causal=causal).square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in kernel.parameters())


# --- models ---------------------------------------------------------------------------------------------------------


def mixed(model, **changes):
    """With maps that are not those of a kernel, and factors that are not one."""
    part = AttentionPart(component="mixture", projection="centroids", num_features=8, refit_output=False, **JOINT)
    found = get_snnk_model(model, SNNKConfig(attention=part, modules_to_save=[], **changes)).eval()
    return trained(found, std=0.5)


def test_maps_are_those_of_query_heads():
    model = mixed(causal_model("llama"))
    kernel = next(module for module in model.modules() if isinstance(module, KernelAttention))
    assert len(kernel.terms[0].feature_maps) == 4  # query heads, of which two share a key head
    assert kernel.joint.factor.shape == (1, 4, 9)


def test_the_cache_is_constant():
    model = mixed(causal_model("llama"))
    sizes = []
    for length in (1, 8, 60):
        cache = RecurrentCache(model)
        model.generate(input_ids=torch.full((2, length), 7), past_key_values=cache, max_new_tokens=5, do_sample=False)
        sizes.append(cache.nbytes)
    # 2 layers, batch 2: M and log Z of 4 heads (8 × 8 + 8 numbers); 5 keys and values of 2 heads, as many flags; place
    assert sizes == [2 * 2 * ((4 * (8 * 8 + 8) + 5 * 2 * 2 * 8) * 4 + 5 + 8)] * 3
    with pytest.raises(UnsupportedError, match="cannot take tokens back"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0


def test_packed_documents_have_sinks_of_their_own():
    model = mixed(causal_model("llama"))
    texts = left_padded()["input_ids"].split(1)
    cut = [text[:, :length] for text, length in zip(texts, (12, 5, 9), strict=True)]
    positions = torch.cat([torch.arange(text.shape[1]) for text in cut])[None]
    with torch.no_grad():
        row = model(input_ids=torch.cat(cut, 1), position_ids=positions, use_cache=False).logits
        apart = torch.cat([model(input_ids=text, use_cache=False).logits for text in cut], 1)
    torch.testing.assert_close(row, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "roberta", "vit"])
def test_an_encoder_with_a_wide_band_is_as_it_was(family):
    """And padding is truncation in a narrow one."""
    model = sharpened(family)
    inputs = inputs_for(model)
    with torch.no_grad():
        exact = model(**inputs).logits
        wide = {**JOINT, "near_field": 64}
        found = patched(copy.deepcopy(model), num_features=8, **wide)(**inputs).logits
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
        narrow = patched(model, num_features=8, **JOINT)
        out = narrow(**inputs).logits
        assert not torch.allclose(out, exact, rtol=1e-5, atol=1e-5)
        if "attention_mask" in inputs:
            kept = int(inputs["attention_mask"][-1].sum())
            cut = narrow(input_ids=inputs["input_ids"][-1:, :kept]).logits[0]
            torch.testing.assert_close(out[-1], cut, rtol=1e-5, atol=1e-6)


def test_factors_are_trained():
    model = mixed(causal_model("llama"))
    inputs = left_padded()
    learned = [p for name, p in model.named_parameters() if "joint.factor" in name and p.requires_grad]
    assert len(learned) == 2
    optimizer = torch.optim.Adam(learned, 0.1)
    losses = []
    for _ in range(6):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"near_field_normalisation": "joint"}, ["near_field_normalisation is 'joint' without near_field"]),
        ({"near_field": 4, "sinks": 2}, ["sinks is 2 with near_field_normalisation 'blend'"]),
        ({**JOINT, "component": "elu"}, ["component 'elu' over 'orf'", "posrf"]),
        ({**JOINT, "projection": "ssr"}, ["component 'posrf' over 'ssr'"]),
        ({**JOINT, "sum_of": [{"component": "relu"}]}, [r"sum_of\[0\] has component 'relu'"]),
        ({**JOINT, "sum_of": 1e30}, [r"sum_of is 1e\+30; expected a list of dicts"]),
        ({**JOINT, "sinks": -1}, ["sinks is -1"]),
        ({"near_field": 4, "near_field_normalisation": "both"}, ["near_field_normalisation is 'both'"]),
        ({"component": "mixture", "projection": "centroids", "near_field": 4}, ["join them"]),
    ],
)
def test_faults_name_the_way_out(fields, messages):
    for message in messages:
        with pytest.raises(ConfigError, match=message):
            SNNKConfig(attention=AttentionPart(**fields))


def test_faults_of_a_layer():
    term = AttentionTerm([build_feature_map("elu", "identity", DIM, DIM)])
    with pytest.raises(ConfigError, match="'elu' over 'identity' are not known as positive numbers"):
        KernelAttention([term], HEADS, near_field=3, joint=True)
    with pytest.raises(ConfigError, match="near_field is None, joint is True"):
        KernelAttention([build_feature_map("posrf", "orf", DIM, 8)], HEADS, joint=True)
    kernel, (q, k, v) = kernel_of("posrf", "orf", 1, False), tensors()
    with pytest.raises(ConfigError, match="same positions"):
        kernel(q[:, :, :4], k, v)


# === behind the fitted length, tokens of a decoder see near keys and sinks alone ======================================


FITTED, LONG, WIDTH, SINKS = 12, 20, 3, 1
FITTED_JOINT = AttentionPart(
    "mixture", "centroids", num_features=4, near_field=WIDTH, near_field_normalisation="joint", sinks=SINKS
)
ALONE = AttentionPart("mixture", "centroids", num_features=4)


def texts(count: int = 4, length: int = FITTED) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 90, (4, length), generator=generator)} for _ in range(count)]


def calibrated(part: AttentionPart) -> Any:
    model = get_snnk_model(causal_model("llama"), SNNKConfig(attention=part))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny data
        report = calibrate(model, texts(), progress=False)
    assert f"at most {FITTED} tokens" in str(report)
    return model.eval()


@pytest.fixture(scope="module")
def joint() -> Any:
    return calibrated(FITTED_JOINT)


def logits(model: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(**inputs).logits


def test_weights_behind_the_fitted_length_are_softmax_of_near_keys_and_sinks(joint):
    """Before it they are what they were."""
    kernel = next(module for module in joint.modules() if isinstance(module, KernelAttention))
    assert kernel.fitted_length == FITTED
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(2, heads, LONG, 8, generator=generator) for heads in (4, 2))
    counts = torch.ones(2, LONG, dtype=torch.bool)
    counts[1, :5] = False  # padding is no text
    with torch.no_grad():
        found = kernel.weights(q, k, counts, causal=True)
        kernel.fitted_length = None
        endless = kernel.weights(q, k, counts, causal=True)
        kernel.fitted_length = FITTED
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    for row, first in ((0, 0), (1, 5)):
        for i in range(first, LONG):
            if i - first < FITTED:
                assert torch.equal(found[row, :, i], endless[row, :, i])
                continue
            seen = [j for j in range(first, i + 1) if i - j < WIDTH or j - first < SINKS]
            expected = torch.zeros(4, LONG)
            expected[:, seen] = scores[row, :, i, seen].softmax(-1)
            torch.testing.assert_close(found[row, :, i], expected)
            assert not torch.allclose(endless[row, :, i], expected, atol=1e-3)


@pytest.mark.parametrize("steps", [[LONG], [5, 9, 6], [1] * LONG], ids=["once", "pieces", "tokens"])
@pytest.mark.parametrize("cache", ["recurrent", "dynamic"])
def test_caches(joint, cache, steps):
    ids = texts(1, LONG)[0]["input_ids"]
    model = joint.get_base_model()
    kept = RecurrentCache(model) if cache == "recurrent" else DynamicCache(config=model.config)
    found = [logits(joint, input_ids=piece, past_key_values=kept) for piece in ids.split(steps, 1)]
    torch.testing.assert_close(torch.cat(found, 1), logits(joint, input_ids=ids), rtol=1e-3, atol=1e-4)


def test_padding_on_the_left_is_no_text(joint):
    ids = texts(1, LONG)[0]["input_ids"]
    padded = torch.cat((ids.new_zeros(4, 7), ids), 1)
    mask = (padded != 0).long()
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    found = logits(joint, input_ids=padded, attention_mask=mask, position_ids=places)
    torch.testing.assert_close(found[:, 7:], logits(joint, input_ids=ids), rtol=1e-3, atol=1e-4)


def test_every_packed_document_begins_anew(joint):
    parts = [each["input_ids"][:1] for each in texts(2, 16)]
    places = torch.arange(16).repeat(2)[None]
    found = logits(joint, input_ids=torch.cat(parts, 1), position_ids=places, use_cache=False)
    alone = torch.cat([logits(joint, input_ids=part) for part in parts], 1)
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-4)


def test_folders_keep_it(joint, tmp_path, caplog):
    """Adapter, bundle, bundle in a process without the package; what an earlier version wrote has a note."""
    ids = texts(1, LONG)[0]["input_ids"]
    expected = logits(joint, input_ids=ids)
    joint.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(causal_model("llama"), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(again, input_ids=ids), expected)
    assert f"texts of at most {FITTED} tokens" in (tmp_path / "adapter" / "README.md").read_text()
    bundle(again).save_pretrained(tmp_path / "bundle")
    assert f"texts of at most {FITTED} tokens" in (tmp_path / "bundle" / "README.md").read_text()
    with caplog.at_level(logging.WARNING, "snnk_peft"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bundle")
        torch.testing.assert_close(logits(loaded, input_ids=ids), expected, rtol=1e-4, atol=1e-4)
        assert "does not say how long" not in caplog.text
        config = loaded.config
        for spec in config.snnk_plan["modules"].values():
            spec.pop("fitted_length", None)
        old = type(loaded)(config)
        assert "does not say how long" in caplog.text
    old.load_state_dict(loaded.state_dict())
    assert not torch.allclose(logits(old.eval(), input_ids=ids), expected, atol=1e-2)
    check_elsewhere(save_known(bundle(again), {"input_ids": ids}, tmp_path / "elsewhere", expected))


def test_generation_warns_once_and_goes_on(joint):
    ids = texts(1, FITTED - 2)[0]["input_ids"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        made = joint.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert made.shape[1] == FITTED + 6
    told = [str(each.message) for each in caught if "linear attention was fitted" in str(each.message)]
    assert len(told) == 1
    assert f"at most {FITTED} tokens" in told[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        joint.generate(input_ids=ids, max_new_tokens=2, do_sample=False)


def test_without_a_near_field_longer_texts_are_refused():
    model = calibrated(ALONE)
    ids = texts(1, LONG)[0]["input_ids"]
    assert logits(model, input_ids=ids[:, :FITTED]).isfinite().all()
    for run in (lambda: model(input_ids=ids), lambda: bundle(model)(input_ids=ids)):
        with pytest.raises(UnsupportedError, match=rf"at most {FITTED} tokens.*This text has {LONG} tokens"):
            run()
    with pytest.raises(UnsupportedError, match=f"This text has {FITTED + 1} tokens"):
        model.generate(input_ids=ids[:, : FITTED - 2], max_new_tokens=8, do_sample=False)
    mask = torch.ones_like(ids)
    mask[:, : LONG - FITTED] = 0
    model(input_ids=ids, attention_mask=mask)  # padding is no text


def test_calibrating_again_on_longer_texts_moves_it():
    model = calibrated(ALONE)
    calibrate(model, texts(4, LONG), progress=False)
    assert logits(model, input_ids=texts(1, LONG)[0]["input_ids"]).isfinite().all()
    assert model.peft_config["default"].attention.fitted_length == LONG


def test_encoders_are_not_cut():
    """They see texts whole, and their positions end where their config says."""
    model = get_snnk_model(tiny("bert", "BertModel"), SNNKConfig(attention=ALONE))
    calibrate(model, texts(), progress=False)
    assert model(input_ids=texts(1, LONG)[0]["input_ids"]).last_hidden_state.isfinite().all()


def test_bad_lengths_are_told():
    with pytest.raises(ConfigError, match="fitted_length is 0"):
        get_snnk_model(
            causal_model("llama"), SNNKConfig(attention=AttentionPart("mixture", "centroids", fitted_length=0))
        )


@pytest.mark.parametrize(("component", "projection", "count", "apart"), [MAPS[0], MAPS[-1]])
def test_both_directions_are_one_batch(component, projection, count, apart):
    """Half as many operations: an exported graph takes its time from their number."""
    kernel, given = kernel_of(component, projection, count, apart), tensors()
    with torch.no_grad():
        both, one = (operations(partial(kernel, *given, causal=causal)).total() for causal in (False, True))
    assert both < 1.25 * one  # one by one: 1.4 times as many and more
