"""Pictures come as `datasets.Image` gives them, whatever the mode, the format and how the camera was held."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from data import TASKS
from data._images import EncodedPictures
from image_layouts import KEPT, kept_as
from papers.programs.fit_picture import read_picture
from papers.programs.train_mlp import columns_of
from PIL import Image
from transformers import ViTImageProcessorPil

from snnk_cli.images import ImageExamples
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.base_image import UnreadableImageError, converted

ORIENTATION = 0x0112
MODES = {
    **dict.fromkeys(("1", "L", "LA", "P", "RGB", "RGBA"), "PNG"),
    **dict.fromkeys(("CMYK", "YCbCr"), "TIFF"),
}
RNG = np.random.default_rng(0)
COLOURS = RNG.integers(0, 256, (6, 4, 3), dtype=np.uint8)


def encoded(image: Any, kind: str, orientation: int | None = None, **options: Any) -> bytes:
    stream = io.BytesIO()
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif.tobytes()
    image.save(stream, kind, **options)
    return stream.getvalue()


def oracle(content: bytes) -> Any:
    """What `datasets` decodes, in the mode in which it is kept."""
    return datasets.Image().decode_example({"bytes": content, "path": None})


def opened(content: bytes) -> Any:
    return EncodedPictures([content], ["x"]).open(0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_a_picture_stands_upright_however_the_camera_was_held(orientation: int, kind: str) -> None:
    content = encoded(Image.fromarray(COLOURS), kind, orientation)
    found, expected = opened(content), oracle(content)
    assert found.size == ((4, 6) if orientation < 5 else (6, 4))
    np.testing.assert_array_equal(found, expected)
    if orientation > 1:
        plain = opened(encoded(Image.fromarray(COLOURS), kind))
        assert plain.size != found.size or (np.asarray(plain) != np.asarray(found)).any()


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_what_datasets_and_pipelines_make_of_it(mode: str) -> None:
    content = encoded(Image.fromarray(COLOURS).convert("RGBA" if mode == "LA" else "RGB").convert(mode), MODES[mode])
    np.testing.assert_array_equal(converted(opened(content), 3), oracle(content).convert("RGB"))
    np.testing.assert_array_equal(converted(opened(content), 1), oracle(content).convert("L"))


@pytest.mark.parametrize("transparency", [0, bytes([0, 128, 255])])
def test_palettes_with_transparency_keep_their_colours(transparency: Any) -> None:
    palette = Image.fromarray(COLOURS).convert("P", palette=Image.Palette.ADAPTIVE, colors=24)
    content = encoded(palette, "PNG", transparency=transparency)
    np.testing.assert_array_equal(converted(opened(content), 3), oracle(content).convert("RGBA").convert("RGB"))
    frames = [Image.fromarray(np.roll(COLOURS, by, 0)) for by in range(3)]
    moving = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(converted(opened(moving), 3), oracle(moving).convert("RGB"))  # the first frame


@pytest.mark.parametrize(("mode", "kind"), [("I;16", "PNG"), ("I", "TIFF"), ("F", "TIFF"), ("LAB", "TIFF")])
def test_modes_without_eight_bits_per_channel_are_refused(mode: str, kind: str) -> None:
    with pytest.raises(UnreadableImageError, match=rf"x: mode '{mode}'; expected eight bits per channel"):
        opened(encoded(Image.new(mode, (4, 6)), kind))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow tells what is missing
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"])
def test_a_picture_cut_anywhere_is_whole_or_named(kind: str) -> None:
    content = encoded(Image.fromarray(COLOURS), kind, 6 if kind not in ("GIF", "BMP") else None)
    for size in range(len(content)):
        try:
            found = opened(content[:size])
        except UnreadableImageError:
            continue
        assert converted(found, 3).size in ((4, 6), (6, 4))


@pytest.mark.parametrize("kept", KEPT)
def test_every_door_turns_a_photo(kept: str, tmp_path: Path) -> None:
    content = encoded(Image.fromarray(COLOURS), "JPEG", 6)
    upright = np.asarray(oracle(content))
    found = kept_as(kept, [content], tmp_path, "jpg")
    np.testing.assert_array_equal(found.picture(0), upright)
    processor = ViTImageProcessorPil(size={"height": 4, "width": 6}, do_normalize=False, do_resize=False)
    pixels = ImageExamples(found, processor, 3, 10).batch([0])["pixel_values"][0]
    np.testing.assert_allclose(pixels.permute(1, 2, 0).numpy() * 255, upright, atol=1e-3)
    grey = np.asarray(oracle(content).convert("L"))
    np.testing.assert_allclose(columns_of(found).values[0] * 255, grey.ravel(), atol=1e-4)


def test_a_photo_as_a_function_is_upright(tmp_path: Path) -> None:
    content = encoded(Image.fromarray(COLOURS[:4]), "PNG", 6)
    (tmp_path / "x.png").write_bytes(content)
    found = read_picture("china", tmp_path / "x.png", 4).values
    np.testing.assert_allclose((found + 1) * 127.5, np.asarray(oracle(content).convert("L")), atol=1e-4)


def test_unreadable_pictures_of_rows_are_named_together(tmp_path: Path) -> None:
    for name, content in {"a/0.png": b"", "a/1.png": b"no", "b/0.png": b"", "b/1.png": b""}.items():
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(content)
    rows = TASKS["image_folder"].with_settings({"dir": str(tmp_path), "hold_out": 0.5}).load()["train"]
    with pytest.raises(ConfigError) as caught:
        columns_of(rows)
    assert len(caught.value.faults) == len(rows) == 2
