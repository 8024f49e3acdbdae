"""Atoms of universal random features: mean and second moment by their formulas, and fits that are made once."""

from __future__ import annotations

import pytest
import torch

from snnk_peft.functional import trigonometric_fit
from snnk_peft.functional.trigonometric_fit import ACTIVATIONS, fit_trigonometric
from tests.trigonometric_atom import atom_phi, atom_psi, best_scale

DRAWS = 400_000


def setting(dim: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, w = (0.7 * torch.randn(dim, generator=generator, dtype=torch.float64) / dim**0.5 for _ in range(2))
    g = torch.randn(DRAWS, dim, generator=generator, dtype=torch.float64)
    return x, w, torch.tensor(0.4, dtype=torch.float64), g


@pytest.mark.parametrize(("a", "c"), [(1.0, 0.0), (0.0, 1.0), (0.8, -1.3)])
@pytest.mark.parametrize("scale", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("tau", [0.5, 1.5])
def test_mean(tau, scale, a, c):
    x, w, b, g = setting()
    products = (atom_phi(x, g, tau, scale) * atom_psi(w, b, g, tau, scale, a, c)).sum(-1)
    z = w @ x + b
    exact = a * torch.cos(tau * z) + c * torch.sin(tau * z)
    assert abs(products.mean() - exact) < 5 * products.std() / DRAWS**0.5


@pytest.mark.parametrize("bound", [0.05, 0.4])
def test_mean_of_bounded_features(bound):
    x, w, b, g = setting()
    products = (atom_phi(x, g, 1.2, 0.9, bound) * atom_psi(w, b, g, 1.2, 0.9, 0.8, -1.3, bound)).sum(-1)
    z = 1.2 * (w @ x + b)
    assert abs(products.mean() - (0.8 * torch.cos(z) - 1.3 * torch.sin(z))) < 5 * products.std() / DRAWS**0.5
    assert products.std() / DRAWS**0.5 < 0.02


@pytest.mark.parametrize("bound", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("scale", [0.8, 1.0, 1.4])
def test_second_moment(scale, bound):
    """E ‖Φ‖²‖Ψ‖² = ((1+4M)²/(1+8M))^{d/2} e^{τ²s²‖x‖² + ‖w‖²/(s²(1+8M))} for the cosine."""
    x, w, b, g = setting()
    tau = 1.2
    phi, psi = atom_phi(x, g, tau, scale, bound), atom_psi(w, b, g, tau, scale, bound=bound)
    sizes = phi.square().sum(-1) * psi.square().sum(-1)
    exact = torch.exp((tau * scale) ** 2 * x.square().sum() + w.square().sum() / (scale**2 * (1 + 8 * bound)))
    exact = exact * ((1 + 4 * bound) ** 2 / (1 + 8 * bound)) ** (len(x) / 2)
    assert abs(sizes.mean() - exact) < 5 * sizes.std() / DRAWS**0.5


def test_best_scale_minimises_the_second_moment():
    x, w, _, _ = setting()
    tau = 1.2

    def moment(scale: torch.Tensor) -> torch.Tensor:
        return torch.exp((tau * scale) ** 2 * x.square().sum() + w.square().sum() / scale**2)

    best = best_scale(x, w, tau)
    assert moment(best) < moment(best * 1.1)
    assert moment(best) < moment(best * 0.9)
    torch.testing.assert_close(moment(best), torch.exp(2 * tau * x.norm() * w.norm()))


def test_shapes():
    x, w, b, g = setting()
    assert atom_phi(x.expand(2, 3, -1), g[:7], 1.0, 1.0).shape == (2, 3, 7, 2)
    assert atom_psi(w.expand(4, -1), b.expand(4), g[:7], 1.0, 1.0).shape == (4, 7, 2)


# === fits are made once ===============================================================================================


def test_named_activations_are_fitted_once_per_setting():
    first = fit_trigonometric(ACTIVATIONS["gelu"], 6.0, 5, reach=1.0)
    assert fit_trigonometric(ACTIVATIONS["gelu"], 6.0, 5, reach=1.0) is first
    fresh = trigonometric_fit._fit(ACTIVATIONS["gelu"], 6.0, 5, 1.0)
    for given, expected in zip(first, fresh, strict=True):
        torch.testing.assert_close(torch.as_tensor(given), torch.as_tensor(expected), rtol=1e-9, atol=1e-12)
    others = [
        fit_trigonometric(ACTIVATIONS["tanh"], 6.0, 5, reach=1.0),
        fit_trigonometric(ACTIVATIONS["gelu"], 5.0, 5, reach=1.0),
        fit_trigonometric(ACTIVATIONS["gelu"], 6.0, 4, reach=1.0),
        fit_trigonometric(ACTIVATIONS["gelu"], 6.0, 5, reach=0.5),
    ]
    assert all(not torch.equal(first.cosines, other.cosines) for other in others)


def test_a_function_that_changes_is_fitted_again():
    slope = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def function(z):
        return (slope * z).sin().detach()

    first = fit_trigonometric(function, 3.0, 4)
    with torch.no_grad():
        slope.mul_(2)
    assert not torch.equal(fit_trigonometric(function, 3.0, 4).sines, first.sines)


def test_a_fit_made_without_gradients_serves_with_them():
    with torch.inference_mode():
        fit = fit_trigonometric(ACTIVATIONS["silu"], 4.5, 3, reach=0.25)
    z = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    fit(z).sum().backward()
    assert z.grad.isfinite().all()
