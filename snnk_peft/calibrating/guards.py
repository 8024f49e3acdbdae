"""Guards around a fit: weights must be finite, a padding token is set, and a failure leaves the model as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from snnk_peft.arguments import number_faults
from snnk_peft.calibrating.inputs import masked_tokens
from snnk_peft.errors import ConfigError
from snnk_peft.tuner.slot_layer import SlotLayer, original_path, root_of, saved_in_full

SHOWN = 4  # parameters that a message names
NONE = -1  # no token: nothing is padding


def common_faults(model: nn.Module, held_out: object, what: str, away: list[str]) -> list[str]:
    """Collect the faults that rule out any fit of a part."""
    faults = number_faults("held_out", held_out, above=0, below=1)
    if away:
        faults.append(
            f"the {what} of {', '.join(away)} are offloaded to memory or disk, where a fit would not last; expected "
            "them beside the model. Calibrate before dispatching the model, or put the adapter on an offloaded base"
        )
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        faults.append("the model is sharded (FSDP2), so that no process has its weights; calibrate it before")
    return faults


@contextlib.contextmanager
def all_or_nothing(model: nn.Module, written: Iterable[torch.Tensor] | None = None) -> Iterator[None]:
    """Restore the model bit for bit if the block ends early, by an error or Ctrl-C.

    For tensors that are written to, the values are saved; for everything else in a module (hooks, flags, the attention
    implementation), the references.

    Args:
        model: any model.
        written: the tensors that the block may write to; None for those of the active slots.
    """
    before = _Before(model, _slot_tensors(model) if written is None else written)
    try:
        yield
    except BaseException:
        while True:
            try:
                before.restore()
                break
            except KeyboardInterrupt:  # once more, from the start; the first one is raised below
                continue
        raise


class _Before:
    """Snapshot of a model; arguments as for `all_or_nothing`."""

    def __init__(self, model: nn.Module, written: Iterable[torch.Tensor]):
        self.modules = [_Attributes(module) for module in model.modules()]
        tensors = {id(tensor): tensor for tensor in written}
        self.tensors = [_Tensor(tensor) for tensor in tensors.values()]

    def restore(self) -> None:
        """Restore everything; may be interrupted and called again."""
        for module in self.modules:
            module.restore()
        for tensor in self.tensors:
            tensor.restore()
        torch.clear_autocast_cache()


class _Attributes:
    """Saved references of one module; its dicts (of hooks, parameters, children) stay the same objects."""

    def __init__(self, module: nn.Module):
        self.module, self.values = module, dict(vars(module))
        self.inside = {name: dict(value) for name, value in self.values.items() if isinstance(value, dict)}

    def restore(self) -> None:
        for name, content in self.inside.items():
            _become(self.values[name], content)
        _become(vars(self.module), self.values)


class _Tensor:
    """Saved values and gradient of one tensor."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.values = tensor, tensor.detach().clone()
        self.trained, self.gradient = tensor.requires_grad, tensor.grad

    def restore(self) -> None:
        self.tensor.requires_grad_(self.trained)
        self.tensor.grad = self.gradient
        with torch.no_grad():
            self.tensor.copy_(self.values)


def _become(target: dict[Any, Any], content: dict[Any, Any]) -> None:
    if list(target) != list(content) or any(target[key] is not value for key, value in content.items()):
        target.clear()
        target.update(content)


def _slot_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    for layer in model.modules():
        if isinstance(layer, SlotLayer):
            for slot in layer.active_slots():
                yield from slot.parameters()
                yield from slot.buffers()


def refuse_not_finite(model: nn.Module, replaced: bool = True) -> None:
    """Raise ValueError if a parameter in use is NaN or infinite.

    Args:
        model: plain or patched; slots of inactive adapters are ignored.
        replaced: whether the originals of modules that a slot replaces are in use, as they are when it is fitted.
    """
    faults = [
        f"{path} holds {_what(value)} in {int((~value.isfinite()).sum())} of {value.numel():,} numbers"
        for path, value in _in_use(model, "", replaced)
        if value.is_floating_point() and value.device.type != "meta" and not _all_finite(value)
    ]
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise ValueError(
            f"{'; '.join(faults[:SHOWN])}{more}; expected finite numbers. A training that diverged, an overflow in "
            "fp16 or a head that was never initialised leave such weights: load or train it again"
        )


def _all_finite(value: torch.Tensor) -> bool:
    try:
        return bool(value.detach().isfinite().all())
    except NotImplementedError:  # torchao's numbers of a few bits, which are always finite
        return True


def refuse_overflow(model: nn.Module, inputs: Mapping[str, Any], what: str) -> None:
    """Raise ValueError if an output of the model is NaN or infinite for these inputs; names the first such module."""
    paths = {module: path for path, module in model.named_modules()}
    first: list[str] = []

    def look(module: nn.Module, args: object, output: Any) -> None:
        if not first and not _finite(output):
            first.append(paths[module])

    with contextlib.ExitStack() as hooks, torch.no_grad(), evaluating(model):
        for module in paths:
            hooks.enter_context(module.register_forward_hook(look))
        hooks.enter_context(named_padding(model, masked_tokens(inputs)))
        outputs = model(**inputs)
    wrong = [name for name, value in outputs.items() if not _finite(value)]
    if wrong:
        where = original_path(first[0]) if first else type(model).__name__
        raise ValueError(
            f"{what}: the model's {', '.join(wrong)} hold NaN or infinity, which begins in the output of "
            f"{where or type(model).__name__}; expected finite numbers. Look at these inputs, or run the model in fp32 "
            "or bf16"
        )


def _in_use(module: nn.Module, path: str, replaced: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(module, SlotLayer):
        slots = module.active_slots()
        for slot in slots:
            for name, value in slot.named_parameters():
                yield f"{original_path(path)} ({name} of the adapter)", value
        if replaced or not any(slot.replaces for slot in slots):
            yield from _in_use(module.base_layer, path, replaced)
        return
    module = saved_in_full(module)
    for name, value in module.named_parameters(recurse=False):
        yield f"{original_path(path)}.{name}".removeprefix("."), value
    for name, child in module.named_children():
        yield from _in_use(child, f"{path}.{name}".removeprefix("."), replaced)


def _what(value: torch.Tensor) -> str:
    return "NaN" if bool(value.detach().isnan().any()) else "infinity"


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, Mapping):
        value = list(value.values())
    return all(map(_finite, value)) if isinstance(value, (tuple, list)) else True


@contextlib.contextmanager
def named_padding(model: Any, tokens: set[int]) -> Iterator[None]:
    """Set a padding token in the config of a text classifier within a context.

    Decoders look for the last token that is not padding, and transformers rejects more than one example if the config
    has no padding token. The tokenizer's padding token is found in the batches, at masked positions.

    Raises:
        ConfigError: different tokens at masked positions.
    """
    root = root_of(model)
    config: Any = getattr(root, "config", None)
    if "ForSequenceClassification" not in type(root).__name__ or getattr(config, "pad_token_id", 0) is not None:
        yield
        return
    if len(tokens) > 1:
        raise ConfigError(
            f"the config of {type(root).__name__} names no padding token, and the batches hold tokens "
            f"{', '.join(map(str, sorted(tokens)[:4]))} where attention_mask is 0; expected one. Set "
            "model.config.pad_token_id = tokenizer.pad_token_id"
        )
    configs = list({id(each): each for each in (config, config.get_text_config())}.values())
    for each in configs:
        each.pad_token_id = next(iter(tokens), NONE)
    try:
        yield
    finally:
        for each in configs:
            each.pad_token_id = None


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set all modules to eval mode, and restore their modes on exit."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag
