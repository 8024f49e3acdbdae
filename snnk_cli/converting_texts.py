"""`snnk convert` and recipes/convert.py on texts alone: `snnk_peft.convert`, from settings into a run folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from snnk_cli.config import ROOT, dump_yaml
from snnk_cli.conversion import pipeline_of
from snnk_cli.convert_settings import ConvertConfig
from snnk_cli.files import check_writable, write_folder, write_json, writing
from snnk_cli.hub import push
from snnk_cli.lock import alone
from snnk_cli.models import resolve_model
from snnk_cli.run_folder import REPORT, check_folder, claim_folder, environment
from snnk_cli.terminal import quiet
from snnk_peft.converting.convert import Converted, converted
from snnk_peft.converting.door import Opened
from snnk_peft.converting.examples import examples_of
from snnk_peft.converting.opened import opened
from snnk_peft.converting.pipeline import Pipeline
from snnk_peft.converting.report import main_figure
from snnk_peft.converting.sentence_encoders import is_sentence_encoder
from snnk_peft.errors import ConfigError


def convert_texts(config: ConvertConfig, resume: bool, overwrite: bool) -> None:
    """Convert, and write the run folder: bundle/, metrics.json, and the records of planning and fitting.

    Args:
        config: settings without a task.
        resume: accepted only if the run is finished; an unfinished conversion cannot be continued.
        overwrite: replace an existing run.

    Raises:
        ConfigError: wrong input; nothing was written.
    """
    quiet()
    folder = Path(config.output.dir)
    check_writable(folder)
    with alone(folder, "output.dir"):
        check_folder(folder, config, resume, overwrite)
        if resume and (folder / REPORT).is_file():
            print(f"{folder} is finished; its results are in {folder / REPORT}")
            return
        if resume:
            raise ConfigError(f"{folder} holds no training to continue; begin again with --overwrite")
        door, pipeline = stages_of(config)
        said = dataclasses.asdict(config.convert)
        settings = config.convert
        done = converted(door, pipeline, settings.budget, settings.quality, settings.int8, said)
        claim_folder(folder, dump_yaml(config), ROOT, False)
        write_folder(folder / "bundle", lambda target: done.save_pretrained(target))
        _record(folder, config, done)
        print(done.report)
        print(f"written to {folder / 'bundle'}")
        if config.output.push_to_hub is not None:
            print(f"uploaded to {push(folder / 'bundle', config.output.push_to_hub, config.output.private)}")


def stages_of(config: ConvertConfig) -> tuple[Opened, Pipeline]:
    """Read the model and its texts; return the model and the pipeline to convert it."""
    data, settings = config.data, config.convert
    given = config.model.name_or_path
    door = opened(given if is_sentence_encoder(given) else resolve_model(given))
    names = [data.text or "text", *([data.text_pair] if data.text_pair is not None else [])]
    file = Path(str(data.texts)).expanduser()
    examples = examples_of(
        file, door, names, settings.samples, data.max_length, config.train.seed, settings.batch_size, "data.texts"
    )
    return door, pipeline_of(config, door.model, examples, door.pooling)


def _record(folder: Path, config: ConvertConfig, done: Converted) -> None:
    report = done.report
    with writing(folder):
        report.calibration.save(folder)  # type: ignore[union-attr]
        if report.plan is not None:
            report.plan.save(folder)
    figures = {name: value for name, value in report.figures.items() if isinstance(value, float)}
    found: dict[str, Any] = {"config": dataclasses.asdict(config), "metrics": figures}
    found |= {"score": figures[main_figure(figures)], **report.to_dict(), "environment": environment(ROOT)}
    write_json(folder / REPORT, found)
