"""ImageNet-1k: 1,281,167 training and 50,000 validation pictures in 1000 classes (Russakovsky et al. 2015).

Read from (`data.dir`):

- class folders, train/WNID/*.JPEG and val/WNID/*.JPEG, also where Kaggle's archive has them (ILSVRC/Data/CLS-LOC). The
  classes are the folders in train, sorted, so a part of ImageNet has fewer. Validation pictures in one flat folder need
  Kaggle's LOC_val_solution.csv; with LOC_synset_mapping.txt the classes have names instead of WNIDs.
- uncompressed tar shards as WebDataset lays them out (KEY.jpg with KEY.cls or KEY.json), whose names say "train",
  "val" or "validation".

Without `data.dir` the Hub's copy is fetched as a whole. Streams (`datasets` with streaming=True, WebDataset pipes) are
not read: they have no random access, so a run could neither shuffle all pictures nor be resumed bit for bit. Where
there is no room for two copies, fetch tar shards into a folder and give that: they are read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from data import TASKS
from data._hub_pictures import HubSource, fetched, published_names
from snnk_peft.tasks import Images
from snnk_peft.tasks._picture_folders import FolderLayout
from snnk_peft.tasks.base_image_folder import ImageFolderTask, unsettled


@dataclass(frozen=True, kw_only=True)
class ImageNet(ImageFolderTask):
    """Without a folder, classes and pictures are the Hub's.

    Args:
        hub: where they are on the Hub.
    """

    hub: HubSource

    @property
    def hub_path(self) -> str:
        """Data set on the Hub."""
        return self.hub.path

    def _without_folder(self, labels: Sequence[str]) -> ImageNet:
        return replace(self, label_names=tuple(labels) or published_names(self.hub, self.folder))

    def _fetched(self, wanted: Sequence[str], cache_dir: str | None) -> dict[str, Images]:
        return fetched(self, self.hub, wanted, cache_dir)


LAYOUT = FolderLayout(
    inner="ILSVRC/Data/CLS-LOC",
    class_pattern=r"n\d{8}",
    class_words="a WNID, n and eight digits",
    names_file="LOC_synset_mapping.txt",
    labels_file="LOC_val_solution.csv",
    shard_classes=1000,
)
IMAGENET1K = ImageNet(
    name="imagenet1k",
    read=unsettled,
    label_names=(),
    folder=LAYOUT.expected,
    source="ImageNet-1k (Russakovsky et al. 2015)",
    hub=HubSource(
        "ILSVRC/imagenet-1k",
        access="It is open to those who accepted its terms: do so at "
        "https://huggingface.co/datasets/ILSVRC/imagenet-1k, then run `hf auth login`. ",
    ),
    layout=LAYOUT,
)
TASKS.register(IMAGENET1K.name, IMAGENET1K)
