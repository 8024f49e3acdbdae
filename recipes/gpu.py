"""Everything that needs a GPU, in one command and under ten minutes: tests, training, speed. `make gpu` runs it.

    python recipes/gpu.py                                              # results in gpu/
    python recipes/gpu.py --steps attention adapter_step
    python recipes/gpu.py --device cpu --small --output gpu_on_a_cpu   # the same programs on a processor

    tests          pytest -m gpu: every part and pair against fp64 on the CPU, generation, resume across devices
    kernels        this package's kernels and flash: 1k to 64k tokens, batch 1 and 8, one token; time of the card alone
    adapter_step   a training step of adapters against LoRA's, of MiniLM; _bert: BERT-base; _llama: a 12-layer Llama
    attention      linear attention against torch's flash attention in bf16, 4k to 64k tokens: time and memory
    pairs          a training step of Spectraformer's pairs and of softmax, 32 documents of 4000 bytes: time, memory
    text, images   finetune.py in bf16 through `accelerate launch`: sentences with MiniLM, images with a small ViT
    ddp, fsdp2     `text` on two cards, where there are two

Every step has a time limit; one that fails or takes too long does not stop the others. metrics.json has the results,
the GPU, its driver and the versions; each step's output is in a .log next to it. The exit code is 0 if everything that
can run here passed, 1 if something failed; without a GPU, 0 with a message.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from snnk_cli.files import guarded


def main(argv: list[str] | None = None) -> int:
    """Run the requested steps; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="where everything runs (cuda)")
    parser.add_argument("--small", action="store_true", help="a sample of the tests, and sizes that take seconds")
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="which steps to run (all)")
    parser.add_argument("--limit", type=float, help="seconds per step, instead of each one's own limit")
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="folder for the results (gpu)")
    given = parser.parse_args(argv)
    os.environ.setdefault("SNNK_DEVICE_KERNELS", "all")  # inherited by everything that is started here
    from lib import gpu_run  # with torch, for which `--help` need not wait

    return guarded(lambda: gpu_run.run(given.device, given.small, given.output.absolute(), given.steps, given.limit))


if __name__ == "__main__":
    sys.exit(main())
