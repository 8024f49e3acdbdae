"""The fit of a named activation is shared by all layers; one of a user's function is not."""

from __future__ import annotations

import torch

from snnk_peft.functional import trigonometric_fit
from snnk_peft.functional.trigonometric_fit import ACTIVATIONS, fit_trigonometric


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
