"""Run recipes/finetune.py over tasks, methods and seeds, one after another; continue a sweep by starting it again.

    python recipes/papers/sweep_glue.py data.dir=path/to/glue
    python recipes/papers/sweep_glue.py \\
        data.dir=path/to/glue --tasks rte mrpc --methods snnk_relu16 lora_r8 --seeds 0 1 2

Each run goes to OUT/<task>/<method>/seed<k>. Finished runs (metrics.json) are skipped, interrupted ones resumed. The
last line of each run tells how long the rest will take. Settings given as section.key=value apply to every run.
Learning rates are those that papers/tune_glue.py found; `--stored model_cards/glue.jsonl` continues the table there.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers.lib import sweep

TASKS = ("rte", "mrpc", "stsb", "cola", "sst2")
# The epoch is chosen on held-back training rows; what is scored once is the official dev set.
# The settings files describe our default: a method here starts without its parts.
RECIPE = [
    *("train.choose_share=0.1", "output.save_model=false"),
    *("method.parts=null", "method.calibrate_adapters=false", "method.fit_head=false"),
]
# Rows of a Linear's size on inputs as they are; a readout of 4 gelu(W x): features of m rows are divided by sqrt(m).
LEARNED = "component: gelu, projection: free, normalize: false"
METHODS = {
    # In LoRA's place, with as many numbers, and with the normalisation layers.
    "rows7_query_value_norms": [
        f"method.adapter={{{LEARNED}, num_features: 7, scaling: 10.6, placement: query_value}}",
        "method.parts=[{part: norms}]",
    ],
    # The same with rows from one labelled pass.
    "rows7_informed_norms": [
        f"method.adapter={{{LEARNED}, num_features: 7, scaling: 10.6, placement: query_value}}",
        "method.parts=[{part: norms}]",
        *("method.calibrate_adapters=true", "method.calibrate_samples=512"),
    ],
    # An adapter of less than 300 kB for MiniLM.
    "rows6_informed_norms": [
        f"method.adapter={{{LEARNED}, num_features: 6, scaling: 9.8, placement: query_value}}",
        "method.parts=[{part: norms}]",
        *("method.calibrate_adapters=true", "method.calibrate_samples=512"),
    ],
    # The same behind a head that was fitted in closed form to the same examples.
    "rows6_fitted_head": [
        f"method.adapter={{{LEARNED}, num_features: 6, scaling: 9.8, placement: query_value}}",
        "method.parts=[{part: norms}]",
        *("method.calibrate_adapters=true", "method.calibrate_samples=512", "method.fit_head=true"),
    ],
    # As many numbers in all layers but the first: the backward pass need not enter that one.
    "rows8_upper_norms": [
        f"method.adapter={{{LEARNED}, num_features: 8, scaling: 11.3, placement: query_value}}",
        "method.adapter.layers=[1, 2, 3, 4, 5]",
        'method.parts=[{part: norms, targets: "*.layer.[1-5].*"}]',
    ],
    "rows8_upper_informed_norms": [
        f"method.adapter={{{LEARNED}, num_features: 8, scaling: 11.3, placement: query_value}}",
        "method.adapter.layers=[1, 2, 3, 4, 5]",
        'method.parts=[{part: norms, targets: "*.layer.[1-5].*"}]',
        *("method.calibrate_adapters=true", "method.calibrate_samples=512"),
    ],
    "rows8_upper_fitted_head": [
        f"method.adapter={{{LEARNED}, num_features: 8, scaling: 11.3, placement: query_value}}",
        "method.adapter.layers=[1, 2, 3, 4, 5]",
        'method.parts=[{part: norms, targets: "*.layer.[1-5].*"}]',
        *("method.calibrate_adapters=true", "method.calibrate_samples=512", "method.fit_head=true"),
    ],
    "rows16_parallel": [f"method.adapter={{{LEARNED}, num_features: 16, scaling: 16, placement: parallel}}"],
    # The paper's: fixed random features behind attention and FFN.
    "snnk_relu16": ["method.adapter={component: relu, num_features: 16}"],
    "snnk_informed16": [
        "method.adapter={component: relu, projection: informed, num_features: 16}",
        *("method.calibrate_adapters=true", "method.calibrate_samples=512"),
    ],
    "lora_r8": ["method.name=lora", "method.lora.r=8", "method.lora.alpha=16"],
    "lora_r8_fitted_head": [
        *("method.name=lora", "method.lora.r=8", "method.lora.alpha=16"),
        *("method.calibrate_samples=512", "method.fit_head=true"),
    ],
    "lora_r8_norms": ["method.name=lora", "method.lora.r=8", "method.lora.alpha=16", "method.lora.norms=true"],
    "dora_r8": ["method.name=lora", "method.lora.r=8", "method.lora.alpha=16", "method.lora.dora=true"],
    "ia3": ["method.name=ia3"],
    "vera_r256": ["method.name=vera", "method.lora.r=256"],
    # Blocks of a size with which it has about as many numbers as lora_r8.
    "boft_b16": ["method.name=boft", "method.lora.block_size=16"],
    "norms_biases": ["method.name=bitfit"],
    "full": ["method.name=full"],
    "linear_probe": ["method.name=linear_probe"],
    # What they read is the mean over the tokens, with which MiniLM was trained; then [CLS].
    "pooler_cos": ["method.adapter=null", "method.pooler={component: cos}"],
    "pooler_dense": ["method.adapter=null", "method.pooler=dense", "method.parts=[{part: mean_pooling}]"],
    "pooler_cos_first": ["method.adapter=null", "method.pooler={component: cos}", "method.pooling=first"],
    "pooler_dense_first": ["method.name=linear_probe", "method.pooler=dense"],
}
# Where the reports of recipes/papers/tune_glue.py are kept.
RATES = Path(__file__).resolve().parents[2] / "model_cards/glue_rates.jsonl"


def chosen_rates(study: Path = RATES) -> dict[str, float]:
    """The learning rate of every method: of those tried on all tasks of the tuning the one with the best mean score.

    Args:
        study: the reports of recipes/papers/tune_glue.py, whose methods are <method>@<rate>.
    """
    from lib.tables import rates

    means = {
        method: {rate: statistics.mean(scores.values()) for rate, scores in tried.items()}
        for method, tried in rates(study).items()
    }
    return {method: max(tried, key=lambda rate: tried[rate]) for method, tried in means.items()}


def main(argv: list[str] | None = None) -> int:
    """Run what is missing; 0 all finished, 1 something failed, 130 or 143 stopped, 3 both."""
    rates = chosen_rates()
    methods = {
        name: [*RECIPE, *settings, *([f"train.learning_rate={rates[name]:g}"] if name in rates else [])]
        for name, settings in METHODS.items()
    }
    return sweep.main(__doc__, "finetune.py", "{task}_adapter.yaml", "glue", TASKS, methods, argv)


if __name__ == "__main__":
    sys.exit(main())
