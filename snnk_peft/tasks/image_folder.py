"""A folder of images as a task: train/CLASS/* with val/CLASS/* or test/CLASS/*, or CLASS/* alone, or tar shards.

The classes are the folders found, sorted. Without a folder to evaluate on, part of the training images is held out,
stratified by class and always the same.

Example:
    >>> import tempfile, pathlib
    >>> from PIL import Image
    >>> from snnk_peft.tasks import TASKS
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"):
    ...     (folder / name).parent.mkdir(exist_ok=True)
    ...     Image.new("RGB", (8, 8)).save(folder / name)
    >>> task = TASKS["image_folder"].with_settings({"dir": folder})
    >>> task.label_names
    ('cat', 'dog')
    >>> {split: len(images) for split, images in task.load().items()}
    {'train': 2, 'validation': 2}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from snnk_peft.errors import ConfigError
from snnk_peft.tasks import TASKS
from snnk_peft.tasks._files import listed
from snnk_peft.tasks._image_folders import FolderLayout
from snnk_peft.tasks.base import Request
from snnk_peft.tasks.base_image import Images, ImageTask

HOLD_OUT = 0.1


def unsettled(path: Path, wanted: Sequence[str]) -> dict[str, Images]:
    """Raise an error: the `read` of a task that has no classes yet."""
    raise ConfigError(
        f"the classes are not known before with_settings({{'dir': {str(path)!r}}}); load from the task that it returns"
    )


@dataclass(frozen=True)
class ImageFolderTask(ImageTask):
    """Task for an image folder; the registered one has no classes until `with_settings` gives it a folder.

    Args:
        layout: the expected layout.
        directory: the folder of the images.
        notes: descriptions of what was found.
    """

    layout: FolderLayout = field(default_factory=FolderLayout)
    directory: Path | None = None
    splits: tuple[str, ...] = ("train", "validation")
    notes: tuple[str, ...] = ()

    def check(self, settings: Mapping[str, Any]) -> list[str]:
        """List the faults of the settings that can be found without reading the folder."""
        mine = ("labels", "hold_out", "split_seed") if self.layout.hold_out else ("labels",)
        faults = super().check({key: value for key, value in settings.items() if key not in mine})
        labels, share = settings.get("labels"), settings.get("hold_out")
        if labels is not None and len({str(name) for name in labels}) < max(2, len(labels)):
            faults.append(f"labels are {listed(map(str, labels))}; expected at least two names, each once")
        if share is not None and "hold_out" in mine and not 0 < share < 1:
            faults.append(f"hold_out is {share}; expected a share above 0 and below 1")
        return faults

    def with_settings(self, settings: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> ImageFolderTask:
        """Return the task for a folder; its classes come from the settings, the model, or the training images.

        Args:
            settings: dir, labels (class folders or their names, in the order of the ids), hold_out and split_seed, with
                None for the default; other keys are ignored.
            model: config.json of a model that was trained on the task: its classes are the labels.

        Raises:
            ConfigError: no such folder, or no classes in it.
        """
        if faults := self.check({key: settings.get(key) for key in ("labels", "hold_out", "split_seed")}):
            raise ConfigError(faults)
        names = (model or {}).get("id2label") or {}
        labels = [str(name) for name in settings.get("labels") or [names[key] for key in sorted(names, key=int)]]
        if settings.get("dir") is None:
            return self._without_folder(labels)
        path = Path(settings["dir"]).expanduser()
        if not path.is_dir():
            what = "is a file; unpack it, if it is an archive" if path.exists() else "does not exist"
            raise ConfigError(f"data.dir {path} {what}. Expected {self.layout.expected}")
        named = self.layout.names(path)
        if labels:
            folders = {name: folder for folder, name in named.items()}
            classes = tuple(folders.get(name, name) for name in labels)
        else:
            classes = self.layout.classes(path)
        share = HOLD_OUT if settings.get("hold_out") is None else float(settings["hold_out"])
        read = partial(self.layout.read, classes=classes, share=share, seed=int(settings.get("split_seed") or 0))
        titles = tuple(labels) or tuple(named.get(name, name) for name in classes)
        notes = [] if labels else [f"{len(titles)} classes are found in {path}: {listed(titles)} (data.labels)"]
        if self.layout.divides(path):
            notes.append(
                f"no evaluation pictures are given: {share:.0%} of the training pictures are held back, always the "
                "same ones (data.hold_out, data.split_seed)"
            )
        source = self.source or f"the pictures in the folder {path.resolve().name}"
        return replace(self, label_names=titles, read=read, directory=path, source=source, notes=tuple(notes))

    def _without_folder(self, labels: Sequence[str]) -> ImageFolderTask:
        """Return the task if no folder is given; overridden by tasks that download the images."""
        raise ConfigError(f"data.dir is missing: a folder that holds {self.layout.expected}")

    @property
    def inferred(self) -> dict[str, Any]:
        return {"labels": list(self.label_names)}

    @property
    def title(self) -> str:
        """The name of the folder, for a user's own data."""
        return self.directory.resolve().name if self.layout.hold_out and self.directory else self.name

    def _read(self, request: Request) -> dict[str, Images]:
        path = self.directory if request.path is None else request.path
        if not self.label_names:
            unsettled(Path("...") if path is None else path, ())
        return super()._read(replace(request, path=path))


LAYOUT = FolderLayout(evaluation=("val", "validation", "valid", "dev", "test"), hold_out=True)
IMAGE_FOLDER = ImageFolderTask(
    name="image_folder", read=unsettled, label_names=(), folder=LAYOUT.expected, source="", layout=LAYOUT
)
TASKS.register(IMAGE_FOLDER.name, IMAGE_FOLDER)
