"""recipes/convert.py: a fine-tuned classifier in, a bundle with its figures out, with labels and without."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import convert
import huggingface_hub
import pytest
import torch
from data import TASKS
from data_files import write_task
from recipe_world import RECIPES, reset_accelerate, same_tensors, save_classifier, write_world
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

import snnk_peft
from snnk_cli import checkpoint as checkpoints
from snnk_cli.config import load_config
from snnk_cli.convert_settings import ConvertConfig, UptrainSection
from snnk_cli.hub import push
from snnk_cli.models import train_in_use
from snnk_cli.teacher import Distilled, layer_loss, load_teacher, logit_loss
from snnk_peft.attention import RecurrentCache
from snnk_peft.errors import ConfigError
from snnk_peft.tasks.texts import batches_by_length
from tests.fresh_process import run_python, start_python
from tests.hub_stand_in import HubStandIn

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`glue/` (stand-ins of RTE and STS-B), and a tiny classifier of each, `rte/` and `stsb/`, with its tokenizer.

    They are as good as random, but their logits differ from example to example.
    """
    folder = write_world(tmp_path_factory.mktemp("convert"))
    for task in ("rte", "stsb"):
        write_task(folder / "glue", task, n_train=64, n_dev=24)
        save_classifier(folder / task, folder / "bert", TASKS[task])
    return folder


def settings(world: Path, out: Path, *changes: str, task: str | None = "rte", model: str | None = None) -> list[str]:
    """Command-line arguments of a small conversion into `out`."""
    file = out.with_name(f"{out.name}.yaml")
    known = [] if task is None else [f"task: {task}"]
    file.write_text("\n".join([*known, "convert: {ffn: {num_features: 16}, samples: 64, batch_size: 8, recover: 0.2}"]))
    fixed = [f"model.name_or_path={world / (model or task or 'rte')}", f"output.dir={out}", "timing.repetitions=1"]
    return [str(file), *fixed, *([] if task is None else [f"data.dir={world / 'glue'}"]), *changes]


@pytest.fixture
def texts(world: Path, tmp_path: Path) -> Path:
    """A file of texts without labels: the second sentences of RTE."""
    file = tmp_path / "texts.txt"
    file.write_text("\n\n".join(TASKS["rte"].load(world / "glue")["train"]["sentence2"]) + "\n")
    return file


def held_out(texts: Path) -> list[str]:
    """The ten of these texts on which a conversion compares."""
    every = texts.read_text().split("\n\n")
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0)).tolist()
    return [every[index].strip() for index in order[:10]]


def read(out: Path, name: str = "metrics.json") -> Any:
    return json.loads((out / name).read_text())


def logits(folder: Path, texts: Any) -> torch.Tensor:
    """By transformers alone: one text, or pair, at a time, no padding."""
    model, reader = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([model.eval()(**reader(*text, return_tensors="pt")).logits for text in texts])


# --- the recipe -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A conversion that was to be uploaded from a place without a network: the run folder, and what was shown."""
    out, shown, told = tmp_path_factory.mktemp("runs") / "run", io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(told):
        assert convert.main(settings(world, out, "output.push_to_hub=me/small")) == 2
    return out, shown.getvalue(), told.getvalue()


def test_with_labels(world: Path, finished: tuple[Path, str, str]) -> None:
    out, shown, _ = finished
    figures = read(out)
    assert "no training" in shown
    rows = TASKS["rte"].load(world / "glue")["validation"]
    pairs, labels = list(zip(rows["sentence1"], rows["sentence2"], strict=True)), torch.tensor(rows["label"][:])
    for name, folder in (("original", world / "rte"), ("converted", out / "bundle")):
        right = (logits(folder, pairs).argmax(-1) == labels).double().mean()
        assert figures["models"][name]["accuracy"] == pytest.approx(right.item())
    assert figures["score"] == figures["models"]["converted"]["accuracy"]
    slots = figures["calibration"]["slots"]
    assert len(slots) == 2
    assert all(slot["error_after"] < slot["error_before"] for slot in slots)
    assert figures["models"]["converted"]["parameters"] < figures["models"]["original"]["parameters"]
    assert figures["speed_up"] > 0
    assert figures["agreement"]["mean"]["agreement"] > 0.5
    assert str(out.parent) not in json.dumps(figures["config"]["data"])
    card = (out / "bundle/README.md").read_text()
    assert "import snnk_peft" in card
    assert "without labels" in card
    assert str(out.parent) not in card
    assert not (out / "learning_curve.png").exists()


def test_a_fresh_process_loads_what_was_measured(finished: tuple[Path, str, str]) -> None:
    folder, text = finished[0] / "bundle", "the film was wonderful near the river ."
    program = (
        "import sys, json, snnk_peft\nfrom transformers import pipeline\n"
        "classify = pipeline('text-classification', sys.argv[1], top_k=None)\n"
        "print(json.dumps({s['label']: s['score'] for s in classify([sys.argv[2]])[0]}))"
    )
    done = run_python(["-c", program, str(folder), text], env={**os.environ, "PYTHONPATH": str(RECIPES.parent)})
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout.splitlines()[-1])
    wanted = logits(folder, [(text,)]).softmax(-1)[0].tolist()
    assert [there[name] for name in TASKS["rte"].label_names] == pytest.approx(wanted, abs=1e-5)


def test_texts_alone(world: Path, texts: Path, tmp_path: Path) -> None:
    """No task: texts that are held out tell how often both predict the same."""
    out = tmp_path / "run"
    assert convert.main(settings(world, out, f"data.texts={texts}", task=None)) == 0
    figures = read(out)
    assert figures["examples"] == {"fitted": 54, "held_out": 10}
    assert figures["score"] == figures["models"]["converted"]["agreement"] == figures["metrics"]["agreement"]
    held = [(text,) for text in held_out(texts)]
    same = logits(world / "rte", held).argmax(-1) == logits(out / "bundle", held).argmax(-1)
    assert figures["score"] == pytest.approx(same.double().mean().item())
    assert (out / "calibration.png").is_file()
    assert (out / "bundle/conversion.png").is_file()
    assert convert.main([*settings(world, out, f"data.texts={texts}", task=None), "--resume"]) == 0  # it is finished


def test_an_encoder_without_head(world: Path, texts: Path, tmp_path: Path) -> None:
    """Texts alone compare pooled vectors: means over the tokens."""
    out = tmp_path / "run"
    assert convert.main(settings(world, out, f"data.texts={texts}", task=None, model="bert")) == 0
    figures = read(out)
    vectors = []
    for folder in (world / "bert", out / "bundle"):
        model, reader = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        with torch.no_grad():
            each = [model(**reader(text, return_tensors="pt")) for text in held_out(texts)]
        vectors.append(torch.cat([output.last_hidden_state.mean(1) for output in each]))
    assert figures["score"] == pytest.approx(torch.cosine_similarity(*vectors, dim=-1).mean().item(), abs=1e-4)


def test_a_decoder_keeps_a_share_of_its_cache(world: Path, tmp_path: Path) -> None:
    """What it generates from is smaller by as much as was asked, and the report tells how far its predictions are."""
    reader = AutoTokenizer.from_pretrained(world / "rte")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(reader), max_position_embeddings=1024, initializer_range=0.2, **sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "decoder")
    reader.save_pretrained(tmp_path / "decoder")
    sentences = TASKS["rte"].load(world / "glue")["train"]["sentence1"]
    texts, out = tmp_path / "texts.txt", tmp_path / "run"
    texts.write_text("\n".join(" ".join([*sentences[n:], *sentences[:n]][:40]) for n in range(20)))
    changes = [f"data.texts={texts}", "data.max_length=1024", "convert.ffn=null", "convert.cache=0.4"]
    assert convert.main(settings(world, out, *changes, task=None, model=str(tmp_path / "decoder"))) == 0
    assert read(out)["metrics"]["divergence"] > 0
    model = AutoModelForCausalLM.from_pretrained(out / "bundle").eval()
    cache, whole = RecurrentCache(model), DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.randint(3, len(reader), (1, 1024)), past_key_values=cache)
        LlamaForCausalLM(config).eval()(input_ids=torch.randint(3, len(reader), (1, 1024)), past_key_values=whole)
    half = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers) / 2
    assert cache.nbytes < 0.5 * half  # near keys are in full precision here


def test_a_sentence_transformer(world: Path, texts: Path, tmp_path: Path) -> None:
    """In and out; compared are the vectors of `encode`."""
    library = pytest.importorskip("sentence_transformers", reason="pip install 'snnk-peft[embeddings]'")
    first = library.base.modules.Transformer(str(world / "bert"), max_seq_length=32)
    pooling = library.sentence_transformer.modules.Pooling(first.get_embedding_dimension(), "cls")
    library.SentenceTransformer(modules=[first, pooling], device="cpu").save_pretrained(str(tmp_path / "st"))
    out = tmp_path / "run"
    assert convert.main(settings(world, out, f"data.texts={texts}", task=None, model=str(tmp_path / "st"))) == 0
    folders = (tmp_path / "st", out / "bundle")
    models = [library.SentenceTransformer(str(folder), device="cpu") for folder in folders]
    vectors = [model.encode(held_out(texts), convert_to_tensor=True) for model in models]
    assert read(out)["score"] == pytest.approx(torch.cosine_similarity(*vectors, dim=-1).mean().item(), abs=1e-4)


def test_numbers_instead_of_classes(world: Path, tmp_path: Path) -> None:
    """STS-B: correlations by the labels; and without labels from a table of pairs."""
    assert convert.main(settings(world, tmp_path / "a", task="stsb")) == 0
    figures = read(tmp_path / "a")
    data = TASKS["stsb"].load(world / "glue")
    dev = list(zip(data["validation"]["sentence1"], data["validation"]["sentence2"], strict=True))
    both = [logits(folder, dev)[:, 0] for folder in (world / "stsb", tmp_path / "a/bundle")]
    correlation = torch.corrcoef(torch.stack(both))[0, 1].item()
    assert figures["agreement"]["mean"]["correlation"] == pytest.approx(correlation, abs=1e-4)
    labels = torch.tensor(data["validation"]["label"][:])
    for name, values in zip(("original", "converted"), both, strict=True):
        pearson = torch.corrcoef(torch.stack((values, labels)))[0, 1].item()
        assert figures["models"][name]["pearson"] == pytest.approx(pearson, abs=1e-4)
    rows = data["train"]
    table = tmp_path / "pairs.jsonl"
    pairs = zip(rows["sentence1"], rows["sentence2"], strict=True)
    table.write_text("".join(json.dumps({"a": first, "b": second}) + "\n" for first, second in pairs))
    given = [f"data.texts={table}", "data.text=a", "data.text_pair=b"]
    assert convert.main(settings(world, tmp_path / "b", *given, task=None, model="stsb")) == 0
    figures = read(tmp_path / "b")
    assert figures["score"] == figures["models"]["converted"]["correlation"]


def test_training_behind_it(world: Path, tmp_path: Path) -> None:
    """The trained conversion is what is bundled if it is better, and the log begins with the one that was not."""
    few = ["train.epochs=4", "train.learning_rate=1e-3", "train.layers=1", "train.batch_size=8"]
    for name, changes in (("a", few), ("b", []), ("c", [*few, "train.learning_rate=1e-30"])):
        assert convert.main(settings(world, tmp_path / name, "convert.recover=0", *changes, task="stsb")) == 0
    trained, untrained, kept = (load_file(tmp_path / name / "bundle/model.safetensors") for name in "abc")
    assert not same_tensors(trained, untrained)
    assert same_tensors(kept, untrained)
    assert (tmp_path / "a/learning_curve.png").is_file()
    log = [json.loads(line) for line in (tmp_path / "a/log.jsonl").read_text().splitlines()]
    assert log[0]["step"] == 0  # what the conversion scores without training
    assert log[0]["score"] == pytest.approx(read(tmp_path / "b")["score"])
    assert read(tmp_path / "a")["score"] == pytest.approx(max(row["score"] for row in log if "score" in row))


def test_killed_in_its_training_it_continues_to_the_same_weights(world: Path, tmp_path: Path) -> None:
    """SIGKILL behind the calibration: `--resume` does not calibrate again, and no bit differs in the end."""
    train = ["train.epochs=2", "train.batch_size=4", "train.save_every_steps=1", "train.trained=all"]
    train.append("convert.recover=0")  # which takes as many steps as the machine makes
    straight = settings(world, tmp_path / "straight", *train)
    assert convert.main(straight) == 0
    killed = tmp_path / "killed"
    arguments = settings(world, killed, *train)
    process = start_python(
        [str(RECIPES / "convert.py"), *arguments], env={**os.environ, "PYTHONPATH": str(RECIPES.parent)}
    )
    deadline = time.monotonic() + 120
    while len(checkpoints.list_checkpoints(killed / "checkpoints")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "metrics.json").exists()
    record = (killed / "conversion.json").read_text()
    reset_accelerate()
    assert convert.main([*arguments, "--resume"]) == 0
    assert (killed / "conversion.json").read_text() == record
    assert same_tensors(*(load_file(tmp_path / name / "bundle/model.safetensors") for name in ("straight", "killed")))


def test_stopped_behind_the_calibration_it_is_not_repeated(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without training, too, `--resume` takes the fitted model from the checkpoint."""
    first, out = tmp_path / "first", tmp_path / "run"
    exact = "convert.recover=0"  # steps by the clock are others in every run
    assert convert.main(settings(world, first, exact)) == 0
    capsys.readouterr()
    shutil.copytree(first, out)
    shutil.rmtree(out / "bundle")
    (out / "metrics.json").unlink()
    assert convert.main([*settings(world, out, exact), "--resume"]) == 0
    assert "error before -> after" not in capsys.readouterr().out
    assert same_tensors(*(load_file(folder / "bundle/model.safetensors") for folder in (first, out)))
    assert read(out)["calibration"] == read(first)["calibration"]


def test_upload(finished: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written before the network is asked; where that refuses, the command that uploads is told."""
    out, _, told = finished
    assert f"hf upload me/small {out / 'bundle'}" in told
    with HubStandIn() as hub:
        for name, value in (("ENDPOINT", hub.url), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_x")
        push(out / "bundle", "me/small", private=True)
        assert set(hub.repos["me/small"]) == {file.name for file in (out / "bundle").iterdir()}
        assert hub.repos["me/small"]["model.safetensors"] == (out / "bundle/model.safetensors").read_bytes()


def test_pictures(tmp_path: Path) -> None:
    """The same recipe for a tiny ViT on scikit-learn's digits."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    names = {"id2label": TASKS["digits"].id2label, "label2id": TASKS["digits"].label2id}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, **sizes, **names))
    model.save_pretrained(tmp_path / "vit")
    reader = {"size": {"height": 8, "width": 8}, "image_mean": [0.5], "image_std": [0.5]}
    ViTImageProcessorPil(**reader).save_pretrained(tmp_path / "vit")
    given = ["task=digits", f"model.name_or_path={tmp_path / 'vit'}", f"output.dir={tmp_path / 'run'}"]
    few = ["convert.ffn={num_features: 8}", "convert.samples=64", "convert.batch_size=8", "timing.repetitions=1"]
    (tmp_path / "empty.yaml").write_text("")
    assert convert.main([str(tmp_path / "empty.yaml"), *given, *few, "data.max_eval_samples=40"]) == 0
    figures = read(tmp_path / "run")
    assert figures["timed"] == "32 x 1 x 8 x 8"
    assert 0 <= figures["models"]["converted"]["accuracy"] <= 1
    assert figures["agreement"]["mean"]["agreement"] > 0.5


def test_a_plan_decides(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Multiply-adds are exact: what is planned is what the bundle costs; `--resume` keeps the plan."""
    out = tmp_path / "run"
    assert convert.main(settings(world, out, "convert.budget=0.8", "convert.of=macs")) == 0
    plan = snnk_peft.Plan.load(out)
    assert plan.predicted["measured"] <= 0.8
    assert {part.num_features for part in plan.config.parts} == {16}  # the candidates are those of the settings
    assert read(out)["models"]["converted"]["parameters"] < read(out)["models"]["original"]["parameters"]
    described = read(out, "conversion.json")["parts"]["parts"]
    assert [part["layers"] for part in described] == [part.layers for part in plan.config.parts]
    assert (out / "plan.png").is_file()
    assert (out / "calibration.png").is_file()
    assert convert.main(settings(world, tmp_path / "b", "convert.budget=0.01", "convert.of=macs")) == 2
    assert "budget" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


# --- faults -----------------------------------------------------------------------------------------------------------


def test_settings_faults() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(
            ConvertConfig,
            None,
            ["convert.ffn={num_feature: 3}", "data.splits=[test]", "train.epochs=-1", "timing.batch=3"],
        )
    text = str(caught.value)
    for part in (
        "output.dir is missing",
        "model.name_or_path is missing",
        "unknown field 'num_feature'; did you mean 'num_features'",
        "train.epochs is -1",
        "timing.batch: unknown setting",
    ):
        assert part in text, part
    good = ["output.dir=x", "model.name_or_path=x", "convert.ffn={}"]
    for changes, fault in (
        ([], "task and data.texts are missing"),
        (["task=rtee"], "did you mean 'rte'"),
        (["task=rte", "data.texts=x.txt", "train.labels=1"], "data.texts have no labels"),
        (["task=digits", "data.texts=x.txt"], "are not texts"),
        (["task=rte", "train.epochs=1", "train.logits=0"], "expected a weight above 0"),
        (["task=rte", "convert.ffn=null"], "no part given"),
        (["data.texts=x.txt", "train.epochs=1"], "convert.recover=SECONDS trains the model"),
        (["task=rte", "convert.quality=0.9"], "expected data.texts alone"),
        (["data.texts=x.txt", "convert.quality=0.9", "convert.budget=2x"], "expected one of them"),
        (["task=rte", "convert.cache=0.1"], "expected data.texts alone"),
        (["data.texts=x.txt", "convert.cache=0.1", "convert.budget=2x"], "expected one of them"),
        (["data.texts=x.txt", "data.splits=[test]"], "there is no task"),
    ):
        with pytest.raises(ConfigError, match=fault):
            load_config(ConvertConfig, None, [*good, *changes])
    load_config(ConvertConfig, None, [*good, "task=rte", "data.texts=x.csv", "data.text=a", "data.text_pair=b"])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (["model.name_or_path=WORLD/bert"], "not a fine-tuned classifier (it has no classifier.bias"),
        (["model.name_or_path=WORLD/stsb"], "it has 1 outputs; expected 2"),
        (["model.name_or_path=WORLD/nowhere"], "no such folder"),
        (["model.name_or_path=WORLD/swapped"], "Expected the same order"),
        (["data.texts=WORLD/nothing.txt"], "cannot be read"),
        (["data.texts=WORLD/empty.txt"], "holds no text"),
        (["data.texts=WORLD/holes.csv"], "line 3: column 'text' is ''; expected a text"),
        (["data.splits=[tset]"], "unknown split of rte 'tset'"),
        (["data.max_length=600"], "positions for 512 tokens"),
        (["convert.ffn.num_features=65"], "only 64 hidden units"),
    ],
)
def test_bad_input_leaves_nothing_behind(
    changes: list[str], fault: str, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "empty.txt").write_text("\n \n")
    (world / "holes.csv").write_text("text,label\na b,1\n,0\n")
    if not (world / "swapped").exists():
        swapped = {
            "id2label": {0: "not_entailment", 1: "entailment"},
            "label2id": {"not_entailment": 0, "entailment": 1},
        }
        model = AutoModelForSequenceClassification.from_pretrained(world / "rte", **swapped)
        model.save_pretrained(world / "swapped")
        AutoTokenizer.from_pretrained(world / "rte").save_pretrained(world / "swapped")
    given = [change.replace("WORLD", str(world)) for change in changes]
    assert convert.main(settings(world, tmp_path / "run", *given)) == 2
    assert fault in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- its parts --------------------------------------------------------------------------------------------------------


def test_losses_by_hand() -> None:
    wanted, given = torch.tensor([[0.0, 2 * math.log(3.0)]]), torch.tensor([[0.0, 0.0]])
    by_hand = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert logit_loss(wanted, given, temperature=2.0).item() == pytest.approx(4 * by_hand)
    assert logit_loss(torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [4.0]]), 2.0).item() == pytest.approx(2.5)
    target = torch.tensor([[[1.0], [3.0], [99.0]]])
    mine = torch.tensor([[[2.0], [3.0], [0.0]]])
    mask = torch.tensor([[1, 1, 0]])
    zero = torch.zeros(1, 3, 1)
    # Σ(h - h')² = 1, Σ(h - 2)² = 2; the first entry is the embeddings'; padding does not count.
    assert layer_loss((zero, target), (zero + 5, mine), mask).item() == pytest.approx(0.5)


@pytest.mark.parametrize("trained", ["converted", "all"])
def test_what_is_trained_has_gradients_and_the_original_stays(world: Path, trained: str) -> None:
    task = TASKS["rte"]
    teacher, reader = load_teacher(str(world / "rte"), task)
    teacher.requires_grad_(False)
    config = load_config(
        ConvertConfig, None, ["task=rte", "output.dir=x", "model.name_or_path=x", "convert.ffn={num_features: 8}"]
    )
    student = snnk_peft.get_snnk_model(copy.deepcopy(teacher), config.convert.snnk_config(0))
    if trained == "all":
        train_in_use(student)
    model = Distilled(student, teacher, UptrainSection(labels=1.0, logits=1.0, layers=1.0)).train()
    inputs = dict(reader(["the film was good", "a"], padding=True, return_tensors="pt"))
    model(**inputs, labels=torch.tensor([0, 1])).loss.backward()
    wanted = [name for name, value in model.named_parameters() if value.requires_grad]
    assert wanted
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)
    assert any("classifier" in name for name in wanted) == (trained == "all")
    assert all(value.grad is None for value in teacher.parameters())
    assert not any("teacher" in name for name in model.state_dict())
    assert not teacher.training
    alone = Distilled(student, nn.Module(), UptrainSection()).eval()  # in eval mode the original is not asked
    assert "loss" not in alone(**inputs)


def test_batches_hold_similar_lengths() -> None:
    lengths = [5, 1, 4, 2, 3, 9]
    assert batches_by_length(lengths, [0, 1, 2, 3, 4], 2) == [[1, 3], [4, 2], [0]]


def test_a_model_in_half_precision_stays_one(world: Path, tmp_path: Path) -> None:
    """The bundle is stored as the original is, and what is measured is what is stored."""
    shutil.copytree(world / "rte", tmp_path / "half")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "half", dtype=torch.float16)
    model.save_pretrained(tmp_path / "half")
    assert convert.main(settings(world, tmp_path / "out", model=str(tmp_path / "half"))) == 0
    kinds = {value.dtype for value in load_file(tmp_path / "out/bundle/model.safetensors").values()}
    assert kinds == {torch.float16}
    bundle = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/bundle", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/bundle")
    rows = TASKS["rte"].load(world / "glue")["validation"]
    with torch.no_grad():
        answers = [
            bundle(**tokenizer(a, b, return_tensors="pt")).logits.argmax().item()
            for a, b in zip(rows["sentence1"], rows["sentence2"], strict=True)
        ]
    right = sum(answer == label for answer, label in zip(answers, rows["label"], strict=True))
    assert read(tmp_path / "out")["models"]["converted"]["accuracy"] == pytest.approx(right / len(answers))
