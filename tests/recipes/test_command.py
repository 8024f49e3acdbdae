"""The command `snnk`: each subcommand on a tiny classifier, its JSON, its faults, and how soon it answers."""

from __future__ import annotations

import copy
import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from data import TASKS
from data_files import write_task
from recipe_world import reset_accelerate, save_classifier, write_decoder
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from snnk_cli.app import app
from snnk_cli.language import passkeys, told
from snnk_peft import AdapterPart, AttentionPart, SNNKConfig, bundle, get_snnk_model
from tests.fresh_process import run_python
from tests.hub_stand_in import HubStandIn
from tests.package.test_export_decoder import read

COMMANDS = ("plan", "convert", "score", "export", "cost", "check", "describe")
QUICK = ["convert.batch_size=8", "convert.recover=0.2", "timing.repetitions=1", "timing.batch_size=4"]
SMALL = ["convert.ffn.num_features=8", *QUICK]


def snnk(*arguments: object) -> int:
    """The exit code."""
    reset_accelerate()
    with pytest.raises(SystemExit) as left:
        app([str(argument) for argument in arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.fixture(scope="module")
def place(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model/`, a tiny classifier of pairs; texts.txt, without labels; dev.csv and some of it as few.csv."""
    folder = tmp_path_factory.mktemp("command")
    write_task(folder / "glue", "rte", n_train=64, n_dev=24)
    save_classifier(folder / "model", world / "bert", TASKS["rte"])
    rows = TASKS["rte"].load(folder / "glue")
    (folder / "texts.txt").write_text("\n".join(rows["train"]["sentence1"]), encoding="utf-8")
    names = TASKS["rte"].label_names
    for name, count in (("dev.csv", 24), ("few.csv", 9)):
        with open(folder / name, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            part = rows["validation"].select(range(count))
            writer.writerows((text, names[label]) for text, label in zip(part["sentence1"], part["label"], strict=True))
    return folder


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `place`, as the current folder."""
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    """stdout, which must be JSON and nothing else."""
    return json.loads(capsys.readouterr().out)


def accuracy(folder: str, file: str) -> float:
    """By transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with open(file, encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    right = 0
    for row in rows:
        with torch.no_grad():
            logits = model(**tokenizer(row["text"], return_tensors="pt")).logits
        right += model.config.id2label[logits.argmax().item()] == row["label"]
    return right / len(rows)


def test_help_waits_for_no_library() -> None:
    """Torch, transformers and this package take seconds to import."""
    code = (
        "import sys\n"
        "for name in [*sys.modules]:\n"  # a fork begins with them
        "    if name.split('.')[0] in ('torch', 'transformers', 'peft', 'snnk_peft'): del sys.modules[name]\n"
        "sys.modules.update(torch=None, transformers=None, peft=None)\n"
        "from snnk_cli.app import app\n"
        "for command in [[], *([name] for name in sys.argv[1:])]:\n"
        "    try: app([*command, '--help'])\n"
        "    except SystemExit as left: assert left.code == 0, left.code\n"
        "assert 'snnk_peft' not in sys.modules, 'imported'\n"
    )
    done = run_python(["-c", code, *COMMANDS])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("Usage: ") == 1 + len(COMMANDS)
    assert "convert.budget" in done.stdout


def test_convert_then_score_export_and_describe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the first command writes, the others and transformers' pipeline read."""
    assert snnk("convert", "model", "--texts", "texts.txt", "--output", "out", *SMALL, "--json") == 0
    figures = printed(capsys)
    assert figures == json.loads(Path("out/metrics.json").read_text())
    assert figures["models"]["converted"]["parameters"] < figures["models"]["original"]["parameters"]
    assert {file.name for file in Path("out/bundle").iterdir()} >= {"config.json", "model.safetensors", "README.md"}
    assert Path("out/calibration.png").is_file()
    assert pipeline("text-classification", "out/bundle")("the farmer")[0]["label"] in TASKS["rte"].label_names

    assert snnk("score", "out/bundle", "--table", "dev.csv", "--json") == 0
    scored = printed(capsys)
    assert scored["metrics"]["accuracy"] == pytest.approx(accuracy("out/bundle", "dev.csv"))
    assert not Path("out/bundle/metrics.json").exists()  # nothing is written into a model unasked
    assert snnk("score", "out/bundle", "--table", "dev.csv", "--output", "scores.json") == 0
    capsys.readouterr()
    assert json.loads(Path("scores.json").read_text())["metrics"] == scored["metrics"]

    assert snnk("export", "out/bundle", "--table", "dev.csv", "--json") == 0
    exported = printed(capsys)
    assert Path("out/bundle/model.onnx").is_file()
    assert snnk("export", "out/bundle", "--format", "torch", "--json") == 0
    assert printed(capsys)["inputs"] == exported["inputs"]  # those that the tokenizer makes, with a table or without
    model, file = exported["scores"].values()
    assert model["accuracy"] == file["accuracy"] == scored["metrics"]["accuracy"]

    assert snnk("describe", "out/bundle", "--json") == 0
    described = printed(capsys)
    assert described["kind"] == "bundle"
    assert described["parameters"] == sum(t.numel() for t in load_file("out/bundle/model.safetensors").values())
    assert any("8 gelu features" in entry["after"] for entry in described["bundle"]["folded"])
    assert snnk("describe", "out", "--json") == 0
    assert printed(capsys)["results"]["metrics.json"] == figures["metrics"]

    for verb in ("score", "export"):
        assert snnk(verb, "out", "--table", "dev.csv") == 2
        assert "give the model in it, out/bundle" in capsys.readouterr().err

    assert snnk("convert", "model", "--texts", "texts.txt", "--output", "out", *SMALL) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert snnk("convert", "model", "--texts", "texts.txt", "--output", "out", *SMALL, "--overwrite") == 0
    told = capsys.readouterr().out
    assert "next: snnk score out/bundle --table" in told


def test_a_language_model_is_scored_on_texts(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside its conversion; perplexity and copying of the plain model by one forward pass without a cache."""
    monkeypatch.chdir(tmp_path)
    write_decoder(tmp_path / "model", 1024)
    tokenizer, model = AutoTokenizer.from_pretrained("model"), AutoModelForCausalLM.from_pretrained("model").eval()
    text = " ".join(f"line {number}: {number**2 % 97} ships on the sea" for number in range(90))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    part = AttentionPart(near_field=16, near_field_normalisation="joint", sinks=2, num_features=4)
    small = bundle(get_snnk_model(copy.deepcopy(model), SNNKConfig(attention=part, modules_to_save=[])))
    small.save_pretrained("small")
    tokenizer.save_pretrained("small")

    how = ["--texts", "long.txt", "--beside", "model", "length=512", "stretches=3", "--output", "told.json", "--json"]
    assert snnk("score", "small", *how) == 0
    first, second = printed(capsys)["rows"]
    assert (first["model"], second["model"]) == ("small", "model")
    assert first["cache bytes"] < 0.2 * second["cache bytes"]
    assert second["cache bytes"] == 522 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, width, bytes

    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]])[:1536]
    with torch.no_grad():
        found = model(ids.view(3, 512)).logits.log_softmax(-1)
    nats = -found[:, :-1].gather(-1, ids.view(3, 512)[:, 1:, None]).squeeze(-1)
    for start, end in ((0, 128), (128, 256), (256, 512)):
        expected = nats[:, max(0, start - 1) : end - 1].mean().exp()
        assert second["perplexity"][f"to {end}"] == pytest.approx(float(expected), rel=1e-4)
        assert first["perplexity"][f"to {end}"] != pytest.approx(float(expected), rel=1e-4)
    shares = []
    for begin in range(0, 4 * ((1536 - 64 - 256) // 4), (1536 - 64 - 256) // 4):
        given = torch.cat((ids[:1], ids[begin : begin + 320], ids[begin : begin + 64]))
        with torch.no_grad():
            likely = model(given[None]).logits[0].argmax(-1)
        shares.append((likely[-49:-1] == given[-48:]).float().mean())
    assert second["copied"]["after 256"] == pytest.approx(float(sum(shares) / 4))
    assert list(second["passkey"]) == ["in 128", "in 256", "in 512"]
    assert (tmp_path / "told.png").read_bytes().startswith(b"\x89PNG")

    assert snnk("score", "model", "--texts", "long.txt", "length=8192") == 2
    assert re.search(r"long.txt holds \d+ tokens; expected 8192", capsys.readouterr().err)
    assert snnk("score", place / "model", "--texts", "long.txt") == 2
    assert "expected a causal language model" in capsys.readouterr().err


@pytest.mark.slow
def test_a_language_model_is_exported_with_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Token by token its logits are those of the model over the whole text."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    write_decoder(tmp_path / "model", 1024)
    part = AttentionPart(near_field=16, near_field_normalisation="joint", sinks=2, num_features=4)
    model = AutoModelForCausalLM.from_pretrained("model").eval()
    small = bundle(get_snnk_model(model, SNNKConfig(attention=part, modules_to_save=[]))).eval()
    small.save_pretrained("small")
    AutoTokenizer.from_pretrained("model").save_pretrained("small")

    assert snnk("export", "small", "--cache", "--int8", "--output", "eight.onnx", "--json") == 0
    assert printed(capsys)["int8"]["examples"] == 64
    assert snnk("export", "small", "--cache", "--json") == 0
    ids = torch.randint(300, (1, 60), generator=torch.Generator().manual_seed(0))
    found = torch.from_numpy(read("small/model.onnx", ids.numpy(), np.ones((1, 60), np.int64)))
    with torch.no_grad():
        torch.testing.assert_close(found, small(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_passkeys_are_looked_for(tmp_path: Path) -> None:
    """Told by a reader that knows where numbers stand, and by none that does not."""
    write_decoder(tmp_path / "model", 1024)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")

    class Knowing:
        def written(self, ids: torch.Tensor, count: int) -> list[int]:
            key = re.findall(r"is (\d+)\.", tokenizer.decode(ids))[0]
            return list(tokenizer(f" {key}", add_special_tokens=False)["input_ids"])[:count]

    class Guessing:
        def written(self, ids: torch.Tensor, count: int) -> list[int]:
            return list(tokenizer(" 12345 678", add_special_tokens=False)["input_ids"])[:count]

    assert passkeys(Knowing(), tokenizer, 900) == 1  # type: ignore[arg-type]
    assert passkeys(Guessing(), tokenizer, 900) == 0  # type: ignore[arg-type]
    assert 750 < len(told(tokenizer, 900, 0.5, 12345)) <= 901


def test_classes_without_names(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two such classes config.json says nothing; a table numbers them, or calls them as transformers does."""
    expected = accuracy("model", "dev.csv")
    entries = json.loads(Path("model/config.json").read_text())
    names = list(entries.pop("id2label").values())
    del entries["label2id"]
    Path("model/config.json").write_text(json.dumps(entries))
    table = Path("dev.csv").read_text()
    for kind in ("{}", "LABEL_{}"):
        text = table
        for index, name in enumerate(names):
            text = text.replace(f",{name}\n", f",{kind.format(index)}\n")
        assert text != table
        Path("dev.csv").write_text(text)
        assert snnk("score", "model", "--table", "dev.csv", "--json") == 0
        assert printed(capsys)["metrics"]["accuracy"] == pytest.approx(expected)


def test_a_table_that_numbers_named_classes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether its numbers are the model's is for the user to say; how, the message tells."""
    expected, text = accuracy("model", "dev.csv"), Path("dev.csv").read_text()
    for index, name in enumerate(TASKS["rte"].label_names):
        text = text.replace(f",{name}\n", f",{index}\n")
    Path("dev.csv").write_text(text)
    assert snnk("score", "model", "--table", "dev.csv") == 2
    remedy = re.search(r"data\.labels=\[.*?\]", capsys.readouterr().err)
    assert remedy is not None
    assert snnk("score", "model", "--table", "dev.csv", remedy[0].replace(" ", ""), "--json") == 0
    assert printed(capsys)["metrics"]["accuracy"] == pytest.approx(expected)


def test_an_adapter_is_told_its_labels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder does not say what its outputs stand for; the kind of the table is seen in the rows."""
    model = get_snnk_model(
        AutoModelForSequenceClassification.from_pretrained("model"), SNNKConfig(adapter=AdapterPart(num_features=4))
    )
    model.save_pretrained("adapter")
    AutoTokenizer.from_pretrained("model").save_pretrained("adapter")
    assert snnk("score", "adapter", "--table", "dev.csv") == 2
    assert "data.labels=[...], in the order of its outputs" in capsys.readouterr().err
    labels = f"data.labels=[{','.join(TASKS['rte'].label_names)}]"
    assert snnk("score", "adapter", "--table", "dev.csv", labels, "--json") == 0
    assert printed(capsys)["metrics"]["accuracy"] == pytest.approx(accuracy("model", "dev.csv"))  # new adapters add 0


def test_labels_score_the_conversion(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--table", "dev.csv", "data.eval_file=few.csv", "--output", "out", *SMALL, "--json"]
    assert snnk("convert", "model", *given) == 0
    models = printed(capsys)["models"]
    assert models["original"]["accuracy"] == pytest.approx(accuracy("model", "few.csv"))
    assert models["converted"]["accuracy"] == pytest.approx(accuracy("out/bundle", "few.csv"))


def test_a_plan_is_what_convert_then_does(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--texts", "texts.txt", "--budget", "0.8", "convert.of=macs", *QUICK, "--output", "plan"]
    assert snnk("plan", "model", *given, "--json") == 0
    plan = printed(capsys)
    assert plan["budget"] == pytest.approx(0.8)
    assert plan["of"] == "macs"
    assert Path("plan/plan.png").is_file()
    assert snnk("plan", "model", *given) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert snnk("plan", "model", *given, "--overwrite") == 0
    command = re.search(r"next: snnk (convert .*)", capsys.readouterr().out)
    assert command is not None
    assert snnk(*command[1].split(), "--output", "out", "--json") == 0
    assert printed(capsys)["models"]["converted"]["parameters"] < 1e9
    made = json.loads(Path("out/metrics.json").read_text())["config"]["convert"]["parts"]
    assert [part["part"] for part in made] == [part["part"] for part in plan["config"]["parts"]]


def test_check_names_every_part_and_the_versions(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert snnk("check", "model", "--json") == 0
    report = printed(capsys)
    assert {"ffn", "attention", "pooler", "narrow_ffn"} <= set(report["checked"])
    assert report["environment"]["packages"]["torch"] == torch.__version__
    entries = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**entries, "architectures": ["BertForMiracles"]}))
    assert snnk("check", "model") == 0  # as a model without a head


def test_describe_an_adapter_and_a_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForSequenceClassification.from_pretrained("model")
    patched = get_snnk_model(model, SNNKConfig(adapter=AdapterPart(num_features=4)))
    patched.save_pretrained("adapter")
    assert snnk("describe", "adapter", "--json") == 0
    described = printed(capsys)
    assert (described["kind"], described["method"], described["base"]) == ("adapter", "SNNK", "model")
    assert described["parts"]["adapter"]["num_features"] == 4
    assert described["parameters"] == sum(t.numel() for t in load_file("adapter/adapter_model.safetensors").values())
    bundle(patched).save_pretrained("bundle")
    assert snnk("describe", "model") == 0
    told = capsys.readouterr().out
    assert "class: BertForSequenceClassification" in told
    assert "layers: 2" in told


def test_models_of_the_hub(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read by id, and files go into the current folder rather than into the cache."""
    with HubStandIn() as hub:
        hub.repos["me/tiny"] = {file.name: file.read_bytes() for file in Path("model").iterdir()}
        given = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        given |= {"HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}"}
        for name, value in {**given, "HF_HUB_CACHE": str(here / "cache")}.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        assert snnk("score", "me/tiny", "--table", "dev.csv", "--json") == 0
        assert printed(capsys)["metrics"]["accuracy"] == pytest.approx(accuracy("model", "dev.csv"))
        assert snnk("export", "me/tiny", "--format", "torch") == 0
        assert snnk("score", "me/absent", "--table", "dev.csv") == 2
    assert Path("tiny.pt2").is_file()
    assert "me/absent cannot be read from the Hub" in capsys.readouterr().err


WRONG = {
    "no model": (["score", "nowhere/at/all", "--table", "dev.csv"], "nowhere/at/all does not exist"),
    "no examples": (["convert", "model"], "expected --texts FILE, --table FILE or --images FOLDER"),
    "two data sets": (["score", "model", "--table", "dev.csv", "--images", "x"], "expected one of them"),
    "no task": (["score", "model"], "task is missing"),
    "no text file": (["convert", "model", "--texts", "absent.txt"], "absent.txt, which cannot be read"),
    "a format": (["export", "model", "--format", "ONNX"], "did you mean 'onnx'"),
    "no family": (["check", "dev.csv"], "dev.csv"),
    "no folder of ours": (["describe", "."], "expected a run, an adapter or a model"),
    "unknown option": (["convert", "model", "--text", "texts.txt"], "No such option"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_told_with_exit_code_2(here: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, message = WRONG[case]
    assert snnk(*arguments) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert message in told
    assert "Traceback" not in told


def test_faults_of_settings_come_all_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faulty = ["convert.ffn.num_features=0", "data.max_lenght=8", "convert.samples=1", "convert.of=speed"]
    assert snnk("convert", "model", "--texts", "texts.txt", *faulty) == 2
    told = capsys.readouterr().err
    for word in ("max_length", "convert.samples", "'latency', 'macs' or 'bytes'"):
        assert word in told
    assert not Path("model-snnk").exists()


def test_settings_of_a_file_and_of_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(yaml.safe_dump({"convert": {"ffn": {"num_features": 6}, "samples": 16}}))
    given = ["--texts", "texts.txt", "--config", "mine.yaml", "convert.ffn.num_features=5", "convert.recover=0"]
    assert snnk("convert", "model", *given, "convert.batch_size=4", "--json") == 0
    capsys.readouterr()
    record = json.loads(Path("model-snnk/metrics.json").read_text())
    assert sum(record["examples"].values()) == 16
    assert record["config"]["convert"]["ffn"]["num_features"] == 5


def test_what_is_not_installed_is_named() -> None:
    code = (
        "import sys\n"
        "sys.modules['datasets'] = None\n"
        "from snnk_cli.app import app\n"
        "app(['convert', 'minilm', '--texts', 'x.txt'])\n"
    )
    done = run_python(["-c", code])
    assert done.returncode == 2, done.stderr[-2000:]
    assert "pip install 'snnk-peft[cli]'" in done.stderr
