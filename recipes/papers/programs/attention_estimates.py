"""Errors of attention weights estimated by random features: Spectraformer's pairs on queries and keys of a real BERT.

    python recipes/papers/programs/attention_estimates.py
    python recipes/papers/programs/attention_estimates.py --model path/to/minilm-l6-sst2 --data path/to/glue
    python recipes/papers/programs/attention_estimates.py --render

Â are the weights Φ(q)·Ψ(k) / Σ_j Φ(q)·Ψ(k_j) of linear attention, A = softmax(q·k/√d) the exact ones, of all layers and
heads of the unchanged model on whole sentences. Two errors, means over sentences, layers, heads and draws: ‖Â − A‖_F /
‖A‖_F, and the Kullback-Leibler divergence Σ_j A_j log(A_j/Â_j) per query. Weights that can be negative have none.

- the pairs of Spectraformer's Table 2, (posrf, oprf, saderf) × (orf, sorf, qmc, mm, sgq, fastfood_learned as drawn),
  and posrf-gaussian and trigrf-orf: drawn, and nothing is learned. sgq has 2d + 1 features, whatever m is.
- uniform attention, 1/n: the baseline to beat, which needs no features at all. Its divergence is log n − H(A).
- centroids: the map that `calibrate` fits in closed form, or followed by `--steps` of Adam, to other sentences
  without labels, one layer at a time, so that each sees the queries and keys of the unchanged model.

`--data` is a folder of GLUE: sentences of SST-2, for calibration those of more than 40 characters of train.tsv, and
measured on dev.tsv. Without it, docstrings of Python's standard library; without `--model`, MiniLM-L6 as pretrained.
Writes metrics.json, error.png and README.md, which `--render` makes again from metrics.json alone. Cost: O(n·m) per
head and sentence; one layer of one sentence at a time is in memory. About nine minutes on one core.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from data import TASKS
from transformers import AutoModel

from papers.lib.estimates_page import CENTROIDS, UNIFORM, draw, render, show
from papers.lib.measured_page import measured_page, page_options, too_small
from papers.lib.printed_pairs import COMPONENTS, MATRICES
from snnk_cli.files import guarded
from snnk_cli.modality import load_tokenizer
from snnk_cli.models import resolve_model
from snnk_cli.terminal import bar
from snnk_peft import AttentionPart, SNNKConfig, build_feature_map, calibrate, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.parts.attention.recording import Recorder
from snnk_peft.projections import PROJECTIONS
from snnk_peft.tasks.texts import batches_by_length, drawn

RESULTS = Path(__file__).resolve().parent / "results" / "attention_estimates"
PAIRS = [*((c, p) for c in COMPONENTS for p in MATRICES), ("posrf", "gaussian"), ("trigrf", "orf")]
SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
FITTED = [64, 128]
SHORTEST = 40  # minimum characters of a whole sentence, as in benchmarks/convert_models.py


class Heads(NamedTuple):
    """Queries and keys of one layer on one sentence.

    Attributes:
        q: (1, H, n, d).
        k: (1, G, n, d), H a multiple of G.
        scaling: factor on q·k.
        exact: the weights of softmax, (1, H, n, n) in fp64.
    """

    q: torch.Tensor
    k: torch.Tensor
    scaling: float
    exact: torch.Tensor


class Errors(NamedTuple):
    """Errors of the weights of all heads: one number per head, (H,).

    Attributes:
        frobenius: ‖Â − A‖_F / ‖A‖_F.
        divergence: mean over queries; meaningless where weights are negative.
        negative: share of the weights below 0.
    """

    frobenius: torch.Tensor
    divergence: torch.Tensor
    negative: torch.Tensor


def options() -> argparse.ArgumentParser:
    """Create the parser of the options."""
    made = page_options(__doc__, RESULTS, "error.png")
    made.add_argument("--model", default="minilm", help="folder or Hub name of an encoder (default minilm)")
    made.add_argument("--data", help="folder that holds SST-2/{train,dev}.tsv; without it, docstrings")
    names = ["-".join(pair) for pair in PAIRS]
    made.add_argument("--pairs", nargs="*", default=names, choices=names, metavar="PAIR", help="(default all)")
    made.add_argument("--features", type=int, nargs="+", default=SIZES, help=f"numbers m (default {SIZES})")
    made.add_argument("--fitted", type=int, nargs="*", default=FITTED, help=f"of calibrated maps (default {FITTED})")
    made.add_argument("--steps", type=int, default=100, help="of Adam behind the closed form, 0 for none (default 100)")
    made.add_argument("--sentences", type=int, default=12, help="that are measured (default 12)")
    made.add_argument("--calibration", type=int, default=300, help="sentences for each calibration (default 300)")
    made.add_argument("--draws", type=int, default=3, help="of feature maps, and calibrations (default 3)")
    made.add_argument("--max-length", type=int, default=64, help="tokens of a sentence (default 64)")
    return made


def main(argv: list[str] | None = None) -> int:
    """Measure and write; return 0 if done, 2 for wrong input."""
    arguments = options().parse_args(argv)
    return guarded(lambda: work(arguments))


def work(arguments: argparse.Namespace) -> None:
    """Measure, unless only the page is wanted, and write."""
    figures = measured_page(arguments.output, arguments.render, lambda: measure(arguments), render)
    draw(figures, arguments.output / "error.png")
    show(figures)
    print(f"written: {arguments.output}")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures."""
    least = {"features": 1, "fitted": 1, "sentences": 1, "calibration": 10, "draws": 2, "max_length": 4, "steps": 0}
    if faults := too_small(arguments, **least):
        raise ConfigError(faults)
    folder = resolve_model(arguments.model, "--model")
    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), load_tokenizer(folder)
    task, unlabelled, measured = sentences(arguments)
    given = [tokens(tokenizer, [text], arguments.max_length) for text in measured]
    heads = heard(model, given)
    layers, dim = len(heads) // len(given), heads[0].q.shape[-1]
    level = [uniform(each) for each in heads]
    rows = [row(UNIFORM, None, [level], level, layers)]

    drawing = [
        (component, projection, m)
        for component, projection in (name.split("-") for name in arguments.pairs)
        for m in dict.fromkeys(PROJECTIONS[projection].nearest_size(dim, m) for m in arguments.features)
    ]
    for component, projection, m in bar(drawing, "pairs and sizes"):
        maps = [build_feature_map(component, projection, dim, m, seed=seed) for seed in range(arguments.draws)]
        draws = [[estimate(KernelAttention([one], each.q.shape[1]), each) for each in heads] for one in maps]
        rows.append(row(f"{component}-{projection}", m, draws, level, layers))

    fitting = [(steps, m) for steps in dict.fromkeys((0, arguments.steps)) for m in arguments.fitted]
    chosen = [drawn(len(unlabelled), arguments.calibration, seed) for seed in range(arguments.draws)]
    jobs = [
        (steps, m, seed, layer) for steps, m in fitting for seed in range(arguments.draws) for layer in range(layers)
    ]
    found: dict[tuple[int, int], list[dict[int, list[Errors]]]] = {each: [{} for _ in chosen] for each in fitting}
    for steps, m, seed, layer in bar(jobs, "calibrations"):
        texts = [unlabelled[index] for index in chosen[seed]]
        groups = batches_by_length([len(text) for text in texts], range(len(texts)), min(32, len(texts) // 8))
        batches = [tokens(tokenizer, [texts[i] for i in group], arguments.max_length) for group in groups]
        kernel = calibrated(model, batches, m, layer, steps, seed)
        found[steps, m][seed][layer] = [estimate(kernel, each) for each in heads[layer::layers]]
    for (steps, m), by_layer in found.items():
        # In the order of `heads`, sentence by sentence.
        draws = [[errors for each in zip(*one.values(), strict=True) for errors in each] for one in by_layer]
        name = CENTROIDS if steps == 0 else f"{CENTROIDS}, {steps} steps"
        rows.append(row(name, m, draws, level, layers))

    settings = {
        key: value for key, value in vars(arguments).items() if key not in ("output", "render", "model", "data")
    }
    return {
        "settings": settings,
        "model": Path(folder).name if arguments.model != "minilm" else "minilm",
        "texts": task,
        "layers": layers,
        "heads": heads[0].q.shape[1],
        "head_dim": dim,
        "tokens": [int(batch["input_ids"].shape[1]) for batch in given],
        "rows": rows,
    }


def sentences(arguments: argparse.Namespace) -> tuple[str, list[str], list[str]]:
    """Return the name of the texts, the calibration texts, and those to measure on."""
    task = "stdlib_docs" if arguments.data is None else "sst2"
    rows = TASKS[task].load(arguments.data)
    train = [text for text in rows["train"]["sentence1"] if len(text) > SHORTEST]
    validation = list(rows["validation"]["sentence1"])
    for name, texts, wanted in (
        ("calibration", train, arguments.calibration),
        ("sentences", validation, arguments.sentences),
    ):
        if len(texts) < wanted:
            raise ConfigError(f"--{name} is {wanted}; {task} has {len(texts)}; expected at most that many")
    return task, train, [validation[index] for index in drawn(len(validation), arguments.sentences, 0)]


def tokens(tokenizer: Any, texts: list[str], max_length: int) -> dict[str, torch.Tensor]:
    """Tokenise a batch of model inputs, padded to its longest text."""
    return dict(tokenizer(texts, truncation=True, max_length=max_length, padding=True, return_tensors="pt"))


@torch.no_grad()
def heard(model: Any, batches: list[dict[str, torch.Tensor]]) -> list[Heads]:
    """Record the attention inputs of all layers in the unchanged model, for each batch of one sentence."""
    part = AttentionPart(num_features=1)
    patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(attention=part, modules_to_save=[])).eval()
    recorder = Recorder()
    for module in patched.modules():
        if "snnk_owner" in vars(module):
            module.snnk_owner = lambda: recorder
    for batch in batches:
        patched(**batch)
    if any(each.causal for each in recorder.calls):
        raise UnsupportedError(
            f"{type(model).__name__} attends to earlier tokens only; expected an encoder, such as BERT"
        )
    return [Heads(each.q, each.k, each.scaling, softmax(each.q, each.k, each.scaling)) for each in recorder.calls]


def softmax(q: torch.Tensor, k: torch.Tensor, scaling: float) -> torch.Tensor:
    """Compute the exact weights (1, H, n, n) in fp64."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (scaling * q.double() @ keys.mT).softmax(-1)


@torch.no_grad()
def estimate(kernel: KernelAttention, heads: Heads) -> Errors:
    """Compute errors of the weights of linear attention."""
    return errors(kernel.weights(heads.q, heads.k, scaling=heads.scaling), heads.exact)


def uniform(heads: Heads) -> Errors:
    """Compute errors of uniform weights 1/n."""
    return errors(torch.full_like(heads.exact, 1 / heads.exact.shape[-1]), heads.exact)


def errors(weights: torch.Tensor, exact: torch.Tensor) -> Errors:
    """Compute errors of weights (1, H, n, n), whose rows sum to 1, against those of softmax."""
    weights = weights.double()
    frobenius = (weights - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))
    # A weight that fp32 rounds to 0 counts as the smallest number; negative ones are counted in `negative`.
    logs = weights.clamp_min(torch.finfo(torch.float32).tiny).log()
    divergence = (torch.xlogy(exact, exact) - exact * logs).sum(-1).mean(-1)
    return Errors(frobenius[0], divergence[0], (weights < 0).double().mean((-2, -1))[0])


def calibrated(
    model: Any, batches: list[dict[str, torch.Tensor]], m: int, layer: int, steps: int, seed: int
) -> KernelAttention:
    """Return the attention of one layer as fitted by `calibrate`; all others remain softmax."""
    part = AttentionPart("mixture", "centroids", num_features=m, layers=[layer], refit_output=False)
    patched = get_snnk_model(copy.deepcopy(model), SNNKConfig(attention=part, modules_to_save=[], seed=seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about poor fits with few features, which are measured here
        calibrate(patched, batches, steps=steps, progress=False)
    return next(module for module in patched.modules() if isinstance(module, KernelAttention))


def row(name: str, m: int | None, draws: list[list[Errors]], level: list[Errors], layers: int) -> dict[str, Any]:
    """Return the figures of a map: means, and standard errors over draws (None for a single one, such as uniform).

    Args:
        name: name of the map.
        m: number of features.
        draws: for each draw the errors of all layers on the first sentence, then on the second, and so on.
        level: errors of uniform attention in the same order.
        layers: number of layers of the model.
    """
    whole = [Errors(*(torch.stack(parts) for parts in zip(*draw, strict=True))) for draw in draws]
    frobenius, divergence = (torch.stack([each[place] for each in whole]) for place in (0, 1))  # draw, place, head
    negative = statistics.mean(float(each.negative.mean()) for each in whole)
    nearer = (divergence < torch.stack([each.divergence for each in level])).double()
    by_layer = divergence.unflatten(1, (-1, layers)).mean((0, 1, 3))
    found = {
        "map": name,
        "features": m,
        "draws": len(draws),
        "error": float(frobenius.mean()),
        "error_se": _standard_error(frobenius.mean((1, 2)).tolist()),
        "error_median": float(frobenius.median()),
        "kl": float(divergence.mean()),
        "kl_se": _standard_error(divergence.mean((1, 2)).tolist()),
        "kl_by_layer": by_layer.tolist(),
        "nearer": float(nearer.mean()),
        "negative": negative,
    }
    return {**found, **dict.fromkeys(("kl", "kl_se", "kl_by_layer", "nearer"))} if negative else found


def _standard_error(values: list[float]) -> float | None:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


if __name__ == "__main__":
    sys.exit(main())
