"""CIFAR-10: 50,000 + 10,000 pictures of 32 x 32 pixels in ten classes (Krizhevsky 2009)."""

from snnk_peft.tasks import TASKS
from snnk_peft.tasks._cifar import reader
from snnk_peft.tasks.base_image import ImageTask

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR10 = ImageTask(
    name="cifar10",
    read=reader(CLASSES),
    label_names=CLASSES,
    folder="cifar-10-batches-py, cifar-10-batches-bin, or {train,test}/CLASS/*.{png,jpg}",
    source="CIFAR-10 (Krizhevsky 2009)",
    hub_path="uoft-cs/cifar10",
)
TASKS.register(CIFAR10.name, CIFAR10)
