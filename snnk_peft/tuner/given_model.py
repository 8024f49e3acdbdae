"""Models as users have them: compiled, in inference_mode, held by another object, or already patched.

Calibrating and folding read modules one by one, through hooks, and write into tensors that are trained later. So a
compiled model is used without its compiled code, and the functions of this package run outside inference_mode, where
no trainable tensors can be created.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import constants
from torch import nn
from transformers import PreTrainedModel

from snnk_peft.arguments import in_words, refuse_arguments
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.families.base import held_model
from snnk_peft.parts import Part
from snnk_peft.tuner.slot_layer import SlotLayer, root_of

COPIES = (nn.parallel.DistributedDataParallel, nn.DataParallel)
Function = TypeVar("Function", bound=Callable[..., Any])


def takes_model(function: Function) -> Function:
    """Decorate a function whose first argument is a model to accept models as users have them (see above).

    Raises:
        ConfigError, UnsupportedError: raised by the function for an object that is not a model, or only holds one.
        UnknownOptionError: arguments that the function does not accept.
    """

    @functools.wraps(function)
    def enter(*args: Any, **kwargs: Any) -> Any:
        refuse_arguments(function, args, kwargs)
        if args:
            args = (plain_model(args[0]), *args[1:])
        elif "model" in kwargs:
            kwargs["model"] = plain_model(kwargs["model"])
        given = args[0] if args else kwargs.get("model")
        if not _unusual(given):
            return function(*args, **kwargs)  # so that Ctrl-C cannot stop anything after the work is done
        with as_usual(given):
            return function(*args, **kwargs)

    return cast(Function, enter)


def outside_inference_mode(method: Function) -> Function:
    """Decorate a method to run outside inference_mode, because its tensors are written to later."""

    @functools.wraps(method)
    def enter(*args: Any, **kwargs: Any) -> Any:
        refuse_arguments(method, args, kwargs)
        with as_usual(None):
            return method(*args, **kwargs)

    return cast(Function, enter)


def is_compiled(model: Any) -> bool:
    """Return True if a model is a wrapper made by torch.compile."""
    return type(model).__name__ == "OptimizedModule" and isinstance(getattr(model, "_orig_mod", None), nn.Module)


def plain_model(model: Any) -> nn.Module:
    """Return the model without the wrapper of torch.compile.

    Raises:
        ConfigError: not a model.
        UnsupportedError: an object that holds a model.
    """
    refuse_holders(model)
    if isinstance(model, COPIES):
        raise UnsupportedError(
            f"the model is wrapped in {type(model).__name__}; expected the bare one, model.module, which the wrapper "
            "uses as well"
        )
    return model._orig_mod if is_compiled(model) else model


def refuse_holders(model: Any) -> None:
    """Raise ConfigError or UnsupportedError for non-modules, and for a SentenceTransformer, naming its model."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {in_words(model)}; expected a transformers model{_instead_of(model)}")
    if any(base.__module__.partition(".")[0] == "sentence_transformers" for base in type(model).__mro__):
        raise UnsupportedError(
            f"{name} is a pipeline of modules around a transformers model; expected that model. Take it out, give it "
            "here, and put what comes of it back: st[0].model = bundle(get_snnk_model(st[0].model, config)). "
            "convert(st, texts) takes a SentenceTransformer whole"
        )


def _instead_of(given: Any) -> str:
    """Describe how to get a model from the object that was given instead."""
    if isinstance(getattr(given, "model", None), nn.Module):
        return f", such as its .model ({in_words(given.model)})"
    if isinstance(given, (str, os.PathLike)):
        return f", such as AutoModelForSequenceClassification.from_pretrained({os.fspath(given)!r})"
    if isinstance(given, type) and hasattr(given, "from_pretrained"):
        return f", such as {given.__name__}.from_pretrained(name)"
    return ", from AutoModelForSequenceClassification.from_pretrained(name) for example; it is the first argument"


def of_transformers(model: nn.Module, consequence: str) -> PreTrainedModel:
    """Return the model if it is a transformers model.

    Raises:
        UnsupportedError: it is not; the message names the consequence, and the path of one inside it.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"{type(model).__name__} is not a transformers PreTrainedModel; {consequence}{held_model(model)}"
        )
    return model


def no_adapter(model: nn.Module) -> str | None:
    """Return the reason why a model has no active SNNK adapter, and what to do, or None if it has one."""
    name = type(root_of(model)).__name__
    layers = [module for module in model.modules() if isinstance(module, SlotLayer)]
    if layers:
        active = any(layer.active_slots() for layer in layers)
        return None if active else "its adapter is not active. Call set_adapter(name), and leave disable_adapter()"
    if is_bundle(root_of(model)):
        return f"{name} is a bundle, whose parts are folded. Give the patched model that it was made from"
    if foreign_layers(model):
        return (
            f"{name} holds layers of another PEFT method and no SNNK part. Merge them (merge_and_unload), and call "
            "get_snnk_model(model, config)"
        )
    return f"{name} is not patched. Call get_snnk_model(model, config) first, and give what it returns"


def is_bundle(model: nn.Module) -> bool:
    """Return True if a model is from `bundle`, or loaded from its folder; False for one with only a new head."""
    plan = getattr(getattr(model, "config", None), "snnk_plan", None)
    return plan is not None and not {spec["kind"] for spec in plan["modules"].values()} <= {"identity", "pooled_head"}


def share_choices(model_type: str, bundled: str) -> None:
    """Let PEFT choose modules for LoRA and similar methods in bundles as in the originals of this type."""
    for choices in vars(constants).values():
        if isinstance(choices, dict) and model_type in choices:
            choices.setdefault(bundled, choices[model_type])


def foreign_layers(model: nn.Module) -> list[tuple[str, BaseTunerLayer]]:
    """Return the layers of other PEFT methods, with their paths."""
    tuned = [(name, each) for name, each in model.named_modules() if isinstance(each, BaseTunerLayer)]
    return [(name, each) for name, each in tuned if not isinstance(each, SlotLayer)]


def refuse_inference_tensors(model: nn.Module) -> None:
    """Raise UnsupportedError for weights created in torch.inference_mode, which cannot be written to or trained."""
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
    """Leave inference_mode, and disable the model's compiled code, in a context."""
    stack = contextlib.ExitStack()
    if _has_compiled(model):
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    if torch.is_inference_mode_enabled():
        grad = torch.is_grad_enabled()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
    return stack


def refuse_prepared(model: nn.Module, parts: Iterable[Part] = ()) -> None:
    """Raise UnsupportedError for a model that is wrapped by PEFT or replicated, a bundle, or quantized.

    Quantized models are rejected only for `parts` that do more than call their Linears, or for none.
    """
    if isinstance(model, COPIES):
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
    if foreign := foreign_layers(model):
        raise UnsupportedError(
            f"{type(model).__name__} holds layers of another PEFT method ({type(foreign[0][1]).__name__} at "
            f"{foreign[0][0]!r}, {len(foreign)} in all); expected a plain transformers model. Merge them first "
            "(merge_and_unload of the PeftModel), or take the plain model back (unload)"
        )
    if is_bundle(model):
        raise UnsupportedError(
            f"{type(model).__name__} is a bundle; expected a plain transformers model. What was folded has no slots "
            "any more: put the new parts on the original model, beside the first ones, and bundle that. (LoRA and "
            "other PEFT methods do go onto the Linears of a bundle)"
        )
    wanted = list(parts)
    quantized = getattr(model, "is_quantized", False) and not is_dequantized(model)
    if quantized and not (wanted and all(part.calls_only for part in wanted)):
        raise UnsupportedError(
            f"{type(model).__name__} is quantized; expected weights in floating point, from which SNNK parts take "
            "sizes, statistics and rows. Load it without quantization_config, patch it, and quantize its bundle. "
            "(AdapterPart and NormsPart do go onto a quantized model)"
        )


PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def is_dequantized(model: nn.Module) -> bool:
    """Return True if transformers dequantized a model from a GGUF file, but it is still marked as quantized."""
    method = getattr(getattr(getattr(model, "hf_quantizer", None), "quantization_config", None), "quant_method", None)
    return str(getattr(method, "value", method)) == "gguf" and all(
        type(parameter.data) is torch.Tensor and parameter.dtype in PLAIN for parameter in model.parameters()
    )


def as_floating_point(model: Any) -> None:
    """Remove the quantization mark from a model without quantized weights, so it can be trained and saved."""
    if not is_dequantized(model):
        return
    model.is_quantized, model.hf_quantizer = False, None
    for name in ("is_loaded_in_8bit", "is_loaded_in_4bit", "quantization_method"):
        vars(model).pop(name, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def refuse_patched(model: nn.Module) -> None:
    """Raise UnsupportedError for a transformers model that get_snnk_model has patched in place."""
    if (slots := next((m for m in model.modules() if isinstance(m, SlotLayer)), None)) is not None:
        raise UnsupportedError(
            f"{type(model).__name__} is patched already (adapter {', '.join(map(repr, slots.snnk_slots))}); expected a "
            "plain transformers model. Use the PeftModel that patching it returned: model.add_adapter(name, config) "
            "puts a second adapter beside the first, model.unload() gives the plain model back"
        )
