"""When two devices agree: both are compared with fp64 on the CPU, on the very numbers that the device is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

# Of the largest entry. Half precision has 11 and 8 bits: what is a rounding in one product is several in a model.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def agree(found: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    """Fail where `found`, computed in `dtype` on a device, is further from `truth` than its roundings explain.

    Args:
        found: on any device.
        truth: in fp64 on the CPU, from the same numbers.
        dtype: in which `found` was computed.
        times: how many times the usual tolerance.
    """
    assert truth.dtype == torch.float64
    assert found.shape == truth.shape
    found, truth = found.detach().cpu().double(), truth.detach()
    bound = times * TOLERANCE[dtype] * float(truth.abs().max())
    error = float((found - truth).abs().max()) if found.numel() else 0.0
    assert error <= bound, f"off by {error:.3g}, allowed are {bound:.3g} (largest entry {float(truth.abs().max()):.3g})"


def gradients_agree(found: torch.nn.Module, truth: torch.nn.Module, dtype: torch.dtype, times: float = 1.0) -> None:
    """The same of the gradients of all trained parameters, by their lengths: single units may switch by a rounding."""
    expected = {name: p.grad for name, p in truth.named_parameters() if p.requires_grad}
    assert expected
    largest = max(float(gradient.norm()) for gradient in expected.values() if gradient is not None)
    for name, parameter in found.named_parameters():
        if not parameter.requires_grad:
            continue
        wanted = expected[name]
        assert parameter.grad is not None, f"{name} got no gradient"
        assert wanted is not None
        off = float((parameter.grad.cpu().double() - wanted).norm())
        bound = 4 * times * TOLERANCE[dtype] * max(float(wanted.norm()), 0.02 * largest)
        assert off <= bound, f"gradient of {name} is off by {off:.3g}, allowed are {bound:.3g}"


def moved(inputs: dict[str, Any], device: str, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Model inputs on a device, numbers that are not whole in `dtype`."""
    return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}
