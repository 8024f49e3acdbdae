"""CostReport: the figures of all methods side by side, as plain data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CostRow:
    """Cost of one method. Bytes are decimal (1 GB = 10⁹ bytes); None where a figure does not apply.

    Args:
        method: "full", "lora", "snnk" or "bundle".
        detail: the rank of LoRA, or what a bundle could not be made for.
        parameters: parameters, trained or not, each tensor once; what is replaced or copied while training counts too.
        buffers: entries of buffers, among them the feature matrices.
        trained: trained parameters.
        macs: multiply-accumulate operations of one forward pass of the batch in matrix products, convolutions and
            attention, masked pairs included; not those of elementwise functions, norms and sums.
        training_macs: the same, forward and backward; nothing is computed for what needs no gradient.
        inference_bytes: the most that is alive during one forward pass without gradients and without a cache of keys:
            parameters, buffers, inputs, intermediate results, outputs (of every position).
        weight_bytes: parameters and buffers.
        saved_bytes: what is alive between forward and backward, besides the weights: inputs, outputs and what the
            backward pass reads.
        gradient_bytes: gradients of the trained parameters.
        optimizer_bytes: AdamW's two moments of each trained parameter.
        training_bytes: the most that is alive during a training step, all of these included as far as they are alive at
            the same time. Not included: what kernels need for themselves, the context of a GPU, what an allocator keeps
            unused.
        ddp_bytes: sent by each process per step by DDP to all-reduce the gradients in a ring, 2 (n−1)/n · gradients
            (Patarasuk & Yuan 2009).
        ddp_buffer_bytes: what DDP besides that broadcasts per step, (n−1)/n · buffers as a mean over processes; none
            with broadcast_buffers=False.
        fsdp_bytes: sent by each process per step by FSDP's full shard, without accumulation: all parameters, frozen
            ones too, are gathered forward and backward, gradients are scattered: (n−1)/n · (2 · parameters +
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
        inputs: name and shape of what it reads, for one process.
        dtype: of the model; not a mixed precision.
        device: type of the device whose kernels are stood in for.
        processes: n, for the traffic.
        rows: one per method.
        remarks: methods that are left out, and why.
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
        """The row of a method; KeyError where it was left out."""
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(method)

    def cells(self) -> list[tuple[str, ...]]:
        """The table in words: a line of titles, and a line per method."""
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
        """The line under the table: model, inputs, dtype, processes."""
        given = ", ".join(f"{name} {' × '.join(map(str, shape))}" for name, shape in self.inputs.items())
        return [
            f"{self.model}, {self.dtype}, {self.device}; {given} per process; bytes sent per step by each of "
            f"{self.processes} processes",
            *self.remarks,
        ]


def short(number: int | None, unit: str = "") -> str:
    """Three digits and a prefix: 1234567 is "1.23 M"."""
    if number is None:
        return "–"
    value, prefixes = float(number), iter(("", "k", "M", "G", "T", "P", "E"))
    prefix = next(prefixes)
    while value >= 999.5:
        value, prefix = value / 1000, next(prefixes)
    digits = f"{value:.0f}" if not prefix else f"{value:.3g}"
    return f"{digits} {prefix}{unit}".rstrip()
