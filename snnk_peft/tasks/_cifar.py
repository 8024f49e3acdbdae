"""The layouts in which CIFAR-10 and CIFAR-100 come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from snnk_peft.errors import ConfigError
from snnk_peft.tasks._class_folders import read_class_folders
from snnk_peft.tasks.base_image import Images

PARTS = {"train": ("train",), "test": ("test",)}


def reader(classes: tuple[str, ...]) -> Callable[[Path, Sequence[str]], dict[str, Images]]:
    """The `read` of an ImageTask with these classes."""

    def read(path: Path, wanted: Sequence[str]) -> dict[str, Images]:
        found = read_class_folders(path, classes, PARTS, wanted)
        if found is None:
            raise ConfigError(f"{path} holds no {{train,test}}/CLASS/*.{{png,jpg}}")
        return found

    return read
