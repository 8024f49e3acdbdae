"""Everything that needs a GPU, in one command and under ten minutes: tests, training, speed. `make gpu` runs it.

    python recipes/gpu.py                                              # results in gpu/
    python recipes/gpu.py --steps attention adapter_step
    python recipes/gpu.py --device cpu --small --output gpu_on_a_cpu   # the same programs on a processor

    tests          pytest -m gpu: every part and pair against fp64 on the processor, generation, resume across devices
    kernels        this package's kernels and flash: 1k to 64k tokens, batch 1 and 8, one token; time of the card alone
    adapter_step   a training step of adapters against LoRA's, of MiniLM; _bert: BERT-base; _llama: a 12-layer Llama
    attention      linear attention against torch's flash attention in bf16, 4k to 64k tokens: time and memory
    pairs          a training step of Spectraformer's pairs beside softmax, 32 documents of 4000 bytes: time, memory
    text, images   finetune.py in bf16 through `accelerate launch`: sentences with MiniLM, images with a small ViT
    ddp, fsdp2     `text` on two cards, where there are two

Every step has a time limit; one that fails or takes too long does not keep the others from running. metrics.json says
what came out, on which card, with which driver and versions; each step's output is in a .log beside it. Exit code 0
where everything that can run here passed, 1 if something failed; without a GPU a message and 0.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

# What imports torch is imported in functions, so that `--help` answers at once.

ROOT = Path(__file__).resolve().parents[1]
PROFILES = ROOT / "recipes/accelerate"
ON_CPU = {"one_gpu.yaml": "cpu.yaml", "multi_gpu.yaml": "multi_cpu.yaml"}  # the profile in place of one for GPUs
SAMPLE = "posrf-orf or relu-gaussian or bert-ffn or calibration or every_way_to_generate or from_the_processor"


@dataclass(frozen=True)
class Plan:
    """What the command line asks for.

    Args:
        device: "cuda" or "cpu".
        small: sizes at which a processor is done in seconds.
        output: folder of all results.
    """

    device: str
    small: bool
    output: Path

    def of(self, usual: Any, small: Any) -> Any:
        """The size that goes with `--small`, or the usual one."""
        return small if self.small else usual


@dataclass(frozen=True)
class Step:
    """One program.

    Args:
        limit: seconds after which it is ended.
        command: its arguments, from the plan.
        figures: what to keep of its results; raises ValueError if they are not what the step is for.
        cards: GPUs that it needs, where the device is one.
        prepare: writes what it reads.
    """

    limit: int
    command: Callable[[Plan], list[str]]
    figures: Callable[[Plan], dict[str, Any]]
    cards: int = 1
    prepare: Callable[[Plan], None] = lambda plan: None


# --- the steps ------------------------------------------------------------------------------------------------------


def tests(plan: Plan) -> list[str]:
    """Everything in tests/gpu."""
    report = plan.output / "tests.xml"
    only = ["-k", SAMPLE] if plan.small else []
    return [
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "--device",
        plan.device,
        f"--junitxml={report}",
        "-q",
        "-n",
        plan.of("auto", "0"),
        *only,
    ]


def test_figures(plan: Plan) -> dict[str, Any]:
    """How many tests there were."""
    suite = next(ElementTree.parse(plan.output / "tests.xml").iter("testsuite"))
    found = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    if found["tests"] == found["skipped"]:
        raise ValueError("every test was skipped; tests.log says why")
    return found


def training(name: str, profile: str, arguments: Callable[[Plan], Sequence[str]]) -> Callable[[Plan], list[str]]:
    """finetune.py through `accelerate launch`, in bf16, with the results in a folder of the step's name.

    Args:
        name: of the step.
        profile: file in recipes/accelerate.
        arguments: what else it is told.
    """

    def command(plan: Plan) -> list[str]:
        chosen = PROFILES / (ON_CPU.get(profile, profile) if plan.device == "cpu" else profile)
        settings = [
            "train.mixed_precision=bf16",
            f"train.device={'cpu' if plan.device == 'cpu' else 'auto'}",
            f"output.dir={plan.output / name}",
            "output.save_model=false",
            "output.tensorboard=false",
        ]
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(chosen), str(ROOT / "recipes/finetune.py")]
        return [*launcher, *arguments(plan), *settings, "--overwrite"]

    return command


def training_figures(name: str) -> Callable[[Plan], dict[str, Any]]:
    """Score, speed and memory of a run, which must have been where it was wanted."""

    def figures(plan: Plan) -> dict[str, Any]:
        from lib.files import read_json

        report = read_json(plan.output / name / "metrics.json")
        if not report["device"].startswith(plan.device):
            raise ValueError(f"it ran on {report['device']}; expected {plan.device}")
        kept = ("score", "seconds_per_epoch", "train_seconds", "peak_memory_bytes", "device", "examples")
        return {key: report[key] for key in kept}

    return figures


def of_text(plan: Plan) -> list[str]:
    """MiniLM on docstrings, in three epochs."""
    data = plan.output / "data/text"
    return [
        str(ROOT / "recipes/configs/table.yaml"),
        *(f"data.{split}_file={data / split}.csv" for split in ("train", "eval")),
        *("data.text=text", "data.label=label", f"data.max_length={plan.of(64, 16)}"),
        *(f"train.epochs={plan.of(3, 1)}", f"train.batch_size={plan.of(32, 8)}"),
    ]


def of_images(plan: Plan) -> list[str]:
    """Adapters in a ViT with random weights, on generated pictures."""
    return [
        str(ROOT / "recipes/configs/cifar10/adapter.yaml"),
        f"model.name_or_path={plan.output / 'data/vit'}",
        f"data.dir={plan.output / 'data/images'}",
        "data.workers=0",
        "augment.flip=0",  # a mirrored wave is one of another class
        *(f"train.epochs={plan.of(3, 1)}", f"train.batch_size={plan.of(64, 8)}"),
    ]


def prepare_text(plan: Plan) -> None:
    """Once for all steps that read it."""
    from lib.gpu_data import write_texts

    folder = plan.output / "data/text"
    if not folder.exists():
        folder.mkdir(parents=True)
        write_texts(folder, plan.of(2000, 16))


def prepare_images(plan: Plan) -> None:
    """Pictures and the model."""
    from lib.gpu_data import write_pictures, write_vit

    (plan.output / "data/images").mkdir(parents=True)
    write_pictures(plan.output / "data/images", plan.of(100, 2))
    write_vit(plan.output / "data/vit", plan.of(6, 1))


def attention(plan: Plan) -> list[str]:
    """From 4k to 64k tokens."""
    lengths = plan.of([4096, 8192, 16384, 32768, 65536], [128])
    return [
        str(ROOT / "recipes/benchmarks/attention.py"),
        *("--sections", "forward", "causal", "training", "--lengths", *map(str, lengths), "--flash"),
        *("--device", plan.device, "--dtype", "bfloat16", "--repetitions", plan.of("9", "1")),
        *("--output", str(plan.output / "attention.json")),
    ]


def kernels(plan: Plan) -> list[str]:
    """Of all lengths, with a plot beside the figures."""
    small = ["--lengths", "64", "--batch-sizes", "1", "--compiled"]
    return [
        str(ROOT / "recipes/benchmarks/attention_on_gpu.py"),
        *("--device", plan.device, "--output", str(plan.output / "attention_on_gpu/metrics.json")),
        *plan.of([], small),
    ]


def adapter_step(name: str, model: str, small_model: str) -> Step:
    """At the sizes that are measured on a processor, and its own.

    Args:
        name: of the step.
        model: as `adapter_step.py --model`.
        small_model: the same with `--small`.
    """

    def command(plan: Plan) -> list[str]:
        small = ["--batch-size", "2", "--length", "8", "--processes", "0"] if plan.small else []
        return [
            str(ROOT / "recipes/benchmarks/adapter_step.py"),
            *("--model", plan.of(model, small_model), "--device", plan.device, "--dtype", "bfloat16"),
            *("--repetitions", plan.of("10", "1"), *small, "--output", str(plan.output / f"{name}.json")),
        ]

    kept = ("step_time_ratio", "host_time_ratio", "peak_memory_ratio", "rows", "dtype", "model")
    return Step(40, command, file_figures(f"{name}.json", *kept))


def pairs(plan: Plan) -> list[str]:
    """Of the length and batch of the Long Range Arena."""
    return [
        str(ROOT / "recipes/benchmarks/attention.py"),
        *("--sections", "pairs", "--device", plan.device, "--batch-size", plan.of("32", "1")),
        *("--repetitions", plan.of("9", "1"), "--output", str(plan.output / "pairs.json")),
        *plan.of([], ["--pairs", "posrf-mm", "saderf-orf", "--processes", "1"]),
    ]


def file_figures(name: str, *keys: str) -> Callable[[Plan], dict[str, Any]]:
    """These entries of a JSON file that a benchmark wrote."""

    def figures(plan: Plan) -> dict[str, Any]:
        from lib.files import read_json

        report = read_json(plan.output / name)
        return {key: report[key] for key in keys}

    return figures


STEPS: dict[str, Step] = {
    "tests": Step(140, tests, test_figures),
    "kernels": Step(115, kernels, file_figures("attention_on_gpu/metrics.json", "card", "forms", "rows", "left_out")),
    "adapter_step": adapter_step("adapter_step", "minilm", "minilm"),
    "adapter_step_bert": adapter_step("adapter_step_bert", "bert_base", "minilm"),
    "adapter_step_llama": adapter_step("adapter_step_llama", "llama12", "llama"),
    "attention": Step(45, attention, file_figures("attention.json", "forward", "causal", "training")),
    "pairs": Step(45, pairs, file_figures("pairs.json", "pairs", "pairs_on")),
    "text": Step(65, training("text", "one_gpu.yaml", of_text), training_figures("text"), prepare=prepare_text),
    "images": Step(
        45, training("images", "one_gpu.yaml", of_images), training_figures("images"), prepare=prepare_images
    ),
    "ddp": Step(60, training("ddp", "multi_gpu.yaml", of_text), training_figures("ddp"), 2, prepare_text),
    "fsdp2": Step(60, training("fsdp2", "fsdp2.yaml", of_text), training_figures("fsdp2"), 2, prepare_text),
}


# --- running them ---------------------------------------------------------------------------------------------------


def perform(name: str, plan: Plan, limit: float) -> dict[str, Any]:
    """Run one step; returns its entry of metrics.json: status, seconds, and figures or the reason why there are none.

    Args:
        name: of the step.
        plan: what was asked for.
        limit: seconds that it may take.
    """
    from lib.files import FileError

    from snnk_peft.errors import ConfigError

    step, started = STEPS[name], time.perf_counter()
    entry: dict[str, Any] = {"step": name}
    if (reason := out_of_reach(name, plan)) is not None:
        return {**entry, "status": "skipped", "reason": reason, "seconds": 0.0}
    log = plan.output / f"{name}.log"
    try:
        step.prepare(plan)
        command = [sys.executable, *step.command(plan)]
        entry["command"] = as_typed(command, plan.output)
        code = ended_in_time(command, log, limit)
        if code == 0:
            entry |= {"status": "passed", "figures": step.figures(plan)}
        else:
            what = f"took more than its {limit:.0f} s" if code is None else f"exit code {code}"
            entry |= {"status": "failed", "reason": f"{what}; {log} says: {verdict(log)}"}
    except (ConfigError, FileError, ImportError, OSError, ValueError, KeyError) as error:
        entry |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {**entry, "seconds": time.perf_counter() - started}


def as_typed(command: Sequence[str], output: Path) -> str:
    """A command as it would be typed in the repository: without the folders of this machine."""
    shown = shlex.join(["python", *command[1:]])
    return shown.replace(f"{output}/", f"{output.name}/").replace(f"{ROOT}/", "")


def out_of_reach(name: str, plan: Plan) -> str | None:
    """Why a step cannot run on this machine, or None."""
    if STEPS[name].cards == 1 or plan.device == "cpu":
        return None
    import torch

    found = torch.cuda.device_count()
    return None if found >= STEPS[name].cards else f"it needs {STEPS[name].cards} GPUs, and there is {found}"


def ended_in_time(command: Sequence[str], log: Path, limit: float) -> int | None:
    """Exit code of a command whose output goes to `log`; None if it was ended after `limit` seconds, children too."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def verdict(log: Path) -> str:
    """What a program said about its end: the last line that tells of an error, or the last one."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    # A launcher has its say behind the program.
    errors = [line for line in lines if line.startswith(("error:", "FAILED"))]
    return (errors or lines or ["nothing"])[-1]


def card(device: str) -> dict[str, Any]:
    """Name, driver and sizes of the device."""
    import torch

    if device == "cpu":
        return {"name": "cpu", "count": 0, "torch": torch.__version__, "driver": None, "cuda": None}
    properties = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False) if shutil.which(asked[0]) else None
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": done.stdout.split()[0] if done is not None and done.stdout.split() else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
    }


def in_short(entry: Mapping[str, Any]) -> str:
    """A line for the table."""
    figures = entry.get("figures")
    if figures is None:
        return str(entry["reason"])
    if entry["step"] == "tests":
        return f"{figures['tests'] - figures['skipped']} tests"
    if entry["step"] == "attention":
        ends = {kind: figures[kind][-1] for kind in ("forward", "causal", "training")}
        length = ends["forward"]["length"]
        return f"at {length} tokens: " + ", ".join(f"{kind} {row['speed_up']:.2f} x" for kind, row in ends.items())
    if entry["step"] == "kernels":
        both = [row for row in figures["rows"] if {"layer_ms", "flash_ms"} <= row.keys()]
        if not both:
            return "no row with both a layer and flash"
        last = both[-1]
        return f"{last['kind']}, {last['length']} tokens: {last['layer_ms']:.2f} ms, flash {last['flash_ms']:.2f}"
    if entry["step"] == "pairs":
        best, before = ({row["pair"]: row for row in figures["pairs"]}[name] for name in ("posrf-mm", "saderf-orf"))
        shares = [best[key] / before[key] for key in ("seconds_per_step", "peak_MiB")]
        return f"posrf-mm: {shares[0]:.2f} x the time, {shares[1]:.2f} x the memory of saderf-orf"
    if entry["step"].startswith("adapter_step"):
        memory = figures["peak_memory_ratio"]
        more = "" if memory is None else f" and {memory:.2f} x the memory"
        return f"{figures['step_time_ratio']:.2f} x the time{more} of LoRA"
    return f"score {figures['score']:.3f}, {figures['seconds_per_epoch']:.2f} s per epoch on {figures['device']}"


def show(entries: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "status", "seconds", "result", title=title)
    for entry in entries:
        colour = {"passed": "green", "skipped": "yellow"}.get(entry["status"], "red")
        status = f"[{colour}]{entry['status']}[/]"
        table.add_row(entry["step"], status, f"{entry['seconds']:.0f}", in_short(entry).replace("[", r"\["))
    Console(width=160).print(table)


def run(plan: Plan, names: Sequence[str], limit: float | None) -> int:
    """All steps; returns the exit code."""
    import torch
    from lib.files import write_json
    from lib.run_folder import environment
    from lib.terminal import quiet

    quiet()
    if plan.device == "cuda" and not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) finds no GPU"
        print(f"skipped: torch {torch.__version__} {why}; README, 'On a GPU', says what to install")
        return 0
    shutil.rmtree(plan.output / "data", ignore_errors=True)
    plan.output.mkdir(parents=True, exist_ok=True)
    found, entries, started = card(plan.device), [], time.perf_counter()
    for name in names:
        print(f"{name} ... (output in {plan.output / name}.log)", flush=True)
        entries.append(perform(name, plan, STEPS[name].limit if limit is None else limit))
        print(f"{name}: {entries[-1]['status']}, {in_short(entries[-1])}", flush=True)
        seconds = time.perf_counter() - started
        report = {"card": found, "small": plan.small, "seconds": seconds, "steps": entries}
        write_json(plan.output / "metrics.json", {**report, "environment": environment(ROOT)})
    show(entries, f"{found['name']}, driver {found['driver']}, torch {found['torch']}, {seconds:.0f} s")
    print(f"written: {plan.output / 'metrics.json'}")
    return int(any(entry["status"] == "failed" for entry in entries))


def main(argv: list[str] | None = None) -> int:
    """Run what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="where everything runs (cuda)")
    parser.add_argument("--small", action="store_true", help="a sample of the tests, and sizes of seconds")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS), help="which ones (all)")
    parser.add_argument("--limit", type=float, help="seconds per step, instead of each one's own limit")
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="folder of the results (gpu)")
    given = parser.parse_args(argv)
    os.environ.setdefault("SNNK_DEVICE_KERNELS", "all")  # of everything that is started here
    from lib.files import check_writable
    from lib.guard import guarded
    from lib.lock import alone

    plan = Plan(given.device, given.small, given.output.absolute())

    def work() -> int:
        check_writable(plan.output)
        with alone(plan.output):
            return run(plan, given.steps, given.limit)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
