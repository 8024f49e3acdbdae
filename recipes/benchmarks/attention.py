"""Linear attention against torch's scaled_dot_product_attention: time, memory, decoding, Spectraformer's pairs.

    python recipes/benchmarks/attention.py
    python recipes/benchmarks/attention.py --sections forward causal training --device cuda --dtype bfloat16 --flash
    python recipes/benchmarks/attention.py --sections pairs --device cuda --batch-size 32

12 heads of 64, one sequence, positive features over an orthogonal matrix (posrf, orf) with 64 rows; the two attentions
are timed in turn. `forward` and `causal` time inference, `training` forward and backward, each next to the bare matrix
products of linear attention with nothing between them: `products_share` is their share of its time (above 1 where
blocks that stay in the cache are faster). `memory` measures the growth of a fresh process, `decoding` times one token
of a two-layer Llama after prefixes of two lengths, `pairs` a training step of the Long Range Arena's Text model (length
4000, batch 2) for the 18 pairs of Spectraformer's Table 2 and for softmax, fused and with its weights formed (as
dropout on them requires on a CPU). `maps` has time and memory of forward and backward by length, for both kinds of
softmax and for positive features over the learned matrices of Learning the Transformer Kernel. Other sections of an
earlier run are kept in the file. On a GPU memory is the peak of allocated tensors, also of the first three; `--flash`
restricts softmax to torch's flash attention, which on a GPU needs half precision. About half an hour on two idle cores.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from _bench import add_device, allocated_growth, alternate, bar, parser, peak_growth, ratio, report, synchronize
from data import TASKS
from papers.lib.lra_model import build_classifier
from papers.lib.lra_settings import AttentionMethod, LongRangeModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from snnk_peft import AttentionPart, SNNKConfig, build_feature_map, get_snnk_model
from snnk_peft.attention import RecurrentCache
from snnk_peft.feature_map import advance
from snnk_peft.functional.exponential_causal import TOKENS
from snnk_peft.layers.kernel_attention import KernelAttention

HEADS, DIM, FEATURES = 12, 64, 64
LENGTHS = (512, 1024, 2048, 4096, 8192)
MEMORY_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
PREFIXES = (512, 8192)
MAPS = ("orf", "gmm", "generative", "fastfood_learned")  # of section `maps`
MAPS_LENGTHS = (512, 1024, 2048, 4096, 8192)
LONGEST_FORMED = 4096  # 12 · 4096² weights take 0.8 GB, several times over
COMPONENTS = ("posrf", "oprf", "saderf")  # Spectraformer, Table 2
PROJECTIONS = ("orf", "sorf", "qmc", "sgq", "mm", "fastfood_learned")
PAIRS = [f"{component}-{projection}" for component, projection in itertools.product(COMPONENTS, PROJECTIONS)]
FORMED = "softmax, weights formed"
Run = Callable[[], object]
Rows = list[dict[str, Any]]


def tensors(length: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Draw queries, keys and values (1, HEADS, length, DIM)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, DIM, generator=generator).to(device, dtype) for _ in range(3)]


def linear() -> KernelAttention:
    """Create the attention to measure."""
    return KernelAttention([build_feature_map("posrf", "orf", DIM, FEATURES)], HEADS)


def candidates(
    length: int, causal: bool, gradient: bool, device: str, dtype: torch.dtype, flash: bool = False
) -> dict[str, Run]:
    """Return both attentions and the bare matrix products on the same tensors, as functions."""
    inputs, kernel = tensors(length, device, dtype), linear().to(device)
    rows = kernel.maps()[0].projection.materialize().mT.to(dtype, copy=True)
    functions = {
        "linear": lambda q, k, v: kernel(q, k, v, causal=causal),
        "softmax": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal),
        "products": lambda q, k, v: products(q, k, v, rows, causal),
    }

    def call(function: Callable[..., torch.Tensor]) -> object:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else contextlib.nullcontext():
            if not gradient:
                with torch.no_grad():
                    function(*inputs)
            else:
                leaves = [tensor.detach().requires_grad_() for tensor in inputs]
                function(*leaves).sum().backward()
        synchronize(device)
        return None

    return {name: partial(call, function) for name, function in functions.items()}


def products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, causal: bool) -> torch.Tensor:
    """Compute the matrix products of linear attention, (1, HEADS, length, DIM); if causal, with those within chunks."""
    phi, psi = q @ rows, k @ rows
    if not causal:
        return phi @ (psi.mT @ v)
    phi, psi, v = (tensor.unflatten(2, (-1, TOKENS)) for tensor in (phi, psi, v))
    return ((phi @ psi.mT) @ v + phi @ (psi.mT @ v)).flatten(2, 3)


def speed(section: str, repetitions: int, lengths: Sequence[int], device: str, dtype: torch.dtype, flash: bool) -> Rows:
    """Measure milliseconds, speed-up over softmax, and share of the bare products by length; on a GPU also memory."""
    rows = []
    for length in lengths:
        runs = candidates(length, section == "causal", section == "training", device, dtype, flash)
        peaks = {name: allocated_growth(runs[name], device) for name in ("linear", "softmax")}
        # Two pairs, not three in turn: the products leave the next candidate fresh memory and a cold cache.
        plain = {"products": runs.pop("products"), "linear": runs["linear"]}
        seconds, beside = alternate(runs, repetitions, warmup=1), alternate(plain, repetitions, warmup=1)
        timed = {**seconds, "products": beside["products"]}
        own = {name: 1e3 * statistics.median(values) for name, values in timed.items()}
        compared = {
            "speed_up": ratio(seconds["softmax"], seconds["linear"]),
            "products_share": ratio(beside["products"], beside["linear"]),
        }
        allocated = {f"{name}_MiB": peak / 2**20 for name, peak in peaks.items() if peak is not None}
        times = {f"{name}_ms": value for name, value in own.items()}
        rows.append({"section": section, "length": length, **times, **compared, **allocated})
    return rows


def prepare(length: int) -> Run:
    """Set up everything but the attention itself in a fresh process."""
    kernel, inputs = linear(), tensors(length)
    with torch.no_grad():
        kernel(*tensors(64))

    def run() -> object:
        with torch.no_grad():
            return kernel(*inputs)

    return run


def memory() -> tuple[Rows, float]:
    """Return peak growth by length, and the exponent of the best-fitting power law up to 32,768."""
    rows = []
    for length in MEMORY_LENGTHS:
        rows.append({"length": length, "linear_MiB": peak_growth(prepare, length) / 2**20})
    points = [(math.log(row["length"]), math.log(row["linear_MiB"])) for row in rows if row["length"] <= 32768]
    x, y = (statistics.mean(values) for values in zip(*points, strict=True))
    slope = sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)
    return rows, slope


def formed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute softmax attention with its weights formed, (1, HEADS, length, length)."""
    return (q @ k.mT * DIM**-0.5).softmax(-1) @ v


def attend_and_return(name: str, length: int) -> Run:
    """Return a function that runs forward and backward of one attention of section `maps`."""
    torch.manual_seed(0)
    kernel: Callable[..., torch.Tensor]
    if name.startswith("softmax"):
        kernel = scaled_dot_product_attention if name == "softmax" else formed
    else:
        kernel = KernelAttention([build_feature_map("posrf", name.removeprefix("posrf-"), DIM, FEATURES)], HEADS)
    inputs = tensors(length)

    def run() -> object:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        kernel(*leaves).sum().backward()
        return None

    return run


def maps(repetitions: int) -> Rows:
    """Measure milliseconds and peak growth of every attention by length, and both relative to fused softmax."""
    rows = []
    for length in bar(MAPS_LENGTHS, "maps"):
        names = ["softmax", *(f"posrf-{projection}" for projection in MAPS)]
        if length <= LONGEST_FORMED:
            names.append(FORMED)
        seconds = alternate({name: attend_and_return(name, length) for name in names}, repetitions, warmup=1)
        peaks = {name: peak_growth(attend_and_return, name, length) / 2**20 for name in names}
        rows += [
            {
                "attention": name,
                "length": length,
                "ms": 1e3 * statistics.median(seconds[name]),
                "time_of_softmax": ratio(seconds[name], seconds["softmax"]),
                "peak_MiB": peaks[name],
                "memory_of_softmax": peaks[name] / peaks["softmax"],
            }
            for name in names
        ]
    return rows


def tiny_llama(linear_attention: bool) -> Any:
    """Build two layers with the measured heads, random weights, and room for the longest prefix."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HEADS * DIM,
        intermediate_size=HEADS * DIM,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        max_position_embeddings=2 * max(PREFIXES),
    )
    model = LlamaForCausalLM(config).eval()
    part = AttentionPart(projection="orf", num_features=FEATURES)
    return get_snnk_model(model, SNNKConfig(attention=part, modules_to_save=[])).eval() if linear_attention else model


def decoding(repetitions: int) -> Rows:
    """Measure milliseconds per token after a short and a long prefix, and the bytes of the cache."""
    rows, tokens = [], 16
    for name in ("linear", "softmax"):
        model = tiny_llama(name == "linear")
        runs: dict[str, Run] = {}
        caches = {}
        for prefix in PREFIXES:
            cache = RecurrentCache(model) if name == "linear" else DynamicCache(config=model.config)
            prompt = torch.randint(256, (1, prefix), generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)

            def step(cache: Any = cache, model: Any = model) -> object:
                with torch.no_grad():
                    for _ in range(tokens):
                        model(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True)
                return None

            runs[str(prefix)], caches[prefix] = step, cache
        seconds = alternate(runs, 4 * repetitions, warmup=2)
        for prefix in PREFIXES:
            kept = caches[prefix]
            size = kept.nbytes if name == "linear" else sum(t.nbytes for x in kept.layers for t in (x.keys, x.values))
            ms = 1e3 * statistics.median(seconds[str(prefix)]) / tokens
            slower = ratio(seconds[str(prefix)], seconds[str(PREFIXES[0])])
            rows.append({"attention": name, "prefix": prefix, "ms_per_token": ms, "time_ratio": slower, "bytes": size})
    return rows


def training_step(attention: dict[str, Any] | str, device: str, documents: int) -> Run:
    """Build a training step of the Long Range Arena's Text model: forward, backward, AdamW.

    Args:
        attention: attention of LRA's settings, or FORMED: softmax whose weights are formed.
        device: device of the model.
        documents: number of documents in the batch, of 4000 bytes each.
    """
    torch.manual_seed(0)
    task = TASKS["lra_text"]
    # Without dropout on the weights, which linear attention lacks, softmax may use its fused kernel.
    sizes = LongRangeModel(attention_dropout=0.0)
    method = AttentionMethod("softmax" if attention == FORMED else attention)
    model = build_classifier(task, sizes, method, 4000, seed=0).train().to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, task.vocab_size, (documents, 1, 4000), generator=generator).to(device)
    mask, labels = torch.ones_like(ids), (torch.arange(documents) % 2).to(device)

    def run() -> object:
        with sdpa_kernel(SDPBackend.MATH) if attention == FORMED else contextlib.nullcontext():
            model(ids, mask, labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        advance(model)
        synchronize(device)
        return None

    return run


def pairs(repetitions: int, device: str, documents: int, chosen: Sequence[str], processes: int) -> Rows:
    """Measure seconds and peak memory of a training step for chosen pairs, and both relative to softmax.

    On a CPU, the peak differs by a few percent between processes: the median of `processes` is reported.
    """
    methods: dict[str, dict[str, Any] | str] = {"softmax": "softmax", FORMED: FORMED}
    for name in chosen:
        component, projection = name.split("-")
        features = 2 * 32 + 1 if projection == "sgq" else 128  # sgq always has 2d + 1 nodes
        methods[name] = {"component": component, "projection": projection, "num_features": features}
    runs = {name: training_step(method, device, documents) for name, method in methods.items()}
    seconds = alternate(runs, repetitions, warmup=1)

    def peak(name: str) -> float:
        grown: float | None = allocated_growth(runs[name], device)
        if grown is None:
            peaks_of = (peak_growth(training_step, methods[name], device, documents) for _ in range(processes))
            grown = statistics.median(peaks_of)
        return grown / 2**20

    peaks = {name: peak(name) for name in methods}
    return [
        {
            "pair": name,
            "seconds_per_step": statistics.median(seconds[name]),
            "time_of_softmax": ratio(seconds[name], seconds["softmax"]),
            "peak_MiB": peaks[name],
            "memory_of_softmax": peaks[name] / peaks["softmax"],
        }
        for name in methods
    ]


def main() -> None:
    """Run the benchmark and write its results."""
    sections = ("forward", "causal", "training", "memory", "decoding", "pairs", "maps")
    options = parser(__doc__ or "", "attention")
    options.add_argument("--sections", nargs="+", default=sections, choices=sections, help="what to measure")
    add_device(options, "of forward, causal, training and pairs")
    three = "of forward, causal and training"
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help=three)
    options.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help=f"{three}; multiples of 64")
    options.add_argument("--flash", action="store_true", help=f"{three}: softmax by torch's flash kernel alone")
    options.add_argument("--batch-size", type=int, default=2, help="documents per step of pairs (default 2)")
    options.add_argument("--pairs", nargs="+", default=PAIRS, choices=PAIRS, metavar="PAIR", help="(default all 18)")
    options.add_argument("--processes", type=int, default=5, help="memory measurements of pairs on a CPU")
    arguments = options.parse_args()
    if arguments.processes < 1:
        options.error(f"--processes was {arguments.processes}; expected 1 or more")
    figures: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    for section in arguments.sections:
        extra: dict[str, Any] = {}
        if section == "memory":
            rows, extra["memory_exponent"] = memory()
        elif section == "pairs":
            sizes = (arguments.batch_size, arguments.pairs, arguments.processes)
            rows = pairs(arguments.repetitions, arguments.device, *sizes)
            extra = {"pairs_on": {"device": arguments.device, "batch_size": arguments.batch_size}}
        elif section in (sized := {"decoding": decoding, "maps": maps}):
            rows = sized[section](arguments.repetitions)
        else:
            dtype = getattr(torch, arguments.dtype)
            rows = speed(section, arguments.repetitions, arguments.lengths, arguments.device, dtype, arguments.flash)
            extra = {f"{section}_on": {"device": arguments.device, "dtype": arguments.dtype, "flash": arguments.flash}}
        for stale in ("rows", "environment"):
            figures.pop(stale, None)
        figures |= {section: rows, **extra}
        report(figures, rows, arguments.output, section)
    if "memory_exponent" in figures:
        print(f"peak memory grows with length to the power {figures['memory_exponent']:.3f}")


if __name__ == "__main__":
    main()
