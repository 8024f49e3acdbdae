"""The learned kernel of attention: eigenvalues of the covariance of the rows ω (Learning the Transformer Kernel,
section 4.1, Tables 4 and 9 to 12).

    gmm                      Σ_c of each component                       rows are N(±μ_c, Σ_c)
    fastfood_learned, "S"    mean of χ_i²/n times I                      over signs, G and permutations
    fastfood_learned, "SGB"  diagonal, see `fastfood_covariance`         over permutations, the only part not learned
    free                     (W − mean)ᵀ(W − mean)/m                     of its rows, which are not a sample
    others                   of rows of fresh draws, each as large as the model's own

Rows that are not learned are N(0, I), so all eigenvalues are 1; smaller ones mean estimates with less variance (the
paper's Theorem 3). The paper has tables only of mixtures, "since covariance matrices are not well defined in the
Generator and FastFood": here they are those of a random row. Where rows have different means, as in Fastfood, the
spread of their means is included.

Cost: O(d³) per matrix, and d² for each of 2048 · d fresh rows: eigenvalues of N(0, I) then spread by ±2/√2048, 4 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from snnk_cli.draws import matrices_redrawn
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMap
from snnk_peft.feature_map.base import registered_name
from snnk_peft.functional.hadamard import walsh_hadamard
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.projections import PROJECTIONS
from snnk_peft.projections.base import Projection
from snnk_peft.projections.fastfood_learned import FastfoodLearned
from snnk_peft.projections.gmm import Gmm

ROWS_PER_DIMENSION = 2048


def learned_sites(model: torch.nn.Module) -> dict[str, list[FeatureMap]]:
    """Return the attention's feature maps with learned rows, by module: one per key head, or one for all.

    The module is the KernelAttention; ".terms.i" is appended where it sums several attentions, ".key_maps" where keys
    have their own maps.

    Args:
        model: any model, patched or bundled.

    Raises:
        ConfigError: the model has none.
    """
    found: dict[str, list[FeatureMap]] = {}
    kinds: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, KernelAttention):
            continue
        for number, term in enumerate(module.terms):
            own = f"{name}.terms.{number}" if len(module.terms) > 1 else name
            for site, given in ((own, term.feature_maps), (f"{own}.key_maps", term.key_maps or [])):
                maps = [each for each in given if isinstance(each, FeatureMap)]
                kinds |= {registered_name(PROJECTIONS, each.projection) for each in maps}
                # Rows computed from queries and keys are learned, but are not samples from a kernel's spectrum.
                if maps and maps[0].projection.trainable and maps[0].projection.distribution != "none":
                    found[site] = maps
    if found:
        return found
    why = f"its attention has projection {', '.join(sorted(kinds))}" if kinds else "it has softmax attention"
    raise ConfigError(
        f"no covariance is learned in this model: {why}. Expected linear attention over rows that learn a kernel, such "
        "as projection gmm, generative or fastfood_learned; rows that do not learn have covariance I"
    )


def learned_spectra(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return eigenvalues in descending order, (heads or 1, [components,] d) in fp64 on the CPU, by `learned_sites`.

    Components are those of mixtures.

    Raises:
        ConfigError: nothing is learned.
    """
    return {name: spectra(maps) for name, maps in learned_sites(model).items()}


def spectra(maps: Sequence[FeatureMap]) -> torch.Tensor:
    """Compute the eigenvalues of each map's rows, in descending order, (maps, [components,] d)."""
    covariances = torch.stack([covariance(each.projection) for each in maps])
    return torch.linalg.eigvalsh(covariances).flip(-1).clamp_min(0)


@torch.no_grad()
def covariance(matrix: Projection) -> torch.Tensor:
    """Compute the covariance of a row of W, (d, d) or, for a mixture, (components, d, d), in fp64 on the CPU."""
    if isinstance(matrix, Gmm):
        return matrix.covariances().double().cpu()
    if isinstance(matrix, FastfoodLearned):
        return fastfood_covariance(matrix)
    if not matrix.resamplable:
        return covariance_of_rows([matrix.materialize()])
    return covariance_of_rows(fresh_rows(matrix))


def fastfood_covariance(matrix: FastfoodLearned) -> torch.Tensor:
    """Compute the covariance of a random row of V = n^-½ S H G Π H B, over all parts that are not learned, (d, d).

    Row i of a block is s_i n^-½ Σ_k H_ik g_k B h_π(k), g = G/‖G‖, with h_j the rows of H: Σ_j h_j = n e₁ and
    Σ_j h_j h_jᵀ = n I. For a random permutation π, with t = H g:

        mean of row i     s_i n^-½ t_i B e₁
        second moment     s_i²/n · B diag(t_i², (n − t_i²)/(n − 1), ..., (n − t_i²)/(n − 1)) B

    If G and B are random too, the direction of a row is uniform on the sphere: s_i²/n · I.

    Args:
        matrix: matrix with `learn` "S" or "SGB".
    """
    n, d, m = matrix.order, matrix.dim, matrix.num_features
    lengths = matrix.lengths.detach().double().cpu()
    if matrix.learn == "S":
        return torch.eye(d, dtype=torch.float64) * lengths.square().mean() / n
    gauss, signs = (value.detach().double().cpu() for value in (matrix.gauss, matrix.signs))
    t = walsh_hadamard(torch.nn.functional.normalize(gauss, dim=-1)).flatten()[:m, None]
    scales = signs.repeat_interleave(n, 0)[:m]  # the diagonal of B for every row, (m, d)
    moments = ((n - t.square()) / max(n - 1, 1)).repeat(1, d)
    moments[:, 0] = t[:, 0].square()
    diagonal = (lengths.square()[:, None] / n * scales.square() * moments).mean(0)
    diagonal[0] -= (lengths * n**-0.5 * t[:, 0] * scales[:, 0]).mean().square()
    return torch.diag(diagonal)


def fresh_rows(matrix: Projection) -> Iterable[torch.Tensor]:
    """Yield rows of new draws from the learned distribution, each (m, d), until there are enough.

    A draw has as many rows as the model's own: a generator normalises over them.
    """
    for number in range(-(-ROWS_PER_DIMENSION * matrix.dim // matrix.num_features)):
        with matrices_redrawn([matrix], 0, number):
            yield matrix.materialize()


def covariance_of_rows(draws: Iterable[torch.Tensor]) -> torch.Tensor:
    """Compute the covariance of all rows together, divided by their number, (d, d) in fp64 on the CPU."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for rows in draws:
        wide = rows.detach().double().cpu()
        count, total, squares = count + len(wide), total + wide.sum(0), squares + wide.T @ wide
    mean = total / count
    return squares / count - torch.outer(mean, mean)


def effective_rank(eigenvalues: torch.Tensor) -> torch.Tensor:
    """Compute exp(−Σ_i p_i log p_i), p = λ/Σλ: d if all are equal, 1 if all but one are 0; (..., d) -> (...).

    Args:
        eigenvalues: non-negative, not all 0.
    """
    shares = eigenvalues / eigenvalues.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()
