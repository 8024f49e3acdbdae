"""Pictures in the recipes: batches, random changes, damaged files, and whole runs of finetune.py on class folders.

Oracles: pixels by hand from the files (numpy), areas counted pixel by pixel, an uninterrupted run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import finetune
import numpy as np
import pytest
import score
import torch
from accelerate import Accelerator
from data import TASKS
from data._images import ArrayPictures
from lib import trunk
from PIL import Image
from recipe_world import RECIPES, at_step, last_weights, same_tensors, scored, stop
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification
from transformers import ViTImageProcessorPil as Processor

from snnk_cli.evaluation import evaluation_splits, predict
from snnk_cli.images import Augmentation, ImageExamples, crop_box, input_size
from snnk_cli.settings import AugmentSection
from snnk_peft.errors import ConfigError
from snnk_peft.tasks import Images

CLASSES = ("airplane", "cat", "truck")
SIZE = 8


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """{train,test}/CLASS/N.png, 8 x 8 pixels; a class has a channel of its own that is bright."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 14), ("test", 5)):
        for channel, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 120, (SIZE, SIZE, 3), dtype=np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return root


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT with weights and image processor."""
    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(7)  # that of the runs is another
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    ViTForImageClassification(ViTConfig(image_size=SIZE, patch_size=4, num_labels=10, **sizes)).save_pretrained(folder)
    Processor(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


def processor(**changes: Any) -> Any:
    return Processor(size={"height": SIZE, "width": SIZE}, **changes)


def examples(pictures: Path, workers: int = 0, most: int = 0, seed: int = 0, **changes: Any) -> ImageExamples:
    rows = TASKS["cifar10"].load(pictures)["train"]
    changed = Augmentation(AugmentSection(**changes), (SIZE, SIZE), 2, seed)
    return ImageExamples(rows, processor(), 3, 10, changed, workers, most)


def by_hand(path: Path) -> np.ndarray:
    """(3, 8, 8): mean and deviation of the processor are 0.5."""
    return ((np.asarray(Image.open(path), dtype=np.float64) / 255 - 0.5) / 0.5).transpose(2, 0, 1)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_pixels_and_labels_are_those_of_the_files(pictures: Path) -> None:
    made = examples(pictures)
    files = sorted((pictures / "train").rglob("*.png"))
    batch = made.batch([0, 20, 41])
    assert batch["labels"].tolist() == [0, 3, 9]  # ids of CIFAR-10
    wanted = np.stack([by_hand(files[index]) for index in (0, 20, 41)])
    np.testing.assert_allclose(batch["pixel_values"].numpy(), wanted, atol=1e-6)
    plain = next(made.batches([[0, 20, 41]], epoch=3))  # no change is on
    np.testing.assert_allclose(plain["pixel_values"].numpy(), wanted, atol=1e-6)
    assert plain["labels"].tolist() == [0, 3, 9]


ALL = {"crop_scale": 0.3, "shift": 1, "flip": 0.5, "mixup": 0.4, "cutmix": 1.0}


@pytest.mark.parametrize("changes", [{"crop_scale": 0.3}, {"shift": 2, "flip": 0.5}, ALL], ids=["crop", "shift", "all"])
def test_what_happens_to_an_example_depends_on_seed_epoch_and_index_alone(
    pictures: Path, changes: dict[str, Any]
) -> None:
    def pixels(indices: list[list[int]], epoch: int = 1, **given: Any) -> dict[int, torch.Tensor]:
        made = examples(pictures, **changes, **given).batches(indices, epoch=epoch)
        return {
            index: row
            for part, batch in zip(indices, made, strict=True)
            for index, row in zip(part, batch["pixel_values"], strict=True)
        }

    once = pixels([[0, 1, 2, 3], [30, 31], [7]])
    for other in (pixels([[7, 3], [31, 0, 30], [1], [2]]), pixels([[0, 1], [2, 3], [30, 31], [7]], workers=2)):
        assert once.keys() == other.keys()
        assert all(torch.equal(once[index], other[index]) for index in once)
    for other in (pixels([[0, 1, 2, 3, 30, 31, 7]], epoch=2), pixels([[0, 1, 2, 3, 30, 31, 7]], seed=1)):
        assert sum(torch.equal(once[index], other[index]) for index in once) < len(once) / 2


def test_flip_and_shift_move_pixels_and_nothing_else(pictures: Path) -> None:
    files = sorted((pictures / "train").rglob("*.png"))
    flipped = next(examples(pictures, flip=1.0).batches([[4]], epoch=0))["pixel_values"][0].numpy()
    np.testing.assert_allclose(flipped, by_hand(files[4])[..., ::-1], atol=1e-6)
    padded = np.pad(by_hand(files[4]), ((0, 0), (2, 2), (2, 2)), constant_values=-1.0)  # black
    seen = set()
    for epoch in range(40):
        moved = next(examples(pictures, shift=2).batches([[4]], epoch=epoch))["pixel_values"][0].numpy()
        places = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if np.allclose(moved, padded[:, top : top + SIZE, left : left + SIZE], atol=1e-6)
        ]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) > 10


def test_crops_have_the_area_and_ratio_they_should() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([crop_box((200, 100), 0.25, rng) for _ in range(4000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0
    assert boxes[:, 2].max() <= 200
    assert boxes[:, 3].max() <= 100
    share, ratio = width * height / 20000, width / height
    assert share.min() > 0.24
    assert ratio.min() > 0.74
    assert ratio.max() < 1.36
    # A whole picture twice as wide as high is no such crop: boxes above 2/3 of it cannot be.
    assert 0.55 < share.max() < 0.68
    square = np.array([crop_box((100, 100), 0.25, rng) for _ in range(4000)])
    area = (square[:, 2] - square[:, 0]) * (square[:, 3] - square[:, 1]) / 1e4
    fits = area[area < 0.7]  # where every ratio fits, the area is uniform
    assert np.quantile(fits, [0.25, 0.5, 0.75]) == pytest.approx([0.3625, 0.475, 0.5875], abs=0.02)
    assert crop_box((300, 10), 0.9, rng) == (143, 0, 156, 10)  # nothing fits: the middle, at ratio 4/3


def test_a_random_crop_takes_the_place_of_the_processors_own(pictures: Path) -> None:
    """A processor that enlarges and cuts out the middle; the random crop, here all of it, has that size at once."""
    rows = TASKS["cifar10"].load(pictures)["train"].select([4])
    cropping = processor(do_center_crop=True, crop_size={"height": 6, "width": 5})
    made = ImageExamples(rows, cropping, 3, 10, Augmentation(AugmentSection(crop_scale=1.0), (6, 5), 2, 0))
    found = next(made.batches([[0]], epoch=0))["pixel_values"][0].numpy()
    # Ratio 1 is drawn in none of ten tries, so the box is the largest one: everything.
    expected = np.asarray(rows.picture(0).resize((5, 6), 2), dtype=np.float64) / 255 * 2 - 1
    np.testing.assert_allclose(found, expected.transpose(2, 0, 1), atol=1e-6)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_labels_are_mixed_as_pixels_are(kind: str) -> None:
    """Pictures of one colour each, so that the shares can be read off the pixels."""
    colours = np.array([0, 50, 100, 150, 200], dtype=np.uint8)
    rows = Images(ArrayPictures(np.broadcast_to(colours[:, None, None], (5, 32, 32)).copy(), "here"), np.arange(5))
    grey = Processor(size={"height": 32, "width": 32}, image_mean=[0.0], image_std=[1.0])
    changes = Augmentation(AugmentSection(**{kind: 1.0}), (32, 32), 2, seed=0)
    made = ImageExamples(rows, grey, 1, 5, changes)
    shares, partners = [], set()
    for epoch in range(60):
        batch = next(made.batches([[0, 1, 2, 3, 4]], epoch=epoch))
        assert batch["pixel_values"].shape == (5, 1, 32, 32)
        assert "labels" not in batch
        for index in range(5):
            soft, pixels = batch["soft_labels"][index], batch["pixel_values"][index, 0] * 255
            assert soft.sum().item() == pytest.approx(1)
            other = [k for k in range(5) if k != index and soft[k] > 0]
            if not other:
                assert torch.allclose(pixels, torch.full((32, 32), float(colours[index])), atol=1e-3)
                continue
            partners.add((index, other[0]))
            shares.append(soft[index].item())
            if kind == "mixup":
                mixed = soft @ torch.tensor(colours, dtype=torch.float32)
                torch.testing.assert_close(pixels, mixed.expand(32, 32), atol=0.01, rtol=0)
            else:
                own = (pixels - float(colours[index])).abs() < 0.01
                assert own.float().mean().item() == pytest.approx(soft[index].item(), abs=1e-6)
                assert ((pixels - float(colours[other[0]])).abs() < 0.01)[~own].all()
                rows_of, columns = (~own).any(1).sum(), (~own).any(0).sum()
                assert (~own).sum() == rows_of * columns  # a rectangle
    assert len(partners) == 20
    assert 0.15 < np.std(shares) < 0.45


# --- damaged pictures -------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(pictures: Path, tmp_path: Path) -> Path:
    """The same with one picture that is cut off and one of 16 bits in train, one cut off in test."""
    for source in pictures.rglob("*.png"):
        target = tmp_path / "damaged" / source.relative_to(pictures)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    root = tmp_path / "damaged"
    for name in ("train/airplane/03.png", "test/cat/01.png"):
        (root / name).write_bytes((root / name).read_bytes()[:60])
    Image.fromarray(np.zeros((SIZE, SIZE), dtype=np.uint16)).save(root / "train/cat/05.png")
    return root


def test_own_pictures_are_trained_on_and_scored_by_the_names_of_their_folders(
    vit: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, own = tmp_path / "run", pictures / "train"
    changes = ("task=image_folder", f"data.dir={own}", "data.hold_out=0.3", "train.epochs=8")
    assert finetune.main(settings(vit, pictures, run, *changes)) == 0
    figures = json.loads((run / "metrics.json").read_text())
    assert figures["score"] >= 0.8
    assert figures["examples"] == {"train": 30, "validation": 12}
    model = AutoModelForImageClassification.from_pretrained(run / "bundle")
    assert list(model.config.id2label.values()) == list(CLASSES)
    evaluation = scored(run)  # the record knows the classes and what was held back
    assert evaluation["examples"] == {"validation": 12}
    assert evaluation["score"] == figures["score"]
    # Other pictures by the classes of the model, in a folder that has one more.
    more = tmp_path / "more"
    shutil.copytree(pictures / "test", more / "val")
    told = scored(run / "bundle", "--task", "image_folder", f"data.dir={more}")
    assert told["examples"] == {"validation": 15}
    shutil.copytree(more / "val/cat", more / "val/dog")
    assert score.main([str(run / "bundle"), "--task", "image_folder", f"data.dir={more}"]) != 0
    assert "unknown class 'dog'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("workers", [0, 2])
def test_training_takes_the_next_picture_for_one_that_cannot_be_read(
    damaged: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    made = examples(damaged, most=2, workers=workers)
    first, second = made.batches([[3, 4], [19, 20]], epoch=0)
    torch.testing.assert_close(first["pixel_values"][0], first["pixel_values"][1])
    torch.testing.assert_close(second["pixel_values"][0], second["pixel_values"][1])
    out = capsys.readouterr().out
    assert "note: left out: " in out
    assert "airplane/03.png: cannot be decoded" in out
    assert "cat/05.png: mode 'I;16'; expected eight bits" in out
    with pytest.raises(ConfigError, match=r"2 images cannot be read; expected at most 1 \(data.max_unreadable\)"):
        list(examples(damaged, most=1, workers=workers).batches([[3, 4], [19, 20]], epoch=0))


def test_evaluation_leaves_unreadable_pictures_out_of_the_count(damaged: Path) -> None:
    rows = TASKS["cifar10"].load(damaged, splits=["test"])["test"]
    made = ImageExamples(rows, processor(), 3, 10, max_unreadable=1)
    config = ViTConfig(image_size=SIZE, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    found = predict(ViTForImageClassification(config), made, 4, Accelerator(cpu=True))
    assert found is not None
    assert found[1].tolist() == [0] * 5 + [3] * 4 + [9] * 5
    assert len(found[0]) == 14
    lost = ImageExamples(rows.select([6]), processor(), 3, 10, max_unreadable=1)
    assert lost.batch([0])["pixel_values"].shape == (1, 3, SIZE, SIZE)  # a batch without any


# --- processors -------------------------------------------------------------------------------------------------------


def test_the_size_is_that_of_the_crop_and_unknown_sizes_are_refused() -> None:
    cropping = processor(do_center_crop=True, crop_size={"height": 6, "width": 5})
    assert input_size(cropping) == (6, 5)
    assert input_size(processor()) == (SIZE, SIZE)
    with pytest.raises(ConfigError, match=r"differ in size; expected height and width: set size to \{height: 7"):
        input_size(Processor(size={"shortest_edge": 7}))


# --- whole runs -------------------------------------------------------------------------------------------------------


def settings(vit: Path, pictures: Path, output: Path, *changes: str) -> list[str]:
    """Two epochs of six steps."""
    given = {
        "task": "cifar10",
        "model.name_or_path": vit,
        "data.dir": pictures,
        "train.epochs": 2,
        "train.batch_size": 8,
        "train.learning_rate": 0.01,
        "method.adapter": "{component: relu, num_features: 4}",
        "output.tensorboard": "false",
        "output.dir": output,
    }
    named = [f"{name}={value}" for name, value in given.items()]
    (output.parent / "settings.yaml").write_text("train: {log_every: 2}\n")
    return [str(output.parent / "settings.yaml"), *named, *changes]


def test_adapters_are_trained_bundled_and_scored(
    vit: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    changes = ("augment.crop_scale=0.5", "augment.flip=0.5", "augment.mixup=0.2", "data.workers=1", "train.epochs=10")
    assert finetune.main(settings(vit, pictures, run, *changes)) == 0
    figures = json.loads((run / "metrics.json").read_text())
    assert figures["score"] >= 0.8  # the brightest channel; chance is a third
    assert figures["examples"] == {"train": 42, "test": 15}
    assert figures["trainable_parameters_without_classifier"] < 2000
    for folder in ("bundle", "adapter"):
        told = scored(run / folder, "--task", "cifar10", f"data.dir={pictures}")
        assert (told["score"], told["examples"]) == (figures["score"], {"test": 15})
    # Rows at equal distances: one of each class.
    assert scored(run, "data.max_eval_samples=3")["examples"] == {"test": 3}
    model = AutoModelForImageClassification.from_pretrained(run / "bundle")
    assert model.config.id2label[3] == "cat"
    card = (run / "bundle/README.md").read_text()
    assert "CIFAR-10 (Krizhevsky 2009)" in card


def test_every_epoch_changes_the_pictures_anew(
    vit: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    real = ImageExamples.batches

    def noting(self: ImageExamples, wanted: Any, device: Any = "cpu", epoch: int | None = None) -> Any:
        asked.append(epoch)
        return real(self, wanted, device, epoch)

    monkeypatch.setattr(ImageExamples, "batches", noting)
    assert finetune.main(settings(vit, pictures, tmp_path / "run", "augment.flip=0.5", "output.save_model=false")) == 0
    assert asked == [0, None, 1, None]


def test_from_scratch_nothing_of_the_folder_is_taken_but_its_configuration(
    vit: Path, pictures: Path, tmp_path: Path
) -> None:
    given, name = load_file(vit / "model.safetensors"), "vit.embeddings.patch_embeddings.projection.weight"
    for pretrained in (True, False):
        run = tmp_path / f"run_{pretrained}"
        changes = ("method.name=linear_probe", f"model.pretrained={str(pretrained).lower()}", "train.epochs=1")
        assert finetune.main(settings(vit, pictures, run, *changes)) == 0
        found = load_file(run / "model/model.safetensors")
        assert found.keys() == given.keys()
        assert torch.equal(found[name], given[name]) == pretrained


def test_a_subset_for_evaluation_has_all_classes(pictures: Path) -> None:
    """Files stand in the order of their classes."""
    rows = evaluation_splits(TASKS["cifar10"], TASKS["cifar10"].load(pictures), 6)
    assert rows["test"]["label"].tolist() == [0, 0, 3, 3, 9, 9]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_run_with_augmentation_resumes_bit_for_bit(
    vit: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    changes = [f"augment.{name}={value}" for name, value in ALL.items()]
    assert finetune.main(settings(vit, pictures, tmp_path / "straight", *changes)) == 0
    run = settings(vit, pictures, tmp_path / "run", *changes, f"data.workers={workers}")
    with monkeypatch.context() as patched:
        at_step(patched, 9, stop)
        assert finetune.main(run) == 143
    assert finetune.main([*run, "--resume", f"data.workers={2 - workers}"]) == 0
    assert same_tensors(last_weights(tmp_path / "run"), last_weights(tmp_path / "straight"))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        (["method.name=lora", "method.adapter=null"], "adapter"),
        (["method.name=linear_probe"], "model"),
        (["method.name=full"], "model"),
        (["method.name=full", "model.pretrained=false"], "model"),
        (["method.adapter=null", "method.ffn={num_features: 8}", "method.calibrate=true"], "bundle"),
        (["method.adapter=null", "method.attention={num_features: 8}"], "bundle"),
        (["method.adapter=null", "method.pooler={num_features: 8}"], "bundle"),
    ],
    ids=["lora", "probe", "full", "scratch", "ffn", "attention", "pooler"],
)
def test_every_method_trains(vit: Path, pictures: Path, tmp_path: Path, changes: list[str], kind: str) -> None:
    run = tmp_path / "run"
    assert finetune.main(settings(vit, pictures, run, "train.epochs=1", *changes)) == 0
    figures = json.loads((run / "metrics.json").read_text())
    told = scored(run / kind, "--task", "cifar10", f"data.dir={pictures}")
    assert told["score"] == pytest.approx(figures["score"])


@pytest.mark.parametrize("head", ["own", "wide"])
def test_layers_that_run_once_over_the_pictures(
    vit: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """As training of the layers behind; unreadable pictures do not count, and augmentation is refused."""
    monkeypatch.setattr(trunk, "DTYPE", torch.float32)
    same = ("train.dropout=0", f"method.head={head}", "data.workers=1")
    behind = "method.adapter={component: relu, num_features: 4, layers: [1]}"
    assert finetune.main(settings(vit, pictures, tmp_path / "plain", *same, behind)) == 0
    assert finetune.main(settings(vit, pictures, tmp_path / "cut", *same, "method.cut=1")) == 0
    wanted = last_weights(tmp_path / "plain")
    for name, found in last_weights(tmp_path / "cut").items():
        torch.testing.assert_close(found, wanted[name], rtol=1e-3, atol=1e-5, msg=name)


def test_a_picture_that_cannot_be_read_has_no_part_in_a_run_with_a_cut(
    vit: Path, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, given = tmp_path / "run", ("method.cut=1", "train.dropout=0", "data.max_unreadable=3")
    assert finetune.main(settings(vit, damaged, run, *given)) == 0
    assert "note: left out" in capsys.readouterr().out
    assert np.isfinite(json.loads((run / "metrics.json").read_text())["score"])
    assert finetune.main(settings(vit, damaged, tmp_path / "flipped", *given, "augment.flip=0.5")) == 2
    assert "augment.flip is 0.5 with method.cut" in capsys.readouterr().err


def test_wrong_settings_are_refused_with_the_remedy(
    vit: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*changes: str) -> str:
        assert finetune.main(settings(vit, pictures, tmp_path / "run", *changes)) == 2
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    large = tmp_path / "large"
    AutoModelForImageClassification.from_pretrained(vit).save_pretrained(large)
    assert "no image processor could be read" in refused(f"model.name_or_path={large}")
    Processor(size={"height": 16, "width": 16}).save_pretrained(large)
    assert "produces images of 16 x 16 pixels; ViTForImageClassification reads 8 x 8" in refused(
        f"model.name_or_path={large}"
    )
    Processor(size={"height": SIZE, "width": SIZE}, image_mean=[0.5], image_std=[0.5]).save_pretrained(large)
    assert "has 1 means (image_mean), one per channel; ViTForImageClassification reads 3" in refused(
        f"model.name_or_path={large}"
    )
    assert "data_dir nowhere does not exist; expected cifar-10-batches-py" in refused("data.dir=nowhere")


def test_the_model_that_is_trained_from_scratch_is_read() -> None:
    """recipes/models: each folder builds the model its recipes name, for pictures of its processor's size."""
    folders = [file.parent for file in (RECIPES / "models").glob("*/config.json")]
    assert folders
    for folder in folders:
        config = json.loads((folder / "config.json").read_text())
        described = json.loads((folder / "preprocessor_config.json").read_text())
        seen = described.get("crop_size", described["size"])
        side = config.get("image_size", 224)  # a convolutional network takes any, and those here were published for 224
        assert seen == {"height": side, "width": side}
        assert len(described["image_mean"]) == config["num_channels"]
