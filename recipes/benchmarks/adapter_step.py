"""Training step of SNNK adapters against PEFT's LoRA on MiniLM: time and peak memory, side by side.

    python recipes/benchmarks/adapter_step.py

One step = forward, backward and AdamW on a batch of 32 x 128 tokens. SNNK: 16 ReLU features, Houlsby placement. LoRA:
r = 8 on query and value. Both train the classifier. Times are medians over alternating repetitions in one process;
peak memory is the growth of a fresh process's resident memory over three steps, the median of five processes in turn
(one tells it to 5%: what the allocator keeps varies from run to run).
"""

from __future__ import annotations

import statistics

import torch
from _bench import alternate, parser, peak_growth, ratio, report
from _lib.models import resolve_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, logging

from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model

PROCESSES = 5
CONFIGS = {
    "snnk": lambda: SNNKConfig(adapter=AdapterPart(num_features=16), task_type="SEQ_CLS"),
    "lora": lambda: LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], task_type="SEQ_CLS"),
}


def prepare(method: str, batch_size: int = 32, length: int = 128):
    """A function that makes one training step."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(resolve_model("minilm"), num_labels=2)
    config = CONFIGS[method]()
    model = (get_snnk_model if method == "snnk" else get_peft_model)(base, config)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(1000, 20000, (batch_size, length))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.randint(0, 2, (batch_size,))}

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step.trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return step


def three_steps(method: str):
    """As `prepare`, three steps at once; for the memory measurement."""
    step = prepare(method)
    return lambda: [step() for _ in range(3)]


def main() -> None:
    """Measure and write."""
    arguments = parser(__doc__, "adapter_step").parse_args()
    peaks: dict[str, list[int]] = {method: [] for method in CONFIGS}
    for _ in range(PROCESSES):
        for method, found in peaks.items():
            found.append(peak_growth(three_steps, method))
    memory = {method: statistics.median(found) for method, found in peaks.items()}
    steps = {method: prepare(method) for method in CONFIGS}
    seconds = alternate(steps, arguments.repetitions)
    rows = [
        {
            "method": method,
            "trainable parameters": steps[method].trainable,
            "seconds per step": statistics.median(seconds[method]),
            "peak memory MB": memory[method] / 2**20,
        }
        for method in CONFIGS
    ]
    figures = {
        "step_time_ratio": ratio(seconds["snnk"], seconds["lora"]),
        "peak_memory_ratio": memory["snnk"] / memory["lora"],
        "seconds": seconds,
        "peak_bytes": peaks,
    }
    report(figures, rows, arguments.output, "Training step, MiniLM, 32 x 128 tokens")
    print(f"SNNK / LoRA: time {figures['step_time_ratio']:.3f}, peak memory {figures['peak_memory_ratio']:.3f}")


if __name__ == "__main__":
    main()
