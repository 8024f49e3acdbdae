"""Training step of SNNK adapters against PEFT's LoRA on MiniLM: time and peak memory, side by side.

    python recipes/benchmarks/adapter_step.py
    python recipes/benchmarks/adapter_step.py --device cuda --dtype bfloat16

One step = forward, backward and AdamW on a batch of 32 x 128 tokens. SNNK: 16 ReLU features, Houlsby placement. LoRA:
r = 8 on query and value. Both train the classifier. Times are medians over alternating repetitions in one process;
peak memory is the growth of a fresh process's resident memory over three steps, the median of five processes in turn
(one tells it to 5%: what the allocator keeps varies from run to run). On a GPU it is the peak of the allocated tensors
over three steps, in one process, beyond weights and optimizer states; `--dtype bfloat16` trains under autocast.
"""

from __future__ import annotations

import statistics

import torch
from _bench import add_device, allocated_growth, alternate, parser, peak_growth, ratio, report, synchronize
from _lib.models import resolve_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, logging

from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model

CONFIGS = {
    "snnk": lambda: SNNKConfig(adapter=AdapterPart(num_features=16), task_type="SEQ_CLS"),
    "lora": lambda: LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], task_type="SEQ_CLS"),
}


def prepare(method: str, batch_size: int, length: int, device: str = "cpu", dtype: str = "float32"):
    """A function that makes one training step."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(resolve_model("minilm"), num_labels=2)
    config = CONFIGS[method]()
    model = (get_snnk_model if method == "snnk" else get_peft_model)(base, config)
    model.to(device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(1000, 20000, (batch_size, length))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (batch_size,))}
    batch = {name: value.to(device) for name, value in batch.items()}

    def step() -> None:
        with torch.autocast(device.split(":")[0], getattr(torch, dtype), enabled=dtype != "float32"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)

    step.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return step


def three_steps(*arguments):
    """As `prepare`, three steps at once; for the memory measurement."""
    step = prepare(*arguments)
    return lambda: [step() for _ in range(3)]


def main() -> None:
    """Measure and write."""
    options = parser(__doc__, "adapter_step")
    add_device(options, "cpu, cuda or cuda:N")
    options.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the forward pass")
    options.add_argument("--batch-size", type=int, default=32, help="texts per step")
    options.add_argument("--length", type=int, default=128, help="tokens per text")
    options.add_argument("--processes", type=int, default=5, help="measurements of memory on a processor, 0 for none")
    arguments = options.parse_args()
    device, size = arguments.device, (arguments.batch_size, arguments.length)
    made = {method: prepare(method, *size, device, arguments.dtype) for method in CONFIGS}
    peaks: dict[str, list[int]] = {method: [] for method in CONFIGS}
    for _ in range(arguments.processes if device == "cpu" else 1):
        for method, found in peaks.items():
            if device == "cpu":
                found.append(peak_growth(three_steps, method, *size, device, arguments.dtype))
            else:
                made[method]()  # the states of the optimizer are made in the first step
                found.append(allocated_growth(lambda step=made[method]: [step() for _ in range(3)], device))
    memory = {method: statistics.median(found) for method, found in peaks.items() if found}
    seconds = alternate(made, arguments.repetitions)
    rows = [
        {
            "method": method,
            "trainable parameters": made[method].trainable,
            "seconds per step": statistics.median(seconds[method]),
            "peak memory MB": memory[method] / 2**20 if memory else None,
        }
        for method in CONFIGS
    ]
    figures = {
        "step_time_ratio": ratio(seconds["snnk"], seconds["lora"]),
        "peak_memory_ratio": memory["snnk"] / memory["lora"] if memory else None,
        "seconds": seconds,
        "peak_bytes": peaks,
        "device": device,
        "dtype": arguments.dtype,
    }
    report(figures, rows, arguments.output, f"Training step, MiniLM, {size[0]} x {size[1]} tokens, {device}")
    ratios = {"time": figures["step_time_ratio"], "peak memory": figures["peak_memory_ratio"]}
    print("SNNK / LoRA:", ", ".join(f"{name} {value:.3f}" for name, value in ratios.items() if value is not None))


if __name__ == "__main__":
    main()
