"""The command `snnk`: what the library does to a model folder or a Hub model, from a shell.

Every subcommand is a function here, which turns its options into the settings of the YAML files. The work is done by a
module that is imported after the command line is parsed, because torch takes seconds and `snnk --help` should not.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from snnk_cli.config import Request, describe
from snnk_cli.convert_settings import ConvertConfig
from snnk_cli.files import guarded
from snnk_cli.settings import EvaluateConfig, LanguageConfig

app = typer.Typer(
    name="snnk",
    help="Make pretrained Transformers smaller and faster; plan, score, export, check and describe them.",
    epilog="Every command takes a model folder or a Hub id. `snnk COMMAND --help` lists the rest.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(help="model folder, or model id on the Hub", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="further settings, as in the YAML files", show_default=False),
]
Texts = Annotated[
    Path | None,
    typer.Option(help="unlabelled texts: .txt, one per line, or a table with the column data.text (text)"),
]
Table = Annotated[
    Path | None,
    typer.Option(
        help="labelled texts: .csv, .tsv, .jsonl or .parquet, columns data.text (text) and data.label (label)"
    ),
]
Images = Annotated[Path | None, typer.Option(help="image folder: train/CLASS/ and val/CLASS/, or CLASS/ alone")]
Config = Annotated[Path | None, typer.Option(help="YAML file of settings; options and SECTION.KEY=VALUE override it")]
Budget = Annotated[
    str | None,
    typer.Option(help="2x for twice as fast, or the share of the cost to keep, 0.5 (2x, unless settings decide)"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON on stdout, everything else on stderr")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what an earlier command wrote")]
OutputFolder = Annotated[Path | None, typer.Option(help="output folder (the model's name with -snnk)")]


def _listed(settings: type[Any], title: str = "Settings") -> str:
    return f"\b\n{title} (default):\n" + "\n".join(describe(settings))


def _value(name: str, value: Any) -> list[str]:
    """Return `name=value` as YAML, of which JSON is a subset; empty for None."""
    return [] if value is None else [f"{name}={json.dumps(str(value) if isinstance(value, Path) else value)}"]


def _examples(texts: Path | None, table: Path | None, images: Path | None, file: str) -> list[str]:
    """Return the settings of task and data for these options."""
    if table is not None and images is not None:
        raise typer.BadParameter("--table and --images are both given; expected one of them")
    task = "table" if table is not None else "image_folder" if images is not None else None
    return [
        *_value("task", task),
        *_value("data.texts", texts),
        *_value(f"data.{file}", table),
        *_value("data.dir", images),
    ]


def _done(work: Callable[[], int], as_json: bool, result: Callable[[], Any]) -> None:
    """Run `work`, print its result as JSON if requested, and exit with its code."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        try:
            code = work()
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] in ("snnk_peft", "snnk_cli"):
                raise
            print(
                f"error: this needs {error.name}, which is not installed: pip install 'snnk-peft[cli]'", file=sys.stderr
            )
            code = 2
    if as_json and code == 0:
        print(json.dumps(result(), indent=2))
    raise typer.Exit(code)


def _is_decoder(bundle: Path) -> bool:
    kinds = str(_read(bundle / "config.json").get("architectures"))
    return "CausalLM" in kinds or "LMHead" in kinds


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False) -> None:
    """Handle the options that come before a command."""
    if version:
        print(importlib.metadata.version("snnk-peft"))
        raise typer.Exit


@app.command(epilog=_listed(ConvertConfig), short_help="Choose layers and sizes for a budget.")
def plan(
    model: Model,
    settings: Settings = None,
    texts: Texts = None,
    table: Table = None,
    images: Images = None,
    budget: Budget = None,
    output: Annotated[Path | None, typer.Option(help="folder for plan.json, plan.png and convert.yaml")] = None,
    config: Config = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Find which layers to replace, and how small, for a share of the latency, MACs or bytes; changes nothing."""
    target = output or _named(model, "-plan")
    given = [*_conversion(model, texts, table, images, budget, target, config, settings or []), *(settings or [])]

    def work() -> int:
        from snnk_cli.planning import plan_model

        return plan_model(config, given, target, overwrite)

    _done(work, as_json, lambda: _read(target / "plan.json"))


@app.command(epilog=_listed(ConvertConfig), short_help="Make a model smaller and faster.")
def convert(
    model: Model,
    settings: Settings = None,
    texts: Texts = None,
    table: Table = None,
    images: Images = None,
    budget: Budget = None,
    output: OutputFolder = None,
    config: Config = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue a stopped training")] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Make a fine-tuned model smaller and faster without labels: plan, calibrate, bundle, recover, compare.

    With --texts alone, any text model can be converted, including embedding encoders. Labels of a table or of images
    are used for scoring only. The output folder gets bundle/ (a plain transformers model with tokenizer and card),
    metrics.json, and what was planned and fitted, as JSON and as plots.
    """
    target = output or _named(model, "-snnk")
    given = [*_conversion(model, texts, table, images, budget, target, config, settings or []), *(settings or [])]
    again = shlex.join(["snnk", *sys.argv[1:], *([] if resume else ["--resume"])])

    def work() -> int:
        from snnk_cli import converting

        code = converting.convert(
            Request(again, resume, None, overwrite, None if config is None else str(config), given)
        )
        if code == 0:
            bundle = shlex.quote(str(target / "bundle"))
            if _is_decoder(target / "bundle"):
                print(f"next: snnk score {bundle} --texts LONG.txt --beside {shlex.quote(model)}")
                print(f"      snnk export {bundle} --cache --int8")
            else:
                print(f"next: snnk score {bundle} --table LABELLED.csv\n      snnk export {bundle} --int8")
        return code

    _done(work, as_json, lambda: _read(target / "metrics.json"))


@app.command(
    epilog=f"{_listed(EvaluateConfig)}\n\n{_listed(LanguageConfig, 'Settings with --texts')}",
    short_help="Score a classifier on labelled examples, or a language model on texts.",
)
def score(
    model: Model,
    settings: Settings = None,
    texts: Annotated[
        Path | None, typer.Option(help="for a language model: a .txt file, which is one text, or a table of texts")
    ] = None,
    beside: Annotated[str | None, typer.Option(help="with --texts: another model, scored in the same run")] = None,
    table: Table = None,
    images: Images = None,
    task: Annotated[str | None, typer.Option(help="short for task=NAME; not needed for a run")] = None,
    output: Annotated[Path | None, typer.Option(help="also write the result to this JSON file")] = None,
    as_json: AsJson = False,
) -> None:
    """Score a classifier on labelled texts or images: a model, a bundle, an adapter or a run.

    With --texts, score a causal language model: perplexity by position, what it copies and retrieves from far back, its
    cache and its speed; with --output also as a plot.
    """
    given = [*_value("task", task), *_examples(None, table, images, "eval_file"), *(settings or [])]
    results: list[dict[str, Any]] = []
    if texts is not None and (table is not None or images is not None or task is not None):
        raise typer.BadParameter("--texts scores a language model, without labels; expected no other examples")
    if texts is None and beside is not None:
        raise typer.BadParameter("--beside is given without --texts; expected both or neither")

    def work() -> int:
        from snnk_cli.models import local_folder
        from snnk_cli.scoring import score_folder

        if texts is not None:
            from snnk_cli.language import score_language

            own = [*_value("beside", beside), *(settings or [])]
            return guarded(lambda: score_language(local_folder(model), texts, own, output, results))
        return guarded(lambda: score_folder(local_folder(model), given, output, results=results))

    _done(work, as_json, lambda: results[0])


@app.command(epilog=_listed(EvaluateConfig), short_help="Write a model as one ONNX or torch file.")
def export(
    model: Model,
    settings: Settings = None,
    table: Table = None,
    images: Images = None,
    task: Annotated[str | None, typer.Option(help="short for task=NAME; not needed for a run")] = None,
    format: Annotated[str, typer.Option(help="onnx or torch")] = "onnx",
    int8: Annotated[bool, typer.Option("--int8", help="int8 Linears (onnx)")] = False,
    cache: Annotated[bool, typer.Option("--cache", help="a converted decoder with its state, token by token")] = False,
    output: Annotated[Path | None, typer.Option(help="output file (model.onnx or model.pt2 in the folder)")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a model as one file that runs without its code; with labelled examples, score both."""
    given = [*_value("task", task), *_examples(None, table, images, "eval_file"), *(settings or [])]
    written: list[Path] = []

    def work() -> int:
        from snnk_cli.exporting import export_model

        return guarded(
            lambda: export_model(model, given, format, output, written, int8=int8, cache=cache, overwrite=overwrite)
        )

    _done(work, as_json, lambda: _read(written[0].with_suffix(".metrics.json")))


@app.command(short_help="Parameters, MACs, memory and traffic.")
def cost(
    model: Model,
    config: Annotated[Path | None, typer.Option(help="YAML with fields of SNNKConfig: adapter, ffn, attention")] = None,
    task: Annotated[str | None, typer.Option(help="task of the model (the one in its config)")] = None,
    num_labels: Annotated[int | None, typer.Option(help="number of classes (as in its config)")] = None,
    batch_size: Annotated[int, typer.Option(help="examples per process")] = 32,
    length: Annotated[int | None, typer.Option(help="tokens per text (512, or the model's maximum)")] = None,
    image_size: Annotated[int | None, typer.Option(help="pixels on each side (as in its config)")] = None,
    dtype: Annotated[str, typer.Option(help="dtype that the model is loaded in")] = "float32",
    processes: Annotated[int, typer.Option(help="number of processes for DDP and FSDP")] = 8,
    device: Annotated[str, typer.Option(help="whose kernels it runs on")] = "cuda",
    as_json: AsJson = False,
) -> None:
    """Report what a model costs, from its config alone: parameters, MACs, memory and traffic."""
    reports: list[Any] = []
    given = {"task": task, "num_labels": num_labels, "batch_size": batch_size, "length": length}
    given |= {"image_size": image_size, "dtype": dtype, "processes": processes, "device": device}

    def work() -> int:
        from snnk_cli.inspecting import show_cost

        return guarded(lambda: reports.append(show_cost(model, config, given)))

    _done(work, as_json, lambda: reports[0].to_dict())


@app.command(short_help="Report which parts a model accepts.")
def check(model: Model, as_json: AsJson = False) -> None:
    """Report what this package can do with a model, by trying every part on a copy: run, train, bundle."""
    reports: list[dict[str, Any]] = []

    def work() -> int:
        from snnk_cli.inspecting import check_model

        return guarded(lambda: reports.append(check_model(model)))

    _done(work, as_json, lambda: reports[0])


@app.command("describe", short_help="Describe what a folder contains.")
def describe_folder(model: Model, as_json: AsJson = False) -> None:
    """Describe what a folder contains: a model, a bundle and its folded parts, an adapter and its parts, or a run."""
    reports: list[dict[str, Any]] = []

    def work() -> int:
        from snnk_cli.inspecting import describe_model

        return guarded(lambda: reports.append(describe_model(model)))

    _done(work, as_json, lambda: reports[0])


def _named(model: str, ending: str) -> Path:
    """Return a path in the current folder, named after the model."""
    return Path(f"{Path(model).resolve().name if Path(model).exists() else model.rpartition('/')[2]}{ending}")


def _conversion(
    model: str,
    texts: Path | None,
    table: Path | None,
    images: Path | None,
    budget: str | None,
    target: Path,
    config: Path | None,
    settings: list[str],
) -> list[str]:
    """Return the settings for the options of `plan` and `convert`; the budget defaults to 2x."""
    if not (texts or table or images or config) and not any(one.startswith(("task=", "data.")) for one in settings):
        raise typer.BadParameter(
            "no examples to calibrate with; expected --texts FILE, --table FILE or --images FOLDER"
        )
    decided = tuple(
        f"convert.{name}" for name in ("budget", "quality", "cache", "ffn", "attention", "pooler", "low_rank", "parts")
    )
    says = config is not None or any(one.startswith(decided) for one in settings)
    share: Any = budget or (None if says else "2x")
    return [
        *_value("model.name_or_path", model),
        *_examples(texts, table, images, "train_file"),
        *_value("convert.budget", float(share) if share and share.replace(".", "", 1).isdigit() else share),
        *_value("output.dir", target),
    ]
