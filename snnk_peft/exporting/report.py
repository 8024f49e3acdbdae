"""ExportReport: files and parity of `export`. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ShapeParity:
    """Parity of program and model on inputs of one shape.

    Args:
        shapes: input -> its shape.
        error: largest difference of the outputs, relative to the largest value of that output.
        output: the output where it occurs.
    """

    shapes: dict[str, list[int]]
    error: float
    output: str


@dataclass(frozen=True)
class Int8Report:
    """Comparison of the graph with int8 Linears and the one in floating point.

    Args:
        linears: products whose weights are int8.
        examples: number of examples compared.
        figures: comparison with the answers in floating point. For classes `agreement`, the share of equal labels, and
            `divergence`, KL in nats; for embeddings `cosine`, and the others in `snnk_peft.calibrating.answers`.
        error: root mean square of the difference relative to that of the output.
        bytes_before: size of the file in floating point.
        milliseconds: median of a call on the sample: "torch", "onnx", "int8", taking turns and with equal numbers of
            threads.
    """

    linears: int
    examples: int
    figures: dict[str, float]
    error: float
    bytes_before: int
    milliseconds: dict[str, float]


@dataclass(frozen=True)
class ExportReport:
    """Result of `export`.

    Args:
        format: "onnx" or "torch".
        files: sizes in bytes of the written files, by path; the program first.
        model_class: class of the exported model.
        dtype: its floating type.
        inputs: names of the program's inputs, each with its dynamic axes.
        opset: version of the ONNX operators; None for torch.
        parity: one entry per verified shape.
        tolerance: largest error that is accepted.
        seconds: wall time in total.
        int8: report of a graph with int8 Linears; `parity` is then that of the graph before quantisation.
    """

    format: str
    files: dict[str, int]
    model_class: str
    dtype: str
    inputs: dict[str, list[int]]
    opset: int | None
    parity: list[ShapeParity]
    tolerance: float
    seconds: float
    int8: Int8Report | None = field(default=None)

    @property
    def path(self) -> str:
        return next(iter(self.files))

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    @property
    def error(self) -> float:
        return max(entry.error for entry in self.parity)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        opset = "" if self.opset is None else f", opset {self.opset}"
        lines = [f"{self.path}: {self.model_class}, {self.dtype}, {self.format}{opset}, {self.bytes:,} bytes"]
        lines += [
            f"    {_shapes(entry.shapes)}: error {entry.error:.1e} of the largest output" for entry in self.parity
        ]
        lines.append(f"    tolerance {self.tolerance:.0e}; any size on {_free(self.inputs)}; {self.seconds:.1f} s")
        if (small := self.int8) is not None:
            times = ", ".join(f"{name} {value:.2f}" for name, value in small.milliseconds.items())
            lines.append(
                f"    int8: {small.linears} Linears, {small.bytes_before:,} -> {self.bytes:,} bytes; on "
                f"{small.examples} examples {_answers(small.figures)}error {small.error:.1e} (rms); ms per call: "
                f"{times}"
            )
        return "\n".join(lines)


def _answers(figures: Mapping[str, float]) -> str:
    """Summarise the answers: "the same label for 98.9 %, KL 0.0007; "."""
    told = {
        "agreement": lambda x: f"the same label for {100 * x:.1f} %",
        "divergence": lambda x: f"KL {x:.1e}",
        "cosine": lambda x: f"cosine to fp32 {x:.4f}",
        "neighbours": lambda x: f"{100 * x:.1f} % of the nearest neighbours kept",
        "perplexity": lambda x: f"perplexity {x:.2f}",
        "original_perplexity": lambda x: f"of fp32 {x:.2f}",
        "correlation": lambda x: f"correlation {x:.4f}",
    }
    return "".join(f"{told[name](value)}, " for name, value in figures.items() if name in told)


def _shapes(shapes: Mapping[str, list[int]]) -> str:
    """Describe shapes, grouping inputs of equal shape: "input_ids, attention_mask 2 × 7"."""
    alike: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        alike.setdefault(" × ".join(map(str, shape)), []).append(name)
    return "; ".join(f"{', '.join(names)} {shape}" for shape, names in alike.items())


def _free(inputs: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{name}[{', '.join(map(str, axes))}]" for name, axes in inputs.items() if axes) or "no axis"
