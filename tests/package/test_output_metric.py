"""calibrate in the metric of the model's answers: sensitivities against autograd, targets that make up for earlier
layers, and every kind of fit judged behind what reads it."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from snnk_peft import (
    AttentionPart,
    FFNPart,
    LowRankPart,
    NarrowFFNPart,
    NarrowHeadsPart,
    SNNKConfig,
    bundle,
    calibrate,
    get_snnk_model,
)
from snnk_peft.calibrating.answers import Answers, Comparison
from snnk_peft.calibrating.batches import Survey, split
from snnk_peft.calibrating.sensitivity import Sensitivity, differentiating, sensitivities
from snnk_peft.calibrating.streams import sum_behind
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.solvers.corrected import Target, fit_corrected, moved
from snnk_peft.solvers.landmarks import SecondMoments
from tests.tiny_models import far_from_linear, half_padded, inputs_for, tiny

F64 = torch.float64
sizes = {"num_hidden_layers": 3, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48}
bert = partial(far_from_linear, max_position_embeddings=512, **sizes)


def test_moments_of_gradients_are_those_of_each_example_by_itself():
    """Of two classes nothing is drawn but a sign: Σ over examples and tokens of p q ∇(z − z')∇(z − z')ᵀ."""
    model, data = bert(), half_padded(3)
    path = "bert.encoder.layer.1.output.dense"
    module = model.get_submodule(path)
    found = sensitivities(model, {path: module}, Survey(model, data, 0.3), Answers(model), lambda: None)[path]
    expected, squares = torch.zeros(24, 24, dtype=F64), []
    for batch in data:
        own = []
        for row in range(8):
            kept = {}
            hook = module.register_forward_hook(lambda m, args, out, kept=kept: kept.setdefault("y", out).retain_grad())
            logits = model(**{name: value[row : row + 1] for name, value in batch.items()}).logits[0]
            (logits.softmax(0).prod().detach().sqrt() * (logits[0] - logits[1])).backward()
            hook.remove()
            gradient = kept["y"].grad[0][batch["attention_mask"][row].bool()].double()
            expected += gradient.T @ gradient
            own.append(gradient.square().sum(1))
        squares.append(torch.cat(own))
    torch.testing.assert_close(found.moment, expected, rtol=1e-4, atol=1e-9)
    for index, each in enumerate(squares):
        torch.testing.assert_close(found.squares[index].double(), each, rtol=1e-4, atol=1e-9)
        mean = torch.cat(squares).mean()
        torch.testing.assert_close(
            found.weights(index).double(), 0.5 + 0.5 * (each / mean).clamp_max(20), rtol=1e-4, atol=0
        )
    root = found.root()
    metric = expected / (expected.trace() / 24) + 0.05 * torch.eye(24, dtype=F64)
    torch.testing.assert_close(root @ root, metric, rtol=1e-4, atol=1e-6)
    assert all(parameter.grad is not None or parameter.requires_grad for parameter in model.parameters())


def test_a_wide_place_keeps_the_diagonal_alone(monkeypatch):
    gradients = torch.randn(50, 6)
    full, wide = Sensitivity(), Sensitivity()
    full.add(0, gradients)
    monkeypatch.setattr("snnk_peft.calibrating.sensitivity.DENSE", 5)
    wide.add(0, gradients)
    assert torch.allclose(wide.moment, full.moment.diagonal())
    assert torch.equal(wide.root(), wide.root().diagonal().diag())
    assert torch.allclose(wide.weights(0), full.weights(0))


def test_what_no_answer_depends_on_is_judged_by_its_own_output():
    found = Sensitivity()
    found.add(0, torch.zeros(4, 3))
    assert torch.equal(found.root(), torch.eye(3, dtype=F64))
    assert found.weights(0) is None


FAMILIES = ["bert", "roberta", "vit", "distilbert", "modernbert", "electra", "deit"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sum_that_a_block_enters_is_found(family, dtype):
    """What is added to the FFN's output behind it is the same for the original and for an FFN that gives nothing."""
    from snnk_peft.families import family_of

    model = tiny(family).to(dtype)
    spec = family_of(model)
    layer = spec.layer_paths(model)[0]
    path, inputs = f"{layer}.{spec.ffn_out}", inputs_for(model)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    with torch.no_grad():  # what random weights add is below the rounding of bf16
        model.get_submodule(path).weight.mul_(30)
    place = sum_behind(model, path, model.get_submodule(layer), lambda: model(**inputs))
    assert place.module is not model.get_submodule(path)
    residuals = []
    for factor in (1.0, 0.0):
        seen, own = [], []
        hooks = [
            model.get_submodule(path).register_forward_hook(
                lambda m, args, out, factor=factor, own=own: own.append(out * factor) or out * factor
            )
        ]
        if place.before:
            hooks.append(place.module.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0])))
        else:
            hooks.append(
                place.module.register_forward_hook(
                    lambda m, args, out, seen=seen: seen.append(out if torch.is_tensor(out) else out[0])
                )
            )
        with torch.no_grad():
            model(**inputs)
        for hook in hooks:
            hook.remove()
        residuals.append(seen[0].float() - own[0].float())
    assert float(residuals[0].abs().max()) > 0.1  # there is one
    rounding = 1e-5 if dtype == torch.float32 else 0.02 * float(residuals[0].abs().max())
    assert torch.allclose(*residuals, rtol=0, atol=rounding)


def test_drift_is_made_good_to_rounding():
    """A first layer of two features is far off; with all units behind it the next sum is the original's again."""
    model = bert()
    some = half_padded(1, size=3, length=8)[0]
    data = [some, some, some]  # 18 tokens, fewer than the units that are fitted to them; held out as well
    parts = [FFNPart(num_features=2, layers=[0]), FFNPart(num_features=48, layers=[1])]
    patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(parts=parts, modules_to_save=[]))
    with pytest.warns(match="also among those that are fitted|too few tokens"):
        calibrate(patched, data, ridges=[1e-12], progress=False)
    real = some["attention_mask"].bool()
    with torch.no_grad():
        expected, found = (each(**some, output_hidden_states=True).hidden_states for each in (model, bundle(patched)))
    assert float((found[1] - expected[1])[real].abs().max()) > 0.05
    torch.testing.assert_close(found[2][real], expected[2][real], rtol=0, atol=2e-4)
    local = get_snnk_model(copy.deepcopy(model), SNNKConfig(parts=parts, modules_to_save=[]))
    with pytest.warns(match="also among those that are fitted|too few tokens"):
        calibrate(local, data, ridges=[1e-12], metric="local", progress=False)
    with torch.no_grad():
        drifted = bundle(local)(**some, output_hidden_states=True).hidden_states
    assert float((drifted[2] - expected[2])[real].abs().max()) > 0.02


def divergence(model, other, data) -> float:
    comparison = Comparison(Answers(model))
    with torch.no_grad():
        for batch in data:
            comparison.update(model(**batch), other(**batch), batch)
    return comparison.distance()


KINDS = {
    "ffn": FFNPart(num_features=6),
    "ffn relu": FFNPart(num_features=6, component="relu"),
    "ffn drawn": FFNPart(num_features=12, component="relu", projection="orf"),
    "ffn with linear path": FFNPart(num_features=4, linear_path=True),
    "narrow_ffn": NarrowFFNPart(num_features=6),
    "narrow_heads": NarrowHeadsPart(head_dim=2),
    "low_rank": LowRankPart(rank=4, targets="*dense"),
    "attention": AttentionPart("mixture", "centroids", num_features=4),
}


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_nearer_than_by_local_errors(name):
    """On texts that no fit has seen, over three models, for every part that is fitted."""
    found = {"output": 0.0, "local": 0.0}
    for seed in range(3):
        torch.manual_seed(seed)
        model = bert()
        with torch.no_grad():
            for each in model.parameters():
                each.add_(0.05 * torch.randn_like(each))
        for metric in found:
            patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(parts=[KINDS[name]], modules_to_save=[]))
            calibrate(patched, half_padded(20), metric=metric, progress=False)
            found[metric] += divergence(model, patched, half_padded(6, seed=2))
    assert found["output"] < found["local"]


def test_embeddings_by_the_vector_that_is_pooled():
    """[CLS] alone is kept where it is what the vector is made of."""
    model, found = bert().bert, {}
    for pooling in ("first", "mean"):
        patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(ffn=FFNPart(num_features=6), modules_to_save=[]))
        calibrate(patched, half_padded(20), pooling=pooling, progress=False)
        comparison = Comparison(Answers(model, "first"))
        with torch.no_grad():
            for batch in half_padded(6, seed=2):
                comparison.update(model(**batch), patched(**batch), batch)
        found[pooling] = comparison.distance()
    assert found["first"] < found["mean"]


def test_half_precision_gains_as_well():
    """Streams are compared in bf16, whose rounding stands in the targets."""
    model, found = bert().to(torch.bfloat16), {}
    for metric in ("output", "local"):
        patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(ffn=FFNPart(num_features=6), modules_to_save=[]))
        calibrate(patched, half_padded(20), metric=metric, progress=False)
        found[metric] = divergence(model, patched, half_padded(6, seed=2))
    assert found["output"] < found["local"]


def test_the_reported_error_is_that_of_the_stream():
    """Recomputed on the held-out batches from both models: ‖R (S − S')‖² over the spread of R (S − residual)."""
    model, data = bert(), half_padded()
    patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(ffn=FFNPart(num_features=8), modules_to_save=[]))
    report = calibrate(patched, data, refit=False, progress=False)
    path = "bert.encoder.layer.2.output"
    found = sensitivities(
        model, {path: model.get_submodule(f"{path}.dense")}, Survey(model, data, 0.2), Answers(model), lambda: None
    )
    root = found[path].root()
    wanted, given, weights = [], [], []
    for index in (2, 7):
        sums, residual = {}, {}
        for name, each in (("original", model), ("converted", patched.get_base_model())):
            module = each.get_submodule(path)
            hooks = [
                module.LayerNorm.register_forward_pre_hook(lambda m, args, n=name: sums.update({n: args[0]})),
                module.register_forward_pre_hook(lambda m, args, n=name: residual.update({n: args[1]})),
            ]
            with torch.no_grad():
                each(**data[index])
            for hook in hooks:
                hook.remove()
        real = data[index]["attention_mask"].bool()
        wanted.append((sums["original"] - residual["converted"])[real].double())
        given.append((sums["converted"] - residual["converted"])[real].double())
        weights.append(found[path].weights(index).double())
    target, estimate, weight = (torch.cat(each) for each in (wanted, given, weights))
    bias = model.get_submodule(f"{path}.dense").bias.detach().double()
    target, estimate = (target - bias) @ root, (estimate - bias) @ root
    centre = (weight @ target) / weight.sum()
    error = weight @ (target - estimate).square().sum(1) / (weight @ (target - centre).square().sum(1))
    assert report.slots[2].error_after == pytest.approx(float(error), rel=1e-3)


def test_gradients_leave_nothing_behind():
    model = get_snnk_model(bert(), SNNKConfig(ffn=FFNPart(num_features=8), modules_to_save=[]))
    calibrate(model, half_padded(), progress=False)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(getattr(module, "held_back", ()) for module in model.modules())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_under_no_grad_as_without(context):
    data, found = half_padded(), []
    for inside in (False, True):
        model = get_snnk_model(bert(), SNNKConfig(ffn=FFNPart(num_features=8), modules_to_save=[]))
        if inside:
            with context():
                report = calibrate(model, data, progress=False)
        else:
            report = calibrate(model, data, progress=False)
        found.append([slot.error_after for slot in report.slots])
    assert found[0] == found[1]


def test_causal_models_by_the_words_that_follow():
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=200, initializer_range=0.3)).eval()
    found = {}
    for metric in ("output", "local"):
        patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(parts=[NarrowFFNPart(keep=0.3)], modules_to_save=[]))
        calibrate(patched, half_padded(20), metric=metric, progress=False)
        found[metric] = divergence(model, patched, half_padded(5, seed=2))
    assert found["output"] < found["local"]


def moments(vectors: torch.Tensor, weight: torch.Tensor | None = None) -> SecondMoments:
    made = SecondMoments(vectors.shape[1])
    made.update(vectors, weight)
    return made


@pytest.mark.parametrize("intercept", [True, False])
def test_corrected_readout_is_weighted_ridge_regression(intercept):
    """Of y + s m on the features by tokens and weights, with the ridge and strength that were chosen."""
    generator = torch.Generator().manual_seed(0)
    data, other = (torch.randn(n, 9, generator=generator, dtype=F64) + 0.5 for n in (400, 200))
    weight = torch.rand(400, generator=generator, dtype=F64) + 0.5
    features, linear = torch.tensor([0, 2, 5]), torch.randn(2, 9, generator=generator, dtype=F64)
    linear[:, 7:] = 0
    metric = torch.randn(2, 2, generator=generator, dtype=F64)
    target = Target(linear, slice(7, 9))
    both = moments(data, weight), moments(other)
    fit = fit_corrected(*both, features, target, metric, [1e-1, 1e-3], intercept=intercept)
    goal = data @ linear.T + fit.strength * data[:, 7:]
    x, y = data[:, features], goal
    if intercept:
        centres = [(weight @ each) / weight.sum() for each in (x, y)]
        x, y = x - centres[0], y - centres[1]
    gram = (x * weight[:, None]).T @ x / weight.sum()
    penalty = fit.ridge * gram.diagonal().mean() * torch.eye(3, dtype=F64)
    expected = torch.linalg.solve(gram + penalty, (x * weight[:, None]).T @ y / weight.sum()).T
    torch.testing.assert_close(fit.weight, expected, rtol=1e-8, atol=1e-10)
    wanted = other @ linear.T + other[:, 7:]
    given = other[:, features] @ fit.weight.T + (0 if fit.bias is None else fit.bias)
    spread = ((wanted - wanted.mean(0)) @ metric.T).square().sum()
    assert fit.error == pytest.approx(float(((wanted - given) @ metric.T).square().sum() / spread), rel=1e-8)
    left = fit_corrected(*both, features, moved(target, features, linear[:, features]), metric, [1e12])
    assert float(left.weight.abs().max()) < 1e-9  # a large ridge leaves the old matrix


def test_arguments_are_named():

    model = get_snnk_model(bert(), SNNKConfig(ffn=FFNPart(num_features=8), modules_to_save=[]))
    with pytest.raises(ConfigError, match="metric is 'fisher'; expected one of output, local"):
        calibrate(model, half_padded(), metric="fisher")


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


def test_answers_that_depend_on_nothing_inside_are_fitted_locally():
    model = bert()
    model.bert.pooler.activation = Detached()
    found = []
    for metric in ("output", "local"):
        patched = get_snnk_model(
            copy.deepcopy(model), SNNKConfig(ffn=FFNPart(num_features=8, layers=[0]), modules_to_save=[])
        )
        found.append(calibrate(patched, half_padded(), metric=metric, progress=False).slots[0].error_after)
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_memory_that_runs_out_is_no_missing_derivative() -> None:
    for error, expected in ((torch.OutOfMemoryError, torch.OutOfMemoryError), (NotImplementedError, UnsupportedError)):
        with pytest.raises(expected), differentiating(torch.nn.Linear(2, 2)):
            raise error("of torch")


def test_a_packed_batch_is_not_cut_apart() -> None:
    """One row of tokens and where its texts begin: rows of the second are none of the first's."""
    packed = {"input_ids": torch.arange(12)[None], "cu_seq_lens_q": torch.tensor([0, 5, 12]), "max_length_q": 7}
    (whole,) = split(packed, 1)
    assert whole == packed
    pairs = list(split({"input_ids": torch.arange(10).view(5, 2), "return_dict": True}, 2))
    assert [each["input_ids"].tolist() for each in pairs] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert all(each["return_dict"] for each in pairs)
