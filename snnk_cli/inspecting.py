"""The commands `snnk cost`, `check` and `describe`: costs and supported methods of a model, contents of a folder."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from snnk_cli.config import ROOT, read_yaml
from snnk_cli.files import read_json
from snnk_cli.models import load_by_class, local_folder
from snnk_cli.run_folder import environment
from snnk_cli.terminal import quiet
from snnk_peft import AdapterPart, SNNKConfig, check_family
from snnk_peft.bundling.report import BundleReport
from snnk_peft.config_parts import SHORTCUTS
from snnk_peft.cost import CostReport, estimate_cost
from snnk_peft.cost.build import read_snnk_config
from snnk_peft.errors import ConfigError

RESULTS = ("metrics.json", "evaluation.json")


def show_cost(model: str, config: Path | None, given: Mapping[str, Any]) -> CostReport:
    """Print a table of a model's cost with several methods.

    Args:
        model: a folder, a config.json or a name on the Hub; only the config is read.
        config: YAML with the fields of SNNKConfig; None for default adapters.
        given: further arguments of `estimate_cost`.
    """
    parts = SNNKConfig(adapter=AdapterPart()) if config is None else read_snnk_config(config)
    report = estimate_cost(model, parts, **given)
    titles, *lines = report.cells()
    table = Table(box=box.MARKDOWN)
    for title in titles:
        table.add_column(title, justify="left" if title == titles[0] else "right", no_wrap=True)
    for cells in lines:
        table.add_row(*cells)
    # A narrow terminal wraps lines; cells would lose digits.
    console = Console(width=max(Console().width, 120))
    console.print(table)
    for line in report.footer():
        console.print(line, highlight=False, markup=False)
    return report


def check_model(model: str) -> dict[str, Any]:
    """Print and return the report of `check_family` on a model, with the versions used."""
    quiet()
    report = check_family(load_by_class(local_folder(model)))
    print(report)
    return {"model": model, **dataclasses.asdict(report), "environment": environment(ROOT)}


def describe_model(model: str) -> dict[str, Any]:
    """Print and return the content of a folder or a model on the Hub.

    Raises:
        ConfigError: the folder contains no run, adapter or model.
    """
    folder = local_folder(model)
    found: dict[str, Any] = {"model": model}
    if (folder / "config.yaml").is_file():
        run = read_yaml(folder / "config.yaml")
        results = {name: read_json(folder / name).get("metrics") for name in RESULTS if (folder / name).is_file()}
        found |= {"kind": "run", "settings": run, "results": results}
    elif (folder / "adapter_config.json").is_file():
        entries = read_json(folder / "adapter_config.json")
        parts = {name: entries[name] for name in (*SHORTCUTS, "parts") if entries.get(name)}
        found |= {"kind": "adapter", "method": entries.get("peft_type"), "base": entries.get("base_model_name_or_path")}
        found |= {"parts": parts or None, "parameters": _parameters(folder, "adapter_model*.safetensors")}
    elif (folder / "config.json").is_file():
        found |= _of_model(folder)
    else:
        raise ConfigError(
            f"{folder} has no config.yaml, adapter_config.json or config.json; expected a run, an adapter or a model"
        )
    _show(found)
    return found


def _of_model(folder: Path) -> dict[str, Any]:
    entries = read_json(folder / "config.json")
    plan = entries.get("snnk_plan")
    found = {
        "kind": "model" if plan is None else "bundle",
        "class": next(iter(entries.get("architectures") or ()), entries.get("model_type")),
        "layers": entries.get("num_hidden_layers"),
        "parameters": _parameters(folder, "*.safetensors"),
        "files": {file.name: file.stat().st_size for file in sorted(folder.glob("*")) if file.is_file()},
    }
    if plan is not None:
        found["bundle"] = BundleReport.from_dict(plan["report"]).to_dict()
    return {name: value for name, value in found.items() if value is not None}


def _parameters(folder: Path, pattern: str) -> int:
    """Count the entries of all tensors in a folder's safetensors files; only their headers are read."""
    total = 0
    for file in folder.glob(pattern):
        with safe_open(file, framework="pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def _show(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if name == "bundle":
            print(BundleReport.from_dict(value))
        elif name == "files":
            print("files:", ", ".join(f"{file} ({size:,} bytes)" for file, size in value.items()))
        elif isinstance(value, Mapping):
            print(f"{name}:")
            for key, entry in value.items():
                shown = {k: v for k, v in entry.items() if v is not None} if isinstance(entry, Mapping) else entry
                print(f"  {key}: {shown}")
        else:
            print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
