"""BundleReport: what `bundle` folded, what it saved, and how close the result is. Plain data; stored in the config."""

from __future__ import annotations

from collections.abc import Mapping
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
class BundleReport:
    """What `bundle` did.

    Args:
        model_class: class of the bundle.
        base_model: name or path of the pretrained model, if known.
        parts: the fields of the SNNK parts that were folded, per adapter name.
        folded: one entry per folded group.
        remarks: what could not be folded further, and why.
        parameters_base: numbers in a checkpoint of the pretrained model; matrices of feature maps count as well.
        parameters_patched: numbers in the patched model: the pretrained model and the active adapters.
        parameters_after: numbers in a checkpoint of the bundle.
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
        """Plain data for JSON."""
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

    def __str__(self) -> str:
        lines = [f"{'model':<12}{'parameters':>15}{'bytes':>16}"]
        lines += [f"{what:<12}{parameters:>15,}{size:>16,}" for what, parameters, size in self.rows()]
        lines.append(
            f"parity error {self.parity_error:.1e} of the largest output (tolerance {self.parity_tolerance:.0e})"
        )
        for entry in self.folded:
            lines.append(f"{', '.join(entry.paths)}")
            lines.append(f"    {entry.before}  ({entry.bytes_before:,} bytes)")
            lines.append(f"    -> {entry.after}  ({entry.bytes_after:,} bytes)")
        return "\n".join(lines + [f"note: {remark}" for remark in self.remarks])
