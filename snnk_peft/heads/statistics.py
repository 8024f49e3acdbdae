"""Additive statistics that determine a task head: shards can be merged, and examples added or removed later.

Ridge regression of targets on the head's inputs needs only moments (solvers/ridge.py), and the moments of two sets of
examples add up. So shards counted on different machines give the same head as one pass over everything, up to rounding
of sums in fp64, and removing examples gives the head that never saw them: a column that is constant over the others is
constant again, although subtraction leaves rounding errors there.

Removed examples must have been counted, with the same vectors to the last bit. In general, moments cannot verify this;
they only reveal it if a class would be left with a negative count, or a column with a negative variance. To be sure,
keep a digest of every example (`remember`), at 16 bytes each.

Targets are one-hot vectors of classes, zeros and ones for labels of which several may apply, or regression targets.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from snnk_peft.arguments import in_words, number_faults, path_of
from snnk_peft.digests import content_faults, open_tensors, refuse
from snnk_peft.errors import ConfigError
from snnk_peft.heads.targets import as_tensor, as_vectors, class_indices, require_finite
from snnk_peft.json_files import parse_json
from snnk_peft.repeats import rows
from snnk_peft.solvers.reduce import gathered
from snnk_peft.solvers.ridge import GramAccumulator, one_hot_targets
from snnk_peft.stamps import stamp_tensors

KINDS = ("classes", "labels", "numbers")
HEADER = "snnk_head_statistics"  # JSON in the file
LEAST_CLASSES = 2
DIGESTS = "digests"  # digests of the examples in the file, concatenated
DIGEST = 16  # bytes each
OS_ERROR = re.compile(r"\(os error (\d+)\)")  # in safetensors' message about a full disk


class HeadStatistics:
    """Moments of vectors and targets.

    Args:
        width: length of the vectors.
        outputs: number of classes, labels or regression targets.
        kind: "classes", "labels" (several may apply) or "numbers".
        origin: plain data that identifies how the vectors were computed (model, features); only statistics of equal
            origin can be added.
        remember: keep a digest of every example, so that `remove` and `take_away` reject any that was not counted.

    Attributes:
        moments: moments of vectors and targets.
        digests: number of times each example was counted, by digest; None without `remember`.

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

    def __init__(
        self,
        width: int,
        outputs: int,
        kind: str,
        origin: Mapping[str, Any] | None = None,
        remember: bool = False,
    ):
        faults = [] if kind in KINDS else [f"kind is {kind!r}; expected one of {', '.join(KINDS)}"]
        faults += number_faults("width", width, int, low=1) + number_faults("outputs", outputs, int, low=1)
        if not isinstance(origin, (Mapping, type(None))):
            faults.append(f"origin is {in_words(origin)}; expected a dict of plain data, or None")
        if faults:
            raise ConfigError(faults)
        if kind == "classes" and outputs < LEAST_CLASSES:
            raise ConfigError(f"outputs is {outputs}; expected {LEAST_CLASSES} classes at least")
        self.kind, self.origin = kind, dict(origin or {})
        self.moments = GramAccumulator(width, outputs)
        self.digests: Counter[bytes] | None = Counter() if remember else None

    @property
    def count(self) -> int:
        return self.moments.count

    @property
    def names(self) -> list[str]:
        """Names of the outputs (classes, labels or regression targets), if `origin` has them."""
        return list(self.origin.get("names") or ())

    def add(self, vectors: Any, targets: Any) -> None:
        """Count examples.

        Args:
            vectors: (n, width), a tensor, an array, lists or columns of a table.
            targets: the same types: class indices (n,) or names of `origin`; labels (n, outputs) of zeros and ones; or
                numbers (n,) or (n, outputs).

        Raises:
            ConfigError: wrong shapes or values, NaN or infinity; nothing is then counted.
        """
        vectors, wanted = as_vectors(vectors, self.moments.feature_dim), self.targets(targets)
        if len(vectors) != len(wanted):
            raise ConfigError(f"{len(vectors)} vectors and {len(wanted)} targets were given; expected as many of each")
        self.moments.update(vectors, wanted.to(vectors.device))
        if self.digests is not None:
            each = rows({"examples": torch.cat([vectors.double().cpu(), wanted.cpu()], 1)})
            self.digests.update(digest[:DIGEST] for digest in each)

    def remove(self, vectors: Any, targets: Any) -> None:
        """Remove examples that were counted before, here or in merged statistics; arguments as in `add`.

        Only `remember` verifies that they were counted. Without it, some foreign examples are detected (see
        `take_away`); others leave statistics that belong to no set of examples.

        Raises:
            ConfigError: wrong shapes or values, or examples that cannot have been counted; nothing is then removed.
        """
        other = self.empty()
        other.add(vectors, targets)
        self.take_away(other)

    def empty(self) -> HeadStatistics:
        """Return statistics of the same kind, origin and shape, without examples."""
        remember = self.digests is not None
        return HeadStatistics(self.moments.feature_dim, self.moments.out_dim, self.kind, self.origin, remember)

    def merge(self, other: HeadStatistics) -> None:
        """Add all examples of the other statistics.

        Raises:
            ConfigError: of another kind, origin or shape.
        """
        self._require_alike(other)
        self.moments.merge(other.moments)
        if self.digests is not None and other.digests is not None:
            self.digests += other.digests

    def take_away(self, other: HeadStatistics, noise: float = 0.0) -> None:
        """Remove all examples of the other statistics, which were counted before.

        `noise` is the relative error of their recomputed vectors; 0 if they are bitwise the same.

        Raises:
            ConfigError: of another kind, origin or shape; more examples, or more of a class or label, than there are;
                vectors whose variance is larger than that of all; with `remember`, an example that was not counted.
                Nothing is then removed.
        """
        self._require_alike(other)
        faults = self._never_counted(other)
        if faults:
            raise ConfigError([*faults, "expected examples that were counted before, as they were then"])
        self.moments.remove(other.moments, noise)
        if self.digests is not None and other.digests is not None:
            self.digests -= other.digests

    def _never_counted(self, other: HeadStatistics) -> list[str]:
        """Return evidence that examples of the other statistics were not counted here."""
        ours = self._numbers()
        found = [
            f"{number} examples {what} are to be forgotten of {ours[what]}"
            for what, number in other._numbers().items()
            if number > ours[what] and other.count <= self.count
        ]
        if self.digests is not None and other.digests is not None:
            unknown = sum((other.digests - self.digests).values())
            if unknown:
                found.append(
                    f"{unknown} of {other.count} examples that are to be forgotten were not counted with these vectors "
                    "and targets (other batches change the last bits of what a model computes)"
                )
        return found

    def _numbers(self) -> dict[str, int]:
        """Count the examples of each class, or those with and without each label."""
        mean = self.moments.target_mean.cpu()
        shares = {"classes": {"of class": mean}, "labels": {"with label": mean, "without label": 1 - mean}}
        return {
            f"{what} {index}": round(float(share) * self.count)
            for what, each in shares.get(self.kind, {}).items()
            for index, share in enumerate(each)
        }

    def reduce(self) -> None:
        """Add the examples of all other processes; every process must call this."""
        self.moments.reduce()
        if self.digests is not None:
            self.digests = sum(gathered(self.digests), Counter())

    def _require_alike(self, other: HeadStatistics) -> None:
        if not isinstance(other, HeadStatistics):
            raise ConfigError(
                f"other is {in_words(other)}; expected HeadStatistics, from a file by HeadStatistics.load"
            )
        remembered = [each.digests is not None for each in (self, other)]
        faults = [
            f"{what} is {theirs!r} there and {ours!r} here"
            for what, ours, theirs in (
                ("kind", self.kind, other.kind),
                ("origin", self.origin, other.origin),
                ("remember", *remembered),
            )
            if ours != theirs
        ]
        if faults:
            raise ConfigError([*faults, "expected statistics of the same task, model and features"])

    def targets(self, given: Any) -> Tensor:
        """Convert targets, given as for `add`, to regression targets (n, outputs) in fp64.

        Raises:
            ConfigError: wrong shapes or values.
        """
        outputs, what = self.moments.out_dim, "numbers" if self.kind == "numbers" else "labels"
        tensor = as_tensor(what, given, self.names if self.kind == "classes" else ())
        if self.kind == "classes":
            return one_hot_targets(class_indices(what, tensor, outputs), outputs)
        if tensor.shape[1:] != (outputs,) and (tensor.ndim, outputs) != (1, 1):
            each = f", a column for each of {', '.join(map(repr, self.names))}" if self.names else ""
            raise ConfigError(f"{what} are {tuple(tensor.shape)}; expected (examples, {outputs}){each}")
        found = tensor.reshape(len(tensor), outputs).double()
        require_finite(what, found)
        if self.kind == "labels" and not bool(((found == 0) | (found == 1)).all()):
            raise ConfigError(f"labels run from {found.min():g} to {found.max():g}; expected zeros and ones")
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file with digests; an existing one is replaced when the new one is complete.

        Raises:
            ConfigError: not a path.
            OSError: it cannot be written; `filename` is this path.
        """
        target = path_of("path", path)
        temporary = target.with_name(f".{target.name}.tmp.safetensors")  # remains of a killed process are overwritten
        header = {HEADER: json.dumps({"kind": self.kind, "origin": self.origin})}
        tensors = self.moments.tensors()
        if self.digests is not None:
            tensors[DIGESTS] = torch.tensor(list(b"".join(sorted(self.digests.elements()))), dtype=torch.uint8)
        try:
            save_file({name: each.contiguous().cpu() for name, each in tensors.items()}, temporary, header)
            stamp_tensors(temporary)
            os.replace(temporary, target)
        except (OSError, SafetensorError) as error:
            number, told = getattr(error, "errno", None), OS_ERROR.search(str(error))
            if told is not None:
                number = int(told[1])
            raise OSError(number or 0, os.strerror(number) if number else str(error), str(target)) from error
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadStatistics:
        """Read the file that `save` wrote.

        Raises:
            ConfigError: no such file, or damaged.
        """
        path = path_of("path", path)
        with open_tensors(path) as file:
            refuse(path, "is damaged", content_faults(path, file))
            text = (file.metadata() or {}).get(HEADER)
            if text is None:
                raise ConfigError(f"{path} holds no statistics of a head; expected a file of HeadStatistics.save")
            told = parse_json(text, f"{HEADER} of {path}")
            if not isinstance(told, dict) or not isinstance(told.get("origin"), dict) or "kind" not in told:
                raise ConfigError(f"{HEADER} of {path} is {str(told)[:100]}; expected kind and origin. Copy it again")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digests = tensors.pop(DIGESTS, None)
        if digests is not None and (digests.dtype != torch.uint8 or digests.ndim != 1 or len(digests) % DIGEST):
            raise ConfigError(
                f"{path}: digests are {tuple(digests.shape)} in {digests.dtype}; expected bytes, {DIGEST} each"
            )
        moments = GramAccumulator.of_tensors(tensors)
        found = cls(moments.feature_dim, moments.out_dim, told["kind"], told["origin"], digests is not None)
        found.moments = moments
        if digests is not None:
            found.digests = Counter(bytes(each.tolist()) for each in digests.split(DIGEST))
        return found
