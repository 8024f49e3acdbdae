"""An adapter as one operation: r + β (f(z) − γ c) Mᵀ with z = α x̂ Wᵀ + b, x̂ = x or LayerNorm(x).

A training step of adapters is bound by its number of operations, so factors are absorbed into matrix products
and the backward pass is explicit. Gradients flow to x, r, W, b and M, and are only computed where needed. If
second derivatives are requested, the backward pass is that of the formula.

Shapes: x (..., dim), r (..., out), W (m, dim), b and c (m,), M (out, m) -> (..., out), in the dtype of r.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from snnk_peft.functional.backend import dispatched
from snnk_peft.functional.normalized_projection import EPSILON
from snnk_peft.functional.precision import wide


class Elementwise(Protocol):
    """f and its derivative: a component with `gradient`; `in_kernels` is its name there, or ""."""

    in_kernels: str

    def function(self, z: Tensor) -> Tensor: ...

    def gradient(self, z: Tensor, grad: Tensor) -> Tensor:
        """Return grad · f′(z)."""


class AdapterForm(NamedTuple):
    """The settings of `adapter_sum` that are not tensors.

    Attributes:
        component: f; None if x already holds features.
        normalize: whether x̂ is LayerNorm(x), without weights.
        scale: α.
        centring: γ.
        factor: β.
        dtype: dtype in which features and M are multiplied.
    """

    component: Elementwise | None
    normalize: bool
    scale: float
    centring: float
    factor: float
    dtype: torch.dtype


@dispatched
def adapter_sum(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    low: Tensor | None,
    bias: Tensor | None,
    centres: Tensor | None,
    matrix: Tensor,
    form: AdapterForm,
) -> Tensor:
    """Compute r + β (f(z) − γ c) Mᵀ, or r + β x Mᵀ for features x if `form` has no component; r defaults to x.

    `low` is W in the dtype in which x̂ is multiplied with it and takes no gradient; the centres c are not trained.
    """
    if torch.is_grad_enabled():  # if nothing needs one, the function detects that itself
        found: Tensor = _AdapterSum.apply(x, residual, weight, low, bias, centres, matrix, form)
    else:
        found = _forward(x, residual, low, bias, centres, matrix, form)[0]
    # Here, because a view returned by a Function must not be modified in place.
    return found.view((*x.shape[:-1], found.shape[-1]))


class _AdapterSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        low: Tensor | None,
        bias: Tensor | None,
        centres: Tensor | None,
        matrix: Tensor,
        form: AdapterForm,
    ) -> Tensor:
        found, narrow, features, z, *moments = _forward(x, residual, low, bias, centres, matrix, form)
        of_x, _, of_weight, _, of_bias, _, of_matrix, _ = ctx.needs_input_grad
        inward = (x, weight, low, bias, centres, z, *moments) if of_x or of_weight or of_bias else (None,) * 9
        ctx.form, ctx.adds_x, ctx.shape = form, residual is None, x.shape if residual is None else residual.shape
        ctx.save_for_backward(*inward, features if of_matrix else None, matrix, narrow)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _of_the_formula(ctx, g)
        x, weight, low, bias, _, z, *moments, features, matrix, narrow = ctx.saved_tensors
        of_x, of_residual, of_weight, _, of_bias, _, of_matrix, _ = ctx.needs_input_grad
        form: AdapterForm = ctx.form
        dx = dweight = dbias = dmatrix = None
        grad = g.to(form.dtype)
        if of_matrix:
            dmatrix = _readout_gradient(grad, features, narrow, form.factor).to(matrix.dtype)
        if x is not None:
            # All is linear in g: if no bias needs dz itself, the scale of the next product is absorbed into this one.
            flat = _flat(x)
            here, there = (form.scale, 1.0) if bias is None else (1.0, form.scale)
            dz = _product(grad, narrow, form.factor * here, narrow.select(0, 0))
            if form.component is None:
                dx = dz.to(x.dtype).view(x.shape)
            else:
                dz = form.component.gradient(z, dz.to(z.dtype))
                dbias = dz.sum(0).to(bias.dtype) if of_bias else None
                if of_weight:
                    seen = _normalized(flat, low)[0] if form.normalize else flat
                    dweight = _product(dz.t(), seen.to(low.dtype), there, low).to(weight.dtype)
                if of_x:
                    added = g if ctx.adds_x else None
                    dx = _input_gradient(dz, flat, low, form, there, _Moments(*moments), added).view(x.shape)
        dresidual = g.view(ctx.shape) if of_residual else None
        return dx, dresidual, dweight, None, dbias, None, dmatrix, None


def _forward(
    x: Tensor,
    residual: Tensor | None,
    low: Tensor | None,
    bias: Tensor | None,
    centres: Tensor | None,
    matrix: Tensor,
    form: AdapterForm,
) -> tuple[Any, ...]:
    """Compute the sum (tokens, out); M and the features in the dtype of the product; z, and moments of x."""
    flat = _flat(x)
    features, z, moments = _features(flat, low, bias, centres, form)
    narrow = matrix.to(form.dtype)
    added = flat if residual is None else _flat(residual)
    if added.dtype == features.dtype:
        found = torch.addmm(added, features, narrow.t(), alpha=form.factor)
    else:  # rounded once
        found = torch.add(added, features.mm(narrow.t()), alpha=form.factor).to(added.dtype)
    return found, narrow, features, z, *moments


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Moments(NamedTuple):
    """Values that LayerNorm's own backward pass reads, if x is normalised."""

    mean: Tensor | None = None
    rstd: Tensor | None = None
    gain: Tensor | None = None


def _normalized(x: Tensor, low: Tensor) -> tuple[Tensor, _Moments]:
    """Compute LayerNorm(x), in the dtype of x or finer."""
    exact, gain = _exact(x, low), None
    if exact.dtype.itemsize < 4 and x.device.type == "cpu":
        gain = torch.ones(x.shape[-1])  # without a gain in fp32, a CPU rounds mean and deviation to the dtype of x
    seen, mean, rstd = torch.native_layer_norm(exact, [x.shape[-1]], gain, None, EPSILON)
    return seen, _Moments(mean, rstd, gain)


def _exact(x: Tensor, low: Tensor) -> Tensor:
    return x if x.dtype == low.dtype and x.device.type in ("cpu", "cuda", "meta") else wide(x)


def _features(
    x: Tensor, low: Tensor | None, bias: Tensor | None, centres: Tensor | None, form: AdapterForm
) -> tuple[Tensor, Tensor | None, _Moments]:
    """Compute f(z) − γ c (tokens, m), in the dtype of the readout; z; moments."""
    if form.component is None or low is None:
        return x.to(form.dtype), None, _Moments()
    seen, moments = _normalized(x, low) if form.normalize else (x, _Moments())
    z = _product(seen.to(low.dtype), low.t(), form.scale, low.select(1, 0), bias)
    values = form.component.function(z)
    if centres is not None:
        # In place, the difference of two numbers in half precision is rounded once.
        recorded = values is z or torch.is_grad_enabled()
        values = (torch.sub if recorded else torch.Tensor.sub_)(values, centres, alpha=form.centring)
    return values.to(form.dtype), z, moments


def _product(a: Tensor, b: Tensor, factor: float, unread: Tensor, added: Tensor | None = None) -> Tensor:
    """Compute factor · a b plus a vector in each row; `unread` is any tensor that broadcasts to its shape."""
    if added is not None:
        return torch.addmm(added.to(a.dtype), a, b, alpha=factor)
    return a.mm(b) if factor == 1.0 else torch.addmm(unread, a, b, beta=0, alpha=factor)


def _readout_gradient(g: Tensor, features: Tensor, matrix: Tensor, factor: float) -> Tensor:
    """Compute factor · gᵀ features, (out, m)."""
    if g.device.type == "cpu" and g.dtype.itemsize >= 4:
        # gᵀz takes CPU libraries up to ten times as long as zᵀg.
        return _product(features.t(), g, factor, matrix.t()).t().contiguous()
    return _product(g.t(), features, factor, matrix)


def _input_gradient(
    dz: Tensor, x: Tensor, low: Tensor, form: AdapterForm, scale: float, moments: _Moments, added: Tensor | None
) -> Tensor:
    """Return the gradient for x (tokens, dim) plus a further term, in the dtype of x."""
    if not form.normalize and added is not None and added.dtype == dz.dtype:
        return torch.addmm(added, dz, low, alpha=scale)
    found = _product(dz, low, scale, low.select(0, 0))
    if form.normalize:
        exact, mask = _exact(x, low), [True, False, False]
        back, shape = torch.ops.aten.native_layer_norm_backward, [x.shape[-1]]
        found = back(found.to(exact.dtype), exact, shape, moments.mean, moments.rstd, moments.gain, None, mask)[0]
    if added is None:
        return found.to(x.dtype)
    return (found.add_(added) if found.dtype.itemsize >= added.dtype.itemsize else added + found).to(x.dtype)


def _of_the_formula(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients as functions of all inputs, so that they can be differentiated again."""
    x, weight, low, bias, centres, *_, features, matrix, _ = ctx.saved_tensors
    form, needed = ctx.form, ctx.needs_input_grad
    if x is not None:
        features = _features(_flat(x), None if low is None else weight.to(low.dtype), bias, centres, form)[0]
    term = (features @ matrix.to(form.dtype).t() * form.factor).to(g.dtype)
    given = {0: x, 2: weight, 4: bias, 6: matrix}
    wanted = {place: tensor for place, tensor in given.items() if needed[place]}
    found = torch.autograd.grad(term, list(wanted.values()), g, create_graph=True, allow_unused=True)
    grads: list[Tensor | None] = [None] * 8
    for place, grad in zip(wanted, found, strict=True):
        grads[place] = grad
    if needed[0] and ctx.adds_x:
        straight = g.view(ctx.shape)
        grads[0] = straight if grads[0] is None else grads[0] + straight
    if needed[1]:
        grads[1] = g.view(ctx.shape)
    return tuple(grads)


def product_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype in which factors of `dtype` are multiplied: autocast's if enabled, except for fp64."""
    # Where there is no autocast ("meta"), checking whether it is on is an error.
    if dtype == torch.float64 or not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return dtype
    return torch.get_autocast_dtype(device)


def residual_linear(x: Tensor, features: Tensor, weight: Tensor) -> Tensor:
    """Compute x + features · weightᵀ in the dtype of x (..., dim), for features (..., m) and weight (dim, m).

    The sum is fused into the matrix product: on its own, it would read and write every hidden state once more.

    Raises:
        ValueError: a weight without values. The fused product would return whatever its memory holds.
    """
    if weight.is_meta and not x.is_meta:
        raise ValueError(
            "a readout is on the meta device, so it has no values yet, and its inputs are not; load its checkpoint "
            "(peft.set_peft_model_state_dict(model, state_dict, low_cpu_mem_usage=True)), or make the adapter without "
            "low_cpu_mem_usage"
        )
    same = x.dtype == features.dtype == weight.dtype
    device = x.device.type
    # Where there is no autocast ("meta"), checking whether it is on is an error.
    if same and not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        # Mᵀ as rows, not as a view of M: autograd would take the gradient as gᵀz, (dim, tokens) times (tokens, m),
        # for which CPU libraries need up to seven times the time of zᵀg; M itself is small.
        rows = weight.T.contiguous()
        flat = torch.addmm(x.reshape(-1, x.shape[-1]), features.reshape(-1, features.shape[-1]), rows)
        return flat.reshape(x.shape)
    # Under autocast a fused sum would round x; the product alone may be of low precision.
    return x + torch.nn.functional.linear(features, weight).to(x.dtype)
