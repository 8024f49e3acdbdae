"""Which names an adapter can have, and how its tensors are found among those of others.

A name becomes a key of modules (`….snnk_slots.NAME.0.…`) and the folder that `save_pretrained` writes the adapter to.
PEFT takes the tensors of all *other* adapters out of a state dict by their names, wherever those stand in a key: with
adapters called "0" or "output" it loses most of every other one. They are put back here (`put_back`), so any such name
works.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch import nn

from snnk_peft.errors import ConfigError

# Names that stand in the keys of every patched model, or in `model(..., adapter_names=[...])`.
RESERVED = ("snnk_slots", "modules_to_save", "base_layer", "original_module", "__base__")
FOLDER_BYTES = 255  # the longest name of a folder that common file systems take


def name_faults(name: object, saved: Collection[str] = ()) -> list[str]:
    """Messages if an adapter cannot have this name.

    Args:
        name: as given.
        saved: the modules that some adapter saves in full (`modules_to_save`). PEFT finds those by the end of their
            path, and would find its own copies of them under such a name.
    """
    remedy = "choose another, such as 'fold-0'"
    if not isinstance(name, str) or not name:
        return [f"the adapter's name is {name!r}; expected text that is not empty"]
    found = []
    # transformers reads keys as regular expressions; of their signs only these do harm.
    if wrong := sorted({sign for sign in name if sign in "./\\()" or not sign.isprintable()}):
        signs = ", ".join(map(repr, wrong))
        found.append(f"adapter name {name!r} holds {signs}, and has to be a module's and a folder's name; {remedy}")
    if len(name.encode(errors="replace")) > FOLDER_BYTES:
        found.append(f"adapter name {name[:20]!r}... is longer than a folder's may be ({FOLDER_BYTES} bytes); {remedy}")
    if name in RESERVED or hasattr(nn.ModuleDict(), name):
        found.append(f"adapter name {name!r} means something else to PEFT or torch; {remedy}")
    if ends := sorted(target for target in saved if name.endswith(target)):
        found.append(
            f"adapter name {name!r} ends like {ends[0]!r} of modules_to_save, which PEFT finds by the end of its path; "
            f"{remedy}"
        )
    return found


def put_back(model: nn.Module, adapter_name: str, state: dict[str, torch.Tensor], others: Collection[str]) -> None:
    """Add to `state`, in place, the tensors that PEFT took for those of other adapters.

    Args:
        model: the patched model.
        adapter_name: the adapter that is saved.
        state: tensors by name, without those whose name holds one of another adapter's.
        others: names of the other adapters.

    Raises:
        ConfigError: `state` is not that of the model (gathered from several processes, averaged), which then cannot
            tell what is missing.
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
