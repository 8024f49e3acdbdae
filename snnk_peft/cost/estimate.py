"""estimate_cost: one call from a config to the figures of all methods."""

from __future__ import annotations

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
from snnk_peft.cost.report import CostReport, CostRow
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.registry import did_you_mean

DEVICES = ("cuda", "cpu")


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

    No weight is read or allocated, and nothing is downloaded but a config.

    Args:
        model: a config, a config.json, a folder with one, or the name of a model on the Hub.
        config: the parts. LoRA gets the rank at which it has as many trained parameters, and the same task head.
        task: a name of `snnk_peft.cost.build.TASKS`; None for the class that the config names.
        num_labels: of a classifier; None for what the config says.
        batch_size: examples per process.
        length: tokens per text, without padding; None for 512, or the model's positions if they are fewer.
        image_size: pixels on each side; None for what the config says.
        dtype: "float32", "bfloat16" or "float16", of the model as it is loaded (no mixed precision).
        processes: number n of processes that share the traffic.
        device: "cuda" or "cpu", whose kernels decide what attention and dropout keep for the backward pass.

    Raises:
        ConfigError: arguments, config or parts that do not fit; lists all that are known.
        UnsupportedError: a quantized model, or one that cannot take the parts.

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
