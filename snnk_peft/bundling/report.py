"""The report of a bundle, and its comparison with the patched model on a probe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from snnk_peft.bundling.pooled_head import as_pairs
from snnk_peft.calibrating.guards import evaluating
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.functional.precision import full_precision
from snnk_peft.heads.features import HEAD
from snnk_peft.layers.kernel_attention import KernelAttention

EXAMPLES, TOKENS = 4, 16
ANY_SIZE = 64  # image size for models whose config specifies none (ResNet): convolutions accept any


@dataclass(frozen=True)
class Folded:
    """One folded group of modules.

    Args:
        paths: the modules that changed.
        before: description of the modules in the pretrained model.
        after: description of the new modules.
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
    """Folded groups that differ only in the layer index.

    Args:
        paths: the modules, with the indices of all layers in one pair of braces.
        count: number of groups.
        folded: one of them.
    """

    paths: list[str]
    count: int
    folded: Folded


def group(entries: Iterable[Folded]) -> list[FoldedAlike]:
    """Group equal entries, in the order of their first occurrence."""
    kinds: dict[tuple[Any, ...], list[Folded]] = {}
    for entry in entries:
        shape = tuple(_LAYER.sub(".{}.", path, count=1) for path in entry.paths)
        kind = (shape, entry.before, entry.after, entry.bytes_before, entry.bytes_after)
        kinds.setdefault(kind, []).append(entry)
    return [
        FoldedAlike([_joined(paths) for paths in zip(*(e.paths for e in alike), strict=True)], len(alike), alike[0])
        for alike in kinds.values()
    ]


# The first number in a path is the layer index.
_LAYER = re.compile(r"\.(\d+)\.")


def _joined(paths: tuple[str, ...]) -> str:
    """Join paths into one, such as "a.{0-2,5}.b" for a.0.b, a.1.b, a.2.b and a.5.b."""
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
        parity_tolerance: largest error that is accepted.
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
        """Build the report from the data of `to_dict`.

        Raises:
            ConfigError: the data was changed since.
        """
        try:
            return cls(**{**data, "folded": [Folded(**entry) for entry in data["folded"]]})
        except (TypeError, KeyError) as error:
            raise ConfigError(f"snnk_plan.report in config.json is no report of a bundle: {error}") from error

    def rows(self) -> list[tuple[str, int, int]]:
        """Return (name, parameters, bytes) of the pretrained, the patched and the bundled model."""
        return [
            ("pretrained", self.parameters_base, self.bytes_base),
            ("patched", self.parameters_patched, self.bytes_patched),
            ("bundled", self.parameters_after, self.bytes_after),
        ]

    def folded_alike(self) -> list[FoldedAlike]:
        """Return `folded` with equal entries of several layers grouped."""
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


def probe_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Create random inputs for a model of texts, images or mel spectrograms, always the same; some tokens are padding.

    Raises:
        UnsupportedError: the model needs other inputs; pass them as `bundle(model, probe=...)`.
    """
    config, generator = model.config, torch.Generator("cpu").manual_seed(0)
    if model.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        frames = 2 * config.max_source_positions
        mel = torch.randn(EXAMPLES, config.num_mel_bins, frames, generator=generator, device="cpu")
        return {"input_features": mel.to(model.device, model.dtype)}
    if model.main_input_name == "pixel_values":
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", ANY_SIZE)
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.randn(EXAMPLES, config.num_channels, height, width, generator=generator, device="cpu")
        return {"pixel_values": pixels.to(model.device, model.dtype)}
    if model.main_input_name != "input_ids":
        raise UnsupportedError(
            f"no probe batch for {type(model).__name__}, which reads {model.main_input_name!r}; give one: "
            "bundle(model, probe={...})"
        )
    pad = getattr(config, "pad_token_id", None)
    fitted = [module.fitted_length for module in model.modules() if isinstance(module, KernelAttention)]
    tokens = max(1, min([TOKENS, text_room(config) or TOKENS, *(length for length in fitted if length is not None)]))
    ids = torch.randint(0, config.vocab_size, (EXAMPLES, tokens), generator=generator, device="cpu")
    ids[ids == pad] = 0 if pad != 0 else 1
    lengths = torch.tensor([tokens, max(1, tokens // 2), tokens, 1], device="cpu")
    mask = torch.arange(tokens, device="cpu") < lengths[:, None]
    ids = torch.where(mask, ids, 0 if pad is None else pad)
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    if "MultipleChoice" in type(model).__name__:
        inputs = {name: value.unsqueeze(0) for name, value in inputs.items()}
    head = getattr(model, HEAD, None)
    if head is not None and head.reader.features.of_pairs:
        inputs = as_pairs(inputs, config)
    return {name: value.to(model.device) for name, value in inputs.items()}


def text_room(config: Any) -> int | None:
    """Return the maximum number of tokens of a text; None if the config does not specify it."""
    positions, pad = getattr(config, "max_position_embeddings", None), getattr(config, "pad_token_id", None)
    if positions is None or pad is None or pad >= positions - 1:
        return positions
    return positions - (pad + 1)  # position ids of the RoBERTa family start after the padding id


@torch.no_grad()
def compare(model: nn.Module, bundled: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[float, str]:
    """Compute the largest difference between two models' outputs, relative to the output's largest value; no autocast.

    Returns:
        The error (NaN if an output is NaN or infinite) and the name of the output where it occurs.
    """
    tensors = (value for value in inputs.values() if isinstance(value, torch.Tensor))
    with full_precision(next(tensors, torch.empty(0, device="meta"))):  # autocast would round the two differently
        with evaluating(model):
            expected = model(**inputs, return_dict=True)
        given = bundled(**inputs, return_dict=True)
    worst, where = 0.0, "output"
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            difference = (given[name].double() - value.double()).abs().max()
            error = float(difference / value.double().abs().max().clamp_min(1e-12))
            if not error <= worst:
                worst, where = error, name
            if worst != worst:
                break
    return worst, where
