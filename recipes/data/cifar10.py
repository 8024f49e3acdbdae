"""CIFAR-10: 50,000 + 10,000 pictures of 32 x 32 pixels in ten classes (Krizhevsky 2009).

Read from cifar-10-python.tar.gz or cifar-10-binary.tar.gz as distributed, or unpacked, or from class folders; python
batches are read without unpickling them.
"""

from data import TASKS
from data._cifar import CIFAR10
from snnk_peft.tasks.base_image import HubSource, ImageTask

TASK = ImageTask(
    name="cifar10",
    read=CIFAR10.read,
    label_names=CIFAR10.classes,
    folder="cifar-10-batches-py, cifar-10-batches-bin, or {train,test}/CLASS/*.{png,jpg}",
    source="CIFAR-10 (Krizhevsky 2009)",
    hub=HubSource("uoft-cs/cifar10", image="img"),
)
TASKS.register(TASK.name, TASK)
