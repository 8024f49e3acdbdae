"""Int8 Linears by ONNX Runtime's dynamic quantisation, with their effect on outputs and time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import exporters

from snnk_peft.errors import NumericalError
from snnk_peft.exporting.program import Inputs, quiet
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.solvers.reduce import relative_error

Run = Callable[..., Mapping[str, torch.Tensor]]

REPETITIONS = 9


def quantized(program: Any, sample: Inputs) -> tuple[Any, int]:
    """The graph with the weights of its Linears in int8, one scale per output; inputs are rounded as they come.

    Matrices of features in place of an FFN or pooler count as Linears. All else stays in floating point: embeddings,
    norms, products of two activations, and the maps of linear attention, after which exponentials stand. Weights take
    seven of the eight bits: CPUs with only AVX2 add products of eight bits in sixteen, which may overflow, and nobody
    knows where the file will run.

    Returns:
        The new graph and the number of its int8 products.
    """
    products = {node.name: node for node in program.graph if node.op_type in ("MatMul", "Gemm")}
    linears = {name for name, node in products.items() if _is_linear(node)}
    settings = exporters.OnnxRuntimeDynamicConfig(
        op_types_to_quantize=["MatMul", "Gemm"],
        nodes_to_exclude=sorted(products.keys() - linears),
        per_channel=True,
        reduce_range=True,
    )
    with quiet():
        quantizer = exporters.OnnxRuntimeQuantizer(settings)
        return quantizer.quantize(program, sample, exporters.ExportFormat("onnx")), len(linears)


def _is_linear(node: Any) -> bool:
    """Return True if a product is one with a weight matrix and not part of linear attention."""
    weight = None if node.inputs[1] is None else node.inputs[1].const_value
    inside = node.metadata_props.get("pkg.torch.onnx.class_hierarchy", "")
    return weight is not None and len(weight.shape) == 2 and KernelAttention.__name__ not in inside


def compared(run: Run, other: Run, batches: Iterable[Inputs]) -> tuple[int, float | None, float]:
    """Compare the outputs of two programs.

    Returns:
        Examples, the share of equal labels (None where the outputs choose none), and the relative error (rms).

    Raises:
        NumericalError: the quantised one answers NaN or infinity.
    """
    examples = equal = chosen = 0
    difference = size = 0.0
    for batch in batches:
        expected, given = run(**batch), other(**batch)
        name = "logits" if "logits" in expected else next(iter(expected))
        a, b = expected[name].double(), given[name].double()
        mask = batch.get("attention_mask")
        if mask is not None and a.dim() == 3 and mask.shape == a.shape[:2]:  # padding answers nothing
            a, b = a[mask.bool()], b[mask.bool()]
        if not bool(b.isfinite().all()):
            raise NumericalError(
                f"{name} of the graph with int8 Linears is not finite, that in floating point is: some weights or "
                "inputs of a Linear are too large for eight bits. Export without int8=True"
            )
        examples += len(next(iter(batch.values())))
        difference += float((a - b).square().sum())
        size += float(a.square().sum())
        if name == "logits" and a.shape[-1] > 1:
            same = a.argmax(-1) == b.argmax(-1)
            equal, chosen = equal + int(same.sum()), chosen + same.numel()
    return examples, equal / chosen if chosen else None, relative_error(difference, size, size) ** 0.5


def milliseconds(runs: Mapping[str, Run], sample: Inputs) -> dict[str, float]:
    """Median time of a call of each, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(-1, REPETITIONS):
        for name, run in runs.items():
            start = time.perf_counter()
            run(**sample)
            if repetition >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: 1000 * statistics.median(values) for name, values in seconds.items()}
