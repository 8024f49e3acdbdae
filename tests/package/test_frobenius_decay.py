"""Frobenius decay of low-rank factors: gradients, optimizers, processes, Trainer, and the factors that it finds."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Adafactor, Trainer, TrainingArguments

from snnk_peft import FrobeniusDecay, LowRankPart, SNNKConfig, get_snnk_model
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.low_rank.frobenius_decay import decay_groups, find_factors, frobenius_gradients, frobenius_penalty
from tests.decay_job import Factored, examples, loss, network, trained
from tests.fresh_process import run_processes
from tests.tiny_models import inputs_for, tiny


def dense_penalty(model: nn.Module, strength: float) -> torch.Tensor:
    return sum(strength / 2 * (m.U @ m.V.T).square().sum() for m in model.modules() if isinstance(m, Factored))  # type: ignore[return-value]


def same(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 1e-12, "atol": 1e-12}), msg=name)


def test_gradient_is_that_of_half_the_squared_norm_of_the_product():
    layer = Factored(7, 4, 3)
    dense = dense_penalty(layer, 1.0)
    torch.testing.assert_close(frobenius_penalty(layer.U, layer.V), dense, rtol=1e-12, atol=0)
    for own, truth in zip(
        frobenius_gradients(layer.U, layer.V), torch.autograd.grad(dense, [layer.U, layer.V]), strict=True
    ):
        torch.testing.assert_close(own, truth, rtol=1e-12, atol=1e-12)


def test_penalty_of_a_model_is_differentiable():
    model = network()
    decay = FrobeniusDecay(model, strength=0.3)
    torch.testing.assert_close(decay.penalty(), dense_penalty(model, 0.3))
    factors = [f for pair in decay.pairs for f in (pair.U, pair.V)]
    found = torch.autograd.grad(decay.penalty(), factors)
    for mine, truth in zip(found, torch.autograd.grad(dense_penalty(model, 0.3), factors), strict=True):
        torch.testing.assert_close(mine, truth)


def test_under_sgd_it_is_the_penalty_in_the_loss_at_any_learning_rate():
    hooked, summed = network(), network()
    optimizers = [
        torch.optim.SGD([{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": 0.01}], lr=0.05)
        for m in (hooked, summed)
    ]
    decay = FrobeniusDecay(hooked, strength=0.2).attach(optimizers[0])
    decay.attach(optimizers[0])  # once more changes nothing
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for _ in range(4):
        for model, optimizer, schedule in zip((hooked, summed), optimizers, schedules, strict=True):
            optimizer.zero_grad()
            (loss(model, slice(None)) + (dense_penalty(model, 0.2) if model is summed else 0)).backward()
            optimizer.step()
            schedule.step()
    same(hooked, summed)
    assert not torch.equal(hooked[0].U, network()[0].U)


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad], ids=lambda m: m.__name__
)
def test_no_optimizer_rescales_it(make):
    """With a gradient of zero nothing is left but the decay."""
    model, before = network(), network()
    optimizer = make(decay_groups(model, 0.1, factor_decay=0.0), lr=0.05)
    FrobeniusDecay(model, strength=0.2).attach(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    truth = torch.autograd.grad(dense_penalty(before, 0.2), list(before[0].parameters())[:2])
    for mine, old, gradient in zip(model[0].parameters(), before[0].parameters(), truth, strict=False):
        torch.testing.assert_close(mine, old - 0.05 * gradient, rtol=1e-12, atol=1e-12)


def test_both_factors_move_from_the_values_before():
    """The product has no place of its own: (U, V) and (V, U) decay alike."""
    layer, mirrored = Factored(5, 5, 2), Factored(5, 5, 2)
    with torch.no_grad():
        mirrored.U.copy_(layer.V), mirrored.V.copy_(layer.U)
    for each in (layer, mirrored):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        FrobeniusDecay(each, strength=1.0).attach(optimizer)
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert torch.equal(layer.U, mirrored.V)
    assert torch.equal(layer.V, mirrored.U)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_decays_nothing(fused):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
    FrobeniusDecay(model, strength=0.3).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    start = copy.deepcopy(model)

    def step(overflow: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(loss(model, slice(None))).backward()
        if overflow:
            model[2].U.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()

    step(overflow=True)
    same(model, start, rtol=0, atol=0)
    step(overflow=False)
    plain = torch.optim.Adam(start.parameters(), lr=1e-2)
    FrobeniusDecay(start, strength=0.3).attach(plain)
    loss(start, slice(None)).backward()
    plain.step()
    same(model, start, rtol=1e-6, atol=1e-8)


def test_accumulated_batches_decay_once_also_under_accelerate():
    accelerate = pytest.importorskip("accelerate")
    models = [network() for _ in range(3)]
    whole, split, prepared = models
    optimizers: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.05) for m in models]
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizers[2] = accelerator.prepare(prepared, optimizers[2])
    for model, optimizer in zip((whole, split, prepared), optimizers, strict=True):
        FrobeniusDecay(model, strength=0.2).attach(optimizer)
    halves = [slice(0, 12), slice(12, 24)]
    for _ in range(3):
        for optimizer in optimizers[:2]:
            optimizer.zero_grad()
        loss(whole, slice(None)).backward()
        for half in halves:
            (loss(split, half) / 2).backward()
            with accelerator.accumulate(prepared):
                accelerator.backward(loss(prepared, half))
                optimizers[2].step()
                optimizers[2].zero_grad()
        for optimizer in optimizers[:2]:
            optimizer.step()
    same(whole, split)
    same(whole, models[2])


def test_processes_of_ddp_stay_at_the_same_bits(tmp_path: Path, root: Path):
    done = run_processes(["-m", "tests.decay_job", str(tmp_path)], env={**os.environ, "PYTHONPATH": str(root)})
    assert [code for code, _ in done] == [0, 0], "".join(output for _, output in done)
    first, second = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    alone, without = trained(0, 1), trained(0, 1, strength=0.0)
    assert (alone["0.U"] - without["0.U"]).abs().max() > 1e-3
    assert first.keys() == alone.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12, msg=name)


class Regression(nn.Module):
    """What Trainer wants of a model: inputs as keywords, the loss in what it returns."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.network(x) - labels).square().mean()}


def test_trainer(tmp_path: Path):
    pytest.importorskip("accelerate")
    model, own = Regression(), network()
    decay = FrobeniusDecay(model, strength=0.2)
    settings: dict[str, Any] = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "max_steps": 2}
    arguments = TrainingArguments(
        str(tmp_path), optim="sgd", learning_rate=0.05, lr_scheduler_type="constant", max_grad_norm=0.0, seed=0,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, train_sampling_strategy="sequential",
        **settings,
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in zip(*examples(), strict=True)]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[decay.trainer_callback()])
    trainer.train()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
    FrobeniusDecay(own, strength=0.2).attach(optimizer)
    for rows_of_step in (slice(0, 12), slice(12, 24)):
        optimizer.zero_grad()
        loss(own, rows_of_step).backward()
        optimizer.step()
    same(model.network, own, rtol=1e-9, atol=1e-12)
    assert not decay._handles  # it left the optimizer when training ended


@pytest.mark.filterwarnings("ignore:Frobenius decay. learning rate times strength")
def test_detached_it_does_nothing():
    model, plain = network(), network()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    FrobeniusDecay(model, strength=1.0).attach(optimizers[0]).detach()
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        loss(each, slice(None)).backward()
        optimizer.step()
    same(model, plain, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Frobenius decay. learning rate times strength")
def test_what_is_frozen_or_unused_stays():
    model = nn.ModuleList([Factored(4, 4, 2), Factored(3, 3, 1)])
    model[0].V.requires_grad_(False)
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    FrobeniusDecay(model, strength=1.0).attach(optimizer)
    model[0].U.grad = torch.zeros_like(model[0].U)
    optimizer.step()
    expected = start[0].U - 0.1 * start[0].U @ (start[0].V.T @ start[0].V)
    torch.testing.assert_close(model[0].U, expected)
    assert torch.equal(model[0].V, start[0].V)
    same(model[1], start[1], rtol=0, atol=0)


def test_half_precision_multiplies_in_fp32():
    U, V = (nn.Parameter(torch.full((600, 1), 0.3, dtype=torch.float16)) for _ in range(2))
    optimizer = torch.optim.SGD([U, V], lr=0.01)
    FrobeniusDecay([(U, V)], strength=0.1).attach(optimizer)
    U.grad, V.grad = torch.zeros_like(U), torch.zeros_like(V)
    optimizer.step()
    expected = 0.3 * (1 - 0.001 * 0.09 * 600)
    torch.testing.assert_close(U.float(), torch.full((600, 1), expected), rtol=1e-3, atol=0)
    assert U.dtype == torch.float16


def test_factors_are_found_by_what_they_are():
    shared = Factored(4, 4, 2, frobenius_decay=0.5)
    other = nn.Module()
    other.U, other.V = nn.Linear(3, 2), nn.Linear(2, 3)  # modules of these names, such as in tests/two_linears_part.py
    misfit = nn.Module()
    misfit.U, misfit.V = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 1))
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, Factored(3, 2, 1)]), "c": other, "d": misfit})
    assert [(pair.path, pair.strength) for pair in find_factors(model)] == [("a", 0.5), ("b.1", None)]
    assert [(pair.path, pair.strength) for pair in FrobeniusDecay(model).pairs] == [("a", 0.5)]
    assert [pair.strength for pair in FrobeniusDecay(model, 2).pairs] == [2, 2]


def test_groups_hold_every_trained_parameter_once():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Factored(4, 4, 2), nn.Linear(4, 2))
    model[3].bias.requires_grad_(False)
    groups = decay_groups(model, 0.1, factor_decay=0.0)
    kinds = {group["weight_decay"]: {id(p) for p in group["params"]} for group in groups if group["weight_decay"]}
    assert kinds == {0.1: {id(model[0].weight), id(model[3].weight)}}
    everything = [id(p) for group in groups for p in group["params"]]
    assert sorted(everything) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    same_decay = decay_groups(model, 0.1)
    assert {group["weight_decay"] for group in same_decay if id(model[2].U) in map(id, group["params"])} == {0.1}


@pytest.mark.parametrize(
    ("factors", "strength", "message"),
    [
        (nn.Linear(3, 3), 1.0, "Linear has no module with parameters U .* Make it low-rank first"),
        (Factored(3, 3, 1), None, "strength is None and none of the 1 low-rank layers .* Pass strength="),
        (Factored(3, 3, 1), -1.0, "strength is -1.0; expected a number >= 0"),
        (Factored(3, 3, 1, frobenius_decay=float("nan")), None, "is nan; expected a number >= 0"),
        ([(torch.ones(3, 2), torch.ones(2, 3))], 1.0, r"pair 0: U has shape \(3, 2\) and V \(2, 3\); expected"),
    ],
)
def test_faults(factors, strength, message):
    with pytest.raises(ConfigError, match=message):
        FrobeniusDecay(factors, strength)


def test_faults_of_optimizers_and_groups():
    model = network()
    decay = FrobeniusDecay(model, 1.0)
    with pytest.raises(ConfigError, match=r"SGD holds no factor of 0, 2; .*as they are now"):
        decay.attach(torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1))
    with pytest.raises(
        ConfigError, match=r"Adafactor has parameter groups without a learning rate .*relative_step=False"
    ):
        decay.attach(Adafactor(model.parameters()))
    with pytest.raises(ConfigError, match=r"2 faults:\n.*weight_decay is -1.*\n.*factor_decay is 'x'"):
        decay_groups(model, -1, factor_decay="x")  # type: ignore[arg-type]


def test_decay_that_changes_signs_is_told():
    """U (1 − ηλ‖V‖²): with ‖V‖² = 4 and η = .1 it is 0 at λ = 2.5, negative beyond."""
    for strength, sign in ((2.4, 1), (2.6, -1)):
        U, V = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.ones(4, 1))
        optimizer, decay = torch.optim.SGD([U], lr=0.1), FrobeniusDecay([(U, V)], strength=strength)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            decay.attach(optimizer)
        assert [each.category for each in told] == [NumericalWarning] * (sign < 0)
        U.grad = torch.zeros_like(U)
        optimizer.step()
        assert bool((U.sign() == sign).all())


# === layers of the package ============================================================================================


def of_layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 10)
    )


@pytest.mark.parametrize("split", ["spatial", "channel"])
def test_convolutions_and_linears(split):
    part = LowRankPart(targets="*", rank=2, split=split, frobenius_decay=0.5)
    model = get_snnk_model(of_layers(), SNNKConfig(parts=[part]))
    decay = FrobeniusDecay(model)
    assert [pair.strength for pair in decay.pairs] == [0.5, 0.5, 0.5]
    # The product has the norm of the kernel: the penalty means the same for all layers.
    for pair in decay.pairs:
        layer = model.get_submodule(pair.path)
        torch.testing.assert_close((pair.U @ pair.V.T).norm(), layer.weight_matrix().norm())
        weights = [p for m in layer.dense().modules() for p in m.parameters(recurse=False) if p.ndim > 1]
        torch.testing.assert_close((pair.U @ pair.V.T).norm(), weights[0].norm(), rtol=1e-4, atol=1e-5)
    before = decay.penalty().item()
    optimizer = torch.optim.AdamW(decay_groups(model, 0.0), lr=1e-2)
    decay.attach(optimizer)
    x = torch.randn(4, 3, 4, 4)
    for _ in range(5):
        optimizer.zero_grad()
        (0 * model(x).sum()).backward()
        optimizer.step()
    assert decay.penalty().item() < 0.98 * before


def test_a_family_by_role():
    part = LowRankPart(targets="ffn", rank_scale=0.25, frobenius_decay=1e-3)
    model = get_snnk_model(tiny("bert"), SNNKConfig(parts=[part]))
    decay = FrobeniusDecay(model)
    assert len(decay.pairs) == 4  # two Linears in each of two layers
    assert {pair.strength for pair in decay.pairs} == {1e-3}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decay.attach(optimizer)
    inputs = inputs_for(model.get_base_model())
    truth = torch.autograd.grad(
        model(**inputs).logits.square().sum() + decay.penalty(), [f for pair in decay.pairs for f in pair[1:3]]
    )
    expected = [f - 0.1 * g for f, g in zip([f for pair in decay.pairs for f in pair[1:3]], truth, strict=True)]
    model(**inputs).logits.square().sum().backward()
    optimizer.step()
    found = [f for pair in find_factors(model) for f in (pair.U, pair.V)]
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted)
