"""fit_potential.py: the potential of two particles from their wave function, and the energies in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from papers.lib.sine_network import PotentialNetwork, SineNetwork
from papers.lib.two_bodies import LocalEnergies, TwoBodies, energies_in, states_in
from papers.programs import fit_potential
from recipe_world import RECIPES, reset_accelerate

CONFIG = str(RECIPES / "papers/configs/potential/two_bodies.yaml")
SMALL = ["model.width=48", "train.steps=400", "train.eval_every=200", "train.learning_rate=3e-3", "data.points=1024"]


def test_the_local_energy_of_the_ground_state_is_its_energy() -> None:
    """−½ (∇²ψ)/ψ + V is ½ (ω + Ω) at every point: Schrödinger's equation, with the kinetic part from ln ψ alone."""
    system = TwoBodies(0.8, 1.1)
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    energy = torch.full((50,), system.energies(1)[0], dtype=torch.float64)
    torch.testing.assert_close(system.kinetic(x) + system.potential(x), energy)
    assert system.energies(1)[0] == pytest.approx((0.8 + (0.8**2 + 2.2) ** 0.5) / 2)
    assert system.kinetic(x).std() > 0.1


def test_energies_on_a_grid_are_exact_for_the_exact_potential() -> None:
    system = TwoBodies(1.0, 1.5)
    assert energies_in(system.potential, 5, reach=6.0) == pytest.approx(system.energies(5), abs=1e-5)
    assert system.energies(4) == pytest.approx([1.5, 2.5, 3.5, 3.5])


def test_exact_wave_functions_solve_the_equation_and_those_on_a_grid_are_theirs() -> None:
    """−½ ∇²ψ + V ψ = E ψ by automatic differentiation; overlaps of states without a twin are ±1."""
    system = TwoBodies(0.9, 1.0)
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    energies, at, found = states_in(system.potential, 4, reach=6.0)
    area = float(at[1, 0, 0] - at[0, 0, 0]) ** 2
    assert energies.tolist() == pytest.approx(system.energies(4), abs=1e-5)
    exact = torch.stack([system.wave_function(at, *state) for state in system.states(4)])
    torch.testing.assert_close(torch.einsum("iab,jab->ij", found, found) * area, torch.eye(4, dtype=torch.float64))
    overlaps = torch.einsum("iab,jab->ij", exact, found) * area
    torch.testing.assert_close(overlaps.abs(), torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-4)
    for state in system.states(4):
        psi = system.wave_function(x, *state)
        (slope,) = torch.autograd.grad(psi.sum(), x, create_graph=True)
        bend = sum(torch.autograd.grad(slope[:, i].sum(), x, retain_graph=True)[0][:, i] for i in range(2))
        torch.testing.assert_close(-bend / 2 + system.potential(x) * psi, system.energy(*state) * psi)
    ratio = system.wave_function(x, 0, 0).log() - system.log_psi(x)
    torch.testing.assert_close(ratio, ratio[:1].expand(40))


@pytest.mark.parametrize("snnk", [None, {"component": "cos", "projection": "gaussian", "num_features": 16}])
def test_the_loss_knows_no_potential_and_is_zero_at_the_right_one(snnk: dict | None) -> None:
    torch.manual_seed(0)
    system = TwoBodies()
    examples = LocalEnergies(system, 64, 3.0, 0)
    batch = examples.batch(range(64))
    assert set(batch) == {"coordinates", "kinetic"}
    network = PotentialNetwork(SineNetwork(2, 1, 16, 1, 1.0, snnk=snnk))
    assert float(network(**batch).loss.detach()) > 0.1
    assert float(network.potential(torch.zeros(1, 2)).detach()) == 0.0
    network.potential = lambda x: system.potential(x) + 3.0  # type: ignore[method-assign]
    assert float(network(**batch).loss) < 1e-8


def test_dense_and_snnk_find_the_potential(tmp_path: Path) -> None:
    for name, given, parameters in (
        ("dense", ["method.snnk=null"], 3 * 48 + 48 * 48 + 48 + 48 + 1),
        ("ours", [], 3 * 48 + 48 * 32 + 48 + 48 + 1),
    ):
        folder = tmp_path / name
        assert fit_potential.main([CONFIG, *SMALL, f"output.dir={folder}", *given]) == 0
        reset_accelerate()
        report = json.loads((folder / "metrics.json").read_text())
        assert report["score"] > 0.99, name
        assert report["trainable_parameters"] == parameters
        assert report["exact_energies"] == [1.5, 2.5, 3.5, 3.5]
        worst = max(abs(a / b - 1) for a, b in zip(report["energies"], report["exact_energies"], strict=True))
        assert report["largest_relative_error_of_an_energy"] == pytest.approx(worst)
        assert worst < 0.1
        assert (folder / "potential.png").stat().st_size > 10_000
    assert fit_potential.main([CONFIG, *SMALL, f"output.dir={folder}", "--overwrite", "train.steps=2"]) == 0
