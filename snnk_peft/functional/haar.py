"""Random orthogonal matrices, and lengths that make their rows Gaussian.

An orthogonal matrix that is uniformly distributed (Haar) has rows that are uniform on the sphere and orthogonal to each
other; times independent lengths from χ_dim every row is N(0, I). All draws are made on the CPU from the generator given.
"""

from __future__ import annotations

import torch


def haar(dim: int, generator: torch.Generator) -> torch.Tensor:
    """A Haar-distributed orthogonal (dim, dim) matrix in fp64: QR of a Gaussian, signs fixed by diag(R)."""
    gaussian = torch.randn(dim, dim, generator=generator, device="cpu", dtype=torch.float32).double()
    q, r = torch.linalg.qr(gaussian)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def orthogonal_rows(num_rows: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """(num_rows, dim) unit rows in fp64: ⌈num_rows / dim⌉ independent Haar blocks, the last one truncated."""
    return torch.cat([haar(dim, generator) for _ in range(-(-num_rows // dim))])[:num_rows]


def chi_lengths(num_rows: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """(num_rows,) lengths of Gaussian vectors, χ_dim distributed, in fp64."""
    vectors = torch.randn(num_rows, dim, generator=generator, device="cpu", dtype=torch.float32)
    return vectors.double().norm(dim=1)
