"""User data with metrics: tables of texts and folders of images, found by name through `TASKS`.

A task (`Task`) has labels, metrics and a `load` method; its class determines what an example is: a text (`TextTask`) or
an image (`ImageTask`). `TASKS["table"].with_settings` makes a task from any table, and
`TASKS["image_folder"].with_settings` one from any folder of class folders. Importing this package and reading the
registry need only numpy; `datasets`, Pillow, scikit-learn and scipy (the `recipes` extra) are imported when data are
loaded or a metric is computed.
"""

from snnk_peft.registry import Registry
from snnk_peft.tasks.base import Split, Task, TextTask
from snnk_peft.tasks.base_image import Images, ImageTask

TASKS: Registry[Task] = Registry("task", __name__)

__all__ = [
    "TASKS",
    "ImageTask",
    "Images",
    "Split",
    "Task",
    "TextTask",
]
