"""One's own pictures as a task: train/CLASS/* with val/CLASS/* or test/CLASS/*, or CLASS/* alone, or tar shards.

The classes are the folders found, sorted. Without a folder to evaluate on, a part of the training pictures is held
back, of every class alike and always the same ones.

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

from snnk_peft.tasks import TASKS
from snnk_peft.tasks._picture_folders import FolderLayout
from snnk_peft.tasks.base_image_folder import ImageFolderTask, unsettled

LAYOUT = FolderLayout(evaluation=("val", "validation", "valid", "dev", "test"), hold_out=True)
IMAGE_FOLDER = ImageFolderTask(
    name="image_folder", read=unsettled, label_names=(), folder=LAYOUT.expected, source="", layout=LAYOUT
)
TASKS.register(IMAGE_FOLDER.name, IMAGE_FOLDER)
