"""Training step of SNNK adapters against PEFT's LoRA on Vision Transformers: time and peak memory, side by side.

    python recipes/benchmarks/vision_step.py
    python recipes/benchmarks/vision_step.py --device cuda --dtype bfloat16 --batch-size 64

ViT-S/16 at 224 x 224 pixels (12 layers, width 384) and the small ViT of recipes/models/vit_cifar at 32 x 32, random
weights: time and memory do not depend on them. As in `adapter_step.py`: 16 ReLU features in two places of a layer
(Houlsby), or 32 in one (Pfeiffer), against rank 8 on query and value; forward, backward and AdamW; medians over
alternating repetitions, memory in separate processes. "least" trains the classifier and the biases of the first
LayerNorm: the cost of any step that has to propagate gradients through the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _bench import ROOT, parser, report
from adapter_step import adapted, add_options, compare, say_ratios, step_of
from torch import nn
from transformers import ViTConfig, ViTForImageClassification, logging

METHODS = ("snnk", "snnk_pfeiffer", "lora", "least")


def config_of(name: str) -> ViTConfig:
    """Return the config of "vit_small" (ViT-S/16) or "vit_cifar"."""
    if name == "vit_cifar":
        return ViTConfig.from_pretrained(ROOT / "recipes/models/vit_cifar", num_labels=10)
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
    return ViTConfig(image_size=224, patch_size=16, num_labels=10, **sizes)


def prepare(method: str, device: str, dtype: str, name: str, batch_size: int) -> Callable[[], None]:
    """Build a training step on a batch of random images."""
    logging.set_verbosity_error()
    torch.manual_seed(0)
    config = config_of(name)
    pixels = torch.randn(batch_size, 3, config.image_size, config.image_size)
    batch = {"pixel_values": pixels, "labels": torch.randint(0, 10, (batch_size,))}
    model: nn.Module = ViTForImageClassification(config)
    if method == "least":
        norm = next(module for module in model.modules() if isinstance(module, nn.LayerNorm))
        trained = {norm.bias, *model.classifier.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in trained)
    else:
        model = adapted(model, method, ["q_proj", "v_proj"], modules_to_save=["classifier"])
    return step_of(model, batch, device, dtype)


def main() -> None:
    """Run the benchmark and write its results."""
    options = parser(__doc__ or "", "vision_step")
    add_options(options)
    arguments = options.parse_args()
    every: dict[str, Any] = {}
    rows = []
    for name, size in (("vit_small", max(1, arguments.batch_size // 4)), ("vit_cifar", arguments.batch_size)):
        every[name], found = compare(prepare, arguments, name, size, methods=METHODS)
        rows += [{"model": name, "batch": size, **row} for row in found]
    report(every, rows, arguments.output, f"Training step of Vision Transformers, {arguments.device}")
    for name, figures in every.items():
        say_ratios(figures, f", {name}")


if __name__ == "__main__":
    main()
