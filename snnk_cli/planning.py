"""Planning of a conversion without carrying it out: plan.json, its plot, and the settings that convert as planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from snnk_cli.config import dump_yaml, load_config
from snnk_cli.conversion import of_task
from snnk_cli.convert_settings import ConvertConfig
from snnk_cli.converting import Converting
from snnk_cli.converting_texts import stages_of
from snnk_cli.files import check_writable, guarded, write_text, writing
from snnk_cli.lock import alone
from snnk_cli.processes import make_accelerator
from snnk_cli.terminal import quiet
from snnk_peft.errors import ConfigError

SETTINGS = "convert.yaml"


def plan_model(file: Path | None, overrides: list[str], target: Path, overwrite: bool) -> int:
    """Plan a conversion, print and write the plan; return the exit code (0 done, 2 wrong input).

    Args:
        file: settings file, or None.
        overrides: overrides of single settings.
        target: the output folder.
        overwrite: replace an existing plan in it.
    """
    quiet()
    return guarded(lambda: _plan_into(target, load_config(ConvertConfig, file, overrides), overwrite))


def _plan_into(target: Path, config: ConvertConfig, overwrite: bool) -> None:
    check_writable(target)
    with alone(target):
        if (target / "plan.json").exists() and not overwrite:
            raise ConfigError(f"{target} holds a plan; replace it with --overwrite, or choose another --output")
        if config.convert.budget is None:
            raise ConfigError("convert.budget is missing: '2x', or the share of the cost that may remain")
        if config.task is None:
            pipeline = stages_of(config)[1]
        else:
            experiment, accelerator = Converting(config), make_accelerator(config.train)
            data = experiment.data(accelerator)
            pipeline = of_task(experiment.teacher, data, experiment.config, accelerator)
        found = pipeline.planned(config.convert.budget)
        parts = found.to_dict()["config"]["parts"]
        rest = replace(config.convert, budget=None, ffn=None, attention=None, pooler=None, low_rank=None, parts=parts)
        with writing(target):
            found.save(target)
            write_text(target / SETTINGS, dump_yaml(replace(config, convert=rest)))
    print(found)
    print(f"written to {target}; next: snnk convert {config.model.name_or_path} --config {target / SETTINGS}")
