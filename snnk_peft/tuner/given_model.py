"""Models as users have them: compiled, in inference_mode, or held by another object.

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
from torch import nn

from snnk_peft.errors import ConfigError, UnsupportedError

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
