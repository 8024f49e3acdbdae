"""Models as users have them: compiled, in inference_mode, held by another object, or patched already.

Calibrating and folding read modules one by one, through hooks, and write into tensors that are trained later. So a
compiled model is used without its compiled code, and the functions of this package run outside of inference_mode, in
which nothing that can be trained is made.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.tuner.slot_layer import SlotLayer

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_model(function: Function) -> Function:
    """Decorate a function whose first argument is a model to accept models as users have them (see the module text).

    Raises:
        ConfigError, UnsupportedError: of the function, for what is no model, or only holds one.
    """

    @functools.wraps(function)
    def enter(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (plain_model(args[0]), *args[1:])
        elif "model" in kwargs:
            kwargs["model"] = plain_model(kwargs["model"])
        given = args[0] if args else kwargs.get("model")
        if not _unusual(given):
            return function(*args, **kwargs)  # nothing follows that Ctrl-C could end after the work was done
        with as_usual(given):
            return function(*args, **kwargs)

    return cast(Function, enter)


def outside_inference_mode(method: Function) -> Function:
    """A method that makes tensors, some of which are written to later."""

    @functools.wraps(method)
    def enter(*args: Any, **kwargs: Any) -> Any:
        with as_usual(None):
            return method(*args, **kwargs)

    return cast(Function, enter)


def is_compiled(model: Any) -> bool:
    """Return True for the wrapper that torch.compile puts around a model."""
    return type(model).__name__ == "OptimizedModule" and isinstance(getattr(model, "_orig_mod", None), nn.Module)


def plain_model(model: Any) -> nn.Module:
    """The model without the wrapper of torch.compile.

    Raises:
        ConfigError: no model.
        UnsupportedError: something that holds a model.
    """
    refuse_holders(model)
    return model._orig_mod if is_compiled(model) else model


def refuse_holders(model: Any) -> None:
    """Raise ConfigError or UnsupportedError for what is no module, and for a SentenceTransformer, naming its model."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        inside = f", such as its .model (a {type(model.model).__name__})" if hasattr(model, "model") else ""
        raise ConfigError(
            f"model is {f'the text {model!r}' if isinstance(model, str) else f'a {name}'}; expected a transformers "
            f"model, from AutoModel….from_pretrained(name) for example{inside}"
        )
    if any(base.__module__.partition(".")[0] == "sentence_transformers" for base in type(model).__mro__):
        raise UnsupportedError(
            f"{name} is a pipeline of modules around a transformers model; expected that model. Take it out, give it "
            "here, and put what comes of it back: st[0].auto_model = bundle(get_snnk_model(st[0].auto_model, config))"
        )


def refuse_inference_tensors(model: nn.Module) -> None:
    """UnsupportedError for weights that were made inside torch.inference_mode: nothing can be written or trained."""
    made = [name for name, value in model.named_parameters() if value.is_inference()]
    if made:
        raise UnsupportedError(
            f"{len(made)} parameters of {type(model).__name__} ({made[0]!r}, ...) were made inside "
            "torch.inference_mode() and can be neither trained nor written to; expected ordinary ones. Load the model "
            "outside of it"
        )


def _has_compiled(model: Any) -> bool:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return any(is_compiled(module) or module._compiled_call_impl is not None for module in modules)


def _unusual(model: Any) -> bool:
    return torch.is_inference_mode_enabled() or _has_compiled(model)


def as_usual(model: Any) -> contextlib.ExitStack:
    """Leave inference_mode, and disable compiled code of the model, in a context."""
    stack = contextlib.ExitStack()
    if _has_compiled(model):
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    if torch.is_inference_mode_enabled():
        grad = torch.is_grad_enabled()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
    return stack


def refuse_prepared(model: nn.Module) -> None:
    """UnsupportedError for a model that is not a plain one: wrapped by PEFT or in copies, a bundle, or quantized."""
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UnsupportedError(
            f"the model is wrapped in {type(model).__name__}; patch the bare model first, "
            "get_snnk_model(model.module, config), and wrap the result"
        )
    refuse_holders(model)
    if is_compiled(model):
        raise UnsupportedError(
            "the model is compiled (torch.compile); expected the plain one, because what is put into a model has to be "
            "there when it is compiled. Patch model._orig_mod, calibrate and train it, and compile last"
        )
    refuse_inference_tensors(model)
    if isinstance(model, PeftModel):
        names = ", ".join(f"{name!r} ({config.peft_type})" for name, config in model.peft_config.items())
        raise UnsupportedError(
            f"{type(model).__name__} holds adapters already: {names}; expected a plain transformers model. To put a "
            "second SNNK adapter beside the first, call model.add_adapter(name, config); to put SNNK on top of LoRA, "
            "merge it first (model.merge_and_unload()); to start again, take the plain model back (model.unload())"
        )
    foreign = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer) and not isinstance(module, SlotLayer)
    ]
    if foreign:
        raise UnsupportedError(
            f"{type(model).__name__} holds layers of another PEFT method ({type(foreign[0][1]).__name__} at "
            f"{foreign[0][0]!r}, {len(foreign)} in all); expected a plain transformers model. Merge them first "
            "(merge_and_unload of the PeftModel), or take the plain model back (unload)"
        )
    if getattr(getattr(model, "config", None), "snnk_plan", None) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} is a bundle; expected a plain transformers model. What was folded has no slots "
            "any more: put the new parts on the original model, beside the first ones, and bundle that. (LoRA and "
            "other PEFT methods do go onto the Linears of a bundle)"
        )
    if getattr(model, "is_quantized", False):
        raise UnsupportedError(
            f"{type(model).__name__} is quantized; expected weights in floating point, from which SNNK parts take "
            "sizes, statistics and rows. Load it without quantization_config, patch it, and quantize its bundle"
        )


def refuse_patched(model: nn.Module) -> None:
    """UnsupportedError for a transformers model that get_snnk_model has patched, in place."""
    if (slots := next((m for m in model.modules() if isinstance(m, SlotLayer)), None)) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} is patched already (adapter {', '.join(map(repr, slots.snnk_slots))}); expected a "
            "plain transformers model. Use the PeftModel that patching it returned: model.add_adapter(name, config) "
            "puts a second adapter beside the first, model.unload() gives the plain model back"
        )
