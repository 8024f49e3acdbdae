"""convert: a model and examples in, a plain model and a report out; the given model stays as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, ViTImageProcessorPil

from snnk_peft import FFNPart, NarrowFFNPart, convert
from snnk_peft.converting import examples
from snnk_peft.converting.door import Opened
from snnk_peft.converting.examples import examples_of
from snnk_peft.converting.report import warnings_of
from snnk_peft.errors import ConfigError
from tests.package.test_calibration_untouched import Interrupted, everything
from tests.tiny_families import build
from tests.tiny_models import same, tiny, trained

WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(40))]
PARTS = [FFNPart(num_features=12)]


def tokenizer() -> Any:
    """One token per word, by its place in the list."""
    bare = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16)


def texts(count: int = 48, seed: int = 5) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    words = [torch.randint(40, (length,), generator=generator).tolist() for length in lengths]
    return [" ".join(f"w{word}" for word in each) for each in words]


def batches(model: Any, count: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    if model.main_input_name == "pixel_values":
        return [{"pixel_values": torch.randn(6, 3, 8, 8, generator=generator)} for _ in range(count)]
    found = []
    for _ in range(count):
        mask = torch.ones(6, 9, dtype=torch.long)
        mask[-1, 5:] = 0
        found.append({"input_ids": torch.randint(3, 50, (6, 9), generator=generator), "attention_mask": mask})
    return found


def converted(model: Any, data: Any, budget: Any = None, **given: Any) -> Any:
    return convert(model, data, budget, **{"parts": PARTS, "progress": False, "steps": 2, **given})


# --- models -----------------------------------------------------------------------------------------------------------

MODELS = {
    "bert": "BertForSequenceClassification",
    "deberta-v2": "DebertaV2ForTokenClassification",
    "distilbert": "DistilBertForQuestionAnswering",
    "electra": "ElectraForSequenceClassification",
    "roberta": "RobertaModel",
    "mpnet": "MPNetModel",
    "modernbert": "ModernBertForSequenceClassification",
    "clip_text_model": "CLIPTextModelWithProjection",
    "vit": "ViTForImageClassification",
    "dinov2": "Dinov2Model",
    "siglip_vision_model": "SiglipVisionModel",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForTokenClassification",
    "opt": "OPTForSequenceClassification",
}


@torch.no_grad()
def rows(model: Any, batch: dict[str, torch.Tensor], output: str) -> torch.Tensor:
    """What a model says of each example, or of each token that is no padding; vectors are means over these."""
    values, mask = model(**batch)[output], batch.get("attention_mask")
    if values.ndim < 3:
        return values
    mask = torch.ones(values.shape[:2]) if mask is None or output == "image" else mask
    if output.endswith("logits"):
        return values[mask.bool()]
    return (values * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@pytest.mark.parametrize("family", MODELS)
def test_every_kind_of_model(family: str) -> None:
    """Figures are those of the two models on what was held out; the steps brought nothing further away."""
    model = trained(build(family, MODELS[family]))
    data, before = batches(model), everything(model)
    done = converted(model, data, parts=[NarrowFFNPart(keep=0.5)])
    assert everything(model) == before
    report = done.report
    assert sum(each.numel() for each in done.model.parameters()) < sum(each.numel() for each in model.parameters())
    assert report.recovery["steps"] == 2
    assert report.recovery["after"] <= report.recovery["before"]
    held = data[4]  # of eight batches, the middle one
    assert report.examples == {"fitted": 42, "held_out": 6}
    outputs = model(**held)
    names = [name for name in outputs if name.endswith("logits")] or [
        next((name for name in outputs if name.endswith("_embeds")), next(iter(outputs)))
    ]
    ours, theirs = ([rows(each, held, name) for name in names] for each in (done.model, model))
    if names[0].endswith("logits"):
        kept = [(a.argmax(-1) == b.argmax(-1)).double().mean().item() for a, b in zip(ours, theirs, strict=True)]
        assert report.figures["agreement"] == pytest.approx(sum(kept) / len(kept))
    else:
        cosine = torch.cosine_similarity(ours[0], theirs[0], dim=-1).mean().item()
        assert report.figures["cosine"] == pytest.approx(cosine, abs=1e-5)
        assert bool(report.warnings) == (cosine < 0.99)


def test_states_behind_each_layer() -> None:
    model = trained(tiny("bert"))
    data = batches(model)
    done = converted(model, data)
    mask = data[4]["attention_mask"].bool()
    with torch.no_grad():
        ours, theirs = (each(**data[4], output_hidden_states=True).hidden_states for each in (done.model, model))
    assert len(done.report.layers) == 2
    for layer, a, b in zip(done.report.layers, ours[1:], theirs[1:], strict=True):
        a, b = a[mask].double(), b[mask].double()
        assert layer["error"] == pytest.approx(float((a - b).square().sum() / (b - b.mean(0)).square().sum()))
        peak = float(b.max() - b.min())
        assert layer["psnr"] == pytest.approx(20 * math.log10(peak) - 10 * math.log10(float((a - b).square().mean())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_stored_and_full_precision_computed(dtype: torch.dtype) -> None:
    model = trained(tiny("bert"))
    data = batches(model.to(dtype))
    done = converted(model, data, 0.9, of="macs", parts=[NarrowFFNPart(num_features=2)])
    assert {each.dtype for each in (*done.model.parameters(), *model.parameters())} == {dtype}
    assert done.model.bundle_report.dtype == str(dtype).removeprefix("torch.")
    assert done.report.plan.settings["dtype"] == "float32"
    assert done.report.figures["bytes"] == sum(each.nbytes for each in done.model.state_dict().values())
    with torch.no_grad():  # the figures are those of what is stored, on the batch that was held out
        ours, theirs = (each.float()(**data[4]).logits.log_softmax(-1) for each in (done.model, model))
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert done.report.figures["divergence"] == pytest.approx(float(divergence), rel=0.02)
    assert divergence > 1e-6  # a hundred times what float32 rounds


def test_what_is_served_is_planned_for_and_timed() -> None:
    model = trained(tiny("bert"))
    data = batches(model)
    served = {"input_ids": torch.ones(2, 14, dtype=torch.long)}
    for inputs, shape in ((served, [2, 14]), (None, [6, 9])):
        report = converted(model, data, 0.9, of="macs", inputs=inputs).report
        assert report.plan.settings["inputs"]["input_ids"] == shape
        assert report.timed == " x ".join(map(str, shape))
    with pytest.raises(ConfigError, match="inputs"):
        converted(model, data, 0.9, of="macs", inputs={"input_ids": torch.full((2, 14), 10_000)})


# --- data -------------------------------------------------------------------------------------------------------------


def door(model: Any, reader: Any) -> Opened:
    return Opened(model, reader, "mean", lambda plain: plain)


def table(kind: str, folder: Path, columns: dict[str, list[str]]) -> Any:
    data = Dataset.from_dict(columns)
    if kind == "dataset":
        return data
    if kind == "frame":
        return data.to_pandas()
    file = folder / f"texts.{kind}"
    if kind == "jsonl":
        data.to_json(str(file))
    elif kind == "parquet":
        data.to_parquet(str(file))
    elif kind == "txt":
        file.write_text("\n".join(columns["text"]))
    else:
        data.to_csv(str(file), sep="\t" if kind == "tsv" else ",")
    return file


def same_examples(found: Any, expected: Any) -> bool:
    for part in ("fitted", "held_out"):
        for mine, theirs in zip(getattr(found, part), getattr(expected, part), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    return True


@pytest.mark.parametrize("kind", ["txt", "csv", "tsv", "jsonl", "parquet", "dataset", "frame", "dicts"])
def test_texts_are_the_same_wherever_they_stand(kind: str, tmp_path: Path) -> None:
    opened, given = door(tiny("bert"), tokenizer()), texts()
    data = [{"text": each} for each in given] if kind == "dicts" else table(kind, tmp_path, {"text": given})
    expected = examples_of(given, opened, None, None, None, 0)
    assert same_examples(examples_of(data, opened, None, None, None, 0), expected)
    fitted = expected.fitted
    assert [batch["input_ids"].shape[1] for batch in fitted] == sorted(b["input_ids"].shape[1] for b in fitted)
    ids = {tuple(row[mask].tolist()) for b in fitted for row, mask in zip(b["input_ids"], b["attention_mask"].bool())}
    out = {tuple(r[m].tolist()) for b in expected.held_out for r, m in zip(b["input_ids"], b["attention_mask"].bool())}
    assert ids | out == {tuple(tokenizer()(each)["input_ids"]) for each in given}
    assert not ids & out


def test_of_long_texts_fewer_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of those that would be as have so many tokens together; the others are fitted."""
    opened, given = door(tiny("bert"), tokenizer()), texts()
    usual = examples_of(given, opened, None, None, None, 0)
    lengths = [int(row.sum()) for batch in usual.held_out for row in batch["attention_mask"]]
    monkeypatch.setattr("snnk_peft.converting.examples.MOST_HELD_OUT_TOKENS", sum(lengths) - 1)
    fewer = examples_of(given, opened, None, None, None, 0).sizes
    assert fewer == {"fitted": usual.sizes["fitted"] + 1, "held_out": usual.sizes["held_out"] - 1}
    monkeypatch.setattr("snnk_peft.converting.examples.MOST_HELD_OUT_TOKENS", 1)
    assert examples_of(given, opened, None, None, None, 0).sizes["held_out"] == 1


@pytest.mark.parametrize("pairs", [False, True])
def test_of_long_texts_fewer_are_read(monkeypatch: pytest.MonkeyPatch, pairs: bool) -> None:
    """As many as have so many characters together, and some at least; all that were asked for."""
    opened, given = door(tiny("bert"), tokenizer()), ["w1 w2 w3 w4 w5 w6 w7"] * 40
    data = [(text[:9], text[9:]) for text in given] if pairs else given
    monkeypatch.setattr(examples, "CHARACTERS", 30 * len(given[0]))

    def read(samples: int | None = None) -> int:
        return sum(examples_of(data, opened, None, samples, None, 0).sizes.values())

    assert read() == 40
    monkeypatch.setattr(examples, "FEW", 8)
    assert read() == 30
    assert read(35) == 35
    monkeypatch.setattr(examples, "CHARACTERS", 1)
    assert read() == 8


@pytest.mark.parametrize("kind", ["csv", "dataset", "lists", "dicts"])
def test_pairs(kind: str, tmp_path: Path) -> None:
    opened, first, second = door(tiny("bert"), tokenizer()), texts(), texts(seed=6)
    columns = {"premise": first, "hypothesis": second}
    data: Any = [list(each) for each in zip(first, second, strict=True)]
    if kind == "dicts":
        data = [dict(zip(columns, each, strict=True)) for each in data]
    elif kind != "lists":
        data = table(kind, tmp_path, columns)
    expected = examples_of(list(zip(first, second, strict=True)), opened, None, None, None, 0)
    assert same_examples(examples_of(data, opened, ["premise", "hypothesis"], None, None, 0), expected)
    longest = max(len(tokenizer()(*each)["input_ids"]) for each in zip(first, second, strict=True))
    assert max(batch["input_ids"].shape[1] for batch in expected.fitted) == min(16, longest)


def test_models_of_language_answer_few_texts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a batch, a vocabulary for each token, are bounded."""
    monkeypatch.setattr(examples, "ANSWERS", 50 * 12 * 2)
    for head, most in (("GPT2LMHeadModel", 2), ("GPT2Model", 5)):
        found = examples_of(texts(), door(build("gpt2", head), tokenizer()), None, None, None, 0)
        assert max(len(batch["input_ids"]) for batch in found.fitted) == most


def test_a_folder_that_is_saved_and_loaded(tmp_path: Path) -> None:
    """The tokenizer is found beside the model; what is saved answers as what was returned."""
    tiny("bert").save_pretrained(tmp_path / "in")
    tokenizer().save_pretrained(tmp_path / "in")
    done = converted(str(tmp_path / "in"), texts())
    assert done.report.examples == {"fitted": 41, "held_out": 7}
    done.save_pretrained(tmp_path / "out")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    inputs = tokenizer()(texts(5), padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        assert same(again(**inputs).logits, done.model(**inputs).logits)
    stored = json.loads((tmp_path / "out/conversion.json").read_text())
    assert stored["models"]["converted"]["agreement"] == done.report.figures["agreement"]
    assert stored["speed_up"] == done.report.speed_up
    assert (tmp_path / "out/conversion.png").read_bytes().startswith(b"\x89PNG")
    card = (tmp_path / "out/README.md").read_text()
    assert "import snnk_peft" in card
    assert "agreement" in card
    assert str(tmp_path) not in card
    for word in ("original", "converted", "same answer", "recovery: 2 steps"):
        assert word in str(done.report)


def test_images(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = [
        Image.fromarray(torch.randint(256, (9, 11, 3), generator=generator, dtype=torch.uint8).numpy())
        for _ in range(20)
    ]
    for number, picture in enumerate(pictures):
        (tmp_path / f"{number % 2}").mkdir(exist_ok=True)
        picture.save(tmp_path / f"{number % 2}/{number:02}.png")
    model, reader = trained(tiny("vit")), ViTImageProcessorPil(size={"height": 8, "width": 8})
    done = converted(model, tmp_path, tokenizer=reader)
    assert done.report.examples == {"fitted": 17, "held_out": 3}
    assert done.report.timed == "2 x 3 x 8 x 8"
    by_name = [pictures[number] for number in (*range(0, 20, 2), *range(1, 20, 2))]
    opened = door(model, reader)
    assert same_examples(*(examples_of(data, opened, None, None, None, 0) for data in (by_name, tmp_path)))
    with pytest.raises(ConfigError, match="reads pixel_values: expected images"):
        converted(model, texts(), tokenizer=reader)


def test_a_data_loader_leaves_the_random_state_alone() -> None:
    model = trained(tiny("bert"))
    data = [{name: value[0] for name, value in batch.items()} for batch in batches(model, 24)]
    before = torch.random.get_rng_state()
    done = converted(model, DataLoader(data, batch_size=3, shuffle=True))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert done.report.examples == {"fitted": 21, "held_out": 3}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("absent.txt", "absent.txt, which cannot be read"),
        ("no such text", "there is no such file"),
        ([], "holds 0 batches"),
        (["w1 w2", 3, "w4", "w5"], r"data\[1\] is 3; expected a text"),
        (["w1 w2", " ", "w4", "w5"], r"data\[1\] is ' '"),
        ([("w1", "w2"), "w3", ("w4", "w5"), ("w4", "w5")], r"data\[1\] is 'w3'; expected a pair"),
        (["w1 w2", "w3"], "holds 2 texts; expected four"),
        ([{"words": "w1"}] * 5, r"data\[0\] holds words; expected text: name the columns with text="),
        (Dataset.from_dict({"words": ["w1"] * 5}), "unknown column 'text'"),
        ({"train": Dataset.from_dict({"text": ["w1"] * 5})}, "expected one of them|Give one of its splits"),
        (3, "data is an int; expected a list of texts"),
    ],
)
def test_data_that_are_none(data: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        converted(tiny("bert"), data, tokenizer=tokenizer())


def test_no_tokenizer_anywhere() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer=AutoTokenizer.from_pretrained"):
        converted(tiny("bert"), texts())


# --- all or nothing ---------------------------------------------------------------------------------------------------


def test_ctrl_c_at_any_moment() -> None:
    """Weights, modes, hooks, flags and the random state of the given model are what they were."""
    model = trained(tiny("bert")).train()
    model.classifier.requires_grad_(False)
    data, before, state = batches(model, 5), everything(model), torch.random.get_rng_state()

    def run() -> None:
        converted(model, data, 0.9, of="macs")

    counting = Interrupted()
    counting.run(run)
    assert everything(model) == before
    for share in (0.2, 0.5, 0.8, 0.95):
        with pytest.raises(KeyboardInterrupt):
            Interrupted(max(1, int(share * counting.lines))).run(run)
        assert everything(model) == before, share
        assert torch.equal(torch.random.get_rng_state(), state)


def test_faults_are_listed_at_once() -> None:
    wrong = {"quality": 1.5, "pooling": "max", "samples": 2, "steps": -1, "recover": -2.0, "tokenizer": 3}
    with pytest.raises(ConfigError) as caught:
        convert(tiny("bert"), texts(), 0.3, **wrong)
    for name in ("quality is 1.5", "budget is 0.3 and quality", "pooling is 'max'", "samples", "steps", "recover"):
        assert name in str(caught.value)
    assert "tokenizer is an int" in str(caught.value)
    with pytest.raises(ConfigError, match="budget is None and no parts"):
        convert(tiny("bert"), texts(), None)


def test_the_layer_that_does_the_harm_is_named_where_answers_are_lost():
    layers = [{"error": each} for each in (0.01, 0.02, 0.4, 0.45)]
    (found,) = warnings_of({"agreement": 0.9}, layers, {})
    assert "layer 2" in found
    assert warnings_of({"agreement": 0.99}, layers, {}) == []
    assert warnings_of({"agreement": 0.9}, [{"error": each} for each in (0.1, 0.2, 0.3, 0.4)], {}) == []
    (found,) = warnings_of({"cosine": 0.95}, [], {})
    assert "make stored ones anew" in found
