"""An upper bound on the model a config may ask for, from the weights next to it: one line can ask for 10⁷ layers.

Part of the code file of every bundle.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from snnk_peft.digests import open_tensors
from snnk_peft.errors import ConfigError
from snnk_peft.json_files import read_json

# Parameters per tensor of a file (a bundle omits some of the original's), without any tensors, and of any model.
PARAMETERS_PER_TENSOR, SPARE_PARAMETERS, UNHEARD_OF = 8, 1000, 100_000


@contextlib.contextmanager
def building_within(most: int, of: str) -> Iterator[None]:
    """Raise ConfigError if more than `most` parameters are created in a context: a config may ask for 10⁷ layers."""
    made = 0

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise ConfigError(
                f"config.json asks for more than {most:,} parameters; {of}. Look at the number of layers, or copy the "
                "folder again"
            )

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _check_indices(home: Path) -> None:
    """Raise ConfigError for an invalid index of shards, which transformers would trust."""
    for path in home.glob("model.safetensors.index*.json"):
        content = read_json(path)
        files = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise ConfigError(f"{path} has no weight_map of tensor names to files; copy or download it again")
        if not isinstance(content.get("metadata", {}), dict):
            raise ConfigError(f"{path}: metadata is {str(content['metadata'])[:100]!r}; expected an object")


def weights_of(folder: Any, subfolder: str | None) -> tuple[int, str]:
    """Return the number of parameters a config may ask for, given the weights in a local folder, and the reason."""
    home = Path(folder) / (subfolder or "") if isinstance(folder, (str, os.PathLike)) else None
    held = 0
    if home is not None and not (home / "model.safetensors").exists():
        _check_indices(home)
    for path in home.glob("*.safetensors") if home is not None and home.is_dir() else ():
        if path.is_file():
            with open_tensors(path) as file:
                held += len(file.keys())
    if not held:
        return UNHEARD_OF, "no known model has as many"
    return PARAMETERS_PER_TENSOR * held + SPARE_PARAMETERS, f"the weights in {home} hold {held:,} tensors"
