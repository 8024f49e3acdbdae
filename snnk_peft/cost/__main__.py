"""The command line, `python -m snnk_peft.cost MODEL --config snnk.yaml`: a table, and the same figures as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from snnk_peft.cost.build import DTYPES, TASKS, read_snnk_config
from snnk_peft.cost.estimate import DEVICES, CostReport, estimate_cost
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.saved_folder import whole_file


def parser() -> argparse.ArgumentParser:
    """The arguments; those of `estimate_cost`."""
    made = argparse.ArgumentParser(
        prog="python -m snnk_peft.cost", description="What a model will cost, by its config."
    )
    made.add_argument("model", help="name on the Hub, folder, or config.json")
    made.add_argument(
        "--config", required=True, help="YAML with the fields of SNNKConfig: adapter, ffn, attention, ..."
    )
    made.add_argument("--task", choices=TASKS, help="what the model is for (what its config names)")
    made.add_argument("--num-labels", type=int, help="classes (what its config says)")
    made.add_argument("--batch-size", type=int, default=32, help="examples per process (32)")
    made.add_argument("--length", type=int, help="tokens per text (512, or what the model has positions for)")
    made.add_argument("--image-size", type=int, help="pixels on each side (what its config says)")
    made.add_argument("--dtype", choices=DTYPES, default="float32", help="of the model as it is loaded (float32)")
    made.add_argument("--processes", type=int, default=8, help="processes of DDP and FSDP (8)")
    made.add_argument("--device", choices=DEVICES, default="cuda", help="whose kernels it runs on (cuda)")
    made.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns 2 if something cannot be built or written."""
    arguments = vars(parser().parse_args(argv))
    output, path = arguments.pop("output"), arguments.pop("config")
    try:
        report = estimate_cost(config=read_snnk_config(path), **arguments)
        show(report)
        if output is not None:
            _write(report, output)
    except (ConfigError, UnsupportedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show(report: CostReport) -> None:
    """Print the table.

    Raises:
        ConfigError: rich is not installed.
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError as error:
        raise ConfigError("the table needs rich: pip install rich (estimate_cost itself does not)") from error
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


def _write(report: CostReport, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; give another --output") from error
    print(f"written: {path}")


if __name__ == "__main__":
    raise SystemExit(main())
