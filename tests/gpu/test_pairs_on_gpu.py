"""Every component over every projection on a device, forward and backward, against fp64 on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from snnk_peft.feature_map import FeatureMap
from tests.every_part import PAIRS, pair
from tests.gpu.agreement import agree, every_dtype, gradients_agree

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")]
KINK = 0.05  # a rounding must not decide on which side of a kink of f an argument lies


def away_from_kinks(feature_map: FeatureMap, dtype: torch.dtype) -> torch.Tensor:
    """Vectors (3, 8) none of whose projections is nearly 0."""
    for _ in range(200):
        x = (torch.randn(3, 8) / 2).to(dtype)
        z = copy.deepcopy(feature_map.projection).double()(x.double()).detach()
        if not bool(((z.abs() < KINK) & (z != 0)).any()):
            return x
    raise AssertionError("no such vectors were found")


@every_dtype
@pytest.mark.parametrize(("component", "projection"), PAIRS)
def test_every_pair(component, projection, dtype, device):
    rounded = pair(component, projection).to(dtype)
    truth, found = copy.deepcopy(rounded).double(), copy.deepcopy(rounded).to(device)
    given = away_from_kinks(rounded, dtype)
    for tower in ("phi", "psi"):
        x, y = given.double().requires_grad_(), given.to(device, copy=True).requires_grad_()
        expected, out = getattr(truth, tower)(x).dense(), getattr(found, tower)(y).dense()
        assert (out.device.type, out.dtype) == (device, dtype)
        agree(out, expected, dtype)
        direction = torch.randn_like(expected).to(dtype)
        expected.backward(direction.double())
        out.backward(direction.to(device))
        agree(y.grad, x.grad, dtype, times=4)
    if any(parameter.requires_grad for parameter in truth.parameters()):
        gradients_agree(found, truth, dtype)
