"""Own data with their metrics: tables of texts and folders of pictures, found by name through `TASKS`.

A task (`Task`) has labels, metrics and one `load`; its class says what an example is: a text (`TextTask`) or a picture
(`ImageTask`). `TASKS["table"].with_settings` makes a task of any table, `TASKS["image_folder"].with_settings` one of
any folder of class folders. Importing this package and reading the registry need nothing beyond numpy; `datasets`,
`evaluate`, Pillow, scikit-learn and scipy (the `recipes` extra) are imported when data are loaded or a metric is
computed.
"""

from snnk_peft.registry import Registry
from snnk_peft.tasks.base import Split, Task
from snnk_peft.tasks.base_image import Images, ImageTask
from snnk_peft.tasks.base_text import TextTask

TASKS: Registry[Task] = Registry("task", __name__)

__all__ = [
    "TASKS",
    "ImageTask",
    "Images",
    "Split",
    "Task",
    "TextTask",
]
