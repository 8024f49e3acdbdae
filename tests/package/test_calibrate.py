"""calibrate: the closed-form fit of replaced layers, against brute force and scikit-learn."""

from __future__ import annotations

import itertools

import pytest
import torch
from sklearn.linear_model import Ridge
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from snnk_peft import FFNPart, PoolerPart, SNNKConfig, calibrate, get_snnk_model
from snnk_peft.calibrating.batches import is_held_out
from snnk_peft.errors import ConfigError
from snnk_peft.solvers.error_meter import ErrorMeter
from snnk_peft.solvers.landmarks import SecondMoments, choose_landmarks, fit_landmarks


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


def batches(count: int = 10, size: int = 8, length: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        mask = torch.ones(size, length, dtype=torch.long)
        mask[::2, length // 2 :] = 0
        ids = torch.randint(1, 200, (size, length), generator=generator)
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


def test_moments_refuse_nan_and_keep_what_they_had():
    made = moments(hidden_units(50, 4))
    before = made.scatter.clone()
    with pytest.raises(ValueError, match="NaN or infinity"):
        made.update(torch.full((3, 4), float("nan")))
    assert torch.equal(made.scatter, before)


@pytest.mark.parametrize("given", [0, 2])
def test_fit_equals_ridge_on_the_same_tokens(given):
    data, other = hidden_units(400, 9 + given), hidden_units(300, 9 + given, seed=1)
    output = torch.randn(3, 9, dtype=torch.float64)
    chosen = torch.tensor([1, 4, 6])
    ridge = 1e-3
    fit = fit_landmarks(moments(data), moments(other), chosen, output, given=given, ridges=[ridge])
    columns = [1, 4, 6, *range(9, 9 + given)]
    features = data[:, columns]
    scale = features.var(0, correction=0).mean() * len(data)
    peer = Ridge(alpha=float(ridge * scale)).fit(features.numpy(), data[:, :9].numpy())
    torch.testing.assert_close(fit.weight, torch.from_numpy(peer.coef_), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(fit.bias, torch.from_numpy(peer.intercept_), rtol=1e-8, atol=1e-8)
    meter = ErrorMeter(output)
    meter.update(other[:, :9], other[:, columns] @ fit.weight.T + fit.bias)
    assert fit.error == pytest.approx(meter.value(), rel=1e-8)


def test_greedy_is_close_to_the_best_subset_and_better_than_importance():
    data = hidden_units(2000, 10, rank=3)
    output = torch.randn(4, 10, dtype=torch.float64)
    made = moments(data)

    def error(chosen) -> float:
        return fit_landmarks(made, made, torch.as_tensor(chosen), output, ridges=[1e-9]).error

    greedy = error(choose_landmarks(made, output, 3, rule="greedy"))
    importance = error(choose_landmarks(made, output, 3, rule="importance"))
    all_subsets = sorted(error(list(subset)) for subset in itertools.combinations(range(10), 3))
    assert greedy <= importance
    assert greedy <= all_subsets[len(all_subsets) // 10]
    first = choose_landmarks(made, output, 1, rule="greedy")
    assert error(first) == pytest.approx(min(error([unit]) for unit in range(10)), rel=1e-9)


def test_greedy_survives_dead_and_duplicate_units():
    data = hidden_units(200, 4)
    data = torch.cat((data, data[:, :2], torch.zeros(200, 2, dtype=torch.float64)), 1)
    chosen = choose_landmarks(moments(data), torch.eye(8, dtype=torch.float64), 8)
    assert chosen.tolist() == list(range(8))


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
    data = batches()
    report = calibrate(model, data, refit=False, progress=False)
    expected = {"ffn": 3, "pooler": 1}
    if name == "both":
        assert len(report.slots) == 3
    else:
        assert len(report.slots) == expected[next(iter(PARTS[name]))]
    held_out = [batch for index, batch in enumerate(data) if is_held_out(index, 0.2)]
    assert len(held_out) == 2
    bert = model.get_base_model()
    for slot in report.slots:
        assert slot.error_after < 1.0
        if "pooler" not in slot.path:
            assert slot.error_after < slot.error_before
        layer = bert.get_submodule(slot.path)
        index = int(slot.path.split(".")[3]) if "encoder" in slot.path else None
        weight = (
            bert.classifier.original_module.weight
            if index is None
            else bert.bert.encoder.layer[index].output.dense.weight
        )
        meter = ErrorMeter(weight.detach())
        stand_in = layer.snnk_slots["default"][0].layer
        activation = torch.tanh if index is None else torch.nn.functional.gelu
        for batch in held_out:
            seen = []
            hook = layer.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
            with torch.no_grad():
                bert(**batch)
            hook.remove()
            x = seen[0] if index is None else seen[0][batch["attention_mask"].bool()]
            with torch.no_grad():
                meter.update(activation(layer.base_layer(x)), stand_in(x))
        assert slot.held_out_tokens == meter.count
        assert slot.error_after == pytest.approx(meter.value(), rel=1e-3, abs=1e-6)


def test_all_units_as_landmarks_reproduce_the_layer():
    model = get_snnk_model(tiny_bert(), SNNKConfig(ffn=FFNPart(num_features=48)))
    reference = tiny_bert()
    data = batches(count=40)
    report = calibrate(model, data, progress=False)
    assert all(slot.error_after < 1e-6 for slot in report.slots)
    with torch.no_grad():
        torch.testing.assert_close(model(**data[0]).logits, reference(**data[0]).logits, rtol=1e-3, atol=1e-4)


def test_later_slots_are_fitted_on_the_converted_stack():
    """Targets come from the original module on the converted inputs: refitting the last slot changes nothing."""
    model = get_snnk_model(tiny_bert(), SNNKConfig(ffn=FFNPart(num_features=8)))
    data = batches()
    report = calibrate(model, data, refit=False, progress=False)
    again = calibrate(model, data, refit=False, progress=False)
    for first, second in zip(report.slots, again.slots, strict=True):
        assert second.error_before == pytest.approx(first.error_after, rel=1e-3)


@pytest.mark.parametrize("part", [FFNPart(num_features=8), FFNPart(num_features=8, component="relu", projection="orf")])
def test_refit_uses_the_held_out_tokens_too(part):
    """With the ridge given, refitting equals fitting to all batches; the report keeps the held-out error."""
    data = batches()
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
    calibrate(model, batches(), progress=False)
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in base.items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_labels_are_ignored():
    data = batches()
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
        ({"batches": batches(count=1)}, "at least one to fit"),
        ({"landmarks": "gready"}, "expected one of greedy, importance"),
        ({"held_out": 1.5}, "between 0 and 1"),
    ],
)
def test_bad_arguments(change, message):
    model = get_snnk_model(tiny_bert(), SNNKConfig(ffn=FFNPart(num_features=8)))
    arguments = {"batches": batches(), **change}
    with pytest.raises(ConfigError, match=message):
        calibrate(model, arguments.pop("batches"), progress=False, **arguments)


@pytest.mark.parametrize("count", [3, 4, 7])
def test_a_few_batches_suffice(count):
    model = get_snnk_model(tiny_bert(), SNNKConfig(ffn=FFNPart(num_features=8, layers=[0])))
    slot = calibrate(model, batches(count=count), progress=False).slots[0]
    assert slot.held_out_tokens > 0
    assert slot.tokens > slot.held_out_tokens


def test_nothing_to_calibrate():
    with pytest.raises(ConfigError, match="no active part that can be calibrated"):
        calibrate(tiny_bert(), batches(), progress=False)
