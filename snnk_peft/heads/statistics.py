"""The statistics that decide a head, and that add: shards merge, examples come later, examples are forgotten.

Ridge regression of targets on what a head reads needs nothing but moments (calibration/ridge.py), and moments of two
sets of examples are those of both. So parts that were counted on different machines make the same head as one pass over
everything, up to the rounding of sums in fp64, and a head from which examples were taken away is the head that never
saw them.

Targets are one-hot vectors of classes, zeros and ones of labels of which several may hold, or numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from snnk_peft.calibration.closed_form import one_hot_targets
from snnk_peft.calibration.ridge import GramAccumulator
from snnk_peft.digests import content_faults, open_tensors, refuse
from snnk_peft.errors import ConfigError
from snnk_peft.stamps import stamp_tensors

KINDS = ("classes", "labels", "numbers")
HEADER = "snnk_head_statistics"  # of the file, as JSON
LEAST_CLASSES = 2


class HeadStatistics:
    """Moments of vectors and targets.

    Args:
        width: of the vectors.
        outputs: classes, labels or numbers that the head tells.
        kind: "classes", "labels" (several may hold) or "numbers".
        origin: plain data that says what made the vectors (model, features); only statistics of one origin are added.

    Attributes:
        moments: of vectors and targets.

    Example:
        >>> import torch
        >>> x, y = torch.randn(60, 5), torch.arange(60) % 3
        >>> one, two = HeadStatistics(5, 3, "classes"), HeadStatistics(5, 3, "classes")
        >>> one.add(x[:40], y[:40])
        >>> two.add(x[40:], y[40:])
        >>> one.merge(two)
        >>> one.count
        60
    """

    def __init__(self, width: int, outputs: int, kind: str, origin: Mapping[str, Any] | None = None):
        if kind not in KINDS:
            raise ConfigError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
        if kind == "classes" and outputs < LEAST_CLASSES:
            raise ConfigError(f"outputs is {outputs}; expected {LEAST_CLASSES} classes at least")
        self.kind, self.origin = kind, dict(origin or {})
        self.moments = GramAccumulator(width, outputs)

    @property
    def count(self) -> int:
        """Examples so far."""
        return self.moments.count

    def add(self, vectors: Tensor, targets: Tensor) -> None:
        """Count examples.

        Args:
            vectors: (n, width).
            targets: class indices (n,), labels (n, outputs) of zeros and ones, or numbers (n,) or (n, outputs).

        Raises:
            ConfigError: shapes or values that do not fit; nothing is counted then.
            ValueError: NaN or infinity; likewise.
        """
        self.moments.update(vectors, self.targets(targets).to(vectors.device))

    def remove(self, vectors: Tensor, targets: Tensor) -> None:
        """Forget examples that were counted before, here or in what was merged; arguments as in `add`.

        Raises:
            ConfigError: shapes or values that do not fit, or more examples than there are; nothing is forgotten then.
        """
        self.take_away(self._of(vectors, targets))

    def _of(self, vectors: Tensor, targets: Tensor) -> HeadStatistics:
        found = self.empty()
        found.add(vectors, targets)
        return found

    def empty(self) -> HeadStatistics:
        """Of the same kind, origin and shape, without examples."""
        return HeadStatistics(self.moments.feature_dim, self.moments.out_dim, self.kind, self.origin)

    def merge(self, other: HeadStatistics) -> None:
        """Count all examples of the other.

        Raises:
            ConfigError: of another kind, origin or shape.
        """
        self._require_alike(other)
        self.moments.merge(other.moments)

    def take_away(self, other: HeadStatistics) -> None:
        """Forget all examples of the other, which were counted before.

        Raises:
            ConfigError: of another kind, origin or shape, or more examples than there are.
        """
        self._require_alike(other)
        self.moments.remove(other.moments)

    def reduce(self) -> None:
        """Count the examples of all other processes as well; every process calls this."""
        self.moments.reduce()

    def _require_alike(self, other: HeadStatistics) -> None:
        faults = [
            f"{what} is {theirs!r} there and {ours!r} here"
            for what, ours, theirs in (("kind", self.kind, other.kind), ("origin", self.origin, other.origin))
            if ours != theirs
        ]
        if faults:
            raise ConfigError([*faults, "expected statistics of the same task, model and features"])

    def targets(self, given: Tensor) -> Tensor:
        """What is regressed, (n, outputs) in fp64.

        Raises:
            ConfigError: shapes or values that do not fit.
        """
        outputs = self.moments.out_dim
        if self.kind == "classes":
            return one_hot_targets(given, outputs)
        found = given.reshape(len(given), -1).double()
        if found.shape[1] != outputs:
            raise ConfigError(f"targets are {tuple(given.shape)}; expected (examples, {outputs})")
        if self.kind == "labels" and not bool(((found == 0) | (found == 1)).all()):
            raise ConfigError(f"labels run from {found.min():g} to {found.max():g}; expected zeros and ones")
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file with digests; an older one is replaced when the new one is complete."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.tmp.safetensors")  # a killed process's remains are written over
        header = {HEADER: json.dumps({"kind": self.kind, "origin": self.origin})}
        try:
            save_file(
                {name: each.contiguous().cpu() for name, each in self.moments.tensors().items()}, temporary, header
            )
            stamp_tensors(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadStatistics:
        """What `save` wrote.

        Raises:
            ConfigError: no such file, or damaged.
        """
        with open_tensors(path) as file:
            refuse(path, "is damaged", content_faults(path, file))
            text = (file.metadata() or {}).get(HEADER)
            if text is None:
                raise ConfigError(f"{path} holds no statistics of a head; expected a file of HeadStatistics.save")
            moments = GramAccumulator.of_tensors({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        told = json.loads(text)
        found = cls(moments.feature_dim, moments.out_dim, told["kind"], told["origin"])
        found.moments = moments
        return found
