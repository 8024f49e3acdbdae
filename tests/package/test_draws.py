"""Draws: the same on every machine, with checksums, and the maps that are formed from them kept while they hold."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from snnk_peft import COMPONENTS, PROJECTIONS, build_feature_map
from snnk_peft.errors import ConfigError
from snnk_peft.functional.random_numbers import (
    normal_numbers,
    random_choices,
    random_permutation,
    random_signs,
    uniform_numbers,
)
from snnk_peft.layers.adapter import GatedReadout
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.snnk_linear import SNNKLinear
from snnk_peft.projections.base_drawn import draw_checksum

VARIANTS = {
    "orf": [{"norms": "sqrt_dim"}, {"norms": "chi_pairs"}],
    "qmc": [{"sequence": "halton"}, {"scramble": False}],
    "rom": [{"complex_unit": True}],
    "simrf": [{"coupling": "weight_dependent"}],
    "sgq": [{"rotate": True}],
    "poisson": [{"rate": 30.0}],
    "dct": [{"rounds": 1}],
    "pmodel": [{"structure": "toeplitz"}],
    "free": [{"init": "orf"}],
    "bbq": [{"points": "random"}],
    "fastfood_learned": [{"learn": "S"}],
}
DRAWING_COMPONENTS = {
    "hrf": [{}],
    "polysketch": [{"degree": 8}],
    "trigrf": [{"form": "phase", "kernel": "cauchy"}, {"kernel": "matern32"}],
    "urf": [{"sampling": "iid", "atoms": 4}],
}


def all_draws(projections, components) -> dict[str, torch.Tensor]:
    """Everything that is drawn, by name; parameters of what is learned included."""
    found = {}
    for dim, rows in ((2, 12), (24, 60)):
        for name in projections:
            cls = projections[name]
            for params in [{}, *VARIANTS.get(name, [])]:
                m = cls.nearest_size(dim, rows, **params)
                w = cls(dim, m, seed=3, site="there", **params)
                found |= {f"{name}{params}.{dim}.{key}": value.detach() for key, value in w.state_dict().items()}
                if cls.redrawable:
                    w = cls(dim, m, seed=3, site="there", save=False, **params)
                    found[f"{name}{params}.{dim}.checksum"] = w.checksum
    for name, variants in DRAWING_COMPONENTS.items():
        for params in variants:
            component = components[name](**params)
            component.prepare(projections["gaussian"](24, 60, seed=3))
            found |= {f"{name}{params}.{key}": value for key, value in component.state_dict().items()}
    return found


# The registries alone, without transformers: a process that takes a second.
THERE = """
import importlib.util, pathlib, sys, types
import torch
tests, out = sys.argv[1:]
package = types.ModuleType("snnk_peft")
package.__path__ = [str(pathlib.Path(tests).parents[2] / "snnk_peft")]
sys.modules["snnk_peft"] = package
from snnk_peft.components import COMPONENTS
from snnk_peft.projections import PROJECTIONS
source = pathlib.Path(tests).read_text()
start, end = source.index("VARIANTS = {"), source.index("# The registries alone")
space = {"torch": torch}
exec(source[start:end], space)
torch.save(space["all_draws"](PROJECTIONS, COMPONENTS), out)
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """What a process draws whose torch uses no vector instructions."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this torch uses no vector instructions; there is no other path to compare with")
    out = tmp_path_factory.mktemp("draws") / "draws.pt"
    done = subprocess.run(
        [sys.executable, "-c", THERE, str(Path(__file__)), str(out)],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "DEFAULT"
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def here():
    return all_draws(PROJECTIONS, COMPONENTS)


def test_every_matrix_is_drawn_alike(here, elsewhere):
    assert here.keys() == elsewhere.keys()
    assert len(here) > 2 * len(PROJECTIONS.names())
    for key, value in here.items():
        if key.endswith("checksum"):
            continue
        torch.testing.assert_close(value, elsewhere[key], rtol=1e-6, atol=1e-6, msg=lambda t, key=key: f"{key}: {t}")


def test_checksums_from_elsewhere_are_accepted(here, elsewhere):
    checked = 0
    for name in PROJECTIONS:
        cls = PROJECTIONS[name]
        for params in [{}, *VARIANTS.get(name, [])] if cls.redrawable else []:
            m = cls.nearest_size(24, 60, **params)
            w = cls(24, m, seed=3, site="there", save=False, **params)
            w.load_state_dict({"checksum": elsewhere[f"{name}{params}.24.checksum"]})
            checked += 1
    assert checked > 10


def test_a_checksum_bears_last_bits_and_nothing_else():
    w = PROJECTIONS["orf"](24, 60, seed=3, site="s", save=False)
    near = torch.nextafter(w.weight, torch.tensor(9.0))
    w.verify(draw_checksum({"weight": near}))
    one_off = w.weight.clone()
    one_off[7, 3] += 0.01
    for other in (one_off, -w.weight, w.weight.flip(0), w.weight.T.reshape(60, 24), w.weight * 1.001):
        with pytest.raises(ConfigError, match=r"checksum of the redrawn projection of 's' \(seed 3\) differs"):
            w.verify(draw_checksum({"weight": other}))
    with pytest.raises(ConfigError, match="differs"):
        w.verify(draw_checksum({"weight": torch.full_like(w.weight, torch.nan)}))
    fast = PROJECTIONS["fastfood"](24, 60, save=False, fast=True)
    drawn = {name: getattr(fast, name).clone() for name in fast._drawn}
    fast.verify(draw_checksum(drawn))
    drawn["permutation"][:2] = drawn["permutation"][:2].flip(0)
    with pytest.raises(ConfigError, match="differs"):
        fast.verify(draw_checksum(drawn))


def test_a_file_of_the_first_method_is_refused_by_its_name():
    w = PROJECTIONS["gaussian"](4, 5, site="s", save=False)
    earlier = torch.tensor(list(b"\x07" * 32), dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"earlier version, which drew .* torch.randn.*save_projection=True"):
        w.load_state_dict({"checksum": earlier})
    later = w.checksum.clone()
    later[3] = 9
    with pytest.raises(ConfigError, match="made by method 9 of drawing matrices; this snnk_peft has method 2"):
        w.load_state_dict({"checksum": later})


def test_what_is_no_checksum_is_refused_as_such():
    w = PROJECTIONS["gaussian"](4, 5, site="s", save=False)
    for wrong in (w.checksum.reshape(4, 8), w.checksum.to(torch.complex64), w.checksum.long(), w.checksum[:8]):
        with pytest.raises(ConfigError, match="checksum of the redrawn projection"):
            w.verify(wrong)


def test_a_saved_matrix_is_taken_as_it_is():
    w = PROJECTIONS["gaussian"](4, 5, seed=1)
    w.load_state_dict({"weight": torch.arange(20.0).reshape(5, 4)})
    assert w.materialize()[4, 3] == 19


def test_numbers_have_their_distributions():
    generator = torch.Generator().manual_seed(0)
    n = 200_000
    u = uniform_numbers(n, generator=generator)
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    z = normal_numbers(n, generator=generator)
    # Moments within five standard errors: Var z = 1, Var z² = 2, Var z³ = 15, Var z⁴ = 96.
    for power, (mean, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs(z.pow(power).mean() - mean) < 5 * (variance / n) ** 0.5
    assert abs(u.mean() - 0.5) < 5 / (12 * n) ** 0.5
    assert abs(random_signs(n, generator=generator).mean()) < 5 / n**0.5
    assert random_permutation(n, generator).sort().values.equal(torch.arange(n))
    first = torch.stack([random_permutation(3, generator)[0] for _ in range(900)]).bincount()
    assert (first - 300).abs().max() < 5 * (900 * 2 / 9) ** 0.5
    shares = random_choices(torch.tensor([0.5, 0.0, 0.3, 0.2]), n, generator).bincount(minlength=4) / n
    assert (shares - torch.tensor([0.5, 0.0, 0.3, 0.2])).abs().max() < 5 * 0.5 / n**0.5
    assert shares[1] == 0


def test_draws_move_the_generator_on_and_leave_the_global_one_alone():
    generator, state = torch.Generator().manual_seed(0), torch.get_rng_state()
    first, second = (normal_numbers(5, generator=generator) for _ in range(2))
    assert not torch.equal(first, second)
    again = torch.Generator().manual_seed(0)
    assert torch.equal(normal_numbers(5, generator=again), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_initial_readouts_are_drawn_alike(monkeypatch):
    """Nothing in the package draws numbers by a function of torch that is vectorised."""

    def forbidden(*args, **kwargs):
        raise AssertionError("drawn by torch")

    for name in ("randn", "rand", "normal", "poisson", "multinomial", "randperm", "bernoulli"):
        monkeypatch.setattr(torch, name, forbidden)
    for name in ("normal_", "uniform_", "exponential_"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    here = all_draws(PROJECTIONS, COMPONENTS)
    assert len(here) > len(PROJECTIONS.names())
    stage = FeatureStage(build_feature_map("relu", "orf", 6, 8))
    for init in ("random", "paper"):
        GatedReadout(stage, init=init, gate=True, generator=torch.Generator())
    linear = torch.nn.Linear.__new__(torch.nn.Linear)
    torch.nn.Module.__init__(linear)
    linear.weight, linear.bias, linear.out_features = torch.nn.Parameter(torch.ones(3, 6)), None, 3
    layer = SNNKLinear.from_linear(linear, torch.relu, stage, init="random", generator=torch.Generator())
    assert layer.A.std() > 0.1


# === maps that are kept ===============================================================================================


DIM, HEADS = 8, 2


def layer(component: str = "posrf", projection: str = "orf", maps: int = 1, **more: Any) -> KernelAttention:
    made = [build_feature_map(component, projection, DIM, 16, site=str(i)) for i in range(maps)]
    return KernelAttention(made, HEADS, **more).requires_grad_(False)


def inputs(**more: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, 5, DIM, generator=generator).to(**more) for _ in range(3)]


def matrix(attention: KernelAttention) -> Any:
    return attention.maps()[0].projection


@pytest.fixture
def formed(monkeypatch) -> list[AttentionTerm]:
    """Grows by one entry whenever logarithms are formed."""
    found: list[AttentionTerm] = []
    form = AttentionTerm.logarithms

    def watched(term: AttentionTerm, *args: Any) -> Any:
        found.append(term)
        return form(term, *args)

    monkeypatch.setattr(AttentionTerm, "logarithms", watched)
    return found


@pytest.mark.parametrize("maps", [1, HEADS])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("near", [{}, {"near_field": 2, "joint": True}], ids=["", "joint"])
def test_formed_once(formed, near, causal, maps):
    attention = layer(maps=maps, **near)
    first = attention(*inputs(), causal=causal)
    count = len(formed)
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(attention(*inputs(), causal=causal), first)
    assert len(formed) == count


def rewrite(attention: KernelAttention) -> None:
    matrix(attention).weight.mul_(1.5)


def point_elsewhere(attention: KernelAttention) -> None:
    """Twice, so that the memory of the first may be that of the third."""
    for _ in range(2):
        matrix(attention).weight.data = matrix(attention).weight * 1.5


def load(attention: KernelAttention) -> None:
    attention.load_state_dict({name: value * 1.5 for name, value in attention.state_dict().items()})


def assign(attention: KernelAttention) -> None:
    attention.load_state_dict({name: value * 1.5 for name, value in attention.state_dict().items()}, assign=True)


def other_map(attention: KernelAttention) -> None:
    attention.terms[0].feature_maps[0] = build_feature_map("posrf", "orf", DIM, 16, seed=1)


def other_matrix(attention: KernelAttention) -> None:
    attention.maps()[0].projection = build_feature_map("posrf", "orf", DIM, 16, seed=1).projection


def other_setting(attention: KernelAttention) -> None:
    attention.maps()[0].component.kernel_name = "gaussian"


def draw_anew(attention: KernelAttention) -> None:
    matrix(attention).seed = 1
    matrix(attention).redraw()


def hooked(attention: KernelAttention) -> None:
    matrix(attention).register_forward_hook(lambda module, args, out: out * 1.5)


CHANGES = [rewrite, point_elsewhere, load, assign, other_map, other_matrix, other_setting, draw_anew, hooked]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_is_formed_anew(change: Callable[[KernelAttention], None]):
    attention = layer()
    before = attention(*inputs())
    change(attention)
    found = attention(*inputs())
    fresh = layer()
    change(fresh)
    torch.testing.assert_close(found, fresh(*inputs()), rtol=0, atol=0)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_goes_its_own_way(copied):
    attention = layer()
    first = attention(*inputs())
    other = copied(attention)
    rewrite(other)
    assert torch.equal(attention(*inputs()), first)
    assert not torch.equal(other(*inputs()), first)


@pytest.mark.parametrize(("kwargs"), [{"fused": True}, {"foreach": True}], ids=str)
def test_what_learns_is_formed_anew(kwargs):
    """A fused optimizer writes to parameters without counting a version; weights may be frozen in between."""
    attention = layer(projection="free")
    optimizer = torch.optim.AdamW(matrix(attention).parameters(), lr=0.1, **kwargs)
    seen: list[torch.Tensor] = []
    for _ in range(3):
        attention.requires_grad_(True)
        attention(*inputs()).square().sum().backward()
        optimizer.step()
        for learns in (True, False):
            attention.requires_grad_(learns)
            with torch.no_grad():
                seen.append(attention(*inputs()))
            expected = layer(projection="free")
            expected.load_state_dict(attention.state_dict())
            assert torch.equal(seen[-1], expected(*inputs()))
    assert not torch.equal(seen[0], seen[-1])
    with torch.no_grad():  # as averages of weights are put in place
        attention.requires_grad_(True)
        matrix(attention).weight.data.mul_(1.5)
        assert not torch.equal(attention(*inputs()), seen[-1])


def test_gradients_pass_what_was_formed_without_them():
    attention = layer()
    with torch.inference_mode():
        attention(*inputs())
    leaves = [x.requires_grad_() for x in inputs()]
    found = torch.autograd.grad(attention(*leaves).square().sum(), leaves)
    again = [x.requires_grad_() for x in inputs()]
    torch.testing.assert_close(found, torch.autograd.grad(layer()(*again).square().sum(), again), rtol=0, atol=0)


def test_other_dtypes_and_temperatures_are_others():
    attention = layer()
    first = attention(*inputs())
    assert attention(*inputs(dtype=torch.float64)).dtype == torch.float64
    assert not torch.equal(attention(*inputs(), scaling=1.0), first)
    assert torch.equal(attention(*inputs()), first)


def test_whoever_looks_at_operations_sees_all_of_them(formed):
    """Compilers, function calls with other weights, dispatch modes (which count, or compute nothing)."""
    attention = layer()
    first = attention(*inputs())
    compiled = torch.compile(lambda *x: attention(*x), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs()), first)
    others = {name: value * 1.5 for name, value in attention.state_dict().items()}
    other = torch.func.functional_call(attention, others, tuple(inputs()))
    assert not torch.equal(other, first)
    assert torch.equal(attention(*inputs()), first)
    count = len(formed)
    with FlopCounterMode(display=False):
        attention(*inputs())
    assert len(formed) == count + 1
    rewrite(attention)
    torch.testing.assert_close(compiled(*inputs()), other)


def test_nothing_of_it_is_saved():
    attention = layer()
    before = set(attention.state_dict())
    attention(*inputs())
    assert set(attention.state_dict()) == before
    assert not any(isinstance(value, nn.Module) for value in vars(attention.terms[0]._kept).values())
