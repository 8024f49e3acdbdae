"""The two formats: how a program is traced, written and run with transformers, and the shapes to verify it on."""

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
from torch import nn
from transformers import PreTrainedModel, exporters
from transformers.utils import ModelOutput

from snnk_peft.bundling.report import text_room
from snnk_peft.calibrating.batches import checked_one
from snnk_peft.calibrating.guards import evaluating
from snnk_peft.errors import ConfigError

Inputs = dict[str, torch.Tensor]

LONG = 160  # tokens: more than one chunk of causal linear attention, which is 128
PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
# Beyond this, ONNX keeps weights in a separate file: protobuf is limited to 2 GiB.
ONE_FILE = int(1.5 * 2**30)


def only_tensors(model: nn.Module, batch: Any, what: str) -> Inputs:
    """Return a batch without its labels.

    Raises:
        ConfigError: not a mapping, an empty one, or a value that is not a tensor with an axis for the examples.
    """
    given = checked_one(model, batch, what)
    kept = {name: value for name, value in given.items() if name not in ("labels", "label", "label_ids")}
    wrong = {name: value for name, value in kept.items() if not isinstance(value, torch.Tensor) or not value.dim()}
    if wrong:
        raise ConfigError(
            f"{what}[{name!r}] is {type(value).__name__}; expected a tensor whose first axis counts examples"
            for name, value in wrong.items()
        )
    return {name: value.detach() for name, value in kept.items()}


class Axes:
    """The axes of a model's inputs that vary between calls: the examples, and the tokens of texts.

    Attributes:
        examples: number of examples in the sample.
        tokens: number of tokens in the sample; None if there are no texts.
        free: name -> its axes that vary.
    """

    def __init__(self, sample: Inputs):
        main = next((name for name in ("input_ids", "inputs_embeds") if name in sample), None)
        first = sample[main] if main else next(iter(sample.values()))
        # For multiple choice, (examples, choices, tokens), the number of choices is fixed.
        last = first.dim() - (2 if main == "inputs_embeds" else 1)
        self.examples = first.shape[0]
        self.tokens = first.shape[last] if main else None
        self._token_axis = {
            name: last
            for name, value in sample.items()
            if self.tokens is not None and name in PER_TOKEN and value.dim() > last and value.shape[last] == self.tokens
        }
        self.free = {
            name: {
                *([0] if value.shape[0] == self.examples else []),
                *([self._token_axis[name]] if name in self._token_axis else []),
            }
            for name, value in sample.items()
        }

    def resized(self, sample: Inputs, examples: int, tokens: int | None) -> Inputs:
        """Return the sample with other numbers of examples and tokens, by selecting or repeating its own.

        Tokens are selected evenly, so that padding stays on its side; a text of padding only becomes one without
        padding.
        """
        resized = {}
        for name, value in sample.items():
            if 0 in self.free[name]:
                value = value[torch.arange(examples, device=value.device) % self.examples]
            if tokens is not None and name in self._token_axis:
                assert self.tokens is not None
                spread = torch.arange(tokens, device=value.device) * self.tokens // tokens
                value = value.index_select(self._token_axis[name], spread)
            resized[name] = value.contiguous()
        if "attention_mask" in self._token_axis:
            mask = resized["attention_mask"]
            resized["attention_mask"] = torch.where(mask.any(-1, keepdim=True), mask, torch.ones_like(mask))
        return resized

    def traced(self, sample: Inputs) -> Inputs:
        """Return the sample with at least two examples and two tokens, since an axis of length one would be fixed."""
        tokens = None if self.tokens is None else max(2, self.tokens)
        return self.resized(sample, max(2, self.examples), tokens)

    def others(self, sample: Inputs, model: PreTrainedModel) -> Iterator[Inputs]:
        """Yield inputs of other shapes that the model supports: single examples, a single token, many tokens."""
        yield sample
        if self.tokens is None:
            for examples in (1, self.examples + 1):
                yield self.resized(sample, examples, None)
            return
        room = text_room(model.config) or LONG
        longest = min(room, max(LONG, 2 * self.tokens + 1))
        for examples, tokens in ((1, 1), (1, min(room, self.tokens + 3)), (self.examples + 1, longest)):
            yield self.resized(sample, examples, tokens)


class TorchFormat:
    """An exported program of torch, which returns a dict: `torch.export.load(path).module()(**inputs)["logits"]`."""

    suffix = ".pt2"
    packages: tuple[str, ...] = ()

    @property
    def exporter(self) -> Any:
        """The exporter class of transformers."""
        return exporters.DynamoExporter

    def settings(self, **common: Any) -> Any:
        return exporters.DynamoConfig(**{name: value for name, value in common.items() if name != "opset_version"})

    def trace(self, model: PreTrainedModel, sample: Inputs, axes: Axes, opset: int | None) -> tuple[Any, Any]:
        """Trace one program for all sizes of the free axes.

        Returns:
            The program, and transformers' metadata about its inputs and outputs.
        """
        auto = torch.export.Dim.AUTO
        shapes = {name: dict.fromkeys(axes.free[name], auto) for name in sample}
        settings = self.settings(dynamic=True, dynamic_shapes=shapes, opset_version=opset)
        with quiet(), self.returning(model):
            return self.exporter().export_program(model, {**sample, "return_dict": True}, settings)

    @contextlib.contextmanager
    def returning(self, model: PreTrainedModel) -> Iterator[None]:
        """Make the model return dicts in a context: a file with transformers' own classes would need transformers."""
        original = model.forward
        vars(model)["forward"] = lambda *args, **kwargs: _plain(original(*args, **kwargs))
        try:
            yield
        finally:
            vars(model)["forward"] = original

    def opset(self, program: Any) -> int | None:
        """Return the version of the operators, or None."""
        return None

    def write(self, program: Any, path: Path) -> list[Path]:
        """Write a program; return the files, the one at `path` first."""
        content = io.BytesIO()  # torch's own writer ends the process on a full disk
        torch.export.save(program, content)
        path.write_bytes(content.getbuffer())
        return [path]

    def run(self, path: Path, metadata: Any) -> Any:
        """Load a file as a function from model inputs to the model's outputs."""
        with quiet():
            component = exporters.ExportedComponent(self.exporter.load_program(path), metadata)
            return exporters.ExportedModel({"model": component}, self.exporter.export_format).to(**self.runtime())

    def runtime(self) -> dict[str, Any]:
        return {}


class OnnxFormat(TorchFormat):
    """An ONNX graph, verified with ONNX Runtime on the CPU."""

    suffix = ".onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")

    @property
    def exporter(self) -> Any:
        return exporters.OnnxExporter

    def settings(self, **common: Any) -> Any:
        return exporters.OnnxConfig(**common)

    def trace(self, model: PreTrainedModel, sample: Inputs, axes: Axes, opset: int | None) -> tuple[Any, Any]:
        """Trace one graph for all sizes of the free axes, with Sum instead of Add for a residual before a LayerNorm.

        ONNX Runtime fuses Add and LayerNormalization into one operation, which on a CPU takes four times as long as
        both (1.32; a third of a small model with int8 Linears).
        """
        program, metadata = super().trace(model, sample, axes, opset)
        for node in program.graph:
            if node.op_type == "LayerNormalization" and (before := node.inputs[0].producer()) is not None:
                before.op_type = "Sum" if before.op_type == "Add" else before.op_type
        return program, metadata

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
        return {"device": "cpu", "session_options": onnx_options()}


def onnx_options() -> Any:
    """Return options of an ONNX Runtime session, with as many threads as torch uses, so that times are comparable.

    The threads do not keep spinning after a run, which would slow down whatever runs next on the same cores.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _plain(value: Any) -> Any:
    return {name: _plain(part) for name, part in value.items()} if isinstance(value, ModelOutput) else value


FORMATS: dict[str, TorchFormat] = {"onnx": OnnxFormat(), "torch": TorchFormat()}


def missing_packages(form: TorchFormat) -> list[str]:
    """List the packages of a format that are not installed."""
    return [name for name in form.packages if importlib.util.find_spec(name) is None]


def opsets() -> tuple[int, int]:
    """Return the oldest and the newest supported version of the ONNX operators."""
    import onnx
    from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET

    return TORCHLIB_OPSET, onnx.defs.onnx_opset_version()


@contextlib.contextmanager
def as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Set the model to eval mode without a cache in a context, and restore it afterwards."""
    config, attributes = model.config.get_text_config(), set(vars(model))
    cached = getattr(config, "use_cache", None)
    if cached is not None:
        config.use_cache = False
    try:
        with evaluating(model):
            yield
    finally:
        if cached is not None:
            config.use_cache = cached
        for name in set(vars(model)) - attributes:  # the exporters leave a `forward` behind
            delattr(model, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' progress and version warnings, since their output is verified."""
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
