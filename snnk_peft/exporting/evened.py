"""Inputs of int8 Linears with balanced channels: each is divided by a scale, by which the weights are multiplied.

    x W = (x / s) (diag(s) W)

ONNX Runtime rounds the input of a Linear to eight bits, with one step size for all channels. If one channel is much
larger than the others, as LayerNorm's gains make it, the others keep two or three bits. The scale balances the errors
of inputs and weights, s_j = max|x_j|^α / max|W_j|^β (SmoothQuant, Xiao et al. 2023, where α + β = 1); for each input
the (α, β) with the smallest error of rounding both, over real inputs, is chosen:

    Δ²/12 Σ_j s_j² |W_j|² + Σ_o Δ_o²/12 Σ_j E x_j² / s_j²,    Δ and Δ_o the steps of the input and of output o's weights

x / s is a separate operation, as cheap as a bias: the sum after a LayerNorm reads x, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from snnk_peft.exporting.program import Inputs, OnnxFormat

STEPS, STEPS_OF_WEIGHTS = 255, 63  # of eight bits, and of seven on either side of zero
EXPONENTS = tuple((a, b) for a in (0.25, 0.5, 0.75, 1.0) for b in sorted({0.0, 1.0 - a}))
LEAST = 1e-3  # smallest range of a channel, relative to the largest
Vector = npt.NDArray[np.float64]


class Channels(NamedTuple):
    """Statistics of the channels of an input, (dim,) each: minimum, maximum, mean square."""

    least: Vector
    largest: Vector
    square: Vector


def even(program: Any, linears: Iterable[str], batches: Sequence[Inputs], file: Path) -> None:
    """Balance the inputs of Linears, in place: the graph computes the same up to rounding in its own precision.

    Args:
        program: an onnx_ir graph.
        linears: names of the matrix products whose weights will be int8.
        batches: real model inputs, on which channels are measured.
        file: the written graph; a temporary one is written next to it.
    """
    wanted = set(linears)
    readers: dict[Any, list[Any]] = {}
    for node in program.graph:
        if node.name in wanted and node.op_type == "MatMul":
            readers.setdefault(node.inputs[0], []).append(node)
    weights = {
        value: np.concatenate([node.inputs[1].const_value.numpy() for node in nodes], 1, dtype=np.float64)
        for value, nodes in readers.items()
    }
    known = _measured({value.name: len(weight) for value, weight in weights.items()}, batches, file)
    for value, nodes in readers.items():
        if (scale := _scale(known[value.name], weights[value])) is not None:
            _put(program.graph, value, nodes, scale)


def _measured(widths: dict[str, int], batches: Sequence[Inputs], file: Path) -> dict[str, Channels]:
    """Measure the channels of values of a graph, by name, reduced in the graph so that no value is held in full."""
    import onnx
    import onnxruntime

    make_node, make_output = onnx.helper.make_node, onnx.helper.make_empty_tensor_value_info
    model = onnx.load(str(file), load_external_data=False)
    graph = model.graph
    constants = {"snnk_rows": [0], **{f"{name}_shape": [-1, width] for name, width in widths.items()}}
    graph.initializer.extend(onnx.numpy_helper.from_array(np.array(value), name) for name, value in constants.items())
    outputs = []
    for name in widths:
        rows, squares = f"{name}_rows", f"{name}_squares"
        graph.node.extend(
            (
                make_node("Reshape", [name, f"{name}_shape"], [rows]),
                make_node("Mul", [rows, rows], [squares]),
                *(
                    make_node(reduction, [source, "snnk_rows"], [f"{name}_{reduction}"], keepdims=0)
                    for reduction, source in (("ReduceMin", rows), ("ReduceMax", rows), ("ReduceMean", squares))
                ),
            )
        )
        outputs += [f"{name}_ReduceMin", f"{name}_ReduceMax", f"{name}_ReduceMean"]
    del graph.output[:]
    graph.output.extend(map(make_output, outputs))
    beside = file.with_name(f"channels_{file.name}")
    onnx.save(model, str(beside))
    session = onnxruntime.InferenceSession(str(beside), OnnxFormat().runtime()["session_options"])
    asked = [entry.name for entry in session.get_inputs()]
    runs = [session.run(outputs, {name: batch[name].numpy() for name in asked}) for batch in batches]
    found = [np.stack(values).astype(np.float64) for values in zip(*runs, strict=True)]
    return {
        name: Channels(found[3 * at].min(0), found[3 * at + 1].max(0), found[3 * at + 2].mean(0))
        for at, name in enumerate(widths)
    }


def _scale(channels: Channels, weight: Vector) -> Vector | None:
    """Return the scale with the smallest rounding error; None if that is 1 for all channels."""
    reach = np.maximum(np.abs(channels.least), np.abs(channels.largest))
    of_weight = np.abs(weight).max(1)
    if not (reach.max() > 0 and of_weight.max() > 0):
        return None
    reach, of_weight = (np.maximum(each, LEAST * each.max()) for each in (reach, of_weight))
    tried = [reach**a / of_weight**b for a, b in EXPONENTS]
    scales = [np.ones_like(reach), *(scale / scale.mean() for scale in tried)]
    errors = [_rounding_error(channels, weight, scale) for scale in scales]
    best = int(np.argmin(errors))
    return scales[best] if best else None


def _rounding_error(channels: Channels, weight: Vector, scale: Vector) -> float:
    """Return 12 times the mean square error that rounding adds to the sum of the outputs."""
    scaled = weight * scale[:, None]
    step = (max(0.0, (channels.largest / scale).max()) - min(0.0, (channels.least / scale).min())) / STEPS
    steps = np.abs(scaled).max(0) / STEPS_OF_WEIGHTS
    return float(step**2 * np.square(scaled).sum() + np.square(steps).sum() * (channels.square / scale**2).sum())


def _put(graph: Any, value: Any, nodes: list[Any], scale: Vector) -> None:
    """Divide a value by the scale for these nodes, and multiply their weights by it."""
    import onnx_ir as ir

    def constant(name: str, content: Vector, like: Any) -> Any:
        made = ir.Value(name=name, const_value=ir.tensor(content.astype(like.const_value.numpy().dtype), name=name))
        made.shape, made.dtype = ir.Shape(content.shape), like.dtype
        graph.register_initializer(made)
        return made

    divided = ir.node("Mul", [value, constant(f"{value.name}_scale", 1 / scale, nodes[0].inputs[1])])
    divided.outputs[0].name = f"{value.name}_evened"
    divided.outputs[0].shape, divided.outputs[0].type = value.shape, value.type
    graph.insert_before(nodes[0], divided)
    for node in nodes:
        old = node.inputs[1]
        weight = old.const_value.numpy() * scale[:, None]
        node.replace_input_with(0, divided.outputs[0])
        node.replace_input_with(1, constant(f"{node.name}_evened_weight", weight, old))
        if not old.uses():
            del graph.initializers[old.name]
