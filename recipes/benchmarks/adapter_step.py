"""Training step of SNNK adapters against PEFT's LoRA on MiniLM: time and peak memory, side by side.

    python recipes/benchmarks/adapter_step.py
    python recipes/benchmarks/adapter_step.py --device cuda --dtype bfloat16
    python recipes/benchmarks/adapter_step.py --methods snnk rows upper parallel lora lora_norms dora
    python recipes/benchmarks/adapter_step.py --model llama --checkpointing --methods snnk rows upper lora lora_norms

One step = forward, backward and AdamW on a batch of 32 x 128 tokens. SNNK: 16 ReLU features, Houlsby placement; "rows":
7 learned GELU rows next to query and value, and all norms; "upper": 8 in all layers but the first, which the backward
pass does not enter, and these layers' norms; "cut": 12 in the upper half of the layers, with their norms, on stored
outputs of the lower half (`method.cut` of recipes/finetune.py); "parallel": 16 next to the FFN (not in a Llama, whose
FFN is gated). LoRA: r = 8 on query and value; with all norms; as DoRA. All train the classifier, without dropout, as
in the settings files. `--model llama` has 4 layers x 512, `llama12` has 12 layers x 768, and `bert_base` has
BERT-base's sizes; weights are random, which changes neither time nor memory. `--checkpointing` recomputes activations
in the backward pass.
Times are medians over alternating repetitions in one process. "operations" counts those of torch in a forward and
backward pass, without views; "host" is the CPU time of a step on one text of 8 tokens, which is little more than
dispatching them (medians over ten times the repetitions). Peak memory is the growth of a fresh process's resident
memory over three steps, the median of five processes in turn (one is accurate to 5%: what the allocator keeps varies
from run to run). On a GPU it is the peak of the allocated tensors over three steps, in one process, beyond weights and
optimizer states; `--dtype bfloat16` trains under autocast.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _bench import add_device, allocated_growth, alternate, parser, peak_growth, ratio, report, synchronize
from lib.trunk import STATES, Trunk
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    logging,
)

from snnk_cli.baselines import norm_names
from snnk_cli.models import resolve_model
from snnk_cli.timing import operations
from snnk_peft import AdapterPart, NormsPart, SNNKConfig, get_snnk_model

TARGETS = ["query", "value"]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {
    "vocab_size": 20_000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1376,
    "pad_token_id": 0,
}
LLAMAS = {
    "llama": LLAMA,
    "llama12": {
        **LLAMA, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048
    },
}  # fmt: skip

TARGETS_OF = {"minilm": TARGETS, "bert_base": TARGETS, **{name: ["q_proj", "v_proj"] for name in LLAMAS}}


# Learned rows on inputs without normalisation; 4 times the readout, which features with 7 rows divide by √7.
LEARNED = {"component": "gelu", "projection": "free", "normalize": False, "scaling": 10.6}
# All layers but the first, and the upper half, of a model of any depth.
UPPER, HALF = "upper", "half"
TINY = 1, 8  # texts and tokens of a step that costs only the dispatching of its operations
# The same number of trained parameters as LoRA of rank 8 on queries and values.
ADAPTERS: dict[str, dict[str, Any]] = {
    "snnk": {"num_features": 16},
    "snnk_pfeiffer": {"num_features": 32, "placement": "pfeiffer"},
    "rows": {"num_features": 7, "placement": "query_value", **LEARNED},
    "upper": {"num_features": 8, "placement": "query_value", **LEARNED, "layers": UPPER},
    "cut": {"num_features": 12, "placement": "query_value", **LEARNED, "layers": HALF},
    "parallel": {"num_features": 16, "placement": "parallel", **LEARNED},
}
WITH_NORMS = ("rows", "upper", "cut", "lora_norms")
LORAS: dict[str, dict[str, Any]] = {"lora": {}, "lora_norms": {}, "dora": {"use_dora": True}}
METHODS = (*ADAPTERS, *LORAS)


def adapted(base: Any, method: str, targets: Sequence[str], **config: Any) -> torch.nn.Module:
    """Return `base` with one of `ADAPTERS`, or with LoRA of rank 8 on the modules of these names."""
    if method in ADAPTERS:
        depth, options = base.config.num_hidden_layers, dict(ADAPTERS[method])
        if (layers := options.get("layers")) is not None:
            options["layers"] = f"top-{depth - 1 if layers == UPPER else depth - depth // 2}"
        parts = [NormsPart(layers=options.get("layers", "all"))] if method in WITH_NORMS else []
        return get_snnk_model(base, SNNKConfig(adapter=AdapterPart(**options), parts=parts, **config))
    if method in WITH_NORMS:
        config["modules_to_save"] = [*(config.get("modules_to_save") or ()), *norm_names(base)]
    options = LORAS.get(method, {})
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=list(targets), **options, **config))


def step_of(model: torch.nn.Module, batch: Mapping[str, torch.Tensor], device: str, dtype: str) -> Callable[[], None]:
    """Return a function that runs one training step, with attributes.

    `trainable` is the number of trained parameters; `gradients` runs only the forward and backward pass.
    """
    model.to(device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    inputs = {name: value.to(device) for name, value in batch.items()}

    def gradients() -> None:
        with torch.autocast(device.split(":")[0], getattr(torch, dtype), enabled=dtype != "float32"):
            loss = model(**inputs).loss
        loss.backward()

    def step() -> None:
        gradients()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)

    step.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)  # type: ignore[attr-defined]
    step.gradients = gradients  # type: ignore[attr-defined]
    return step


def prepare(
    method: str,
    device: str,
    dtype: str,
    batch_size: int,
    length: int,
    name: str = "minilm",
    checkpointing: bool = False,
) -> Callable[[], None]:
    """Build a training step on MiniLM or on a model with random weights."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    if name in LLAMAS:
        base: Any = LlamaForSequenceClassification(LlamaConfig(**LLAMAS[name], num_labels=2))
    elif name == "bert_base":
        base = BertForSequenceClassification(BertConfig(num_labels=2, **NO_DROPOUT))
    else:
        base = AutoModelForSequenceClassification.from_pretrained(resolve_model(name), num_labels=2, **NO_DROPOUT)
    ids = torch.randint(1000, 20000, (batch_size, length))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (batch_size,))}
    model = adapted(base, method, TARGETS_OF[name], task_type="SEQ_CLS")
    if method == "cut":
        trunk = Trunk(model.to(device), base.config.num_hidden_layers // 2)
        batch[STATES] = trunk.outputs({"input_ids": ids.to(device)})[0].bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return step_of(model, batch, device, dtype)


def three_steps(preparing: Callable[..., Callable[[], None]], *arguments: Any) -> Callable[[], object]:
    """Run three steps of `preparing` at once, for the memory measurement."""
    step = preparing(*arguments)
    return lambda: [step() for _ in range(3)]


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of device, dtype and sizes."""
    add_device(options, "cpu, cuda or cuda:N")
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of forward passes")
    options.add_argument("--batch-size", type=int, default=32, help="examples per step")
    options.add_argument("--processes", type=int, default=5, help="memory measurements on a CPU, 0 for none")


def compare(
    preparing: Callable[..., Callable[[], None]],
    arguments: argparse.Namespace,
    *given: Any,
    methods: Sequence[str] = ("snnk", "lora"),
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return figures and table rows: time and peak memory of all methods, run in turn.

    Args:
        preparing: (method, device, dtype, *given) -> a step.
        arguments: command-line arguments, see `add_options`.
        *given: further arguments of `preparing`.
        methods: "snnk" and "lora", which the ratios compare, and others.
    """
    device = arguments.device
    known = (device, arguments.dtype, *given)
    made: dict[str, Any] = {method: preparing(method, *known) for method in methods}
    peaks: dict[str, list[int]] = {method: [] for method in methods}
    for _ in range(arguments.processes if device == "cpu" else 1):
        for method, found in peaks.items():
            if device == "cpu":
                found.append(peak_growth(three_steps, preparing, method, *known))
            else:
                made[method]()  # the first step creates the optimizer states
                grown = allocated_growth(lambda step=made[method]: [step() for _ in range(3)], device)
                assert grown is not None
                found.append(grown)
    memory = {method: statistics.median(found) for method, found in peaks.items() if found}
    seconds = alternate(made, arguments.repetitions)
    counts = {method: sum(operations(made[method].gradients).values()) for method in methods}
    rows = [
        {
            "method": method,
            "trainable parameters": made[method].trainable,
            "seconds per step": statistics.median(seconds[method]),
            "peak memory MB": memory[method] / 2**20 if memory else None,
            "time / LoRA": ratio(seconds[method], seconds["lora"]),
            "memory / LoRA": memory[method] / memory["lora"] if memory else None,
            "operations": counts[method],
        }
        for method in methods
    ]
    figures = {
        "step_time_ratio": ratio(seconds["snnk"], seconds["lora"]),
        "peak_memory_ratio": memory["snnk"] / memory["lora"] if memory else None,
        "seconds": seconds,
        "peak_bytes": peaks,
        "device": device,
        "dtype": arguments.dtype,
    }
    return figures, rows


def say_ratios(figures: Mapping[str, Any], what: str = "") -> None:
    """Print the ratios of time and memory."""
    ratios = {"time": figures["step_time_ratio"], "peak memory": figures["peak_memory_ratio"]}
    text = ", ".join(f"{name} {value:.3f}" for name, value in ratios.items() if value is not None)
    print(f"SNNK / LoRA{what}: {text}")


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "adapter_step")
    add_options(options)
    options.add_argument("--length", type=int, default=128, help="tokens per text")
    options.add_argument(
        "--methods", nargs="+", default=["snnk", "lora"], choices=METHODS, help="including snnk and lora (the default)"
    )
    options.add_argument("--model", default="minilm", choices=TARGETS_OF, help="model to train")
    options.add_argument("--checkpointing", action="store_true", help="use gradient checkpointing")
    arguments = options.parse_args()
    size = arguments.batch_size, arguments.length
    given = arguments.model, arguments.checkpointing
    figures, rows = compare(prepare, arguments, *size, *given, methods=arguments.methods)
    tiny = {each: prepare(each, arguments.device, arguments.dtype, *TINY, *given) for each in arguments.methods}
    host = alternate(tiny, 10 * arguments.repetitions, clock=time.process_time)
    for row in rows:
        row["host / LoRA"] = ratio(host[row["method"]], host["lora"])
    figures |= {"host_time_ratio": ratio(host["snnk"], host["lora"]), "host_seconds": host}
    figures |= {"model": arguments.model, "checkpointing": arguments.checkpointing}
    how = ", gradient checkpointing" if arguments.checkpointing else ""
    title = f"Training step, {arguments.model}, {size[0]} x {size[1]} tokens, {arguments.device}{how}"
    report(figures, rows, arguments.output, title)
    say_ratios(figures)


if __name__ == "__main__":
    main()
