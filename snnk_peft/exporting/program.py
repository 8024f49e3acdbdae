"""The two formats: how a program is traced, written to a file, and run from it. The work is done by transformers."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from snnk_peft.exporting.shapes import Axes, Inputs

# Beyond this, ONNX keeps weights in a file of their own: protobuf ends at 2 GiB.
ONE_FILE = int(1.5 * 2**30)


class TorchFormat:
    """An exported program of torch, which returns a dict: `torch.export.load(path).module()(**inputs)["logits"]`."""

    suffix = ".pt2"
    packages: tuple[str, ...] = ()

    @property
    def exporter(self) -> Any:
        """The class in transformers that does the work."""
        from transformers.exporters import DynamoExporter

        return DynamoExporter

    def settings(self, **common: Any) -> Any:
        """The settings of `exporter`."""
        from transformers.exporters import DynamoConfig

        return DynamoConfig(**{name: value for name, value in common.items() if name != "opset_version"})

    def trace(self, model: PreTrainedModel, sample: Inputs, axes: Axes, opset: int | None) -> tuple[Any, Any]:
        """One program for all sizes of the free axes.

        Args:
            model: inside `as_it_was`.
            sample: inputs.
            axes: which of their axes are free.
            opset: version of the ONNX operators; None takes the newest.

        Returns:
            The program, and what transformers remembers about its inputs and outputs.
        """
        auto = torch.export.Dim.AUTO
        shapes = {name: dict.fromkeys(axes.free[name], auto) for name in sample}
        settings = self.settings(dynamic=True, dynamic_shapes=shapes, opset_version=opset)
        with quiet(), self.returning(model):
            return self.exporter().export_program(model, {**sample, "return_dict": True}, settings)

    @contextlib.contextmanager
    def returning(self, model: PreTrainedModel) -> Iterator[None]:
        """Inside, the model returns dicts: a file with transformers' own classes could not be read without them."""
        original = model.forward
        vars(model)["forward"] = lambda *args, **kwargs: _plain(original(*args, **kwargs))
        try:
            yield
        finally:
            vars(model)["forward"] = original

    def opset(self, program: Any) -> int | None:
        """Version of the operators, where there is one."""
        return None

    def write(self, program: Any, path: Path) -> list[Path]:
        """Write a program; returns the files, that at `path` first."""
        content = io.BytesIO()  # torch's own writer ends the process on a full disk
        torch.export.save(program, content)
        path.write_bytes(content.getbuffer())
        return [path]

    def run(self, path: Path, metadata: Any) -> Any:
        """Load a file as a function of model inputs that returns what the model would."""
        from transformers.exporters.base import ExportedComponent, ExportedModel

        with quiet():
            component = ExportedComponent(self.exporter.load_program(path), metadata)
            return ExportedModel({"model": component}, self.exporter.export_format).to(**self.runtime())

    def runtime(self) -> dict[str, Any]:
        return {}


class OnnxFormat(TorchFormat):
    """An ONNX graph, checked with ONNX Runtime on the CPU."""

    suffix = ".onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")

    @property
    def exporter(self) -> Any:
        """The class in transformers that does the work."""
        from transformers.exporters import OnnxExporter

        return OnnxExporter

    def settings(self, **common: Any) -> Any:
        """The settings of `exporter`."""
        from transformers.exporters import OnnxConfig

        return OnnxConfig(**common)

    @contextlib.contextmanager
    def returning(self, model: PreTrainedModel) -> Iterator[None]:
        yield

    def opset(self, program: Any) -> int | None:
        return int(program.opset_imports[""])

    def write(self, program: Any, path: Path) -> list[Path]:
        """Write a graph with its weights inside, or in a second file if they are too many."""
        import onnx_ir

        constants = [value.const_value for value in program.graph.initializers.values()]
        if sum(constant.nbytes for constant in constants if constant is not None) < ONE_FILE:
            onnx_ir.save(program, str(path))
            return [path]
        beside = path.with_name(f"{path.name}.data")
        onnx_ir.save(program, str(path), external_data=beside.name)
        return [path, beside]

    def runtime(self) -> dict[str, Any]:
        """On as many threads as torch takes, so that times can be compared."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        return {"device": "cpu", "session_options": options}


def _plain(value: Any) -> Any:
    """A dict, also of what is inside."""
    return {name: _plain(part) for name, part in value.items()} if isinstance(value, ModelOutput) else value


FORMATS: dict[str, TorchFormat] = {"onnx": OnnxFormat(), "torch": TorchFormat()}


def missing_packages(form: TorchFormat) -> list[str]:
    """Packages of a format that are not installed."""
    return [name for name in form.packages if importlib.util.find_spec(name) is None]


def opsets() -> tuple[int, int]:
    """The oldest and the newest version of the ONNX operators that can be asked for."""
    import onnx
    from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET

    return TORCHLIB_OPSET, onnx.defs.onnx_opset_version()


@contextlib.contextmanager
def as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model is in eval mode and returns no cache; afterwards it is as it was."""
    training = {module: module.training for module in model.modules()}
    config, attributes = model.config.get_text_config(), set(vars(model))
    cached = getattr(config, "use_cache", None)
    model.eval()
    if cached is not None:
        config.use_cache = False
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag
        if cached is not None:
            config.use_cache = cached
        for name in set(vars(model)) - attributes:  # the exporters leave a `forward` behind
            delattr(model, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' progress and version warnings: their output is checked."""
    loggers = [logging.getLogger(name) for name in ("transformers", "torch.onnx", "onnxscript", "onnx_ir", "root")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
