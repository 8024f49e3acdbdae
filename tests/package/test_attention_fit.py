"""calibrate of attention: centroids stand for softmax, alone or beside a near field, by independent oracles."""

from __future__ import annotations

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from sklearn.linear_model import Ridge
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from snnk_peft import (
    AdapterPart,
    AttentionPart,
    FFNPart,
    SNNKConfig,
    build_feature_map,
    bundle,
    calibrate,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.recording import Recorded, Sample
from snnk_peft.solvers.centroids import Scores, centroids, descend, divergence, key_moments, output_error, sharpest
from snnk_peft.solvers.joint_centroids import (
    RIDGE,
    NearScores,
    best_joint,
    fitted_factor,
    joint_centroids,
    joint_divergence,
    joint_output_error,
)
from tests.elsewhere import check_elsewhere, save_known
from tests.tiny_families import build, main_head
from tests.tiny_models import logits

PART = {"component": "mixture", "projection": "centroids"}


def vivid(name: str = "bert", factor: float = 6.0, **changes: Any) -> Any:
    """A small random model whose attention is far from uniform."""
    model = build(name, main_head(name), **changes)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if any(
                word in path
                for word in (
                    "query.weight",
                    "key.weight",
                    "q_lin.weight",
                    "k_lin.weight",
                    "q_proj.weight",
                    "k_proj.weight",
                )
            ):
                parameter *= factor
    return model


def sentences(model: Any, count: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for length in range(count):
        ids = torch.randint(5, model.config.vocab_size, (4, 8 + length % 5), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def scores(heads: int = 2, length: int = 12, dim: int = 4, batches: int = 5, causal: bool = False) -> list[Scores]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(batches):
        q = 1.5 * torch.randn(3, heads, 1, length, dim, generator=generator)
        k = torch.randn(3, heads, length, dim, generator=generator) + 2
        pairs = torch.ones(3, 1, 1, length, length, dtype=torch.bool)
        pairs[0, ..., -4:] = False
        if causal:
            pairs = pairs & torch.ones(length, length, dtype=torch.bool).tril()
        counted = torch.ones(3, length, dtype=torch.bool)
        counted[0, -4:] = False
        v = torch.randn(3, heads, length, dim + 1, generator=generator)
        exact = (q @ k.mT.unsqueeze(2)).masked_fill(~pairs, float("-inf")).softmax(-1)
        found.append(Scores(q, k, v, exact @ v.unsqueeze(2), pairs, counted))
    return found


# --- the closed form ------------------------------------------------------------------------------------------------


def test_moments_are_those_of_the_keys_that_count():
    given = scores()
    mean, covariance = key_moments(given)
    rows, centred = [], []
    for batch in given:
        for i in range(3):
            kept = batch.k[i, :, : 8 if i == 0 else 12].double()
            rows.append(kept.mean(1))
            centred.append(kept - kept.mean(1, keepdim=True))
    torch.testing.assert_close(mean, torch.stack(rows).mean(0))
    both = torch.cat(centred, 1)
    torch.testing.assert_close(covariance, both.mT @ both / both.shape[1])


@pytest.mark.parametrize("causal", [False, True])
def test_as_many_centres_as_queries_give_softmax(causal):
    """Each query is a centre of its own; sharpened enough, its weights are its own: e^{c·k} / Σ e^{c·k}."""
    batch = scores(length=6, batches=1, causal=causal)[0]
    queries = batch.q.permute(1, 0, 2, 3, 4).flatten(1, 3)
    maps = centroids(queries, *key_moments([batch]), queries.shape[1], torch.Generator().manual_seed(0))
    exact = maps.sharpened(torch.full((2,), 1e-4))
    assert divergence(exact, batch).max() < 1e-5
    assert divergence(maps, batch).min() > 1e-2  # τ = 1 mixes the centres


def test_the_divergence_is_that_of_the_weights():
    """Against the weights written out."""
    batch = scores(batches=1)[0]
    queries = batch.q.permute(1, 0, 2, 3, 4).flatten(1, 3)
    maps = centroids(queries, *key_moments([batch]), 3, torch.Generator().manual_seed(0))
    total, count = torch.zeros(2), 0
    for b in range(3):
        keys = 8 if b == 0 else 12
        for i in range(keys):
            for g in range(2):
                q, k = batch.q[b, g, 0, i], batch.k[b, g, :keys]
                phi = (maps.query_rows[g] @ q + maps.query_bias[g]).softmax(-1)
                psi = (k @ maps.key_rows[g].T + maps.key_bias[g]).exp()
                found = psi @ phi / (psi @ phi).sum()
                wanted = (k @ q).softmax(-1)
                total[g] += (wanted * (wanted / found).log()).sum()
            count += 1
    torch.testing.assert_close(divergence(maps, batch), total / count, rtol=1e-4, atol=1e-5)


def test_each_stage_lowers_the_divergence():
    given = scores(batches=12)
    queries = torch.cat([each.q.permute(1, 0, 2, 3, 4).flatten(1, 3) for each in given], 1)
    maps = centroids(queries, *key_moments(given), 16, torch.Generator().manual_seed(0))
    sharp = sharpest(maps, given)
    turns = itertools.cycle(given)
    fitted = descend(sharp, lambda tried: divergence(tried, next(turns)).sum(), 60)
    first, second, third = (
        torch.stack([divergence(each, batch) for batch in given]).mean(0) for each in (maps, sharp, fitted)
    )
    assert (second <= first).all()
    assert (third < 0.95 * second).all()


@pytest.mark.parametrize("readout", [None, torch.randn(7, 10, generator=torch.Generator().manual_seed(4))])
def test_the_error_of_the_output_is_that_of_the_heads_or_of_what_reads_them(readout):
    """Against attention written out per token; steps on it lower it."""
    given = scores(batches=6)
    queries = torch.cat([each.q.permute(1, 0, 2, 3, 4).flatten(1, 3) for each in given], 1)
    maps = sharpest(centroids(queries, *key_moments(given), 6, torch.Generator().manual_seed(0)), given)
    batch, wanted, got = given[0], [], []
    for b in range(3):
        keys = 8 if b == 0 else 12
        for i in range(keys):
            q, k, v = batch.q[b, :, 0, i, :, None], batch.k[b, :, :keys], batch.v[b, :, :keys]
            phi = (maps.query_rows @ q + maps.query_bias[..., None]).softmax(1)
            psi = (k @ maps.key_rows.mT + maps.key_bias[:, None]).exp() @ phi
            got.append((v * psi / psi.sum(1, keepdim=True)).sum(1).flatten())
            wanted.append((v * (k @ q).softmax(1)).sum(1).flatten())
    true, made = (torch.stack(each) @ (torch.eye(10) if readout is None else readout.T) for each in (wanted, got))
    expected = (true - made).square().sum() / (true - true.mean(0)).square().sum()
    torch.testing.assert_close(output_error(maps, batch, readout), expected, rtol=1e-4, atol=1e-6)
    turns = itertools.cycle(given)
    fitted = descend(maps, lambda tried: output_error(tried, next(turns), readout), 60)
    after = torch.stack([output_error(fitted, each, readout) for each in given]).mean()
    assert after < 0.9 * torch.stack([output_error(maps, each, readout) for each in given]).mean()


def test_a_sample_is_bounded_and_random():
    def heard(number: int) -> Recorded:
        q = torch.full((2, 1, 5, 1), float(number))
        return Recorded(q, q, q, q, None, False, 1.0)

    sample = Sample(30, torch.Generator().manual_seed(0))
    for number in range(200):
        sample.add(heard(number))
    assert sample.count == sample.tokens == 30
    kept = sorted(int(each.q[0, 0, 0, 0]) for each in sample)
    assert kept[-1] > 60, "the first ones alone"
    one = Sample(3, torch.Generator().manual_seed(0))
    one.add(heard(0))
    assert one.tokens == 10  # a call is not split


# --- the feature map ------------------------------------------------------------------------------------------------


def test_features():
    feature_map = build_feature_map("mixture", "centroids", dim=3, num_features=5)
    projection = feature_map.projection
    with torch.no_grad():
        projection.bias.normal_()
    x = torch.randn(4, 3)
    z = x @ projection.weight.T + projection.bias
    torch.testing.assert_close(feature_map.phi(x).dense(), z.softmax(-1))
    torch.testing.assert_close(feature_map.psi(x).dense(), z.exp())
    huge = feature_map.psi(100 * x)
    assert torch.isfinite(huge.values).all()
    assert torch.isfinite(huge.log_scale).all()


@pytest.mark.parametrize("given", [{"adapter": AdapterPart(**PART)}, {"ffn": FFNPart(**PART, init="random")}])
def test_centroids_are_for_attention(given):
    with pytest.raises(ConfigError, match="in an attention part only"):
        SNNKConfig(**given)


@pytest.mark.parametrize("beside", [{"near_field": 4}, {"sum_of": [{"num_features": 4}]}])
def test_nothing_stands_beside_what_is_fitted_to_all_of_softmax(beside):
    with pytest.raises(ConfigError, match="fits to all of softmax"):
        SNNKConfig(attention=AttentionPart(**PART, **beside))


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("name", ["bert", "distilbert", "opt"])
def test_calibrated_attention_is_nearer_to_softmax(name, refit, tmp_path: Path):
    original = vivid(name)
    batches = sentences(original)
    wanted = logits(original, batches[0])
    model = get_snnk_model(original, SNNKConfig(attention=AttentionPart(**PART, num_features=12, refit_output=refit)))
    before = logits(model, batches[0])
    report = calibrate(model, batches[2:], progress=False)
    after = logits(model, batches[0])
    errors = [float((each - wanted).square().mean()) for each in (before, after)]
    assert errors[1] < 0.7 * errors[0]
    assert all(slot.error_after < slot.error_before for slot in report.slots)
    assert [slot.num_features for slot in report.slots] == [12] * len(report.slots)
    assert all((slot.ridge is not None) == refit for slot in report.slots)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model, batches[0]), wanted)
    small = bundle(model)
    torch.testing.assert_close(logits(small, batches[0]), after, rtol=1e-4, atol=1e-5)
    check_elsewhere(save_known(small, batches[0], tmp_path, after), package=True)


def test_the_same_every_time_and_steps_help():
    reports = []
    for steps in (0, 0, 40):
        original = vivid()
        model = get_snnk_model(original, SNNKConfig(attention=AttentionPart(**PART, num_features=8)))
        reports.append(calibrate(model, sentences(original), steps=steps, progress=False))
    errors = [[slot.error_after for slot in report.slots] for report in reports]
    assert errors[0] == errors[1]
    assert sum(errors[2]) < sum(errors[0])


def test_the_whole_of_a_model_with_its_ffn_blocks(tmp_path: Path):
    original = vivid()
    batches = sentences(original)
    config = SNNKConfig(attention=AttentionPart(**PART, num_features=12), ffn=FFNPart(num_features=16))
    model = get_snnk_model(original, config)
    report = calibrate(model, batches[2:], progress=False)
    assert len(report.slots) == 2 * original.config.num_hidden_layers
    after = logits(model, batches[0])
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(vivid(), tmp_path)
    torch.testing.assert_close(logits(again, batches[0]), after)


def test_padding_and_batching_do_not_change_what_is_fitted():
    """The same sentences, padded more: the same moments, hence the same rows."""
    original = vivid()
    batches = sentences(original)
    rows = []
    for more in (0, 5):
        model = get_snnk_model(vivid(), SNNKConfig(attention=AttentionPart(**PART, num_features=6, layers="bottom-1")))
        padded = [{key: nn.functional.pad(value, (0, more)) for key, value in batch.items()} for batch in batches]
        calibrate(model, padded, progress=False)
        rows.append({name: p for name, p in model.named_parameters() if "term" in name and "bottom" not in name})
    for name, row in rows[0].items():
        torch.testing.assert_close(row, rows[1][name], rtol=1e-3, atol=1e-4)


def test_faults():
    model = get_snnk_model(vivid(), SNNKConfig(attention=AttentionPart(**PART, num_features=6)))
    with pytest.raises(ConfigError, match="steps is -1; expected an integer >= 0"):
        calibrate(model, sentences(vivid()), steps=-1, progress=False)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "query.weight" in n).fill_(torch.nan)
    with pytest.raises(ValueError, match=r"query\.weight holds NaN in 256 of 256"):
        calibrate(model, sentences(vivid()), progress=False)
    with pytest.raises(UnsupportedError, match="does not say which Linear reads the heads"):
        get_snnk_model(vivid("gpt_neox"), SNNKConfig(attention=AttentionPart(**PART)))


@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (4, 2)])
def test_grouped_heads_and_rotary_positions(heads, groups):
    original = vivid("llama", num_attention_heads=heads, num_key_value_heads=groups)
    batches = sentences(original)
    wanted = logits(original, batches[0])
    model = get_snnk_model(original, SNNKConfig(attention=AttentionPart(**PART, num_features=12, refit_output=False)))
    before = logits(model, batches[0])
    calibrate(model, batches[2:], progress=False)
    errors = [float((each - wanted).square().mean()) for each in (before, logits(model, batches[0]))]
    assert errors[1] < 0.7 * errors[0]


def test_attention_that_is_lost_is_told_of():
    """Sharp random heads look for single words; the more features there are, the more of them are found."""
    found = {}
    for features in (4, 64):
        model = vivid(factor=20.0)
        patched = get_snnk_model(model, SNNKConfig(attention=AttentionPart(**PART, num_features=features)))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            report = calibrate(patched, sentences(model), progress=False)
        errors = {slot.path: slot.error_after for slot in report.slots}
        poor = {path: error for path, error in errors.items() if error > 0.25}
        texts = [str(each.message) for each in said if "attention is lost" in str(each.message)]
        assert len(texts) == bool(poor)
        for path, error in poor.items():
            assert f"{path} ({error:.2f})" in texts[0]
        found[features] = len(poor)
    assert found == {4: 2, 64: 0}


def test_key_features_have_the_mean_one_over_gaussian_keys() -> None:
    """exp(row·k + bias) is e^{c·z − ‖c‖²/2} of whitened keys z: a change of density, whatever the centre."""
    generator = torch.Generator().manual_seed(0)
    mean, root = torch.tensor([0.3, -0.2, 0.5]).double(), 0.6 * torch.randn(3, 3, generator=generator).double()
    covariance = root @ root.T
    maps = centroids(torch.randn(1, 60, 3, generator=generator), mean[None], covariance[None], 5, generator)
    keys = mean + torch.randn(400_000, 3, generator=generator, dtype=torch.float64) @ root.T
    features = (keys @ maps.key_rows[0].double().T + maps.key_bias[0].double()).exp()
    error = features.std(0) / len(keys) ** 0.5
    assert bool((maps.query_bias[0] < -0.05).any())  # centres far enough from 0 that half of ‖c‖² shows
    assert bool(((features.mean(0) - 1).abs() < 5 * error).all())


# === beside an exact near field =======================================================================================


JOINT = {"component": "mixture", "projection": "centroids", "near_field_normalisation": "joint"}
WIDTH, SINKS = 3, 1


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def near_scores(
    batches: int = 6, length: int = 24, causal: bool = True, groups: int = 2, dim: int = 4
) -> list[NearScores]:
    """Queries and keys with a mean, two query heads to a key head; the last tokens of the first row are padding."""
    found, drawn = [], generator()
    for _ in range(batches):
        q = torch.randn(2, groups, 2, length, dim, generator=drawn) + 1.0
        k, v = (torch.randn(2, groups, length, dim, generator=drawn) + 1.0 for _ in range(2))
        counted = torch.ones(2, length, dtype=torch.bool)
        counted[0, -4:] = False
        pairs = counted[:, None, None, None].expand(-1, 1, 1, length, -1)
        if causal:
            pairs = pairs & torch.ones(length, length, dtype=torch.bool).tril()
        exact = (q @ k.mT.unsqueeze(2)).masked_fill(~pairs, -1e9).softmax(-1)
        found.append(NearScores.of(Scores(q, k, v, exact @ v.unsqueeze(2), pairs, counted), WIDTH, SINKS))
    return found


# --- the closed form ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_as_many_joint_centres_as_queries_give_softmax(causal):
    """Each query is a centre of its own, whose weights are e^{c·k} on the scale of the near field."""
    given = near_scores(1, 12, causal)
    count = int(given[0].affected.sum())
    maps = joint_centroids(given, count, 10_000, generator())
    assert joint_divergence(maps.sharpened(1e-4), given[0]).max() < 1e-4
    assert joint_divergence(maps, given[0]).min() > 1e-2  # τ = 1 mixes the centres


def test_near_and_far_are_all_that_is_seen():
    """Against a loop over pairs."""
    for causal in (True, False):
        each = near_scores(1, 12, causal)[0]
        for b in range(2):
            for i in range(8):
                for j in range(12):
                    seen = (j < 8 or b == 1) and (not causal or j <= i)
                    near = seen and (abs(i - j) < WIDTH or j < SINKS)
                    assert bool(each.near[b, 0, i, j]) == near
                    assert bool(each.far[b, 0, i, j]) == (seen and not near)


def test_sinks_are_the_first_tokens_that_count():
    counted = torch.ones(1, 12, dtype=torch.bool)
    counted[0, :5] = False
    pairs = counted[:, None, None, None].expand(-1, 1, 1, 12, -1)
    q = k = torch.zeros(1, 1, 12, 2)
    each = NearScores.of(Scores(q.unsqueeze(2), k, k, q.unsqueeze(2), pairs, counted), 1, 2)
    assert each.near[0, 0, 11].nonzero().flatten().tolist() == [5, 6, 11]


def test_divergence_and_error_written_out():
    given = near_scores(2)
    maps = best_joint(joint_centroids(given, 5, 100, generator()), given)
    each = given[1]
    total, wrong, outputs, queries = torch.zeros(4), [], [], 0
    for b in range(2):
        for i in range(20 if b == 0 else 24):
            affected = bool(each.far[b, 0, i].any())
            queries += affected
            for h in range(4):
                q, near, far = each.q[b, h, i], each.near[b, 0, i], each.far[b, 0, i]
                phi = (maps.query_rows[h] @ q + maps.query_bias[h]).softmax(-1)
                g = (maps.factor[h, :-1] @ q + maps.factor[h, -1]).exp()
                found = torch.where(far, g * (each.k[b, h] @ maps.key_rows[h].T).exp() @ phi, (each.k[b, h] @ q).exp())
                found = found * (near | far)
                exact = (each.k[b, h] @ q).masked_fill(~(near | far), -1e9).softmax(-1)
                found = found / found.sum()
                wrong.append((found - exact) @ each.v[b, h])
                outputs.append(exact @ each.v[b, h])
                if affected:
                    kept = near | far
                    total[h] += (exact[kept] * (exact[kept] / found[kept]).log()).sum()
    torch.testing.assert_close(joint_divergence(maps, each), total / queries, rtol=1e-3, atol=1e-5)
    wanted = torch.stack(outputs).unflatten(0, (-1, 4)).flatten(1)
    expected = torch.stack(wrong).square().sum() / (wanted - wanted.mean(0)).square().sum()
    torch.testing.assert_close(joint_output_error(maps, each, None), expected, rtol=1e-3, atol=1e-5)
    readout = torch.randn(3, 16, generator=generator())
    missing = torch.stack(wrong).unflatten(0, (-1, 4)).flatten(1) @ readout.T
    expected = missing.square().sum() / ((wanted - wanted.mean(0)) @ readout.T).square().sum()
    torch.testing.assert_close(joint_output_error(maps, each, readout), expected, rtol=1e-3, atol=1e-5)


def test_the_factor_is_that_of_scikit_learn():
    drawn = generator()
    q, missing = torch.randn(2, 50, 3, generator=drawn), torch.randn(2, 50, generator=drawn)
    share = torch.rand(2, 50, generator=drawn)
    found = fitted_factor(q, missing, share)
    for head in range(2):
        weights = (share[head] * (1 - share[head]) + 1e-4).double()
        penalty = RIDGE * float((weights[:, None] * q[head].double() ** 2).sum(0).mean())
        model = Ridge(alpha=penalty).fit(q[head], missing[head], sample_weight=weights)
        wanted = torch.tensor([*model.coef_, model.intercept_], dtype=torch.float32)
        torch.testing.assert_close(found[head], wanted, rtol=1e-4, atol=1e-5)


def test_each_stage_lowers_the_joint_divergence():
    given, drawn = near_scores(8), generator()
    start = joint_centroids(given, 8, 1000, drawn)
    fitted = best_joint(start, given)
    without = fitted._replace(factor=torch.zeros_like(fitted.factor))
    moved = descend(fitted, lambda maps: joint_divergence(maps, given[0]).sum(), 40)
    stages = [
        torch.stack([joint_divergence(each, batch) for batch in given[:1]]).mean()
        for each in (start, without, fitted, moved)
    ]
    assert stages[2] < 0.9 * min(stages[:2])
    assert stages[3] < 0.9 * stages[2]


# --- models ---------------------------------------------------------------------------------------------------------


def vivid_with_groups(name: str) -> Any:
    """A small random model whose attention is far from uniform."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"vocab_size": 300, "initializer_range": 0.2}
    if name == "llama":
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes, **tokens)).eval()
    return BertForSequenceClassification(BertConfig(max_position_embeddings=64, **sizes)).eval()


def long_sentences(count: int = 10, length: int = 40) -> list[dict[str, torch.Tensor]]:
    found, drawn = [], generator(1)
    for number in range(count):
        ids = torch.randint(5, 100, (3, length + number % 3), generator=drawn)
        mask = torch.ones_like(ids)
        mask[0, -6:] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def converted(name: str, steps: int = 0, **fields: Any) -> tuple[Any, Any]:
    part = AttentionPart(**{**JOINT, "num_features": 12, "near_field": 4, "sinks": 2, **fields})
    model = get_snnk_model(vivid_with_groups(name), SNNKConfig(attention=part, modules_to_save=[])).eval()
    return model, calibrate(model, long_sentences(), steps=steps, progress=False)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_model_comes_closer_to_what_it_was(name):
    """Than without a far field, and before the fit; twice the same; better with steps."""
    plain, given = vivid_with_groups(name), long_sentences()[0]

    def apart(model: Any) -> float:
        with torch.no_grad():
            missing = model(**given).logits - plain(**given).logits
        kept = given["attention_mask"].bool() if name == "llama" else slice(None)
        return float(missing[kept].square().mean())

    part = AttentionPart(**JOINT, num_features=12, near_field=4, sinks=2)
    untrained = get_snnk_model(vivid_with_groups(name), SNNKConfig(attention=part, modules_to_save=[])).eval()
    before = apart(untrained)
    for module in untrained.modules():
        if isinstance(module, KernelAttention):
            module.joint.factor.data[..., -1] = -1e4
    near_alone = apart(untrained)
    model, report = converted(name)
    assert apart(model) < 0.7 * min(near_alone, before)
    assert all(slot.error_after < slot.error_before for slot in report.slots)
    assert all(slot.divergence_after < slot.divergence_before for slot in report.slots)
    again, _ = converted(name)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    _, stepped = converted(name, steps=30)
    assert sum(s.divergence_after for s in stepped.slots) < sum(s.divergence_after for s in report.slots)


def test_what_is_fitted_is_saved(tmp_path: Path):
    model, _ = converted("llama")
    given = long_sentences()[0]
    before = logits(model, given)
    model.save_pretrained(tmp_path / "adapter")
    found = PeftModel.from_pretrained(vivid_with_groups("llama"), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(found, given), before)
    small = bundle(model).eval()
    small.save_pretrained(tmp_path / "bundle")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "bundle").eval()
    assert torch.equal(found(**given).logits, small(**given).logits)


def test_sequences_that_are_all_near_are_refused():
    model = get_snnk_model(
        vivid_with_groups("llama"),
        SNNKConfig(attention=AttentionPart(**JOINT, num_features=8, near_field=64, sinks=4), modules_to_save=[]),
    ).eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"has 42 tokens, all within near_field=64 and\s+sinks=4"):
        calibrate(model, long_sentences(), progress=False)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


@pytest.mark.parametrize("room", [42, 43])
def test_positions_that_were_never_seen_are_told(room):
    """A warning, once for all layers; the longest sequence here has 42 tokens."""
    model = vivid_with_groups("llama")
    model.config.max_position_embeddings = room
    patched = get_snnk_model(
        model, SNNKConfig(attention=AttentionPart(**JOINT, num_features=8, near_field=4), modules_to_save=[])
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        calibrate(patched.eval(), long_sentences(), progress=False)
    told = [each for each in found if "has 42 tokens, and the model takes 43" in str(each.message)]
    assert len(told) == (room == 43)
    assert all(each.category is UserWarning and each.filename == __file__ for each in told)
