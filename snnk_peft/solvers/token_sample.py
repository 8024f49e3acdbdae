"""A random sample of at most a given number of vectors: reservoir sampling (Vitter 1985, algorithm R).

Vector number i (from 0) takes a place j drawn from 0 to i if there is such a place, j < most; every vector is then kept
with the same chance. The draws follow the vectors one by one, so how they come in batches makes no difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snnk_peft.solvers.reduce import gathered, processes


class TokenSample:
    """Keeps vectors of one length.

    Args:
        most: how many are kept at most, in all processes together.
        generator: draws, on the CPU.

    Attributes:
        count: number of vectors seen.
    """

    def __init__(self, most: int, generator: torch.Generator):
        self.most, self.generator = max(1, most // processes()), generator
        self.count = 0
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def update(self, vectors: Tensor) -> None:
        """Add (n, dim) vectors; those that are kept are copied."""
        free = self.most - self.count
        if free > 0:
            self._kept.append(vectors[:free].clone())
            self.count += len(vectors[:free])
            vectors = vectors[free:]
        if len(vectors) == 0:
            return
        kept = self._joined()
        numbers = torch.arange(self.count, self.count + len(vectors), dtype=torch.float64)
        places = (torch.rand(len(vectors), generator=self.generator, dtype=torch.float64) * (numbers + 1)).long()
        # Of two that want one place the later has it, whatever order a device writes in.
        last = torch.full((self.most,), -1).scatter_reduce_(
            0, places.clamp_max(self.most - 1), torch.where(places < self.most, torch.arange(len(vectors)), -1), "amax"
        )
        taken = (last >= 0).nonzero().squeeze(1)
        kept[taken.to(kept.device)] = vectors[last[taken].to(vectors.device)].to(kept)
        self.count += len(vectors)

    def _joined(self) -> Tensor:
        if len(self._kept) > 1:
            self._kept = [torch.cat(self._kept)]
        return self._kept[0]

    def reduced(self) -> Tensor:
        """Gather the kept tokens of all processes by rank, (n, dim); every process must call this."""
        shares = [share for share in gathered(self._joined() if self._kept else None) if share is not None]
        if not shares:
            raise ValueError("no vectors were given; give at least one batch with an unmasked token")
        return shares[0] if len(shares) == 1 else torch.cat([share.to(shares[0].device) for share in shares])
