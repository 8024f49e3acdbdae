"""export: write a bundle as one file for ONNX Runtime or plain torch, verified on new shapes before it is renamed."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from snnk_peft.arguments import in_words, number_faults, path_of
from snnk_peft.bundling.bundle import bundle
from snnk_peft.bundling.report import compare, probe_inputs
from snnk_peft.calibrating.batches import read, refuse_no_batches
from snnk_peft.calibrating.guards import refuse_not_finite
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.exporting import decoder
from snnk_peft.exporting.formed_maps import formed_maps
from snnk_peft.exporting.int8 import compared, milliseconds, quantized
from snnk_peft.exporting.program import (
    FORMATS,
    Axes,
    Inputs,
    TorchFormat,
    as_it_was,
    missing_packages,
    only_tensors,
    opsets,
)
from snnk_peft.exporting.report import ExportReport, Int8Report, ShapeParity
from snnk_peft.options import closest
from snnk_peft.tuner.given_model import of_transformers, takes_model
from snnk_peft.tuner.slot_layer import is_of_an_adapter

# Relative to the largest output; other kernels sum in another order.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@takes_model
def export(
    model: nn.Module,
    format: str,
    path: str | os.PathLike[str],
    *,
    sample: Mapping[str, Any] | None = None,
    batches: Iterable[Mapping[str, Any]] | None = None,
    int8: bool = False,
    cache: bool = False,
    opset: int | None = None,
    tolerance: float | None = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write a model as one program that runs without its code, using transformers' exporters.

    The program takes any number of examples and, for texts, any number of tokens. It is written under a temporary name,
    read back, and compared with the model on shapes that it was not traced with: one example, one token, lengths around
    and beyond the sample's, the batches. Only then does it get its final name. Causal models are exported as one pass
    over a whole text, without a cache.

    Args:
        model: a bundle, or a patched model, which is bundled first (adapters are folded into it). A transformers model
            without anything from this package is exported as it is. It is not changed.
        format: "onnx": a graph for ONNX Runtime (`pip install snnk-peft[onnx]`). Its inputs and outputs have the
            model's names; unused inputs are left out. "torch": an exported program,
            `torch.export.load(path).module()(**inputs)["logits"]`, for the type of device that the model is on.
        path: the file, `model.onnx` or `model.pt2`. Weights are inside; an ONNX graph of more than 1.5 GiB keeps them
            next to it, in `model.onnx.data`.
        sample: model inputs (tensors by name) whose names the program will have; labels are left out. None: the first
            batch, else random token ids with padding, or random images.
        batches: real inputs, labels optional; the program must agree on each of them, too.
        int8: only for "onnx": weights of all Linears in eight bits, one scale per output, inputs rounded at run time
            (ONNX Runtime's dynamic quantisation). `batches` of real inputs show which channels need a scale of their
            own, without which rounding loses several times as much. Parity is then checked before rounding; the report
            has the effect of rounding on `batches` (without them on random inputs, which is less meaningful), and
            times.
        opset: version of the ONNX operators; None for the newest that the exporter supports.
        tolerance: largest difference of an output relative to its largest value; None: 1e-4 in fp32, 2e-2 in fp16,
            1e-1 in bf16, 1e-6 in fp64.
        overwrite: replace a file of that name.

    Returns:
        Parity per shape, sizes, opset; `print(report)` shows them.

    Raises:
        ConfigError: lists every wrong argument; an existing file without `overwrite`.
        ImportError: "onnx" without its packages.
        UnsupportedError: a model that cannot be bundled, or that the exporter or ONNX Runtime does not support, or only
            for some shapes; says why.
        ValueError: the program differs from the model by more than `tolerance`; nothing is written.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from snnk_peft import FFNPart, SNNKConfig, export, get_snnk_model
        >>> tiny = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
        >>> model = get_snnk_model(BertForSequenceClassification(tiny), SNNKConfig(ffn=FFNPart(num_features=4)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export(model, "torch", f"{folder}/model.pt2")
        ...     program = torch.export.load(report.path).module()
        >>> words = torch.ones(7, 5, dtype=torch.long)
        >>> program(input_ids=words, attention_mask=words)["logits"].shape
        torch.Size([7, 2])
    """
    started = time.perf_counter()
    target = _check(format, path, int8, cache, opset, tolerance, overwrite)
    form = FORMATS[format]
    if missing := missing_packages(form):
        raise ImportError(
            f'export(..., "{format}") needs {", ".join(missing)}, which {"is" if len(missing) == 1 else "are"} not '
            "installed: pip install snnk-peft[onnx]"
        )
    if batches is not None:
        refuse_no_batches(batches)
    given = [
        only_tensors(model, batch, f"batches[{number}]")
        for number, batch in enumerate(() if batches is None else read(batches))
    ]
    if batches is not None and not given:
        raise ConfigError("batches is empty; expected model inputs, or None. An iterator may have been read before")
    first = only_tensors(model, sample, "sample") if sample is not None else given[0] if given else None
    plain = _plain_model(model, first)
    if format == "onnx" and plain.device.type != "cpu":
        plain = copy.deepcopy(plain).cpu()  # the graph is checked on the CPU, which sums in its own order
    refuse_not_finite(plain)
    first = _placed(first or probe_inputs(plain), plain)
    if absent := sorted({name for batch in given for name in first.keys() - batch.keys()}):
        raise ConfigError(
            f"some of the batches lack {', '.join(absent)}, which the sample has; expected the same names"
        )
    given = [_placed({name: batch[name] for name in first}, plain) for batch in given]
    limit = TOLERANCES.get(plain.dtype, 1e-4) if tolerance is None else tolerance

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as refused:
        raise OSError(
            refused.errno, f"{target.parent} cannot be written to ({refused}); choose another path"
        ) from refused
    try:
        with torch.no_grad(), as_it_was(plain):
            steps = decoder.Step(plain) if cache else None
            small, axes = None, Axes(first)
            traced = axes.traced(first) if steps is None else steps.first()
            texts = [*axes.others(first, plain), *given] if steps is None else decoder.texts(plain, steps)
            with formed_maps(plain, traced):
                if steps is None:
                    program, metadata = _traced(partial(form.trace, plain, traced, axes, opset), plain, traced)
                    opened = partial(_opened, form, metadata=metadata)
                else:
                    program = _traced(partial(steps.traced, opset), plain, traced)
                    opened = partial(decoder.Session, steps=steps)
            files = form.write(program, folder / target.name)
            run = opened(files[0])
            parity = _parity(plain, run, texts, limit)
            if int8:
                (folder / "int8").mkdir()
                if steps is None:
                    rounded, linears = quantized(program, traced, given, files[0])
                else:
                    rounded, linears = quantized(program, traced, (), files[0], steps.maps())
                before = sum(file.stat().st_size for file in files)
                files = form.write(rounded, folder / "int8" / target.name)
                other = opened(files[0])
                examples, figures, error = compared(plain, run, other, given or texts)
                runs = {"torch": plain, "onnx": run, "int8": other}
                if steps is not None:
                    runs = {"torch": steps.again, "onnx": run.again, "int8": other.again}
                small = Int8Report(linears, examples, figures, error, before, milliseconds(runs, traced))
        written = _moved(files, target)
    except (OSError, RuntimeError) as error:
        # torch's writer reports a full disk as a RuntimeError, and neither names the file.
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        raise OSError(
            getattr(error, "errno", None),
            f"{target} could not be written ({error}); nothing is left of it. Make room, or choose another path",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ExportReport(
        format=format,
        files=written,
        model_class=type(plain).__name__,
        dtype=str(plain.dtype).removeprefix("torch."),
        inputs={name: sorted(axes.free[name]) for name in first} if steps is None else steps.free(),
        opset=form.opset(program),
        parity=parity,
        tolerance=limit,
        seconds=time.perf_counter() - started,
        int8=small,
    )


def _check(
    format: object, path: object, int8: bool, cache: bool, opset: int | None, tolerance: object, overwrite: bool
) -> Path:
    target = path_of("path", path)
    faults = []
    if not isinstance(format, str) or format not in FORMATS:
        close = closest(format, FORMATS) if isinstance(format, str) else None
        hint = f". Did you mean {close!r}?" if close else ""
        faults.append(f"format is {in_words(format)}; expected {' or '.join(map(repr, FORMATS))}{hint}")
    elif (other := next((name for name, form in FORMATS.items() if form.suffix == target.suffix), format)) != format:
        faults.append(
            f"path is {target}, the name of a {other!r} file; expected one that ends in {FORMATS[format].suffix}"
        )
    if target.is_dir():
        faults.append(f"path is {target}, a folder; expected the name of a file, such as {target / 'model.onnx'}")
    elif (file := next((each for each in target.parents if each.is_file()), None)) is not None:
        faults.append(f"path is {target}, but {file} is a file; expected the name of a file in a folder")
    elif not overwrite and (there := [file for file in (target, _beside(target)) if file.exists()]):
        faults.append(f"{there[0]} exists; choose another path, or replace it with overwrite=True")
    if format == "torch" and int8:
        faults.append('int8 is True and format "torch"; int8 Linears are written for ONNX Runtime: format="onnx"')
    if format == "torch" and cache:
        faults.append('cache is True and format "torch"; a decoder with its state is written for ONNX Runtime: "onnx"')
    if format == "torch" and opset is not None:
        faults.append(f'opset is {opset} and format "torch", which has none; leave it out')
    if format == "onnx" and opset is not None and not missing_packages(FORMATS["onnx"]):
        lowest, newest = opsets()
        if type(opset) is not int or not lowest <= opset <= newest:
            faults.append(
                f"opset is {opset!r}; expected {lowest} to {newest}, which this torch and the installed onnx know, "
                "or None for the newest that it writes"
            )
    if tolerance is not None:
        faults += number_faults("tolerance", tolerance, above=0)
    if faults:
        raise ConfigError(faults)
    return target


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.data")


def _plain_model(model: nn.Module, sample: Inputs | None) -> PreTrainedModel:
    """Return the model to export: a patched one is bundled first."""
    if any(is_of_an_adapter(module) for module in model.modules()):
        return bundle(model, probe=None if sample is None else _placed(sample, model))
    return of_transformers(model, "expected a bundle, or a model from get_snnk_model")


def _placed(batch: Inputs, model: Any) -> Inputs:
    """Move a batch to the model's device and dtype."""
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in batch.items()
    }


def _traced(trace: Callable[[], Any], model: PreTrainedModel, sample: Inputs) -> Any:
    try:
        return trace()
    except ImportError:
        raise
    except Exception as error:  # torch, onnxscript or the model's code: whatever prevents a graph
        raise UnsupportedError(
            f"{type(model).__name__} in {model.dtype} could not be exported with inputs {', '.join(sample)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _opened(form: TorchFormat, file: Path, metadata: Any) -> Any:
    """Load the program of a file, or raise an error if it does not load."""
    try:
        return form.run(file, metadata)
    except Exception as error:
        half = "ONNX Runtime has few kernels for half precision on the CPU: export model.float()"
        told = f"the exported program cannot be loaded: {type(error).__name__}: {error}"
        raise UnsupportedError(f"{told}. {half}" if form is FORMATS["onnx"] else told) from error


def _parity(model: PreTrainedModel, run: Any, batches: Iterable[Inputs], limit: float) -> list[ShapeParity]:
    """Return the largest error for every shape.

    Raises:
        ValueError: an error exceeds the limit.
        UnsupportedError: the program does not accept a shape.
    """
    worst: dict[str, ShapeParity] = {}
    for batch in batches:
        error, output = compare(model, partial(_answer, run), batch)
        entry = ShapeParity(_shapes(batch), error, output)
        if not error <= limit:
            raise ValueError(
                f"the exported program's {output} differs from the model's by {error:.1e} of its largest value for "
                f"inputs {entry.shapes}; expected at most {limit:.0e}. Nothing was written. If the difference is "
                "rounding (weights or readouts with very large entries), raise tolerance=, or export in float64"
            )
        key = str(entry.shapes)
        if key not in worst or worst[key].error < error:
            worst[key] = entry
    return list(worst.values())


def _answer(run: Any, return_dict: bool, **inputs: torch.Tensor) -> Any:
    try:
        return run(**inputs)
    except Exception as error:  # torch or ONNX Runtime: the graph fits only some shapes
        raise UnsupportedError(
            f"the exported program fails for inputs {_shapes(inputs)}: {type(error).__name__}: {error}. Nothing was "
            "written"
        ) from error


def _shapes(batch: Inputs) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in batch.items()}


def _moved(files: list[Path], target: Path) -> dict[str, int]:
    """Rename the files to their final names, the program last."""
    written = {}
    for file, name in reversed(list(zip(files, (target, _beside(target)), strict=False))):
        written[str(name)] = file.stat().st_size
        os.replace(file, name)
    if len(files) == 1:
        _beside(target).unlink(missing_ok=True)  # weights of the replaced graph
    return {name: written[name] for name in reversed(written)}
