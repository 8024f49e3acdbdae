"""Int8 Linears by ONNX Runtime's dynamic quantisation, and their effect on outputs and time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import exporters

from snnk_peft.calibrating.answers import Answers, Comparison
from snnk_peft.errors import NumericalError
from snnk_peft.exporting.evened import even
from snnk_peft.exporting.program import Inputs, quiet
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.solvers.reduce import relative_error
from snnk_peft.turns import taking_turns

Run = Callable[..., Mapping[str, torch.Tensor]]

REPETITIONS = 9


def quantized(
    program: Any, sample: Inputs, batches: Sequence[Inputs], file: Path, maps: Collection[tuple[int, ...]] = ()
) -> tuple[Any, int]:
    """Quantise the weights of a graph's Linears to int8, one scale per output; inputs are rounded at run time.

    Feature matrices in place of an FFN or pooler count as Linears. Everything else stays in floating point: embeddings,
    norms, products of two activations, and the maps of linear attention, which are followed by exponentials. Weights
    use seven of the eight bits: CPUs with only AVX2 accumulate 8-bit products in 16 bits, which may overflow, and the
    file may run on any CPU.

    Args:
        program: in floating point; its Linears are balanced in place.
        sample: model inputs.
        batches: real inputs on which channels are balanced; empty for no balancing.
        file: the written program.
        maps: shapes of the matrices of feature maps, where nodes do not say that they are part of linear attention.

    Returns:
        The new graph and the number of its int8 matrix products.
    """
    products = {node.name: node for node in program.graph if node.op_type in ("MatMul", "Gemm")}
    linears = {name for name, node in products.items() if _is_linear(node, maps)}
    if batches:
        even(program, linears, batches, file)
    settings = exporters.OnnxRuntimeDynamicConfig(
        op_types_to_quantize=["MatMul", "Gemm"],
        nodes_to_exclude=sorted(products.keys() - linears),
        per_channel=True,
        reduce_range=True,
    )
    with quiet():
        quantizer = exporters.OnnxRuntimeQuantizer(settings)
        return quantizer.quantize(program, sample, exporters.ExportFormat("onnx")), len(linears)


def _is_linear(node: Any, maps: Collection[tuple[int, ...]]) -> bool:
    """Return whether a matrix product has a weight matrix and is not part of linear attention."""
    weight = None if node.inputs[1] is None else node.inputs[1].const_value
    inside = node.metadata_props.get("pkg.torch.onnx.class_hierarchy", "")
    if weight is None or len(weight.shape) != 2 or 0 in weight.shape:  # all units of an FFN may have been pruned
        return False
    return KernelAttention.__name__ not in inside and tuple(map(int, weight.shape)) not in maps


def compared(model: Any, run: Run, other: Run, batches: Iterable[Inputs]) -> tuple[int, dict[str, float], float]:
    """Compare the outputs of two programs of one model.

    Returns:
        Number of examples, `Comparison.figures` of the answers, and the relative error (rms) of the first output.

    Raises:
        NumericalError: an output of the quantised program is NaN or infinite.
    """
    comparison = Comparison(Answers(model))
    examples, difference, size = 0, 0.0, 0.0
    for batch in batches:
        expected, given = run(**batch), other(**batch)
        comparison.update(expected, given, batch)
        name = "logits" if "logits" in expected else next(iter(expected))
        a, b = expected[name].double(), given[name].double()
        mask = batch.get("attention_mask")
        if mask is not None and a.dim() == 3 and mask.shape == a.shape[:2]:  # padding has no answers
            a, b = a[mask.bool()], b[mask.bool()]
        if not bool(b.isfinite().all()):
            raise NumericalError(
                f"{name} of the graph with int8 Linears is not finite, that in floating point is: some weights or "
                "inputs of a Linear are too large for eight bits. Export without int8=True"
            )
        examples += len(next(iter(batch.values())))
        difference += float((a - b).square().sum())
        size += float(a.square().sum())
    return examples, comparison.figures(), relative_error(difference, size, size) ** 0.5


def milliseconds(runs: Mapping[str, Run], sample: Inputs) -> dict[str, float]:
    """Measure the median time of a call of each program, taking turns."""
    seconds = taking_turns({name: partial(run, **sample) for name, run in runs.items()}, range(-1, REPETITIONS))
    return {name: 1000 * statistics.median(values) for name, values in seconds.items()}
