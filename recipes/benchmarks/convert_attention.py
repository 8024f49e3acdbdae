"""Convert the attention of a fine-tuned BERT without labels: accuracy, speed-up at 512 tokens and seconds on SST-2.

    python recipes/benchmarks/convert_attention.py --model path/to/minilm-l6-sst2 --data path/to/glue

Softmax of all layers becomes linear attention, a mixture over 64 centroids of each head, made by `calibrate` from
unlabelled training sentences: in closed form, or with 200 steps of Adam per layer behind it; then the same with all FFN
blocks. Accuracy is that of the bundle on the 872 development sentences, which are short; speed-up is the teacher's time
over the bundle's for 4 x 512 tokens, taken in turn in one process.
"""

from __future__ import annotations

from pathlib import Path

import torch
from _bench import parser
from _conversion import Conversion, compare_conversions
from convert_sst2 import accuracy, batches, load
from transformers import logging

from snnk_peft import AttentionPart, FFNPart


def conversions(features: int, steps: int) -> dict[str, Conversion]:
    """What is compared."""
    attention = AttentionPart(component="mixture", projection="centroids", num_features=features)
    ffn = FFNPart(num_features=4 * features)
    return {
        f"attention, {features} features, closed form": Conversion({"attention": attention}),
        f"attention, {features} features, {steps} steps": Conversion({"attention": attention}, {"steps": steps}),
        f"the same and 6 of 6 FFNs, {4 * features} features": Conversion(
            {"attention": attention, "ffn": ffn}, {"steps": steps}
        ),
    }


def main() -> None:
    """Measure and write."""
    options = parser(__doc__ or "", "convert_attention")
    options.add_argument("--model", type=Path, required=True, help="folder of the fine-tuned classifier")
    options.add_argument("--data", required=True, help="folder that holds SST-2/{train,dev}.tsv")
    options.add_argument("--sentences", type=int, default=1200, help="unlabelled training sentences (default 1200)")
    options.add_argument("--features", type=int, default=64, help="of each head (default 64)")
    options.add_argument("--steps", type=int, default=200, help="of Adam per layer, where there are any (default 200)")
    options.add_argument("--tokens", type=int, default=512, help="of a sequence that is timed (default 512)")
    arguments = options.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    teacher, tokenizer, unlabelled, sentences, labels = load(arguments.model, arguments.data, arguments.sentences)
    shape, generator = (4, arguments.tokens), torch.Generator().manual_seed(0)
    ids = torch.randint(teacher.config.vocab_size, shape, generator=generator)
    compare_conversions(
        teacher,
        conversions(arguments.features, arguments.steps),
        batches(tokenizer, unlabelled),
        lambda model: accuracy(model, tokenizer, sentences, labels),
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        arguments,
        title="Attention of an SST-2 classifier, without labels",
        timed=f"4x{arguments.tokens} tokens",
    )


if __name__ == "__main__":
    main()
