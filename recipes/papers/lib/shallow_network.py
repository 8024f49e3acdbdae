"""Recover the weight of a ReLU layer from samples (x, ReLU(Wx)), x ~ N(0, I); `factorize` makes it rank r.

Algorithm 2 of "Efficiently learning low-rank networks" recovers Ŵ by gradient descent, estimates the nonlinearity
kernel K_ij = E[ReLU(w_i·x) ReLU(w_j·x)] by the samples, and projects Ŵ on the top r eigenvectors of K̂. `factorize` is
used instead, because the paper's results do not hold:

- Theorem 2.8 (it reaches the best rank-r risk up to any ε) rests on Theorem 2.10, which is false: the projection by the
  exact kernel does not minimise the ReLU risk. For W = [[1, 0], [−1, 0], [0, 1]] and r = 1 its risk is 1.0249, that of
  the plain SVD .5 and the least .4414, so no number of samples gets Algorithm 2 below 1.0249. Its Lemma 8.20 writes
  risks by Theorem 4.2, which holds only for rows of the best norm; those of a projection have others.
- The eigenvalue gap λ_r − λ_{r−1} in the bounds is never positive; λ_r − λ_{r+1} is meant. In step 2, σ(xᵀW)σ(xᵀW)ᵀ is
  a number, the outer product σ(Wᵀx)σ(Wᵀx)ᵀ is meant; Definition 2.5 needs z ~ N(0, I).
- Remark 8.17 (the kernel must be learned apart from W) is wrong: by Cauchy-Schwarz |k(w, v) − k(ŵ, v̂)| is at most
  (‖w − ŵ‖‖v‖ + ‖ŵ‖‖v − v̂‖)/2, an additive bound, so K̂ may be k(Ŵ, Ŵ) in closed form. The d²m²/ε_K² samples
  that dominate Theorem 2.8 are not needed.
- Nor is gradient descent: without noise y_i > 0 says y_i = w_i·x, linear equations, which give W exactly as soon as
  each unit is active in `in` samples (`recover_weight`).

Layout as in torch: W is (out, in), the transpose of the paper's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.errors import ConfigError

RECOVERIES = ("least_squares", "gradient_descent")


def recover_weight(x: Tensor, y: Tensor, *, recovery: str = "least_squares", steps: int = 500) -> Tensor:
    """Recover Ŵ (out, in) from samples of ReLU(Wx).

    Args:
        x: (n, in).
        y: (n, out), without noise.
        recovery: "least_squares" solves, unit by unit, the linear equations of the samples in which it is active; exact
            from two to three times `in` samples on. "gradient_descent" is step 1 of Algorithm 2 (Soltanolkotabi 2017):
            from zero, ŵ ← ŵ − (1/n) Σ (ReLU(ŵ·x) − y)(1 + sgn(ŵ·x)) x, for n of several times `in`.
        steps: most steps of gradient descent; it stops once Ŵ moves by no more than rounding.

    Raises:
        ConfigError: x and y do not match; for least squares, a unit is active in fewer samples than there are inputs.
    """
    faults = []
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or len(x) == 0:
        faults.append(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; expected (n, in) and (n, out) with the same n >= 1"
        )
    elif not (x.isfinite().all() and y.isfinite().all()) or y.min() < 0:
        faults.append("x or y holds NaN or infinity, or y is negative somewhere; expected y = ReLU(Wx) of finite x")
    if recovery not in RECOVERIES:
        faults.append(f"recovery is {recovery!r}; expected one of {', '.join(RECOVERIES)}")
    if faults:
        raise ConfigError(faults)
    if recovery == "gradient_descent":
        weight = x.new_zeros(y.shape[1], x.shape[1])
        for _ in range(steps):
            z = x @ weight.T
            step = ((torch.relu(z) - y) * (1 + z.sign())).T @ x / len(x)
            weight = weight - step
            if step.norm() <= 4 * torch.finfo(x.dtype).eps * weight.norm():
                break
        return weight
    active = (y > 0).sum(0)
    # A unit that is never active is either zero or has also seen too few samples.
    if few := (active < x.shape[1]).nonzero().flatten().tolist():
        some = f"{few[:5]}{' and more' if len(few) > 5 else ''}"
        raise ConfigError(
            f"units {some} are active in {[int(active[i]) for i in few[:5]]} of {len(x)} samples; expected at "
            f"least {x.shape[1]} each, the number of inputs. Give about {3 * x.shape[1]} samples, or use "
            "recovery='gradient_descent' for an estimate"
        )
    rows = [torch.linalg.lstsq(x[on], y[on, i : i + 1]).solution[:, 0] for i, on in enumerate((y > 0).T)]
    return torch.stack(rows)
