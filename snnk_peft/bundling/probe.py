"""The parity check of a bundle: random but valid inputs, and the largest difference of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from snnk_peft.errors import UnsupportedError
from snnk_peft.functional.precision import full_precision
from snnk_peft.layers.kernel_attention import KernelAttention

EXAMPLES, TOKENS = 4, 16
ANY_SIZE = 64  # of images, for models whose config names none (ResNet): convolutions read any


def probe_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Random inputs for a model of texts, images or mel spectrograms, always the same; some tokens are padding.

    Raises:
        UnsupportedError: the model reads something else; `bundle(model, probe=...)` takes inputs for it.
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
    return {name: value.to(model.device) for name, value in inputs.items()}


def text_room(config: Any) -> int | None:
    """Return the largest number of tokens in a text; None if the config does not say."""
    positions, pad = getattr(config, "max_position_embeddings", None), getattr(config, "pad_token_id", None)
    if positions is None or pad is None or pad >= positions - 1:
        return positions
    return positions - (pad + 1)  # position ids of the RoBERTa family start after the padding id


@torch.no_grad()
def compare(model: nn.Module, bundled: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[float, str]:
    """The largest difference between two models' outputs, relative to the largest value of that output; no autocast.

    Args:
        model: run in eval mode; its training flags are restored.
        bundled: in eval mode, or any function of the same inputs.
        inputs: keyword arguments of both.

    Returns:
        The error (NaN if an output is NaN or infinite) and the name of the output where it occurs.
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    tensors = (value for value in inputs.values() if isinstance(value, torch.Tensor))
    with full_precision(next(tensors, torch.empty(0, device="meta"))):  # autocast rounds each of them in its own way
        try:
            expected = model(**inputs, return_dict=True)
        finally:
            for module, flag in training.items():
                module.training = flag
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
