"""Image models: every head takes its parts or says why not, a new pooler before the classifier, real digits."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, ViTModel
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from snnk_peft import (
    FAMILIES,
    AdapterPart,
    AttentionPart,
    FFNPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    calibrate,
    check_family,
    fit_closed_form,
    get_snnk_model,
)
from snnk_peft.bundling.bundle import TOLERANCES
from snnk_peft.bundling.report import compare, probe_inputs
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.parts.replaced.pooler import NewPooler
from tests.fresh_process import run_python
from tests.package.test_families import PARTS, TWO_SIDED, agree
from tests.tiny_families import CONFIGS, IMAGE, build, heads
from tests.tiny_models import trained

TOWERS = ("clip", "siglip")
FAMILIES_OF_IMAGES = [name for name in FAMILIES if "image_size" in CONFIGS[name] or name in TOWERS]
HEADS = [(family, head) for family in FAMILIES_OF_IMAGES for head in heads(family) if head not in TWO_SIDED]
CLASSIFIERS = [(family, head) for family, head in HEADS if "ForImageClassification" in head]
POOLED = {"ViTModel", "DeiTModel"}  # encoders with a pooler of their own
SCALED = {"data2vec-vision": "only after changing them"}  # its scale follows from the size of a head
SOFTMAX = {"beit": "bias per pair of positions", "data2vec-vision": "does not call its attention through"}


def test_the_families_are_those_that_are_claimed():
    assert len(FAMILIES_OF_IMAGES) == 11
    assert len(CLASSIFIERS) == 10


# Segmentation reads inner layers only: nothing reads the last one, which check_family says. It is in test_families.py.
@pytest.mark.parametrize(("family", "head"), [case for case in HEADS if not case[1].endswith("Segmentation")])
def test_every_head_takes_its_parts_and_refuses_the_others(family, head):
    """Each placement of adapters, FFN, pooler and attention: check_family runs, trains, disables and bundles it."""
    report = check_family(build(family, head))
    refused = {"attention": SOFTMAX[family]} if family in SOFTMAX else {}
    if family in SCALED:
        refused["narrow_heads"] = SCALED[family]
    if head not in POOLED and (family, head) not in CLASSIFIERS:
        refused["pooler"] = "has no pooler to replace"
    assert set(report.checked) == PARTS - set(refused)
    assert set(report.left_out) == set(refused)
    assert all(reason in report.left_out[part] for part, reason in refused.items())


def test_beit_without_a_bias_takes_linear_attention():
    part = SNNKConfig(attention=AttentionPart(num_features=8), modules_to_save=[])
    plain = {"use_relative_position_bias": False}
    model = get_snnk_model(build("beit", "BeitForImageClassification", **plain), part).eval()
    inputs = probe_inputs(model.get_base_model())
    assert compare(model, bundle(model), inputs)[0] < 1e-5
    shared = build("beit", "BeitForImageClassification", use_shared_relative_position_bias=True, **plain)
    with pytest.raises(UnsupportedError, match="bias per pair of positions"):
        get_snnk_model(shared, copy.deepcopy(part))


@pytest.mark.parametrize("family", FAMILIES_OF_IMAGES)
@torch.no_grad()
def test_an_ffn_is_converted_fitted_bundled_and_loaded(family, tmp_path):
    """As many ReLU landmarks as hidden units are the FFN itself, once they are fitted."""
    head = next((one for name, one in CLASSIFIERS if name == family), next(iter(heads(family))))
    changes = {"vision_config": {**IMAGE, "hidden_act": "relu"}} if family in TOWERS else {"hidden_act": "relu"}
    model = build(family, head, **changes)
    batches = [{"pixel_values": torch.randn(8, 3, 8, 8)} for _ in range(5)]
    exact = model(**batches[0])
    hidden = 32 if family.startswith("dino") else 24
    part = FFNPart("relu", "landmark", num_features=hidden, layers=[1], init="random")
    changed = get_snnk_model(model, SNNKConfig(ffn=part, modules_to_save=[])).eval()
    (slot,) = calibrate(changed, batches, progress=False).slots
    assert slot.error_after < 1e-6 < 0.1 < slot.error_before
    bundle(changed).save_pretrained(tmp_path)
    auto = getattr(transformers, heads(family)[head])
    agree(auto.from_pretrained(tmp_path)(**batches[0]), exact, rtol=1e-3, atol=1e-4)


HALF = {
    **{
        place: {"adapter": AdapterPart(placement=place)} for place in ("houlsby", "pfeiffer", "parallel", "query_value")
    },
    "ffn": {"ffn": FFNPart(num_features=16)},
    "pooler": {"pooler": PoolerPart(num_features=16)},
    "attention": {"attention": AttentionPart(projection="free", num_features=16)},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("part", "saved"), [*((part, None) for part in HALF), ("pooler", [])])
def test_half_precision(part, saved, dtype):
    """The output is that of the same numbers in fp32, gradients are finite, and the bundle keeps the type."""
    config = SNNKConfig(**copy.deepcopy(HALF[part]), modules_to_save=saved)
    model = get_snnk_model(build("vit", "ViTForImageClassification").to(dtype), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    inputs = {"pixel_values": torch.randn(4, 3, 8, 8)}
    given = {"pixel_values": inputs["pixel_values"].to(dtype)}
    wide = copy.deepcopy(model).float()
    logits, expected = model(**given).logits, wide(pixel_values=given["pixel_values"].float()).logits
    assert logits.dtype == dtype
    assert (logits.float() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()
    logits.float().square().sum().backward()
    learned = [p for p in model.parameters() if p.requires_grad]
    assert learned
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learned)
    small = bundle(model)
    assert small.dtype == dtype
    assert small.bundle_report.parity_error <= TOLERANCES[dtype]


# --- a new pooler ---------------------------------------------------------------------------------------------------


def image_classifier(**changes):
    return build("vit", "ViTForImageClassification", **changes)


def pooler_of(model) -> NewPooler:
    (found,) = (module for module in model.modules() if isinstance(module, NewPooler))
    return found


@pytest.mark.parametrize(("family", "head"), CLASSIFIERS)
@torch.no_grad()
def test_a_new_pooler_stands_between_the_vector_and_its_head(family, head, tmp_path):
    """W_c (Φ(x) Aᵀ + b) + b_c, by hand; bundled to one Linear of the features; loaded back, the adapter as well."""
    base = build(family, head)
    inputs, read = probe_inputs(base), {}
    names = [name for name in FAMILIES[family].pooled_heads if hasattr(base, name)]
    hooks = [
        getattr(base, name).register_forward_hook(lambda module, args, out, name=name: read.update({name: args[0]}))
        for name in names
    ]
    before = base(**inputs).logits
    for hook in hooks:
        hook.remove()
    assert set(read) == set(names)
    model = trained(get_snnk_model(copy.deepcopy(base), SNNKConfig(pooler=PoolerPart(num_features=6)))).eval()
    wanted = []
    for name in names:
        copied, pooler = getattr(model.get_base_model(), name).snnk_slots["default"]
        features = pooler.layer.stage(read[name]) @ pooler.layer.A.T + pooler.layer.bias
        wanted.append(copied.module(features))
    expected = model(**inputs).logits
    torch.testing.assert_close(expected, torch.stack(wanted).mean(0), rtol=1e-4, atol=1e-5)
    with model.disable_adapter():
        assert torch.equal(model(**inputs).logits, before)

    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").eval()
    torch.testing.assert_close(again(**inputs).logits, expected, rtol=1e-5, atol=1e-6)

    small = bundle(model)
    for name in names:
        stage, linear = getattr(small, name)
        assert (stage.out_dim, linear.in_features, linear.out_features) == (6, 6, base.config.num_labels)
    small.save_pretrained(tmp_path / "bundle")
    auto = getattr(transformers, heads(family)[head])
    torch.testing.assert_close(
        auto.from_pretrained(tmp_path / "bundle")(**inputs).logits, expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("saved", [None, ["classifier"], []], ids=["default", "named", "nothing"])
def test_the_head_is_trained_with_its_new_pooler_or_not(saved, tmp_path):
    config = SNNKConfig(pooler=PoolerPart(num_features=6), modules_to_save=saved)
    model = trained(get_snnk_model(image_classifier(), config))
    inputs = probe_inputs(model.get_base_model())
    model(**inputs).logits.square().sum().backward()
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters() if parameter.requires_grad)
    slots = "base_model.model.classifier.snnk_slots.default."
    pooler = {f"{slots}{0 if saved == [] else 1}.layer.{name}" for name in ("A", "bias")}
    assert names == pooler | (set() if saved == [] else {f"{slots}0.module.{name}" for name in ("weight", "bias")})
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(image_classifier(), tmp_path, is_trainable=True)
    assert {name for name, parameter in again.named_parameters() if parameter.requires_grad} == names
    torch.testing.assert_close(again.eval()(**inputs).logits, model.eval()(**inputs).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("component", ["cos", "relu"])
@torch.no_grad()
def test_a_new_pooler_starts_as_the_best_readout_of_its_input(component):
    """Against least squares on many draws of what the LayerNorm before it hands on."""
    base = image_classifier()
    norm = base.vit.layernorm
    norm.weight.copy_(torch.rand(16) + 0.5)
    norm.bias.copy_(torch.randn(16))
    layer = pooler_of(get_snnk_model(base, SNNKConfig(pooler=PoolerPart(component, num_features=24)))).layer
    x = norm.bias + norm.weight * torch.randn(100_000, 16)
    features = torch.cat([layer.stage(x), torch.ones(len(x), 1)], 1).double()
    best = torch.linalg.lstsq(features, x.double()).solution

    def error(estimate: torch.Tensor) -> float:
        return float((estimate - x).square().sum() / (x - x.mean(0)).square().sum())

    # A fitted readout gains about (features / draws) of the variance on its own draws, far below one percent.
    assert error(features @ best) <= error(layer(x).double()) * (1 + 1e-6)
    assert error(layer(x).double()) < error(features @ best) * 1.01 < 0.6


@pytest.mark.parametrize("family", ["clip", "dinov2", "siglip"])
@torch.no_grad()
def test_inputs_that_no_layernorm_has_scaled_are_normalised(family):
    """The start is then that of standard normal inputs, whatever their size and offset."""
    base = build(family, next(head for name, head in CLASSIFIERS if name == family))
    layer = pooler_of(get_snnk_model(base, SNNKConfig(pooler=PoolerPart(num_features=64)))).layer
    x = torch.randn(1000, layer.out_features)
    torch.testing.assert_close(layer(40 * x + 30), layer(x), rtol=1e-3, atol=1e-4)
    assert (layer(x) - x).square().sum() < 0.5 * x.square().sum()


@pytest.mark.parametrize("init", ["paper", "random"])
def test_a_new_pooler_takes_the_other_starts(init):
    """With a W that is drawn: the same for the same seed, another for another."""

    def readout(seed: int) -> torch.Tensor:
        part = PoolerPart(num_features=6, init=init)
        return pooler_of(get_snnk_model(image_classifier(), SNNKConfig(pooler=part, seed=seed))).layer.A

    assert torch.equal(readout(0), readout(0))
    assert readout(0).std() > 0.01
    assert not torch.equal(readout(0), readout(1))


def test_what_a_new_pooler_cannot_have():
    part = PoolerPart(projection="landmark", num_features=6)
    with pytest.raises(ConfigError, match=r"'landmark', which takes rows from a pretrained pooler, and ViTFor.* 'orf'"):
        get_snnk_model(image_classifier(), SNNKConfig(pooler=part))
    part = PoolerPart(num_features=6)
    with pytest.raises(UnsupportedError, match=r"ViTForMaskedImageModeling .*no pooler to replace, and no classifier"):
        get_snnk_model(build("vit", "ViTForMaskedImageModeling"), SNNKConfig(pooler=part))
    with pytest.raises(UnsupportedError, match="has a Identity at 'classifier'; expected Linear"):
        get_snnk_model(image_classifier(num_labels=0), SNNKConfig(pooler=part))
    small = bundle(get_snnk_model(build("deit", "DeiTForImageClassificationWithTeacher"), SNNKConfig(pooler=part)))
    assert any("one of several heads" in remark for remark in small.bundle_report.remarks)
    batch = {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.tensor([0, 1, 0, 1])}
    with pytest.raises(UnsupportedError, match=r"no Linear of SnnkDeiT.*WithTeacher gives its logits"):
        fit_closed_form(small, [batch], ridge=0.1)


def test_two_new_poolers_have_a_head_each():
    config = SNNKConfig(pooler=PoolerPart(num_features=6))
    model = trained(get_snnk_model(image_classifier(), config)).eval()
    inputs = probe_inputs(model.get_base_model())
    first = model(**inputs).logits
    model.add_adapter("other", SNNKConfig(pooler=PoolerPart(num_features=8)))
    model.set_adapter("other")
    assert (trained(model, std=0.2)(**inputs).logits - first).abs().max() > 0.01
    model.set_adapter("default")
    assert torch.equal(model(**inputs).logits, first)
    assert compare(model, bundle(model), inputs)[0] < 1e-5
    plain = model.unload()
    assert torch.equal(plain(**inputs).logits, image_classifier()(**inputs).logits)


def test_a_head_belongs_to_one_kind_of_adapter():
    adapter, pooler = (SNNKConfig(**copy.deepcopy(HALF[part])) for part in ("houlsby", "pooler"))
    model = get_snnk_model(image_classifier(), adapter)
    with pytest.raises(ConfigError, match="another adapter saves 'classifier' in full, and a new pooler"):
        model.add_adapter("other", pooler)
    model = get_snnk_model(image_classifier(), pooler)
    with pytest.raises(ConfigError, match="'classifier' cannot be saved in full: an SNNK part changes"):
        model.add_adapter("other", adapter)


@torch.no_grad()
def test_calibration_measures_behind_the_head_in_use():
    """The trained copy of the head, and not the pretrained one."""
    model = trained(get_snnk_model(image_classifier(), SNNKConfig(pooler=PoolerPart(num_features=6)))).eval()
    batches = [{"pixel_values": torch.randn(8, 3, 8, 8)} for _ in range(4)]
    copied, pooler = model.get_base_model().classifier.snnk_slots["default"]
    read = [model.get_base_model().vit(**batch).last_hidden_state[:, 0] for batch in batches]
    held_out = read[1]  # the one of four where the running count of held_out=0.25 passes a half
    wanted, given = (x @ copied.module.weight.T for x in (held_out, pooler(lambda y: y, held_out)))
    error = (wanted - given).square().sum() / (wanted - wanted.mean(0)).square().sum()
    (slot,) = calibrate(model, batches, held_out=0.25, metric="local", progress=False).slots
    assert slot.error_before == pytest.approx(float(error), rel=1e-4)
    assert slot.path == "classifier"


@pytest.mark.parametrize("name", ["ConvNext", "Swin", "ResNet"])
def test_other_image_architectures_are_refused_by_name(name):
    sizes = {"depths": [1, 1], "num_stages": 2, "hidden_sizes": [8, 16]} if name != "Swin" else {"depths": [1, 1]}
    config = getattr(transformers, f"{name}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForImageClassification")(config)
    with pytest.raises(UnsupportedError, match=f"unknown model family '{name.lower()}'.*register_family"):
        get_snnk_model(model, SNNKConfig(adapter=AdapterPart(num_features=4)))


def test_seeds_alone_are_saved_for_a_new_pooler(tmp_path):
    config = SNNKConfig(pooler=PoolerPart(num_features=6), save_projection=False)
    model = trained(get_snnk_model(image_classifier(), config)).eval()
    inputs = probe_inputs(model.get_base_model())
    model.save_pretrained(tmp_path)
    assert not [key for key in load_file(tmp_path / "adapter_model.safetensors") if key.endswith("projection.weight")]
    again = PeftModel.from_pretrained(image_classifier(), tmp_path).eval()
    torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits, rtol=1e-5, atol=1e-6)


def test_a_bundle_with_a_new_pooler_works_in_a_pipeline_without_the_package(tmp_path):
    parts = {"pooler": PoolerPart(num_features=6), "adapter": AdapterPart(num_features=4)}
    model = bundle(trained(get_snnk_model(image_classifier(), SNNKConfig(**parts)), std=0.1))
    model.save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    inputs = ViTImageProcessorPil.from_pretrained(tmp_path)(Image.fromarray(pixels), return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).logits.softmax(-1)[0]
    program = f"""
import sys; sys.modules["snnk_peft"] = None
import json
from transformers import pipeline
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
folder = {str(tmp_path)!r}
processor = ViTImageProcessorPil.from_pretrained(folder)
classify = pipeline("image-classification", model=folder, image_processor=processor, trust_remote_code=True)
print(json.dumps(classify(folder + "/image.png")))
"""
    done = run_python(["-c", program])
    assert done.returncode == 0, done.stderr[-3000:]
    found = {entry["label"]: entry["score"] for entry in json.loads(done.stdout.strip().split("\n")[-1])}
    assert found == pytest.approx({f"LABEL_{i}": float(score) for i, score in enumerate(expected)}, rel=1e-4)


# --- real digits ----------------------------------------------------------------------------------------------------

TRAIN, TEST = 2000, 1000


@pytest.fixture(scope="module")
def digits(shared_dir) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """MNIST as the model was trained on it: images (n, 1, 28, 28) and labels."""
    folder, found = shared_dir / "data" / "mnist", {}
    if not folder.is_dir():
        pytest.skip(f"MNIST not found at {folder}")
    for name, count in (("train", TRAIN), ("t10k", TEST)):
        with gzip.open(folder / f"{name}-images-idx3-ubyte.gz") as file:
            pixels = np.frombuffer(file.read(16 + count * 784)[16:], np.uint8).reshape(count, 1, 28, 28)
        with gzip.open(folder / f"{name}-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(8 + count)[8:], np.uint8)
        found[name] = ((torch.tensor(pixels) / 255 - 0.1307) / 0.3081, torch.tensor(labels).long())
    return found


@pytest.fixture(scope="module")
def weights(shared_dir) -> Path:
    folder = shared_dir / "weights" / "vit_mnist"
    if not folder.is_dir():
        pytest.skip(f"the ViT for MNIST was not found at {folder}")
    return folder


@torch.no_grad()
def test_the_pooler_of_a_real_vit_is_converted(digits, weights, tmp_path):
    """Dense + GELU (128 units) becomes 96 ReLU features; 500 images without labels keep all but 3 of 100 digits."""
    tensors = load_file(weights / "model.safetensors")
    head = nn.Linear(128, 10)
    head.load_state_dict({key: tensors.pop(f"classifier.{key}") for key in ("weight", "bias")})
    base = ViTModel(ViTConfig.from_pretrained(weights))
    base.layernorm = nn.Identity()
    base.load_state_dict(tensors)
    images, labels = digits["t10k"]

    def accuracy(model) -> float:
        return float((head(model(pixel_values=images).pooler_output).argmax(-1) == labels).float().mean())

    whole = accuracy(base.eval())
    assert whole > 0.96
    part = PoolerPart(component="relu", num_features=96)
    model = get_snnk_model(base, SNNKConfig(pooler=part, modules_to_save=[])).eval()
    uncalibrated = accuracy(model)
    batches = [{"pixel_values": digits["train"][0][i : i + 50]} for i in range(0, 500, 50)]
    (slot,) = calibrate(model, batches, progress=False).slots
    assert slot.error_after < 0.2 < slot.error_before
    assert uncalibrated < 0.7
    assert accuracy(model) > whole - 0.03
    bundle(model).save_pretrained(tmp_path)
    loaded = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "SnnkViTModel"
    assert accuracy(loaded) == pytest.approx(accuracy(model), abs=2 / TEST)


@torch.no_grad()
def test_a_new_pooler_learns_real_digits_in_closed_form(digits, weights, tmp_path):
    """64 cosine features before the classifier of a ViT without one: one pass over 2000 images, above 95 of 100."""
    tensors = load_file(weights / "model.safetensors")
    model = ViTForImageClassification(ViTConfig.from_pretrained(weights))
    model.vit.layernorm = nn.Identity()
    model.vit.load_state_dict({key: v for key, v in tensors.items() if not key.startswith(("classifier", "pooler"))})
    images, labels = digits["train"]
    small = bundle(get_snnk_model(model.eval(), SNNKConfig(pooler=PoolerPart(num_features=64))))
    batches = [{"pixel_values": images[i : i + 100], "labels": labels[i : i + 100]} for i in range(0, TRAIN, 100)]
    fit = fit_closed_form(small, batches)
    assert fit.head == "classifier.1"
    small.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    images, labels = digits["t10k"]
    assert (loaded(pixel_values=images).logits.argmax(-1) == labels).float().mean() > 0.95
