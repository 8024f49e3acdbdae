"""method.pooling: what a checkpoint was trained on is read again, and peers that cannot are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import finetune
import pytest
import torch
import yaml
from lib.config import load_config
from lib.finetuning import with_pooling
from lib.models import trained_on_means
from lib.settings import FinetuneConfig
from lib.task_settings import find_task
from recipe_world import RECIPES
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

NOUNS = ("dog", "film", "report", "storm", "king", "sea", "house", "train", "song", "cake")


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


def reads(run: Path) -> str:
    return yaml.safe_load((run / "config.yaml").read_text())["method"]["pooling"]


POOLERS = {
    "exchanged": ["method.adapter=null", "method.pooler={component: cos}"],
    "trained": ["method.pooler=dense"],
}


@pytest.mark.parametrize("form", POOLERS)
@pytest.mark.parametrize("pooling", ["auto", "first"])
def test_a_recipe_reads_what_its_checkpoint_was_trained_on(
    form: str, pooling: str, minilm_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"gj04\t{number % 2}\t\tThe {noun} was there.\n" for number, noun in enumerate(NOUNS)]
    (tmp_path / "CoLA").mkdir()
    for name in ("train", "dev"):
        (tmp_path / f"CoLA/{name}.tsv").write_text("".join(rows))
    given = [f"data.dir={tmp_path}", f"model.name_or_path={minilm_dir}", f"output.dir={tmp_path / 'run'}"]
    quick = ["train.epochs=1", "output.tensorboard=false", "method.parts=null", "method.calibrate_adapters=false"]
    settings = [*given, *quick, *POOLERS[form], f"method.pooling={pooling}"]
    assert finetune.main([str(RECIPES / "configs/glue/cola_adapter.yaml"), *settings]) == 0
    is_mean = pooling == "auto"
    assert ("the pooler reads the mean over the tokens" in capsys.readouterr().out) is is_mean
    assert reads(tmp_path / "run") == ("mean" if is_mean else "first")
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
    again = [str(RECIPES / "configs/glue/cola_adapter.yaml"), *settings, "--resume"]
    assert finetune.main(again) == 0  # "auto" means the same again


@pytest.mark.parametrize("method", ["lora", "full", "linear_probe"])
def test_peers_that_cannot_are_refused(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"method.name={method}", "method.pooling=mean", f"output.dir={tmp_path / 'run'}"]
    assert finetune.main([str(RECIPES / "configs/glue/cola_adapter.yaml"), *given]) == 2
    assert "method.pooling is mean, and method" in capsys.readouterr().err


def test_frozen_poolers_read_what_they_read() -> None:
    """Adapters beside a frozen pooler are compared with LoRA beside the same one."""
    file = RECIPES / "configs/glue/cola_adapter.yaml"
    config = load_config(FinetuneConfig, file, ["output.dir=nowhere"])
    assert with_pooling(config, find_task(config)) is config
