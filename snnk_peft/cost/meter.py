"""Count the MACs and the memory of one forward pass or training step on the meta device.

Every operation that torch calls in the forward pass, the backward pass and the optimizer is intercepted. Its MACs are
counted by the formulas of torch's FlopCounterMode (which cannot run every model without gradients: its hooks expect a
graph if a parameter is an input), and the memory of its results from creation to the last reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx.experimental import _config as symbolic
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _shapes(query: torch.Tensor, *others: torch.Tensor) -> list[Any]:
    """Return the shapes of query, key and value as if each query head had its own keys."""
    return [query.shape, *((*query.shape[:2], *other.shape[2:]) for other in others)]


def _fused_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(*_shapes(query, key, value)))


def _fused_backward_flops(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, *_shapes(query, key, value)))


# torch has no formula for the CPU's fused kernel. As in the GPU formulas, masked pairs are counted.
FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _fused: _fused_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward_flops,
}


class KernelsOf(TorchFunctionMode):
    """Context in which the meta device saves for the backward pass what a device's kernels save.

    On the meta device torch decomposes attention and dropout, and would save the weights of every pair of tokens. All
    fused attention kernels save the same: query, key, value, output and one scalar per query.

    Args:
        device: type of the device, "cuda" or "cpu". A CPU has no fused attention with dropout, and its dropout saves a
            factor instead of the GPU's bool.
    """

    def __init__(self, device: str):
        super().__init__()
        self.gpu = device != "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is nn.functional.dropout and self.gpu:
            return self._dropout(*args, **kwargs)
        # transformers asks if a batch has no masked tokens or packed rows (yes), and if it has padding (no).
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        if func is torch.Tensor.__contains__ and args[0].is_meta:
            return False
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p and not self.gpu:
            return nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:  # the kernels add their masks
            mask = torch.empty(mask.shape, dtype=query.dtype, device=mask.device)
        output: torch.Tensor = _fused(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
        return output

    def _dropout(self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(input, p, True)[0] if training and p else input


class Meter(TorchDispatchMode):
    """Counter of the MACs of all operations, and of the bytes of live storages, each counted once.

    Attributes:
        flops: twice the MACs so far.
        now: bytes currently in use.
        peak: maximum of `now` since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.now = self.peak = 0
        self._alive: set[int] = set()

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of the tensors while they are alive."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._alive:
                self._alive.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        if (formula := FORMULAS.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


@contextmanager
def metered(device: str) -> Iterator[Meter]:
    """Measure what runs on the meta device in a context, with the kernels of `device`."""
    # A boolean index selects everything: in a batch without padding, every token and label counts.
    whole = symbolic.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with whole, KernelsOf(device), Meter() as meter:
        yield meter


def held(model: nn.Module) -> list[torch.Tensor]:
    """Return parameters and buffers, each counted once."""
    return [*model.parameters(), *model.buffers()]


class Inference(NamedTuple):
    """Measurements of one forward pass in eval mode.

    Attributes:
        macs: multiply-accumulate operations.
        peak: peak memory in bytes, including the model and the outputs.
    """

    macs: int
    peak: int


class Training(NamedTuple):
    """Measurements of one training step: forward, backward, AdamW.

    Attributes:
        macs: as in `Inference`, forward and backward.
        saved: bytes in use between forward and backward, apart from the model.
        gradients: bytes of the gradients.
        optimizer: bytes of AdamW's state.
        peak: peak memory in bytes of any step but the first, including the model.
    """

    macs: int
    saved: int
    gradients: int
    optimizer: int
    peak: int


def measure_inference(model: nn.Module, inputs: Mapping[str, torch.Tensor], device: str) -> Inference:
    """Run `model(**inputs)` without gradients, on the meta device."""
    model.eval()
    with torch.no_grad(), metered(device) as meter:
        meter.add([*held(model), *inputs.values()])
        model(**inputs)
    return Inference(meter.flops // 2, meter.peak)


def measure_training(model: nn.Module, inputs: Mapping[str, torch.Tensor], device: str) -> Training:
    """Run one step on the meta device, training every parameter with `requires_grad`.

    Args:
        model: set to train mode.
        inputs: keyword arguments; without labels, the sum of the first output is the loss.
        device: as in `measure_inference`.
    """
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=device != "cpu")
    with metered(device) as meter:
        meter.add(held(model))
        weights = meter.now
        meter.add(inputs.values())
        before = meter.now
        outputs = model(**inputs)
        loss = outputs["loss"] if "loss" in outputs else next(iter(outputs.values())).float().sum()
        saved = meter.now - weights
        loss.backward()
        macs = meter.flops // 2
        del outputs, loss
        peak, gradients = meter.peak, meter.now - before
        meter.peak = meter.now
        optimizer.step()
        stepping = meter.peak
        state = meter.now - before - gradients
        # In the first backward pass there is no optimizer state yet.
        return Training(macs, saved, gradients, state, max(peak + state, stepping))
