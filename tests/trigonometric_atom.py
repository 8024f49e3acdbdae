"""One atom of the universal random features: a cos τz + c sin τz of z = w·x + b, linearised (SNNK paper, section 3.1).

For a Gaussian g ~ N(0, I) and a scale s > 0, in real arithmetic (no complex parameters):

    Φ(x)    = e^{τ²s²‖x‖²/2} [cos(τs g·x), sin(τs g·x)]
    Ψ(w, b) = e^{g·w/s − ‖w‖²/2s²} [a cos τb + c sin τb,  c cos τb − a sin τb]

    E[Φ(x)·Ψ(w, b)] = a cos τ(w·x + b) + c sin τ(w·x + b)

because E e^{g·(w/s + iτs x)} = e^{‖w‖²/2s² − τ²s²‖x‖²/2 + iτ w·x}. For a single cosine (c = 0) the second moment is
at most E‖Φ‖²‖Ψ‖² = a² e^{τ²s²‖x‖² + ‖w‖²/s²}, least at s² = ‖w‖/(τ‖x‖) where it is a² e^{2τ‖x‖‖w‖}: fine for small
norms, hopeless for large ones.

With bound M > 0 (the paper's A = −M) both sides get (1+4M)^{d/4} e^{−M‖g‖²} and g is stretched by √(1+4M): features are
bounded in g, and the second moment becomes ((1+4M)²/(1+8M))^{d/2} a² e^{τ²s²‖x‖² + ‖w‖²/(s²(1+8M))}. In many dimensions
the first factor is hopeless (10^170 at d = 768, M = 1), so 0 is the default.

Shapes: g (m, dim), x (..., dim) -> (..., m, 2); w (..., dim), b (...) -> (..., m, 2). Average over the m draws.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _bounding(g: Tensor, bound: float) -> Tensor:
    """(1+4M)^{d/4} e^{−M‖g‖²} per draw, (m,)."""
    return (1 + 4 * bound) ** (g.shape[-1] / 4) * torch.exp(-bound * g.square().sum(-1))


def atom_phi(x: Tensor, g: Tensor, tau: float, scale: float, bound: float = 0.0) -> Tensor:
    """Φ for every draw.

    Args:
        x: (..., dim) data.
        g: (m, dim) standard normal draws.
        tau: frequency τ of the atom.
        scale: s, moves variance between the two sides.
        bound: M >= 0.

    Returns:
        (..., m, 2).
    """
    angle = (1 + 4 * bound) ** 0.5 * tau * scale * (x @ g.T)
    growth = torch.exp((tau * scale) ** 2 * x.square().sum(-1) / 2)[..., None, None]
    return growth * _bounding(g, bound)[:, None] * torch.stack((torch.cos(angle), torch.sin(angle)), -1)


def atom_psi(
    w: Tensor, b: Tensor, g: Tensor, tau: float, scale: float, a: float = 1.0, c: float = 0.0, bound: float = 0.0
) -> Tensor:
    """Ψ for every draw.

    Args:
        w: (..., dim) weights.
        b: (...) biases.
        g: (m, dim), the same draws as for Φ.
        tau: frequency τ.
        scale: s.
        a: coefficient of the cosine.
        c: coefficient of the sine.
        bound: M >= 0.

    Returns:
        (..., m, 2).
    """
    stretch = (1 + 4 * bound) ** 0.5
    weight = _bounding(g, bound) * torch.exp(
        stretch * (w @ g.T) / scale - w.square().sum(-1, keepdim=True) / (2 * scale**2)
    )
    cos, sin = torch.cos(tau * b), torch.sin(tau * b)
    return weight[..., None] * torch.stack((a * cos + c * sin, c * cos - a * sin), -1)[..., None, :]


def best_scale(x: Tensor, w: Tensor, tau: float) -> Tensor:
    """The s that minimises the second moment, √(‖w‖ / (τ‖x‖)), for x and w (..., dim)."""
    return (w.norm(dim=-1) / (tau * x.norm(dim=-1))).sqrt()
