"""calibrate: closed-form fits and steps against brute force and scikit-learn; one pass, however many tokens."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from sklearn.linear_model import Ridge
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from snnk_peft import (
    AdapterPart,
    AttentionPart,
    FFNPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    calibrate,
    calibrate_adapters,
    fit_attention,
    get_snnk_model,
)
from snnk_peft.calibrating.batches import is_held_out
from snnk_peft.errors import ConfigError
from snnk_peft.parts.replaced import fit
from snnk_peft.solvers.corrected import CorrectedFit, Target, fit_corrected
from snnk_peft.solvers.landmarks import SecondMoments, choose_landmarks
from snnk_peft.solvers.reduce import ErrorMeter, TokenSample
from snnk_peft.solvers.ridge import DEFAULT_RIDGES, GramAccumulator, fit_ridge
from tests.elsewhere import check_elsewhere, save_known
from tests.fresh_process import ROOT, run_python
from tests.tiny_models import half_padded, tiny


def hidden_units(count: int, units: int, seed: int = 0, rank: int = 5) -> torch.Tensor:
    """Correlated non-negative vectors, as hidden activations are."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(rank, units, generator=torch.Generator().manual_seed(99))
    latent = torch.randn(count, rank, generator=generator)
    return torch.relu(latent @ mixing + 0.3 * torch.randn(count, units, generator=generator)).double()


def moments(*parts: torch.Tensor) -> SecondMoments:
    made = SecondMoments(parts[0].shape[1])
    for part in parts:
        made.update(part)
    return made


def tiny_bert(**options: object) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=48,
        vocab_size=200,
        initializer_range=0.2,
        **options,
    )
    return BertForSequenceClassification(config).eval()


def measured(model: Any, path: str, data: list[dict[str, torch.Tensor]]) -> ErrorMeter:
    """The error of the FFN or pooler at this path behind what reads it, from the modules and the held-out batches."""
    bert, pooler = model.get_base_model(), "pooler" in path
    layer = bert.get_submodule(path)
    reader = bert.classifier.original_module if pooler else bert.get_submodule(path.replace("intermediate", "output"))
    meter, activation = ErrorMeter(reader.weight.detach()), torch.tanh if pooler else torch.nn.functional.gelu
    for batch in (batch for index, batch in enumerate(data) if is_held_out(index, 0.2)):
        seen: list[torch.Tensor] = []
        hook = layer.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            bert(**batch)
            hook.remove()
            x = seen[0] if pooler else seen[0][batch["attention_mask"].bool()]
            meter.update(activation(layer.base_layer(x)), layer.snnk_slots["default"][0].layer(x))
    return meter


def test_moments_refuse_nan_and_keep_what_they_had():
    made = moments(hidden_units(50, 4))
    before = made.scatter.clone()
    with pytest.raises(ValueError, match="NaN or infinity"):
        made.update(torch.full((3, 4), float("nan")))
    assert torch.equal(made.scatter, before)


def all_units(
    train: SecondMoments, test: SecondMoments, features: torch.Tensor, output: torch.Tensor, ridges: list[float]
) -> CorrectedFit:
    """The readout of all hidden units, the first coordinates, judged behind `output`."""
    goal = torch.eye(output.shape[1], len(train.mean), dtype=torch.float64)
    return fit_corrected(train, test, features, Target(goal), output, ridges)


@pytest.mark.parametrize("given", [0, 2])
def test_fit_equals_ridge_on_the_same_tokens(given):
    data, other = hidden_units(400, 9 + given), hidden_units(300, 9 + given, seed=1)
    output = torch.randn(3, 9, dtype=torch.float64)
    ridge = 1e-3
    columns = [1, 4, 6, *range(9, 9 + given)]
    fit = all_units(moments(data), moments(other), torch.tensor(columns), output, [ridge])
    features = data[:, columns]
    scale = features.var(0, correction=0).mean() * len(data)
    peer = Ridge(alpha=float(ridge * scale)).fit(features.numpy(), data[:, :9].numpy())
    torch.testing.assert_close(fit.weight, torch.from_numpy(peer.coef_), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(fit.bias, torch.from_numpy(peer.intercept_), rtol=1e-8, atol=1e-8)
    meter = ErrorMeter(output)
    meter.update(other[:, :9], other[:, columns] @ fit.weight.T + fit.bias)
    assert fit.error == pytest.approx(meter.value(), rel=1e-8)


def test_greedy_survives_dead_and_duplicate_units():
    data = hidden_units(200, 4)
    data = torch.cat((data, data[:, :2], torch.zeros(200, 2, dtype=torch.float64)), 1)
    chosen = choose_landmarks(moments(data), torch.eye(8, dtype=torch.float64), 8)
    assert sorted(chosen.tolist()) == list(range(8))


@pytest.mark.parametrize(("rule", "count", "message"), [("gready", 2, "expected one of"), ("greedy", 9, "8 hidden")])
def test_landmark_choice_refuses(rule, count, message):
    with pytest.raises(ConfigError, match=message):
        choose_landmarks(moments(hidden_units(20, 8)), torch.eye(8), count, rule=rule)


PARTS = {
    "landmark gelu (hidden units)": {"ffn": FFNPart(num_features=12)},
    "landmark with linear path": {"ffn": FFNPart(num_features=12, linear_path=True)},
    "landmark relu": {"ffn": FFNPart(num_features=12, component="relu")},
    "orf relu": {"ffn": FFNPart(num_features=24, component="relu", projection="orf")},
    "pooler": {"pooler": PoolerPart(num_features=24)},
    "both": {"ffn": FFNPart(num_features=12, layers="top-2"), "pooler": PoolerPart(num_features=24, component="sin")},
}


@pytest.mark.parametrize("name", PARTS)
def test_reported_errors_are_those_of_the_model(name):
    """The error after, recomputed from the calibrated modules themselves on the held-out batches."""
    model = get_snnk_model(tiny_bert(), SNNKConfig(**PARTS[name]))
    data = half_padded()
    report = calibrate(model, data, refit=False, metric="local", progress=False)
    assert len(report.slots) == (1 if name == "pooler" else 3)
    for slot in report.slots:
        assert slot.error_after < 1.0
        if "pooler" not in slot.path:
            assert slot.error_after < slot.error_before
        meter = measured(model, slot.path, data)
        assert slot.held_out_tokens == meter.count
        assert slot.error_after == pytest.approx(meter.value(), rel=1e-3, abs=1e-6)


def test_later_slots_are_fitted_on_the_converted_stack():
    """Targets come from the original module on the converted inputs: refitting the last slot changes nothing."""
    model = get_snnk_model(tiny_bert(), SNNKConfig(ffn=FFNPart(num_features=8)))
    data = half_padded()
    report = calibrate(model, data, refit=False, progress=False)
    again = calibrate(model, data, refit=False, progress=False)
    for first, second in zip(report.slots, again.slots, strict=True):
        assert second.error_before == pytest.approx(first.error_after, rel=1e-3)


@pytest.mark.parametrize("part", [FFNPart(num_features=8), FFNPart(num_features=8, component="relu", projection="orf")])
def test_refit_uses_the_held_out_tokens_too(part):
    """With the ridge given, refitting equals fitting to all batches; the report keeps the held-out error."""
    data = half_padded()
    weights, errors = [], []
    for refit in (True, False):
        model = get_snnk_model(tiny_bert(), SNNKConfig(ffn=part))
        report = calibrate(model, data, ridges=[1e-3], refit=refit, progress=False)
        errors.append(report.slots[0].error_after)
        slot = model.get_submodule(f"base_model.model.{report.slots[0].path}").snnk_slots["default"][0]
        weights.append((slot.layer.A.clone(), slot.layer.bias.clone()))
    assert errors[0] == pytest.approx(errors[1], rel=1e-9)
    assert not torch.allclose(weights[0][0], weights[1][0], rtol=1e-3)


def test_model_state_and_global_randomness_are_left_alone():
    model = get_snnk_model(tiny_bert(), SNNKConfig(ffn=FFNPart(num_features=8, layers=[0])))
    model.train()
    base = {name: value.clone() for name, value in model.state_dict().items() if ".snnk_slots." not in name}
    state = torch.get_rng_state()
    calibrate(model, half_padded(), progress=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in base.items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_labels_are_ignored():
    data = half_padded()
    reports = []
    for extra in ({}, {"labels": torch.full((8,), 10**6)}):
        model = get_snnk_model(tiny_bert(), SNNKConfig(ffn=FFNPart(num_features=8, layers=[2])))
        reports.append(calibrate(model, [{**batch, **extra} for batch in data], progress=False).slots[0].error_after)
    assert reports[0] == reports[1]


def test_accepts_a_function_and_vision_models():
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=4
    )
    model = get_snnk_model(ViTForImageClassification(config), SNNKConfig(ffn=FFNPart(num_features=16)))
    images = [{"pixel_values": torch.randn(4, 3, 16, 16)} for _ in range(6)]
    report = calibrate(model, lambda: iter(images), progress=False)
    assert len(report.slots) == 2
    assert all(slot.error_after < slot.error_before for slot in report.slots)
    assert report.slots[0].tokens + report.slots[0].held_out_tokens == 6 * 4 * 17
    assert "error before -> after" in str(report)
    assert report.to_dict()["slots"][1]["num_features"] == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": iter([])}, "read only once"),
        ({"batches": half_padded(count=1)}, "at least one to fit"),
        ({"landmarks": "gready"}, "expected one of greedy, importance"),
        ({"held_out": 1.5}, "held_out is 1.5; expected a number > 0 and < 1"),
    ],
)
def test_bad_arguments(change, message):
    model = get_snnk_model(tiny_bert(), SNNKConfig(ffn=FFNPart(num_features=8)))
    arguments = {"batches": half_padded(), **change}
    with pytest.raises(ConfigError, match=message):
        calibrate(model, arguments.pop("batches"), progress=False, **arguments)


@pytest.mark.parametrize("count", [3, 4, 7])
def test_a_few_batches_suffice(count):
    model = get_snnk_model(tiny_bert(), SNNKConfig(ffn=FFNPart(num_features=8, layers=[0])))
    slot = calibrate(model, half_padded(count=count), progress=False).slots[0]
    assert slot.held_out_tokens > 0
    assert slot.tokens > slot.held_out_tokens


def test_nothing_to_calibrate():
    with pytest.raises(ConfigError, match="no active part that can be calibrated"):
        calibrate(tiny_bert(), half_padded(), progress=False)


# === one pass, memory, steps ==========================================================================================


bert = partial(tiny, "bert", initializer_range=0.2)  # weights so large that its FFN blocks are far from linear
long_batches = partial(half_padded, 30, words=(3, 100))


def converted(part: FFNPart | PoolerPart, steps: int = 0, seed: int = 0, data: list | None = None, **changes: object):
    model = get_snnk_model(bert(**changes), SNNKConfig(parts=[part], seed=seed))
    return model, calibrate(model, long_batches() if data is None else data, steps=steps, progress=False)


# ---------------------------------------------------------------- one pass, however the tokens come


@pytest.mark.parametrize("sizes", [(1,), (37,), (1500,), (64, 1, 900)])
def test_streaming_is_one_shot(sizes):
    """Choice, readout and error from tokens in parts are those from all at once, which numpy's formulas give."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(6, 23, generator=generator, dtype=torch.float64)
    hidden = torch.relu(torch.randn(1500, 6, generator=generator, dtype=torch.float64) @ mixing + 1) + 3
    output = torch.randn(4, 23, generator=generator, dtype=torch.float64)
    streamed, start = SecondMoments(23), 0
    gram = GramAccumulator(5, 23, output_weight=output)
    features = torch.tanh(hidden[:, :5])
    while start < len(hidden):
        for size in sizes:
            streamed.update(hidden[start : start + size])
            gram.update(features[start : start + size], hidden[start : start + size])
            start += size
    torch.testing.assert_close(streamed.covariance(), torch.cov(hidden.T, correction=0), rtol=1e-10, atol=1e-10)
    at_once = SecondMoments(23)
    at_once.update(hidden)
    chosen = choose_landmarks(streamed, output, 7)
    assert torch.equal(chosen, choose_landmarks(at_once, output, 7))
    fits = [all_units(each, each, chosen, output, list(DEFAULT_RIDGES)) for each in (streamed, at_once)]
    for each, other in zip(*fits, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-10)
    whole = GramAccumulator(5, 23, output_weight=output)
    whole.update(features, hidden)
    for each, other in zip(fit_ridge(gram, gram), fit_ridge(whole, whole), strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-10)


FFN_PARTS = {
    "hidden units": FFNPart(num_features=12),
    "hidden units and the input": FFNPart(num_features=6, linear_path=True),
    "another function": FFNPart(num_features=12, component="relu"),
    "not elementwise": FFNPart(num_features=12, component="trigrf", init="random"),
    "drawn": FFNPart(num_features=12, component="relu", projection="orf"),
    "learned": FFNPart(num_features=12, component="relu", projection="free"),
}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", FFN_PARTS)
def test_one_pass_per_slot(name, steps):
    """A layer more is a pass more."""
    reads = []

    def passes(layers: list[int]) -> int:
        model = get_snnk_model(bert(), SNNKConfig(ffn=FFNPart(**{**vars(FFN_PARTS[name]), "layers": layers})))
        reads.clear()
        batches = long_batches()[:6]
        calibrate(model, lambda: reads.append(1) or iter(batches), steps=steps, progress=False)
        return len(reads)

    assert passes([0, 1]) == passes([0]) + 1


def test_a_sample_is_uniform_and_does_not_depend_on_the_batches():
    """Each of 60 tokens is among 20 with chance 1/3: over 1,000 draws all lie within five standard deviations."""
    tokens = torch.arange(60.0).unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    hits = torch.zeros(60)
    for _ in range(1000):
        sample = TokenSample(20, generator)
        for part in tokens.split(7):
            sample.update(part)
        kept = sample.reduced().squeeze(1).long()
        assert len(kept) == len(kept.unique()) == 20
        hits[kept] += 1
    assert (hits - 1000 / 3).abs().max() < 5 * (1000 * (1 / 3) * (2 / 3)) ** 0.5

    def kept_of(size: int) -> torch.Tensor:
        sample = TokenSample(20, torch.Generator().manual_seed(4))
        for part in tokens.split(size):
            sample.update(part)
        return sample.reduced()

    assert torch.equal(kept_of(1), kept_of(60))
    assert torch.equal(kept_of(13), kept_of(60))
    assert not torch.equal(kept_of(60), tokens[:20])
    with pytest.raises(ValueError, match="no vectors were given"):
        TokenSample(20, generator).reduced()


def test_more_tokens_than_a_sample_holds(monkeypatch):
    """Rows of another function are fitted to a sample: nearly as good as to all tokens."""
    part = FFNPart(num_features=12, component="relu", layers=[0])
    everything = converted(part)[1].slots[0].error_after
    monkeypatch.setattr(fit, "TOKENS", 600)
    report = converted(part)[1]
    assert report.slots[0].tokens > 1500
    assert report.slots[0].held_out_tokens == 150
    assert report.slots[0].error_after < 1.3 * everything


MEMORY = """
import sys, json, torch
sys.path.insert(0, "recipes/benchmarks")
from transformers import BertConfig, BertForSequenceClassification
from _bench import peak_bytes
from snnk_peft import FFNPart, SNNKConfig, calibrate, get_snnk_model
config = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=512, vocab_size=500)
model = BertForSequenceClassification(config).eval()
generator = torch.Generator().manual_seed(0)
data = [{"input_ids": torch.randint(3, 500, (256, 64), generator=generator)} for _ in range(7)]
def forward():
    with torch.no_grad():
        for batch in data:
            model(**batch)
forward()
forward = peak_bytes(forward)
patched = get_snnk_model(model, SNNKConfig(ffn=FFNPart(num_features=32)))
calibrating = peak_bytes(lambda: calibrate(patched, data, steps=5, progress=False))
print(json.dumps([forward, calibrating]))
"""


def test_memory_of_many_tokens():
    """114,688 tokens: at most half as much again as a forward pass, where their hidden units alone are 235 MB."""
    run = run_python(["-c", MEMORY], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    forward, calibrating = json.loads(run.stdout.splitlines()[-1])
    if forward is None:
        pytest.skip("this system does not tell how much memory a call takes")
    assert calibrating < 1.5 * forward


# ---------------------------------------------------------------- steps


def slot_layer(model: torch.nn.Module, index: int) -> torch.nn.Module:
    return model.get_base_model().bert.encoder.layer[index].intermediate.dense


@pytest.mark.parametrize("name", ["hidden units", "hidden units and the input", "another function", "learned"])
def test_steps_move_the_rows_and_lower_the_error(name):
    """The error that is reported is that of the model, recomputed from its modules on the held-out batches."""
    part = FFNPart(**{**vars(FFN_PARTS[name]), "layers": [1]})
    data = long_batches()
    model = get_snnk_model(bert(), SNNKConfig(ffn=part))
    plain = calibrate(model, data, refit=False, metric="local", progress=False).slots[0]
    again = get_snnk_model(bert(), SNNKConfig(ffn=part))
    moved = calibrate(again, data, refit=False, steps=200, metric="local", progress=False).slots[0]
    assert moved.error_before == pytest.approx(plain.error_before, rel=1e-5)
    assert moved.tokens == plain.tokens
    most = 0.98 if part.linear_path else 0.9  # the linear path leaves little to gain here
    assert moved.error_after < most * plain.error_after
    meter = measured(again, moved.path, data)
    assert moved.held_out_tokens == meter.count
    assert moved.error_after == pytest.approx(meter.value(), rel=1e-3)


def test_drawn_rows_stay_as_drawn():
    """They are the draw of a seed, which a reader of the file expects; steps then change nothing at all."""
    models = [converted(FFN_PARTS["drawn"], steps=steps)[0] for steps in (0, 20)]
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name]), name


def test_what_steps_spoil_is_not_taken(monkeypatch):
    """A step that is far too long raises the error on held-out tokens: the closed form stays, bit for bit."""
    part = FFNPart(num_features=12, layers=[0])
    plain, report = converted(part)
    monkeypatch.setattr("snnk_peft.solvers.descent.LEARNING_RATE", 30.0)
    spoiled, other = converted(part, steps=5)
    assert other.slots[0].error_after == report.slots[0].error_after
    for name, value in plain.state_dict().items():
        assert torch.equal(value, spoiled.state_dict()[name]), name


def test_the_same_every_time():
    def weights(seed: int) -> torch.Tensor:
        model = get_snnk_model(bert(), SNNKConfig(ffn=FFNPart(num_features=12, layers=[0]), seed=seed))
        state = torch.get_rng_state()
        calibrate(model, long_batches(), steps=20, progress=False)
        assert torch.equal(state, torch.get_rng_state())
        stage = slot_layer(model, 0).snnk_slots["default"][0].layer.stage
        return stage.feature_map.projection.weight.clone()

    first, again, other = weights(0), weights(0), weights(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_moved_rows_are_saved_bundled_and_loaded_in_a_fresh_process(tmp_path, padding):
    data = long_batches()[:12]
    if padding == "left":
        data = [{name: value.flip(1) for name, value in batch.items()} for batch in data]
    original = bert()
    model = get_snnk_model(copy.deepcopy(original), SNNKConfig(ffn=FFNPart(num_features=12)))
    calibrate(model, data, steps=30, progress=False)
    with torch.no_grad():
        logits = model.eval()(**data[0]).logits
        with model.disable_adapter():
            torch.testing.assert_close(model(**data[0]).logits, original(**data[0]).logits)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(bert(), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**data[0]).logits, logits, rtol=1e-5, atol=1e-5)
    check_elsewhere(save_known(bundle(model), data[0], tmp_path / "bundle", logits))


def test_half_precision_and_the_pooler():
    model = get_snnk_model(bert().to(torch.bfloat16), SNNKConfig(ffn=FFNPart(num_features=12, layers=[1])))
    plain = calibrate(model, long_batches(), progress=False).slots[0]
    moved = calibrate(model, long_batches(), steps=100, progress=False).slots[0]
    assert moved.error_after < 0.9 * plain.error_after
    with torch.no_grad():
        assert model(**long_batches()[:1][0]).logits.dtype == torch.bfloat16
    pooler = PoolerPart(num_features=12, component="relu", projection="free")
    errors = [converted(pooler, steps=steps)[1].slots[0].error_after for steps in (0, 60)]
    assert errors[1] < errors[0]


# === the verb for all parts ===========================================================================================


LEARNED = AttentionPart(component="softmax_pm", projection="free", num_features=8)
ROWS = AdapterPart("gelu", "free", num_features=4, placement="query_value")


def labelled_batches(labels: bool = True) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 100, (6, 8, 12), generator=generator)
    return [{"input_ids": each, **({"labels": (each[:, 0] > 50).long()} if labels else {})} for each in ids]


def patched(**parts):
    torch.manual_seed(0)
    return get_snnk_model(tiny("bert", "BertForSequenceClassification"), SNNKConfig(**parts, task_type="SEQ_CLS"))


def numbers(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("parts", "door", "options"),
    [
        ({"attention": LEARNED}, fit_attention, {"steps": 3}),
        ({"adapter": ROWS}, calibrate_adapters, {}),
        ({"adapter": ROWS}, calibrate_adapters, {"held_out": 0.3, "ridges": [0.1], "refit": False}),
    ],
    ids=["attention", "adapters", "adapters-with-options"],
)
def test_it_does_what_the_older_names_do(parts, door, options):
    one, other, untouched = (patched(**parts) for _ in range(3))
    report, expected = (
        calibrate(one, labelled_batches(), progress=False, **options),
        door(other, labelled_batches(), **options),
    )
    found, wanted = numbers(one), numbers(other)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(not torch.equal(found[name], value) for name, value in numbers(untouched).items())
    assert type(report) is type(expected)
    assert report.settings == expected.settings


def test_the_loss_of_attention_follows_the_features():
    assert (
        calibrate(patched(attention=LEARNED), labelled_batches(), steps=1, progress=False).settings["loss"]
        == "cross_entropy"
    )
    signed = AttentionPart(component="trigrf", projection="free", num_features=8)
    assert (
        calibrate(patched(attention=signed), labelled_batches(), steps=1, progress=False).settings["loss"] == "output"
    )


@pytest.mark.parametrize(
    ("parts", "given", "options", "words"),
    [
        ({"adapter": ROWS}, labelled_batches(labels=False), {}, "expected labels"),
        ({"attention": LEARNED}, labelled_batches(), {}, "learned projection with steps=200"),
        ({"attention": LEARNED}, labelled_batches(), {"steps": -1}, "steps is -1"),
    ],
    ids=["no-labels", "no-steps", "negative"],
)
def test_what_is_missing_is_named_and_nothing_changes(parts, given, options, words):
    model = patched(**parts)
    before = numbers(model)
    with pytest.raises(ConfigError, match=words):
        calibrate(model, given, progress=False, **options)
    after = numbers(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_beside_a_stand_in_the_others_stay_as_they_are():
    model = patched(ffn=FFNPart(num_features=8, layers="top-1"), adapter=ROWS)
    before = numbers(model)
    calibrate(model, labelled_batches(), progress=False)
    changed = {name for name, value in numbers(model).items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".layer.1.intermediate.dense" in name for name in changed), sorted(changed)
