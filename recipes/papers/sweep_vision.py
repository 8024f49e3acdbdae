"""Adapt an image classifier by every method, one run of recipes/finetune.py after another.

    python recipes/papers/sweep_vision.py model.name_or_path=path/to/vit
    python recipes/papers/sweep_vision.py model.name_or_path=path/to/vit --methods snnk_relu8 lora_r4 --seeds 0 1 2
    python recipes/papers/sweep_vision.py model.name_or_path=path/to/vit data.dir=path/to/cifar10 --tasks cifar10

The model is any image classifier of transformers with its image processor: the folder `model` of a run of finetune.py,
or an encoder that becomes a classifier by

    AutoModelForImageClassification.from_pretrained(encoder, ignore_mismatched_sizes=True).save_pretrained(folder)
    size = {"height": 28, "width": 28}
    ViTImageProcessorPil(size=size, image_mean=[0.1307], image_std=[0.3081]).save_pretrained(folder)

with the size, mean and deviation that it was trained with (here MNIST's). Each run goes to OUT/<task>/<method>/seed<k>.
Finished runs (metrics.json) are skipped, interrupted ones resumed: start it again to continue. table_vision.py makes a
page of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib import sweep

METHODS = {
    "snnk_relu8": ["method.adapter.num_features=8"],
    "pooler_cos32": ["method.adapter=null", "method.pooler={component: cos, num_features: 32}"],
    # The feed-forward blocks replaced, fitted to the originals, and trained on.
    "ffn_256": ["method.adapter=null", "method.ffn={num_features: 256}", "method.calibrate=true"],
    "lora_r4": ["method.name=lora", "method.lora.r=4", "method.lora.alpha=8"],
    "linear_probe": ["method.name=linear_probe"],
    "full": ["method.name=full"],
    # The same network with random weights: what pretraining is worth.
    "scratch": ["method.name=full", "model.pretrained=false"],
}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 130 or 143 stopped, 3 both."""
    return sweep.main(__doc__, "finetune.py", "{task}/adapter.yaml", "vision", ("digits",), METHODS, argv, ".")


if __name__ == "__main__":
    sys.exit(main())
