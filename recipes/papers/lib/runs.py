"""Load models of finished runs of the papers' programs, and score sequence runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from papers.lib.lra_model import LongRangeClassifier, build_classifier
from papers.lib.lra_settings import LongRangeConfig, LongRangeEvaluation
from papers.lib.masked_model import with_attention
from papers.lib.sequences import SequenceExamples
from snnk_cli.checkpoint import load_model
from snnk_cli.config import load_config, read_yaml
from snnk_cli.models import load_by_class
from snnk_cli.results import load_run, trained_checkpoint
from snnk_cli.scoring import Subject, known_of
from snnk_cli.settings import FinetuneConfig
from snnk_cli.task_settings import is_sequence_run
from snnk_peft.errors import ConfigError


def load_long_range(folder: Path, run: LongRangeConfig) -> LongRangeClassifier:
    """Load the classifier of a sequence run's best checkpoint, in eval mode."""
    task, length = run.read_task()
    model = build_classifier(task, run.model, run.method, length, run.train.seed)
    load_model(trained_checkpoint(folder, run), model)
    return model.eval()


def load_folder(folder: Path) -> Any:
    """Load the model of a run's best checkpoint or of a model folder, in eval mode, for uses without data.

    The folder may be a run of train_lra.py, pretrain_mlm.py or a fine-tuning, a bundle, or another transformers folder,
    possibly with the attention that a pretraining saved in it.
    """
    if not (folder / "config.yaml").is_file():
        return with_attention(load_by_class(folder), folder).eval()
    settings = read_yaml(folder / "config.yaml")
    if is_sequence_run(settings):
        return load_long_range(folder, load_config(LongRangeConfig, settings))
    # The saved model is self-contained, whatever was pretrained before it and wherever.
    left = next((folder / name for name in ("bundle", "model") if (folder / name).is_dir()), None)
    return load_folder(left) if left else load_run(folder, load_config(FinetuneConfig, settings))[0]


def of_sequences(folder: Path, given: Mapping[str, Any] | None, overrides: list[str]) -> Subject:
    """Prepare the classifier of a run of train_lra.py, and its test split; see `Preparer` of lib/scoring.py."""
    run = load_config(LongRangeConfig, given)
    known = known_of(run)
    known["data"] = {field: known["data"][field] for field in ("dir", "max_test_samples")}
    config = load_config(LongRangeEvaluation, known, overrides)
    if config.task != run.task:
        raise ConfigError(f"task is {config.task}; {folder} was trained on {run.task}: leave the setting out")
    task, length = run.read_task()

    def read() -> dict[str, Any]:
        limits = {"test": config.data.max_test_samples}
        rows = task.load(config.data.dir, splits=["test"], max_samples=limits)
        return {name: SequenceExamples(part, length) for name, part in rows.items()}

    return Subject(config, task, load_long_range(folder, run), length, read)
