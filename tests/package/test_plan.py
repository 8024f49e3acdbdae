"""plan: costs, errors and the choice among candidates, each against an oracle; budgets, files, the model untouched."""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.isotonic import IsotonicRegression
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from snnk_peft import (
    AttentionPart,
    FFNPart,
    NarrowFFNPart,
    NarrowHeadsPart,
    Plan,
    PoolerPart,
    SNNKConfig,
    bundle,
    calibrate,
    get_snnk_model,
    plan,
)
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.planning.choose import STEPS, Offer, apart, pareto
from snnk_peft.planning.fits import OPTIONS
from snnk_peft.planning.sample import HELD_OUT
from snnk_peft.planning.sizes import Measured, between, grid, rising
from tests.fresh_process import run_python
from tests.tiny_models import far_from_linear, half_padded, inputs_for, tiny

PARTS = [FFNPart(num_features=8), FFNPart(num_features=24), NarrowHeadsPart(head_dim=6), PoolerPart(num_features=4)]
WISH = "1.6x"


def held_out(model) -> torch.Tensor:
    """Logarithms of the probabilities of what `plan` holds out of ten batches: of texts, or of their words."""
    found = []
    for batch in (half_padded()[index] for index in (1, 3, 6, 8)):
        given = model(**batch).logits
        found.append(given[batch["attention_mask"].bool()] if given.dim() == 3 else given)
    return torch.cat(found).log_softmax(-1)


def divergence(model, other) -> float:
    return torch.nn.functional.kl_div(held_out(other), held_out(model), reduction="batchmean", log_target=True).item()


@pytest.fixture(scope="module")
def planned() -> tuple[Any, Plan]:
    model = far_from_linear()
    return model, plan(model, half_padded(), WISH, of="macs", parts=PARTS, progress=False)


def flops(model, inputs) -> int:
    """Those of a CPU's fused attention are unknown to torch."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops()


def test_the_choice_is_the_best_of_all_choices():
    draw = random.Random(3)
    for _ in range(20):
        places = [
            [Offer(draw.randrange(-500, 3000) / STEPS, draw.random()) for _ in range(draw.randrange(1, 4))]
            for _ in range(4)
        ]
        every = [
            (1 - sum(o.saved for o in chosen), sum(o.error for o in chosen))
            for chosen in itertools.product(
                *([Offer(0.0, 0.0), *(o for o in place if o.saved > 0)] for place in places)
            )
        ]
        points = pareto(places)
        assert points[0].cost == 1
        for budget in (0.95, 0.8, 0.7):
            able = [error for cost, error in every if cost <= budget + 1e-9]
            found = next((point for point in points if point.cost <= budget + 1e-9), None)
            assert (found is None) == (not able)
            if found is not None:
                assert found.error == pytest.approx(min(able), abs=1e-12)
                offers = [place[i] for place, i in zip(places, found.chosen, strict=True) if i >= 0]
                assert sum(o.error for o in offers) == pytest.approx(found.error)
                assert 1 - sum(o.saved for o in offers) == pytest.approx(found.cost)


def test_points_apart():
    """Of costs within a stride the cheapest, the original and the last."""
    points = pareto([[Offer(0.01, 0.1)], [Offer(0.02, 0.3)], [Offer(0.04, 0.9)]])
    assert [round(1 - point.cost, 3) for point in points] == [0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07]
    assert [round(1 - point.cost, 3) for point in apart(points, 0.02)] == [0, 0.01, 0.03, 0.05, 0.07]
    assert apart(points, 0) == points
    assert apart(points[:1], 0.02) == points[:1]


def test_sizes_are_put_in_order_as_scikit_learn_does():
    for seed in range(5):
        values = np.random.default_rng(seed).normal(size=9) + np.arange(9) / 4
        expected = IsotonicRegression().fit_transform(np.arange(9), values)
        assert rising(values.tolist()) == pytest.approx(expected.tolist())


def test_the_budget_holds_for_the_calibrated_bundle_by_torchs_own_counter(planned):
    model, found = planned
    patched = get_snnk_model(copy.deepcopy(model), found.config)
    calibrate(patched, half_padded(), progress=False)
    middle = sorted(half_padded(), key=lambda batch: int(batch["attention_mask"].sum()))[5]
    share = flops(bundle(patched), middle) / flops(model, middle)
    assert share <= 1 / 1.6
    assert found.predicted["measured"] == pytest.approx(share, abs=1e-3)
    assert found.predicted["cost"] == pytest.approx(share, abs=1e-3)
    assert len({candidate.part for candidate in found.choices}) > 1


def test_sizes_between_are_multiples_and_their_figures_lie_between():
    assert grid([32, 384]) == [*range(32, 385, 16)]
    assert grid([8, 16, 24]) == [8, 12, 16, 20, 24]
    assert grid([1, 3, 5]) == [1, 2, 3, 4, 5]
    assert grid([64, 1000]) == [64, *range(96, 1000, 32), 1000]
    found = {each.size: each for each in between([Measured(16, 0.3, 0.4), Measured(64, 0.1, 0.1)])}
    assert (found[16].error, found[32].error, found[64].error) == pytest.approx((0.4, 0.2, 0.1))
    assert found[40].saved == pytest.approx(0.2)
    noisy = between([Measured(8, 0.3, 0.1), Measured(16, 0.2, 0.4), Measured(24, 0.1, 0.01)])
    assert all(a.error >= b.error and a.saved >= b.saved for a, b in itertools.pairwise(noisy))


@pytest.mark.parametrize("of", ["macs", "bytes"])
@pytest.mark.parametrize("share", [0.93, 0.85, 0.78])
def test_the_budget_is_spent(of, share):
    model = far_from_linear(intermediate_size=256, vocab_size=20)
    few = [{**batch, "input_ids": batch["input_ids"] % 20} for batch in half_padded(6)]
    parts = [FFNPart(num_features=8), FFNPart(num_features=232), NarrowHeadsPart(head_dim=6)]
    found = plan(model, few, share, of=of, parts=parts, progress=False)
    assert 0.97 * share <= found.predicted["measured"] <= share
    sizes = {choice.size: choice for choice in found.choices if choice.part == "ffn"}
    assert all(choice.between == (size not in ("8", "232")) for size, choice in sizes.items())
    assert {str(part.num_features) for part in found.config.parts if isinstance(part, FFNPart)} == set(sizes)


def test_another_budget_from_the_same_measurements(planned, monkeypatch, tmp_path):
    """As a plan for it, but for rounding; a plan that was read from a file tells the same."""
    model, found = planned
    whole = plan(model, half_padded(), "1.3x", of="macs", parts=PARTS, progress=False)
    monkeypatch.setattr("snnk_peft.planning.costs.macs", None)
    other = found.at("1.3x")
    assert other.config == whole.config
    assert other.predicted["expected"] == pytest.approx(whole.predicted["measured"], abs=1e-3)
    assert other.predicted["error"] == pytest.approx(whole.predicted["error"])
    assert other.choices == whole.choices
    assert other.at(1 / 1.6).config == found.config
    found.save(tmp_path, picture=False)
    assert Plan.load(tmp_path).at("1.3x").to_dict() == other.to_dict()
    assert "measured" not in other.predicted
    assert "as expected" in str(other)
    for budget, message in ((0, "budget is 0"), ("9x", "the nearest that can be met")):
        with pytest.raises(ConfigError, match=message):
            found.at(budget)


def test_the_error_of_all_parts_together_is_measured(planned):
    """By `calibrate` on the same batches; what was predicted is of its size."""
    model, found = planned
    patched = get_snnk_model(copy.deepcopy(model), found.config)
    calibrate(patched, half_padded(), held_out=HELD_OUT, ridges=OPTIONS.ridges, refit=False, progress=False)
    assert found.predicted["measured_error"] == pytest.approx(divergence(model, patched), rel=1e-3)
    assert found.predicted["error"] / 2 < divergence(model, patched) < 2 * found.predicted["error"]
    assert (
        "measured_error"
        not in plan(model, half_padded(), WISH, of="macs", parts=PARTS, check=False, progress=False).predicted
    )


def test_bytes_are_those_of_the_saved_model(tmp_path):
    model = far_from_linear()
    found = plan(model, half_padded(), 0.85, of="bytes", parts=PARTS, progress=False)
    small = bundle(get_snnk_model(copy.deepcopy(model), found.config))
    sizes = []
    for number, each in enumerate((model, small)):
        save_file({name: t.clone().contiguous() for name, t in each.state_dict().items()}, tmp_path / str(number))
        whole = (tmp_path / str(number)).read_bytes()
        sizes.append(len(whole) - 8 - int.from_bytes(whole[:8], "little"))
    assert found.predicted["measured"] == pytest.approx(sizes[1] / sizes[0], rel=1e-9)
    assert found.predicted["cost"] == pytest.approx(sizes[1] / sizes[0], abs=4 / STEPS)


@pytest.mark.parametrize("part", [PARTS[0], PARTS[2]], ids=["ffn", "heads"])
def test_errors_of_a_layer_are_those_of_a_model_with_this_layer_converted(planned, part):
    """By `calibrate` with one size; the divergence of the outputs as torch has it is predicted from gradients."""
    model, found = planned
    part = copy.copy(part)
    part.layers = [0]
    patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(parts=[part], modules_to_save=[]))
    report = calibrate(patched, half_padded(), held_out=HELD_OUT, ridges=OPTIONS.ridges, refit=False, progress=False)
    size = str(getattr(part, "num_features", None) or part.head_dim)
    own = next(c for c in found.candidates if c.layer == 0 and c.size == size and c.part != "pooler")
    # Directions of heads are searched for in fewer steps.
    assert own.fit_error == pytest.approx(report.slots[0].error_after, rel=1e-5 if isinstance(part, FFNPart) else 0.01)
    assert own.output_error / 2 < divergence(model, patched) < 2 * own.output_error


def test_the_predicted_divergence_is_the_fisher_information_along_the_change():
    """Of a change so small that no higher order matters: half the square of the logits' change by diag p − p pᵀ."""
    model = far_from_linear(num_labels=2)
    found = plan(model, half_padded(), 0.98, of="macs", parts=[FFNPart(num_features=60)], progress=False)
    for layer in (0, 1):
        part = FFNPart(num_features=60, layers=[layer])
        patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(parts=[part], modules_to_save=[]))
        calibrate(patched, half_padded(), held_out=HELD_OUT, refit=False, progress=False)
        target, other = held_out(model).double(), held_out(patched).double()
        p, moved = target.exp(), other - target
        expected = 0.5 * ((p * moved.square()).sum(-1) - (p * moved).sum(-1).square()).mean()
        (own,) = (candidate for candidate in found.candidates if candidate.layer == layer)
        assert own.output_error == pytest.approx(expected.item(), rel=0.2)


def test_without_gradients_every_candidate_is_run(planned, monkeypatch):
    """Their errors are then what torch says of a model with one layer converted."""

    def none(*given):
        raise RuntimeError("derivative is not implemented")

    monkeypatch.setattr("snnk_peft.calibrating.answers.Answers.drawn_loss", none)
    model, part = far_from_linear(), FFNPart(num_features=16)
    found = plan(model, half_padded(), 0.97, of="macs", parts=[part], progress=False)
    part.layers = [0]
    patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(parts=[part], modules_to_save=[]))
    given = {"held_out": HELD_OUT, "ridges": OPTIONS.ridges, "refit": False, "metric": "local", "progress": False}
    calibrate(patched, half_padded(), **given)
    assert found.candidates[0].output_error == pytest.approx(divergence(model, patched), rel=1e-3)


def test_smaller_budgets_cost_more_error_and_a_plan_is_on_its_curve(planned):
    _, found = planned
    pairs = [(point["cost"], point["error"]) for point in found.curve]
    assert pairs[0] == (1.0, 0.0)
    assert all(a[0] > b[0] and a[1] < b[1] for a, b in itertools.pairwise(pairs))
    assert (found.predicted["cost"], found.predicted["error"]) in pairs


def test_the_model_is_left_alone_and_a_second_plan_is_the_same(planned):
    model, found = planned
    model = far_from_linear().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [
        (name, type(module), module.training, len(module._forward_hooks)) for name, module in model.named_modules()
    ]
    random_state = torch.get_rng_state()
    again = plan(model, half_padded(), WISH, of="macs", parts=PARTS, progress=False)
    assert again.to_dict() == found.to_dict()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert modules == [
        (name, type(module), module.training, len(module._forward_hooks)) for name, module in model.named_modules()
    ]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == far_from_linear().config._attn_implementation


def test_files(planned, tmp_path):
    _, found = planned
    found.save(tmp_path)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    code = f"""
from snnk_peft import Plan
found = Plan.load({str(tmp_path)!r})
print(found)
assert found.config.modules_to_save == [] and len(found.config.parts) > 1
"""
    assert run_python(["-c", code]).stdout.rstrip() == str(found)
    assert Plan.load(tmp_path).to_dict() == found.to_dict()
    (tmp_path / "plan.json").write_text(json.dumps({"of": "macs"}))
    with pytest.raises(ConfigError, match=r"cannot be read as a plan \(KeyError"):
        Plan.load(tmp_path)
    with pytest.raises(ConfigError, match="expected a folder that Plan"):
        Plan.load(tmp_path / "nothing")


def test_an_unreachable_budget_names_one_that_is_not():
    with pytest.raises(ConfigError, match=r"budget leaves 0.100 of the macs \(10.00x\)") as refused:
        plan(far_from_linear(), half_padded(), "10x", of="macs", parts=PARTS, progress=False)
    nearest = str(refused.value).split("nearest that can be met is '")[1].split("'")[0]
    found = plan(far_from_linear(), half_padded(), nearest, of="macs", parts=PARTS, progress=False)
    assert 1 / found.predicted["measured"] >= float(nearest.removesuffix("x")) > 1.4


def test_candidates_of_which_none_saves_anything():
    """However near the budget is to all of the cost."""
    for of in ("latency", "macs"):
        with pytest.raises(ConfigError, match=r"saves nothing measurable. Give larger inputs"):
            plan(far_from_linear(), half_padded(), 0.99, of=of, parts=[FFNPart(num_features=64)], progress=False)


def test_every_bad_argument_is_told_at_once():
    with pytest.raises(ConfigError) as refused:
        plan(far_from_linear(), half_padded(), "0.5x", of="time", parts=[], tokens=0)
    for name in ("budget is '0.5x'", "of is 'time'", "parts is []", "tokens is 0"):
        assert name in str(refused.value)
    with pytest.raises(ConfigError, match="batches holds 2; expected three at least"):
        plan(far_from_linear(), half_padded(2), "2x", of="macs")
    wrong = [{"input_ids": batch["input_ids"] + 5000} for batch in half_padded()]
    with pytest.raises(ConfigError, match="has token id 5198"):
        plan(far_from_linear(), wrong, "2x", of="macs")
    with pytest.raises(UnsupportedError, match="holds adapters already"):
        plan(get_snnk_model(far_from_linear(), SNNKConfig(ffn=FFNPart(num_features=8))), half_padded(), "1.2x")


def test_seconds_are_measured_once(tmp_path, monkeypatch):
    model = far_from_linear(hidden_size=64, intermediate_size=768)
    parts = [FFNPart(num_features=16), FFNPart(num_features=64)]
    file = tmp_path / "timings.json"
    given = {"of": "latency", "parts": parts, "timings": file, "progress": False}
    found = plan(model, half_padded(size=16, length=32), 0.9, **given)
    assert found.predicted["measured"] <= 0.9
    # Layers that are built alike cost the same.
    saved = {candidate.layer: candidate.saved for candidate in found.candidates if candidate.size == "16"}
    assert len(saved) == 2
    assert len(set(saved.values())) == 1

    def again(*args, **kwargs):
        raise AssertionError("measured a second time")

    assert found.settings["timing_limit"] > 0
    monkeypatch.setattr("snnk_peft.planning.costs.seconds", again)
    monkeypatch.setattr("snnk_peft.planning.costs.paired", again)
    assert plan(model, half_padded(size=16, length=32), 0.9, **given).to_dict() == found.to_dict()
    with pytest.raises(AssertionError, match="a second time"):
        plan(model, half_padded(size=16, length=32), 0.9, **{**given, "timings": tmp_path / "other.json"})
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds a list; expected a file that plan"):
        plan(model, half_padded(), 0.9, **given)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("vit", {}, {"ffn", "narrow_heads"}),
        ("bert", {"num_labels": 1}, {"ffn", "narrow_heads"}),
        ("distilbert", {}, {"ffn", "narrow_heads"}),
        ("modernbert", {}, {"narrow_ffn", "low_rank"}),
    ],
)
def test_other_models(family, changes, expected):
    """Pictures, a score instead of classes, other module names, gated FFNs: what a family can take is tried."""
    model = tiny(family, **changes)
    whole = inputs_for(model, batch=16)
    batches = [{name: rows[i : i + 4] for name, rows in whole.items()} for i in range(0, 16, 4)]
    found = plan(model, batches, 0.9, of="macs", progress=False)
    assert found.predicted["measured"] <= 0.9
    assert {candidate.part for candidate in found.candidates} - {"pooler"} == expected
    patched = get_snnk_model(model, found.config)
    calibrate(patched, batches, progress=False)
    bundle(patched)


def test_a_causal_model_is_judged_by_all_its_words():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=200, intermediate_size=48, initializer_range=0.2, **sizes)).eval()
    found = plan(model, half_padded(), 0.85, of="macs", parts=[NarrowFFNPart(keep=0.5)], progress=False)
    assert [(choice.layer, choice.part, choice.size) for choice in found.choices] == [
        (0, "narrow_ffn", "0.5"),
        (1, "narrow_ffn", "0.5"),
    ]
    only = copy.deepcopy(found.config.parts[0])
    only.layers = [1]
    patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(parts=[only], modules_to_save=[]))
    calibrate(patched, half_padded(), held_out=HELD_OUT, refit=False, progress=False)
    assert found.choices[1].output_error / 2 < divergence(model, patched) < 2 * found.choices[1].output_error


def test_half_precision():
    model = far_from_linear().to(torch.bfloat16)
    found = plan(model, half_padded(), 0.9, of="macs", parts=PARTS[:2], progress=False)
    assert found.settings["dtype"] == "bfloat16"
    assert all(0 < candidate.fit_error < 1 for candidate in found.candidates)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_linear_attention_is_offered_where_it_pays():
    model = far_from_linear(max_position_embeddings=256)
    offered = [[part.num_features for part in AttentionPart.candidates(model, length)] for length in (64, 130, 512)]
    assert offered == [[], [32], [32, 64, 128]]
    long = half_padded(4, size=2, length=256)
    attention = AttentionPart.candidates(model, 256)
    found = plan(model, long, 0.8, of="macs", parts=attention, progress=False)
    assert {candidate.part for candidate in found.choices} == {"attention"}
    patched = get_snnk_model(model, found.config)
    calibrate(patched, long, progress=False)
    assert [hasattr(m, "snnk_kernel") for m in bundle(patched).modules()].count(True) == len(found.choices)


def test_within_autocast_candidates_are_judged_as_they_were_fitted(planned):
    """Autocast keeps copies of what it has cast once: those from before a fit would count as the candidate."""
    with torch.autocast("cpu", torch.bfloat16):
        found = plan(far_from_linear(), half_padded(), WISH, of="macs", parts=PARTS, progress=False)
    errors = {(c.part, c.size, c.layer): c.output_error for c in planned[1].candidates}
    for each in found.candidates:
        assert each.output_error == pytest.approx(errors[each.part, each.size, each.layer], rel=0.5, abs=1e-4)
