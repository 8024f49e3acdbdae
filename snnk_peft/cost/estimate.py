"""estimate_cost: the figures of all methods from a config, in one call."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from snnk_peft.config import SNNKConfig
from snnk_peft.cost.build import (
    DTYPES,
    Builder,
    inputs_for,
    labels_for,
    prepare,
    read_model_config,
    slot_parameters,
    without_numbers,
)
from snnk_peft.cost.meter import held, measure_inference, measure_training
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.registry import did_you_mean

DEVICES = ("cuda", "cpu")


@dataclass(frozen=True)
class CostRow:
    """Cost of one method. Bytes are decimal (1 GB = 10⁹ bytes); None if a figure does not apply.

    Args:
        method: "full", "lora", "snnk" or "bundle".
        detail: the rank of LoRA; None for other methods.
        parameters: parameters, trained or not, each tensor once, including those replaced or copied during training.
        buffers: buffer entries, including the feature matrices.
        trained: trained parameters.
        macs: multiply-accumulate operations of one forward pass of the batch in matrix products, convolutions and
            attention, masked pairs included; without elementwise functions, norms and sums.
        training_macs: the same, forward and backward; gradients that are not needed are not computed.
        inference_bytes: peak memory of one forward pass without gradients and without a key-value cache: parameters,
            buffers, inputs, intermediate results, outputs (for every position).
        weight_bytes: parameters and buffers.
        saved_bytes: memory in use between forward and backward, apart from the weights: inputs, outputs and tensors
            saved for the backward pass.
        gradient_bytes: gradients of the trained parameters.
        optimizer_bytes: AdamW's two moments of each trained parameter.
        training_bytes: peak memory of a training step, including all of these as far as they are alive at the same
            time. Not included: kernel workspaces, the GPU context, memory that an allocator keeps unused.
        ddp_bytes: sent by each process per step by DDP to all-reduce the gradients in a ring, 2 (n−1)/n · gradients
            (Patarasuk & Yuan 2009).
        ddp_buffer_bytes: broadcast by DDP per step in addition, (n−1)/n · buffers as a mean over processes; none with
            broadcast_buffers=False.
        fsdp_bytes: sent by each process per step by FSDP's full shard, without accumulation: all parameters, including
            frozen ones, are gathered forward and backward, and gradients are scattered: (n−1)/n · (2 · parameters +
            gradients) (Rajbhandari et al. 2020, ZeRO, 7.2).
    """

    method: str
    detail: str | None
    parameters: int
    buffers: int
    trained: int | None
    macs: int
    training_macs: int | None
    inference_bytes: int
    weight_bytes: int
    saved_bytes: int | None
    gradient_bytes: int | None
    optimizer_bytes: int | None
    training_bytes: int | None
    ddp_bytes: int | None
    ddp_buffer_bytes: int | None
    fsdp_bytes: int | None

    @property
    def title(self) -> str:
        return self.method if self.detail is None else f"{self.method}, {self.detail}"


@dataclass(frozen=True)
class CostReport:
    """Costs of a model by several methods.

    Args:
        model: its class.
        inputs: name and shape of its inputs, for one process.
        dtype: dtype of the model; not mixed precision.
        device: type of the device whose kernels are simulated.
        processes: n, for the traffic.
        rows: one per method.
        remarks: methods that were left out, and why.
    """

    model: str
    inputs: dict[str, list[int]]
    dtype: str
    device: str
    processes: int
    rows: list[CostRow]
    remarks: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def row(self, method: str) -> CostRow:
        """Return the row of a method; KeyError if it was left out."""
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(method)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table as text: a header line, and a line per method."""
        titles = (
            *("method", "parameters", "trained", "MACs", "MACs of a step", "inference", "training"),
            *("DDP sends", "FSDP sends"),
        )
        return [
            titles,
            *(
                (
                    row.title,
                    *(short(number) for number in (row.parameters, row.trained, row.macs, row.training_macs)),
                    *(short(number, "B") for number in (row.inference_bytes, row.training_bytes)),
                    *(short(number, "B") for number in (row.ddp_bytes, row.fsdp_bytes)),
                )
                for row in self.rows
            ),
        ]

    def footer(self) -> list[str]:
        given = ", ".join(f"{name} {' × '.join(map(str, shape))}" for name, shape in self.inputs.items())
        return [
            f"{self.model}, {self.dtype}, {self.device}; {given} per process; bytes sent per step by each of "
            f"{self.processes} processes",
            *self.remarks,
        ]


def short(number: int | None, unit: str = "") -> str:
    """Format a number with three digits and a prefix: 1234567 is "1.23 M"."""
    if number is None:
        return "–"
    value, prefixes = float(number), iter(("", "k", "M", "G", "T", "P", "E"))
    prefix = next(prefixes)
    while value >= 999.5:
        value, prefix = value / 1000, next(prefixes)
    digits = f"{value:.0f}" if not prefix else f"{value:.3g}"
    return f"{digits} {prefix}{unit}".rstrip()


def estimate_cost(
    model: str | Path | PretrainedConfig,
    config: SNNKConfig,
    *,
    task: str | None = None,
    num_labels: int | None = None,
    batch_size: int = 32,
    length: int | None = None,
    image_size: int | None = None,
    dtype: str = "float32",
    processes: int = 8,
    device: str = "cuda",
) -> CostReport:
    """Estimate parameters, MACs, memory and traffic of SNNK, its bundle, LoRA and full fine-tuning.

    No weights are read or allocated, and only a config is downloaded.

    Args:
        model: a config, a config.json, a folder with one, or the name of a model on the Hub.
        config: the parts. LoRA gets the rank with the same number of trained parameters, and the same task head.
        task: a name of `snnk_peft.cost.build.TASKS`; None for the class that the config names.
        num_labels: number of labels of a classifier; None for the config's.
        batch_size: examples per process.
        length: tokens per text, without padding; None for 512, or the model's positions if they are fewer.
        image_size: pixels on each side; None for the config's.
        dtype: dtype of the loaded model, "float32", "bfloat16" or "float16" (no mixed precision).
        processes: number n of processes, for the traffic.
        device: "cuda" or "cpu"; its kernels determine what attention and dropout save for the backward pass.

    Raises:
        ConfigError: wrong arguments, config or parts; lists all known faults.
        UnsupportedError: a quantized model, or one that does not support the parts.

    Example:
        >>> from transformers import BertConfig
        >>> from snnk_peft import AdapterPart, SNNKConfig
        >>> from snnk_peft.cost import estimate_cost
        >>> bert, config = BertConfig(num_hidden_layers=2), SNNKConfig(adapter=AdapterPart())
        >>> report = estimate_cost(bert, config, task="sequence-classification")
        >>> [(row.title, row.parameters, row.trained) for row in report.rows][:2]
        [('full', 38605058, 38605058), ('lora, r = 8', 38655748, 50690)]
    """
    _check(batch_size, length, image_size, num_labels, processes, dtype, device)
    source = read_model_config(model)
    prepare(source, num_labels, image_size)
    build = Builder(source, task, DTYPES[dtype])
    base = build.full()
    inputs = inputs_for(base, batch_size, length, DTYPES[dtype])
    labelled = {**inputs, **labels_for(base, inputs)}
    remarks: list[str] = []

    def row(method: str, made: Any, detail: str | None = None) -> CostRow:
        return _row(method, detail, made, inputs, labelled, device, processes)

    patched = build.patched(config)
    size = slot_parameters(patched)
    rows = [row("full", base)]
    try:
        lora, rank = build.lora(config, size)
        rows.append(row("lora", lora, f"r = {rank}"))
    except ConfigError as error:
        remarks.append(f"lora is left out: {error}")
    rows.append(row("snnk", patched))
    try:
        rows.append(row("bundle", build.bundled(patched)))
    except UnsupportedError as error:
        remarks.append(f"bundle is left out: {error}")
    shapes = {name: list(tensor.shape) for name, tensor in inputs.items()}
    return CostReport(type(base).__name__, shapes, dtype, device, processes, rows, remarks)


def _check(
    batch_size: int,
    length: int | None,
    image_size: int | None,
    num_labels: int | None,
    processes: int,
    dtype: str,
    device: str,
) -> None:
    values = {
        "batch_size": batch_size,
        "length": length,
        "image_size": image_size,
        "num_labels": num_labels,
        "processes": processes,
    }
    faults = [
        f"{name} is {value!r}; expected an integer >= 1"
        for name, value in values.items()
        if value is not None and (type(value) is not int or value < 1)
    ]
    if dtype not in DTYPES:
        faults.append(did_you_mean("dtype", dtype, list(DTYPES)))
    if device not in DEVICES:
        faults.append(did_you_mean("device", device, list(DEVICES)))
    if faults:
        raise ConfigError(faults)


def _row(
    method: str, detail: str | None, model: Any, inputs: Any, labelled: Any, device: str, processes: int
) -> CostRow:
    parameters, buffers = list(model.parameters()), list(model.buffers())
    weights = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held(model)}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    with without_numbers(f"running the model of row {method!r}"):
        inference = measure_inference(model, inputs, device)
        step = measure_training(model, labelled, device) if method != "bundle" and trained else None
    share = (processes - 1) / processes
    gradients = _bytes(trained)
    return CostRow(
        method=method,
        detail=detail,
        parameters=sum(parameter.numel() for parameter in parameters),
        buffers=sum(buffer.numel() for buffer in buffers),
        trained=None if method == "bundle" else sum(parameter.numel() for parameter in trained),
        macs=inference.macs,
        training_macs=None if step is None else step.macs,
        inference_bytes=inference.peak,
        weight_bytes=sum(weights.values()),
        saved_bytes=None if step is None else step.saved,
        gradient_bytes=None if step is None else step.gradients,
        optimizer_bytes=None if step is None else step.optimizer,
        training_bytes=None if step is None else step.peak,
        ddp_bytes=None if step is None else round(2 * share * gradients),
        ddp_buffer_bytes=None if step is None else round(share * _bytes(buffers)),
        fsdp_bytes=None if step is None else round(share * (2 * _bytes(parameters) + gradients)),
    )


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
