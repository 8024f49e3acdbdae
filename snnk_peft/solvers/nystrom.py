"""The data-free readout: the best linear map from features to a pretrained layer's outputs under Gaussian inputs.

For inputs x ~ N(mean, diag(std²)), a layer f(W x + b) and features φ(x) = s·g(G x + c), the minimiser of
E‖f(Wx + b) − A φ(x) − a‖² is the Nyström form

    A = K_fg K_gg^{-1} / s,     K_fg = Cov(f(w_i·x + b_i), g(g_j·x + c_j)),   K_gg likewise,   a = E f − A E φ

(second moments instead of covariances without intercept). Only weights enter: a preceding LayerNorm's bias and weight
are the mean and standard deviation of its output. The paper's own initialisation A = Φ(W) does not approximate the
layer; this one is optimal for the given features, and equals the layer if G contains its rows.

Kernels: closed forms for ReLU-ReLU (half the arc-cosine kernel of order 1) and GELU-GELU when pre-activations have
mean zero, Hermite series otherwise, with pairs of fully correlated units (equal or opposite rows) by direct quadrature.
Cost: O(l m (d + degree) + m³), in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError
from snnk_peft.functional.activation_kernels import arccos_from_cosine, gelu_kernel_from_moments
from snnk_peft.functional.gauss_hermite import (
    ScalarFunction,
    dual_kernel,
    gaussian_product,
    hermite_coefficients,
)
from snnk_peft.solvers.ridge import Readout, solve_symmetric


class _Units(NamedTuple):
    """Scalar units function(z_i), z_i ~ N(mean_i, std_i²); `direction` (n, d) gives the correlations of the z_i."""

    function: ScalarFunction
    mean: Tensor
    std: Tensor
    direction: Tensor
    coefficients: Tensor


def _units(
    function: ScalarFunction, rows: Tensor, offset: Tensor | None, mean: Tensor, std: Tensor, degree: int
) -> _Units:
    rows = rows.double()
    centre = rows @ mean if offset is None else rows @ mean + offset.double()
    scaled = rows * std
    spread = torch.linalg.vector_norm(scaled, dim=1)
    direction = scaled / torch.where(spread > 0, spread, 1.0).unsqueeze(1)
    return _Units(function, centre, spread, direction, hermite_coefficients(function, centre, spread, degree))


def _same_function(f: ScalarFunction, g: ScalarFunction) -> bool:
    """Compare two elementwise functions by value: activations come as functions, modules and library classes."""
    grid = torch.linspace(-10, 10, 401, dtype=torch.float64)
    return torch.allclose(f(grid), g(grid), rtol=1e-12, atol=1e-12)


def _second_moment(a: _Units, b: _Units) -> Tensor:
    """Compute E[f(z_i) g(z_j)] for all pairs, (n_a, n_b)."""
    rho = (a.direction @ b.direction.T).clamp(-1, 1)
    if not a.mean.any() and not b.mean.any():
        if _same_function(a.function, torch.relu) and _same_function(b.function, torch.relu):
            return torch.outer(a.std, b.std) * arccos_from_cosine(rho, 1) / 2
        gelu = torch.nn.functional.gelu
        if _same_function(a.function, gelu) and _same_function(b.function, gelu):
            covariance = torch.outer(a.std, b.std) * rho
            return gelu_kernel_from_moments(a.std.square().unsqueeze(1), b.std.square().unsqueeze(0), covariance)
    moment = dual_kernel(a.coefficients, b.coefficients, rho)
    # Truncating the series matters only at |rho| = 1: there a single integral is exact.
    i, j = (rho.abs() > 1 - 1e-9).nonzero(as_tuple=True)
    if len(i):
        signed_std = b.std[j] * rho[i, j].sign()
        moment[i, j] = gaussian_product(a.function, b.function, a.mean[i], a.std[i], b.mean[j], signed_std)
    return moment


def nystrom_readout(
    weight: Tensor,
    bias: Tensor | None,
    activation: ScalarFunction,
    projection: Tensor,
    offset: Tensor | None,
    feature_function: ScalarFunction,
    *,
    feature_scale: float | Tensor = 1.0,
    input_mean: Tensor | None = None,
    input_std: Tensor | None = None,
    intercept: bool = True,
    ridge: float = 1e-10,
    degree: int = 64,
) -> Readout:
    """Return the readout minimising E‖f(Wx + b) − A φ(x) − a‖² for Gaussian x, with φ(x) = feature_scale·g(Gx + c).

    Features made of several functions, such as [cos, sin], are written with one function and repeated rows:
    sin z = cos(z − π/2).

    Args:
        weight: W (l, d), the pretrained weight as nn.Linear stores it.
        bias: b (l,) or None.
        activation: f, elementwise (torch.relu, nn.GELU(), ...), evaluated in fp64.
        projection: G (m, d), the feature rows.
        offset: c (m,) or None.
        feature_function: g, elementwise.
        feature_scale: s, a nonzero number or (m,), e.g. m^-½.
        input_mean: (d,) mean of the inputs; default 0.
        input_std: (d,) standard deviations of the inputs (signs are ignored, so a LayerNorm weight will do); default 1.
        intercept: fit the bias a as well. Without it, A is also right if the layer has no bias to put it in.
        ridge: added to the diagonal of K_gg as a fraction of its mean; raise it (1e-6 to 1e-2) to keep A small if
            features nearly coincide or inputs are far from Gaussian. 0 gives the pseudo-inverse if rows coincide.
        degree: Hermite degree used if no closed form applies.

    Returns:
        Readout: weight A (l, m) and bias (l,) or None in the weight's dtype; `relative_error` is the predicted
        E‖f(Wx + b) − Aφ − a‖² / Σ_i Var f(w_i·x + b_i).

    Raises:
        ConfigError: shapes that do not fit, a negative ridge, a zero scale; reports all at once.
        ValueError: a tensor that holds NaN or infinity, or a function that overflows.
    """
    (out_dim, d), m = weight.shape, len(projection)
    tensors: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "weight": (weight, (out_dim, d)),
        "bias": (bias, (out_dim,)),
        "projection": (projection, (m, d)),
        "offset": (offset, (m,)),
        "input_mean": (input_mean, (d,)),
        "input_std": (input_std, (d,)),
    }
    scale = torch.as_tensor(feature_scale, dtype=torch.float64, device=weight.device)
    faults = [
        f"{name} is {tuple(tensor.shape)}; expected {shape}"
        for name, (tensor, shape) in tensors.items()
        if tensor is not None and tensor.shape != shape
    ]
    if scale.shape not in {(), (m,)} or not scale.all():
        faults.append(f"feature_scale is {feature_scale}; expected a nonzero number or {m} nonzero numbers")
    if not 0 <= ridge < float("inf"):
        faults.append(f"ridge is {ridge}; expected a finite number >= 0")
    if faults:
        raise ConfigError(faults)
    for name, (tensor, _) in tensors.items():
        if tensor is not None and not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds NaN or infinite entries; expected finite numbers")
    with torch.no_grad():
        ones = torch.ones(d, dtype=torch.float64, device=weight.device)
        mean = torch.zeros_like(ones) if input_mean is None else input_mean.to(ones)
        std = ones if input_std is None else input_std.to(ones).abs()
        layer = _units(activation, weight, bias, mean, std, degree)
        features = _units(feature_function, projection, offset, mean, std, degree)
        cross, gram = _second_moment(layer, features), _second_moment(features, features)
        energy = gaussian_product(activation, activation, layer.mean, layer.std, layer.mean, layer.std)
        layer_mean, feature_mean = layer.coefficients[:, 0], features.coefficients[:, 0]
        variance = energy - layer_mean.square()
        if intercept:
            cross = cross - torch.outer(layer_mean, feature_mean)
            gram = gram - torch.outer(feature_mean, feature_mean)
            energy = variance
        A = solve_symmetric(gram, cross, ridge * float(gram.diagonal().mean()))
        risk = energy.sum() - (A * (2 * cross - A @ gram)).sum()
        total = float(variance.sum())
        relative_error = max(float(risk), 0.0) / total if total > 0 else 0.0
        readout_bias = (layer_mean - A @ feature_mean).to(weight.dtype) if intercept else None
        return Readout((A / scale).to(weight.dtype), readout_bias, relative_error)
