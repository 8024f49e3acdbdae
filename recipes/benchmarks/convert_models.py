"""Convert a fine-tuned or pretrained model and measure what that costs and gains against the original, in one run.

    python recipes/benchmarks/convert_models.py curve --model path/to/minilm-l6-sst2 --data path/to/glue
    python recipes/benchmarks/convert_models.py curve --help

    curve       agreement over latency of a BERT on a text task: conversions and baselines, in fp32 and int8
    cifar10     the FFNs of a ViT
    llama       the attention of a causal language model: perplexity, cache and speed
    recall      the attention of small decoders trained to recall
    llama_ffn   the gated FFNs of a causal language model: perplexity and size
    embeddings  a sentence encoder: its vectors, their similarities and neighbours
    sizes       seconds and memory of `convert`, from MiniLM to RoBERTa-large

Figures go to results/convert_NAME.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from _bench import parser
from transformers import logging

NAMES = ("curve", "cifar10", "llama", "recall", "llama_ffn", "embeddings", "sizes")


def main() -> None:
    """Parse the command line, run the benchmark and write its results."""
    first = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    first.add_argument("name", choices=NAMES, help="what to convert; see NAME --help")
    name = first.parse_args(sys.argv[1:2]).name
    conversion = import_module(f"_conversions.{name}")
    options = parser(conversion.__doc__ or "", f"convert_{name}")
    options.prog = f"convert_models.py {name}"
    conversion.add_options(options)
    arguments = options.parse_args(sys.argv[2:])
    if found := getattr(conversion, "fault", lambda given: None)(arguments):
        options.error(found)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    conversion.run(arguments)


if __name__ == "__main__":
    main()
