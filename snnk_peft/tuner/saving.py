"""Save adapters: the whole folder or nothing, with the config tied to the weights; and check their names.

PEFT writes weights, config and card one after the other into the folder itself; transformers writes the config first.
The model inside a PeftModel would write its wrapped modules under names unknown to transformers, so its
`save_pretrained` is replaced.

A name becomes part of module keys (`….snnk_slots.NAME.0.…`) and of the folder that `save_pretrained` writes the
adapter to. PEFT removes the tensors of all *other* adapters from a state dict by name, wherever the name occurs in a
key: with adapters called "0" or "output" it loses most of every other one. They are put back here (`put_back`), so any
such name works.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from snnk_peft.config import CONFIG, FREE, WEIGHTS, SNNKConfig
from snnk_peft.errors import ConfigError
from snnk_peft.model_card import mend_card
from snnk_peft.saved_folder import written_whole
from snnk_peft.stamps import stamp_together

CARD = "README.md"
# Names that occur in the keys of every patched model, or in `model(..., adapter_names=[...])`.
RESERVED = ("snnk_slots", "modules_to_save", "base_layer", "original_module", "__base__")
FOLDER_BYTES = 255  # the longest folder name that common file systems accept


@contextlib.contextmanager
def saved_adapters(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide a folder in a context to save adapters to, also in subfolders; on exit, move them to `folder`.

    Raises:
        ConfigError: the folder cannot be written to; existing files are unchanged.
    """
    target = Path(folder)
    with written_whole(target) as staged:
        for card in [target / CARD, *target.glob(f"*/{CARD}")]:  # cards edited by users are kept
            if card.is_file():
                (copy := staged / card.relative_to(target)).parent.mkdir(exist_ok=True)
                shutil.copyfile(card, copy)
        yield staged
        for weights in staged.rglob(WEIGHTS):
            if (config := weights.with_name(CONFIG)).is_file():
                stamp_together(config, FREE, [weights])


def watch_saving() -> None:
    """Patch `PeftModel.save_pretrained`, once, to write SNNK adapters atomically, with cards that the Hub accepts."""
    PeftModel.create_or_update_model_card = _keeping_cards(PeftModel.create_or_update_model_card)  # type: ignore[method-assign]
    PeftModel.save_pretrained = _saving_whole(PeftModel.save_pretrained)  # type: ignore[method-assign]


def _keeping_cards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap PEFT's card writer, which replaces the tags of an existing card and names a local base model."""

    @functools.wraps(original)
    def create_or_update_model_card(self: PeftModel, output_dir: str) -> None:
        config = next(iter(self.peft_config.values()), None)
        if not isinstance(config, SNNKConfig):
            original(self, output_dir)
            return
        card = Path(output_dir) / CARD
        if not card.is_file():
            original(self, output_dir)
        mend_card(card, config.base_model_name_or_path)

    return create_or_update_model_card


def _saving_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: PeftModel, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        ours = any(isinstance(config, SNNKConfig) for config in self.peft_config.values())
        if not ours or not given.arguments["is_main_process"]:
            return original(self, *args, **kwargs)
        folder = given.arguments["save_directory"]
        if not given.arguments["safe_serialization"]:
            raise ConfigError(
                f"safe_serialization is False for {folder}; SNNK adapters are saved as {WEIGHTS}, the only file that "
                "is read. Leave it out"
            )
        with saved_adapters(folder) as staged:
            given.arguments["save_directory"] = str(staged)
            return original(*given.args, **given.kwargs)

    return save_pretrained


class PatchedSave:
    """Replacement for a patched model's `save_pretrained`."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save an adapter added by transformers as the model's own method does.

        Raises:
            ConfigError: the adapter belongs to a PeftModel.
        """
        if not getattr(self.model, "_hf_peft_config_loaded", False):
            raise ConfigError(
                f"this {type(self.model).__name__} is the inside of a PeftModel: saved alone, it could not be loaded "
                "again. Save the adapter with the PeftModel's save_pretrained, the whole as a plain model with "
                "snnk_peft.bundle(model).save_pretrained(folder), or the base model after model.unload()"
            )
        save = type(self.model).save_pretrained
        if not (args[0] if args else kwargs.get("is_main_process", True)):
            return save(self.model, save_directory, *args, **kwargs)
        with saved_adapters(save_directory) as staged:
            return save(self.model, staged, *args, **kwargs)


def guard_save(model: Any) -> None:
    """Install the replacement of `save_pretrained`."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = PatchedSave(model)


def release_save(model: Any) -> None:
    """Undo `guard_save`."""
    if isinstance(vars(model).get("save_pretrained"), PatchedSave):
        del model.save_pretrained


def name_faults(name: object, saved: Collection[str] = ()) -> list[str]:
    """List the faults of an adapter's name.

    Args:
        name: the name.
        saved: the modules that some adapter saves in full (`modules_to_save`). PEFT matches these by the end of their
            path, and would match its own copies of them under such a name.
    """
    remedy = "choose another, such as 'fold-0'"
    if not isinstance(name, str) or not name:
        return [f"the adapter's name is {name!r}; expected text that is not empty"]
    faults = []
    # transformers treats keys as regular expressions; only these special characters do harm.
    if wrong := sorted({sign for sign in name if sign in "./\\()" or not sign.isprintable()}):
        signs = ", ".join(map(repr, wrong))
        faults.append(f"adapter name {name!r} holds {signs}, and has to be a module's and a folder's name; {remedy}")
    if len(name.encode(errors="replace")) > FOLDER_BYTES:
        faults.append(
            f"adapter name {name[:20]!r}... is longer than a folder's may be ({FOLDER_BYTES} bytes); {remedy}"
        )
    if name in RESERVED or hasattr(nn.ModuleDict(), name):
        faults.append(f"adapter name {name!r} means something else to PEFT or torch; {remedy}")
    if ends := sorted(target for target in saved if name.endswith(target)):
        faults.append(
            f"adapter name {name!r} ends like {ends[0]!r} of modules_to_save, which PEFT finds by the end of its path; "
            f"{remedy}"
        )
    return faults


def put_back(model: nn.Module, adapter_name: str, state: dict[str, torch.Tensor], others: Collection[str]) -> None:
    """Add to `state`, in place, the tensors that PEFT mistook for those of other adapters.

    Args:
        model: the patched model.
        adapter_name: the adapter being saved.
        state: tensors by name, without those whose name contains another adapter's name.
        others: names of the other adapters.

    Raises:
        ConfigError: `state` is not the model's own (gathered from several processes, or averaged), so that missing
            tensors cannot be identified.
    """
    names = (name for name, _ in itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers()))
    taken = [n for n in names if n not in state and any(f".{one}." in f"{n}." for one in others)]
    if not any(_belongs(name, adapter_name, others) for name in taken):
        return
    own = model.state_dict()
    changed = [key for key in state if key in own and not _equal(state[key], own[key])]
    if changed:
        raise ConfigError(
            f"the state_dict given for adapter {adapter_name!r} is not the model's own ({changed[0]} differs). PEFT "
            f"leaves tensors out of it, because adapters are called {', '.join(map(repr, others))}, which their "
            "paths hold. Save without state_dict, or load the adapters under other names"
        )
    state |= {key: own[key] for key in taken if key in own}


def _belongs(name: str, adapter_name: str, others: Collection[str]) -> bool:
    """Return True for a tensor of this adapter, or of the base model, which may be saved with it."""
    for holder in (".snnk_slots.", ".modules_to_save."):
        if holder in name:
            return name.partition(holder)[2].partition(".")[0] == adapter_name
    return True


def _equal(given: torch.Tensor, own: torch.Tensor) -> bool:
    if given.shape != own.shape or given.dtype != own.dtype:
        return False
    return given.data_ptr() == own.data_ptr() or bool(torch.equal(given.to(own.device), own))
