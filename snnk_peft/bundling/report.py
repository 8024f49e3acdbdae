"""BundleReport: folded modules, savings and parity of a bundle. Plain data; stored in the config.

Layers that were folded alike are shown as one entry: `encoder.layer.{0-5}.output.dense`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from snnk_peft.errors import ConfigError


@dataclass(frozen=True)
class Folded:
    """One folded group of modules.

    Args:
        paths: the modules that changed.
        before: what stood there in the pretrained model.
        after: what stands there now.
        bytes_before: bytes of the pretrained modules in a checkpoint.
        bytes_after: bytes of the new ones.
    """

    paths: list[str]
    before: str
    after: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class FoldedAlike:
    """Folded groups that differ only in the number of their layer.

    Args:
        paths: the modules, with the indices of all layers in one pair of braces.
        count: how many groups these are.
        folded: one of them.
    """

    paths: list[str]
    count: int
    folded: Folded


def group(entries: Iterable[Folded]) -> list[FoldedAlike]:
    """Equal entries together, in the order in which the first of each kind comes."""
    kinds: dict[tuple[Any, ...], list[Folded]] = {}
    for entry in entries:
        shape = tuple(_LAYER.sub(".{}.", path, count=1) for path in entry.paths)
        kind = (shape, entry.before, entry.after, entry.bytes_before, entry.bytes_after)
        kinds.setdefault(kind, []).append(entry)
    return [
        FoldedAlike([_joined(paths) for paths in zip(*(e.paths for e in alike), strict=True)], len(alike), alike[0])
        for alike in kinds.values()
    ]


# The first number in a path is that of the layer.
_LAYER = re.compile(r"\.(\d+)\.")


def _joined(paths: tuple[str, ...]) -> str:
    """One path for all, "a.{0-2,5}.b" for a.0.b, a.1.b, a.2.b and a.5.b."""
    if len(paths) == 1:
        return paths[0]
    runs: list[list[int]] = []
    for number in sorted(int(match[1]) for path in paths if (match := _LAYER.search(path))):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    numbers = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return _LAYER.sub(f".{{{numbers}}}.", paths[0], count=1)


@dataclass(frozen=True)
class BundleReport:
    """Result of `bundle`.

    Args:
        model_class: class of the bundle.
        base_model: name or path of the pretrained model, if known.
        parts: the fields of the SNNK parts that were folded, per adapter name.
        folded: one entry per folded group.
        remarks: what could not be folded further, and why.
        parameters_base: parameters in a checkpoint of the pretrained model; matrices of feature maps count as well.
        parameters_patched: parameters of the patched model: the pretrained model and the active adapters.
        parameters_after: parameters in a checkpoint of the bundle.
        bytes_base: the same in bytes.
        bytes_patched: the same in bytes.
        bytes_after: the same in bytes.
        parity_error: largest difference between the outputs of bundle and patched model on a probe batch, relative to
            the largest output.
        parity_tolerance: what would have been accepted.
        dtype: floating type of the bundle.
    """

    model_class: str
    base_model: str | None
    parts: dict[str, Any]
    folded: list[Folded]
    remarks: list[str]
    parameters_base: int
    parameters_patched: int
    parameters_after: int
    bytes_base: int
    bytes_patched: int
    bytes_after: int
    parity_error: float
    parity_tolerance: float
    dtype: str = field(default="float32")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BundleReport:
        """The report that `to_dict` wrote.

        Raises:
            ConfigError: it was changed since.
        """
        try:
            return cls(**{**data, "folded": [Folded(**entry) for entry in data["folded"]]})
        except (TypeError, KeyError) as error:
            raise ConfigError(f"snnk_plan.report in config.json is no report of a bundle: {error}") from error

    def rows(self) -> list[tuple[str, int, int]]:
        """(what, parameters, bytes) of the pretrained, the patched and the bundled model."""
        return [
            ("pretrained", self.parameters_base, self.bytes_base),
            ("patched", self.parameters_patched, self.bytes_patched),
            ("bundled", self.parameters_after, self.bytes_after),
        ]

    def folded_alike(self) -> list[FoldedAlike]:
        """`folded`, with equal entries of several layers together."""
        return group(self.folded)

    def __str__(self) -> str:
        lines = [f"{'model':<12}{'parameters':>15}{'bytes':>16}"]
        lines += [f"{what:<12}{parameters:>15,}{size:>16,}" for what, parameters, size in self.rows()]
        lines.append(
            f"parity error {self.parity_error:.1e} of the largest output (tolerance {self.parity_tolerance:.0e})"
        )
        for alike in self.folded_alike():
            entry, times = alike.folded, f"{alike.count} × " if alike.count > 1 else ""
            lines.append(f"{', '.join(alike.paths)}")
            lines.append(f"    {times}{entry.before}  ({entry.bytes_before:,} bytes{' each' if times else ''})")
            lines.append(f"    -> {entry.after}  ({entry.bytes_after:,} bytes{' each' if times else ''})")
        return "\n".join(lines + [f"note: {remark}" for remark in self.remarks])
