"""Time saved by fusing the matrices that read the same input: queries, keys and values; gate and expansion.

    python recipes/benchmarks/fused_products.py

A bundle keeps these matrices separate, as the transformers classes do. Here both layouts are timed in turn on the
tokens of a batch, and the time saved by the fused product in all layers is compared with the whole model's time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _bench import alternate, parser, ratio, report
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel


class Case(NamedTuple):
    """A model, and the matrices of one layer that read the same input.

    Args:
        model: builds the model.
        layers: number of such groups in the model.
        width: dimension of the input.
        out: rows of each matrix.
        bias: whether they have a bias.
    """

    model: Callable[[], nn.Module]
    layers: int
    width: int
    out: tuple[int, ...]
    bias: bool


def bert(width: int, layers: int, heads: int) -> BertModel:
    """Build a random BERT of this size."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return BertModel(BertConfig(**sizes, intermediate_size=4 * width, vocab_size=1000))


def llama() -> LlamaModel:
    """Build a random Llama of SmolLM2-135M's size, with a third of its layers."""
    sizes: dict[str, Any] = {"hidden_size": 576, "num_hidden_layers": 10, "intermediate_size": 1536}
    return LlamaModel(LlamaConfig(**sizes, num_attention_heads=9, num_key_value_heads=3, vocab_size=1000))


CASES = {
    "BERT, 6 layers of 384: query, key, value": Case(lambda: bert(384, 6, 12), 6, 384, (384, 384, 384), True),
    "BERT, 4 layers of 768: query, key, value": Case(lambda: bert(768, 4, 12), 4, 768, (768, 768, 768), True),
    "Llama, 10 layers of 576: query, key, value": Case(llama, 10, 576, (576, 192, 192), False),
    "Llama, 10 layers of 576: gate, up": Case(llama, 10, 576, (1536, 1536), False),
}


@torch.inference_mode()
def measure(name: str, case: Case, rows: int, length: int, repetitions: int) -> dict[str, Any]:
    """Measure a row of the table."""
    torch.manual_seed(0)
    model = case.model().eval()
    apart = [nn.Linear(case.width, out, bias=case.bias) for out in case.out]
    one = nn.Linear(case.width, sum(case.out), bias=case.bias)
    x = torch.randn(rows, length, case.width)
    ids = torch.randint(1000, (rows, length))

    def separately() -> None:
        for linear in apart:
            linear(x)

    def together() -> None:
        one(x).split(case.out, -1)

    with torch.inference_mode():
        seconds = alternate({"model": lambda: model(input_ids=ids), "apart": separately, "one": together}, repetitions)
    saved = [
        (a - b) * case.layers / m for a, b, m in zip(*(seconds[k] for k in ("apart", "one", "model")), strict=True)
    ]
    return {
        "matrices": name,
        "tokens": f"{rows}x{length}",
        "ms apart": 1000 * statistics.median(seconds["apart"]),
        "ms as one": 1000 * statistics.median(seconds["one"]),
        "speed-up of the products": ratio(seconds["apart"], seconds["one"]),
        "share of the model's time saved": statistics.median(saved),
    }


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "fused_products")
    options.add_argument("--shapes", nargs="+", default=["32x64", "4x512", "1x1"], help="(default 32x64 4x512 1x1)")
    arguments = options.parse_args()
    rows = [
        measure(name, case, *map(int, shape.split("x")), arguments.repetitions)
        for name, case in CASES.items()
        for shape in arguments.shapes
    ]
    report({}, rows, arguments.output, "One product instead of several")


if __name__ == "__main__":
    main()
