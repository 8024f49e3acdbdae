"""Different adapters for the rows of a batch: `model(x, adapter_names=["a", "b", "__base__"])`.

Row i is the model's output with only its named adapter, or with none for "__base__". Modules changed by adapters
process their rows adapter by adapter; all others process the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.registry import did_you_mean
from snnk_peft.tuner.slot_layer import SlotLayer

BASE = "__base__"


class RowAdapters:
    """Assignment of the rows of a batch to adapters, during one call of the model.

    Attributes:
        widths: adapter -> length of its rows, if the previous module made them different (features of an adapter
            parallel to the FFN); shorter rows are padded with zeros.
    """

    def __init__(self, names: Sequence[str]):
        self.names = list(names)
        self.widths: dict[str, int] = {}

    def run(self, where: nn.Module, ways: Callable[[str], Callable[..., Any]], args: Any, kwargs: Any) -> torch.Tensor:
        """Compute the output of a module whose rows use different adapters.

        Raises:
            ConfigError: the number of rows is not a multiple of the number of names (beams and choices are adjacent).
            UnsupportedError: the module returns something other than a tensor.
        """
        x, names = args[0], self.names
        if len(x) % len(names):
            raise ConfigError(f"adapter_names has {len(names)} names; a {type(where).__name__} was given {len(x)} rows")
        repeats = len(x) // len(names)
        taken, self.widths = self.widths, {}
        if x.shape[-1] != max(taken.values(), default=0):
            taken = {}

        def part(value: Any, rows: torch.Tensor) -> Any:
            return value[rows] if isinstance(value, torch.Tensor) and value.ndim and len(value) == len(x) else value

        parts = {}
        for name in dict.fromkeys(names):
            own = torch.tensor([one == name for one in names], device=x.device).repeat_interleave(repeats)
            rows = own.nonzero().flatten()
            first = x[rows][..., : taken[name]] if name in taken else x[rows]
            more = {key: part(value, rows) for key, value in kwargs.items()}
            parts[name] = rows, ways(name)(first, *(part(value, rows) for value in args[1:]), **more)
        outputs = [output for _, output in parts.values()]
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            raise UnsupportedError(
                f"adapter_names: a {type(where).__name__} gives a {type(outputs[0]).__name__}, whose rows cannot be "
                "put together again; expected a tensor. Call the model once per adapter, with set_adapter"
            )
        widths = {name: output.shape[-1] for name, (_, output) in parts.items()}
        widest = max(outputs, key=lambda output: output.shape[-1])
        whole = widest.new_zeros(len(x), *widest.shape[1:])
        for rows, output in parts.values():
            whole[rows, ..., : output.shape[-1]] = output.to(whole.dtype)
        if len(set(widths.values())) > 1:
            self.widths = widths
        return whole


class _SavedInFull:
    """Forward hook of a module that adapters save in full: sends the rows of each adapter through its copy.

    PEFT's own implementation supports three kinds of modules, and requires that all adapters have a copy.
    """

    def __init__(self, rows: RowAdapters):
        self.rows = rows

    def __call__(self, wrapper: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        if wrapper.disable_adapters:
            return output
        copies = wrapper.modules_to_save
        return self.rows.run(
            wrapper.original_module,
            lambda name: copies[name] if name in copies else wrapper.original_module,  # noqa: SIM401 - no dict
            args,
            kwargs,
        )


@contextlib.contextmanager
def rows_through(model: nn.Module, names: Any, configs: Mapping[str, Any], rows: int | None) -> Iterator[None]:
    """Send each row through its adapter in a context.

    Raises:
        ConfigError: unknown adapter names, or not one per row, or a model in training mode.
        UnsupportedError: an adapter with a part that cannot be chosen per row.
    """
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names) or not names:
        raise ConfigError(f"adapter_names is {names!r}; expected a list with the name of an adapter for each row")
    faults = [did_you_mean("adapter", n, [*configs, BASE]) for n in dict.fromkeys(names) if n not in {*configs, BASE}]
    if rows is not None and rows != len(names):
        faults.append(f"adapter_names has {len(names)} names; the batch has {rows} rows, and needs one for each")
    if model.training:
        faults.append("adapter_names is for inference, as in PEFT; the model is in training mode: call model.eval()")
    if faults:
        raise ConfigError(faults)
    layers = [module for module in model.modules() if isinstance(module, SlotLayer)]
    for name in dict.fromkeys(names):
        for layer in layers:
            for slot in layer.slots_of(name) if name in layer.snnk_slots else ():
                if not getattr(slot, "by_row", False):
                    parts = ", ".join(f"{part} ({type(p).__name__})" for part, p in configs[name].named_parts().items())
                    raise UnsupportedError(
                        f"adapter_names: adapter {name!r} has the parts {parts}; a {type(slot).__name__} replaces a "
                        "module, or acts on the whole batch. Expected adapters (AdapterPart) only: call the model "
                        "once per adapter, with set_adapter"
                    )
    choice = RowAdapters(names)
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, ModulesToSaveWrapper):
                hooks.enter_context(module.register_forward_hook(_SavedInFull(choice), with_kwargs=True))
        try:
            for layer in layers:
                layer.rows = choice
            yield
        finally:
            for layer in layers:
                layer.rows = None


def refuse_rows(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Reject `adapter_names`; a forward pre-hook of models with adapters added by transformers, which ignores them.

    Raises:
        UnsupportedError: names are given.
    """
    if kwargs.get("adapter_names") is not None:
        raise UnsupportedError(
            f"adapter_names was given to a {type(model).__name__}, whose adapters transformers added, and would "
            "do nothing; expected a PeftModel. Make it with get_snnk_model or PeftModel.from_pretrained, or call the "
            "model once per adapter, with set_adapter"
        )


def rows_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the batch size of a call of a transformers model, if its main input is given."""
    names = (getattr(model, "main_input_name", "input_ids"), "inputs", "input_ids", "inputs_embeds", "pixel_values")
    given = [*(kwargs.get(name) for name in names), *args[:1]]
    return next((len(value) for value in given if isinstance(value, torch.Tensor)), None)
