"""CIFAR-100: 50,000 + 10,000 pictures of 32 x 32 pixels in a hundred (fine) classes (Krizhevsky 2009).

Read from cifar-100-python.tar.gz or cifar-100-binary.tar.gz as distributed, or unpacked, or from class folders; python
batches are read without unpickling them. The twenty coarse classes are not used.
"""

from data import TASKS
from data._cifar import CifarLayout
from snnk_peft.tasks.base_image import HubSource, ImageTask

_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""

LAYOUT = CifarLayout(
    classes=tuple(_NAMES.split()),
    files=(("train", "train"), ("test", "test")),
    labels="fine_labels",
    label_bytes=2,
    example="train and test, train.bin and test.bin",
)
CIFAR100 = ImageTask(
    name="cifar100",
    read=LAYOUT.read,
    label_names=LAYOUT.classes,
    folder="cifar-100-python, cifar-100-binary, or {train,test}/CLASS/*.{png,jpg}",
    source="CIFAR-100 (Krizhevsky 2009)",
    # The Hub's copy misspells one class.
    hub=HubSource("uoft-cs/cifar100", image="img", label="fine_label", renamed=(("cra", "crab"),)),
)
TASKS.register(CIFAR100.name, CIFAR100)
