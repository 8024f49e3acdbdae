"""`snnk_peft.cost` against real small models: sizes, products, memory and traffic; and large configs."""

from __future__ import annotations

import copy
import json
import re
import shlex
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, LlamaConfig, ViTConfig

from snnk_cli.app import app
from snnk_peft import PARTS as PARTS_REGISTRY
from snnk_peft import (
    AdapterPart,
    AttentionPart,
    FFNPart,
    LowRankPart,
    Part,
    Patch,
    PatchContext,
    SNNKConfig,
    bundle,
    get_snnk_model,
)
from snnk_peft.cost import estimate_cost
from snnk_peft.cost.build import Builder, inputs_for, labels_for, prepare
from snnk_peft.cost.meter import held, measure_inference, measure_training
from snnk_peft.errors import UnsupportedError
from tests.every_part import PARTS
from tests.fresh_process import run_python, start_python
from tests.tiny_families import CONFIGS, build, main_head
from tests.tiny_models import TEXT, tiny

# PEFT 0.21 asks the model by a name that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CLASSIFIER = "sequence-classification"
ADAPTER = SNNKConfig(adapter=AdapterPart(num_features=4))


def builder_of(model: Any, dtype: torch.dtype = torch.float32) -> Builder:
    """Builds models like this one."""
    prepare(model.config)
    made = Builder(model.config, None, dtype)
    made.cls = type(model)
    return made


def layout(model: Any) -> dict[str, Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors}


def ones(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Real inputs without padding."""
    return {name: torch.ones(value.shape, dtype=value.dtype) for name, value in inputs.items()}


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_the_same_tensors_on_meta_and_in_its_bundle(part):
    config = SNNKConfig(**PARTS[part])
    real = tiny("bert")
    make = builder_of(real)
    real, made = get_snnk_model(real, config), make.patched(config)
    assert all(t.is_meta for t in [*made.parameters(), *made.buffers()])
    assert layout(made) == layout(real)
    assert layout(make.bundled(made)) == layout(bundle(real))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_the_dtypes_of_real_models(dtype):
    make = builder_of(tiny("bert"), dtype)
    assert layout(make.patched(ADAPTER)) == layout(get_snnk_model(tiny("bert").to(dtype), ADAPTER))
    lora = peft.LoraConfig(r=3, target_modules=["query", "value"], modules_to_save=["classifier"])
    per_rank = 2 * 2 * (32 + 32)
    made, rank = make.lora(ADAPTER, 3 * per_rank + 1)
    assert rank == 3
    assert layout(made) == layout(peft.get_peft_model(tiny("bert").to(dtype), lora))


def test_rows_have_the_sizes_of_real_models():
    config = SNNKConfig(ffn=FFNPart(num_features=8), adapter=AdapterPart(num_features=4))
    report = estimate_cost(tiny("bert").config, config, task=CLASSIFIER, batch_size=2)
    real = {"full": tiny("bert"), "snnk": get_snnk_model(tiny("bert"), config)}
    rank = int(report.row("lora").detail.removeprefix("r = "))
    lora = peft.LoraConfig(r=rank, target_modules=["query", "value"], modules_to_save=["classifier"])
    real["lora"] = peft.get_peft_model(tiny("bert"), lora)
    for name, model in real.items():
        row = report.row(name)
        assert row.parameters == sum(p.numel() for p in model.parameters())
        assert row.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert row.buffers == sum(b.numel() for b in model.buffers())
    small = bundle(real["snnk"])
    assert report.row("bundle").parameters == sum(p.numel() for p in small.parameters())
    assert report.row("bundle").trained is None
    # "Equal size" is the nearest rank.
    per_rank = sum(p.numel() for n, p in lora_only(real["lora"])) / rank
    assert abs(report.row("lora").trained - report.row("snnk").trained) <= per_rank / 2


def lora_only(model: Any) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in model.named_parameters() if "lora_" in name]


# --- products ---------------------------------------------------------------------------------------------------------


def test_macs_of_bert_and_vit_by_hand():
    L, d, h, layers, batch = 20, 32, 64, 2, 3
    per_layer = L * (4 * d * d + 2 * d * h) + 2 * L * L * d
    bert = builder_of(tiny("bert")).pretrained()
    found = measure_inference(bert, inputs_for(bert, batch, L, torch.float32), "cuda")
    assert found.macs == batch * (layers * per_layer + d * d + 2 * d)  # pooler and classifier
    L = 5  # 4 patches of 4 × 4 × 3 numbers, and [CLS]
    per_layer = L * (4 * d * d + 2 * d * h) + 2 * L * L * d
    vit = builder_of(tiny("vit")).pretrained()
    found = measure_inference(vit, inputs_for(vit, batch, None, torch.float32), "cuda")
    assert found.macs == batch * (4 * 48 * d + layers * per_layer + 2 * d)


class Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def kept_bytes(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Between forward and backward on real tensors: what autograd keeps, inputs and outputs; each storage once."""
    alive: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Kept:
        alive.add(kept := Kept(tensor))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        out = model(**batch)
        loss = out["loss"] if "loss" in out else next(iter(out.values())).float().sum()
    assert loss.requires_grad
    found = [*(kept.tensor for kept in alive), *(t for t in tree_leaves(out) if isinstance(t, torch.Tensor)), loss]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in [*found, *batch.values()]}
    return sum(size for key, size in sizes.items() if key not in {t.untyped_storage()._cdata for t in held(model)})


def check(build_real: Callable[[], Any], config: SNNKConfig, length: int) -> None:
    """MACs against FlopCounterMode, which knows no fused kernel of a CPU: softmax is written out. What is kept for the
    backward pass against what autograd keeps with the kernels that torch takes."""
    usual = build_real()
    # Made so from the start: not every architecture can be switched.
    written_out = type(usual)._from_config(copy.deepcopy(usual.config), attn_implementation="eager")
    make = builder_of(usual)
    inputs = inputs_for(usual, 2, length, torch.float32)
    labelled = {**inputs, **labels_for(usual, inputs)}
    made, real, usual = (make.patched(config), *(get_snnk_model(m, config) for m in (written_out, usual)))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        real.eval()(**ones(inputs))
    assert measure_inference(made, inputs, "cpu").macs == pytest.approx(counter.get_total_flops() / 2, rel=0.05)
    with FlopCounterMode(display=False) as counter:
        out = real.train()(**ones(labelled))
        (out["loss"] if "loss" in out else next(iter(out.values())).sum()).backward()
    found = measure_training(made, labelled, "cpu")
    assert found.macs == pytest.approx(counter.get_total_flops() / 2, rel=0.05)
    assert found.saved == pytest.approx(kept_bytes(usual.train(), ones(labelled)), rel=0.05)


@pytest.mark.parametrize("family", CONFIGS)
def test_macs_and_kept_bytes_of_every_family(family):
    check(lambda: build(family, main_head(family)), ADAPTER, 7)


@pytest.mark.parametrize("part", PARTS)
def test_macs_and_kept_bytes_of_every_part(part):
    if part == "attention-joint":
        pytest.skip("on a processor the sums of its far field go another way: see the next test")
    check(lambda: tiny("bert", vocab_size=30), SNNKConfig(**PARTS[part]), 40)


def test_a_joint_near_field_costs_no_more_than_told():
    """What is told is the way that graphs and accelerators take (exponential_causal.py), which keeps more numbers."""
    model = tiny("bert", vocab_size=30)
    make, inputs = builder_of(model), inputs_for(model, 2, 40, torch.float32)
    config, labelled = SNNKConfig(**PARTS["attention-joint"]), {**inputs, **labels_for(model, inputs)}
    written_out = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    real, usual = (get_snnk_model(each, config) for each in (written_out, model))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        real.eval()(**ones(inputs))
    told = measure_inference(make.patched(config), inputs, "cpu").macs
    assert told == pytest.approx(counter.get_total_flops() / 2, rel=0.08)
    kept = kept_bytes(usual.train(), ones(labelled))
    assert kept < measure_training(make.patched(config), labelled, "cpu").saved < 2.5 * kept


def test_linear_attention_is_counted_at_the_given_length():
    """Twice the tokens: twice the products of linear attention, four times those of softmax."""
    config = SNNKConfig(attention=AttentionPart(num_features=8))
    bert = BertConfig(**{**TEXT, "max_position_embeddings": 2048}, architectures=["BertModel"])

    reports = {length: estimate_cost(bert, config, batch_size=1, length=length) for length in (1024, 2048)}

    def attention_macs(length: int, method: str) -> int:
        without = length * 2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 32
        return reports[length].row(method).macs - without

    assert attention_macs(2048, "full") == 4 * attention_macs(1024, "full") == 2 * 2 * 2048**2 * 32
    assert attention_macs(2048, "snnk") == pytest.approx(2 * attention_macs(1024, "snnk"), rel=0.01)
    assert attention_macs(2048, "snnk") < attention_macs(2048, "full") / 10


def test_what_the_kernels_of_a_gpu_keep():
    """Dropout keeps a bool per number instead of a factor; attention keeps no weights, with dropout neither."""

    def saved(device: str, hidden: float, attention: float) -> int:
        rates = {"hidden_dropout_prob": hidden, "attention_probs_dropout_prob": attention}
        bert = builder_of(tiny("bert", **rates)).full()
        inputs = inputs_for(bert, 3, 40, torch.float32)
        return measure_training(bert, {**inputs, **labels_for(bert, inputs)}, device).saved

    numbers = 5 * 3 * 40 * 32 + 3 * 32  # behind embeddings, twice per layer, before the classifier
    kept = {device: saved(device, 0.1, 0.0) for device in ("cpu", "cuda")}
    assert kept["cpu"] - kept["cuda"] == 3 * numbers
    assert saved("cuda", 0.1, 0.1) == kept["cuda"]
    weights = 2 * 3 * 2 * 40 * 40  # layers, examples, heads, pairs of tokens
    assert saved("cpu", 0.1, 0.1) - kept["cpu"] > 2 * 4 * weights


# --- memory and traffic of processes ----------------------------------------------------------------------------------

PEAK = """
import ctypes, json, sys
from pathlib import Path
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
import torch
from transformers import BertConfig, BertForSequenceClassification
from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model

torch.set_num_threads(1)
model = BertForSequenceClassification(BertConfig(**json.loads(sys.argv[1])))
if sys.argv[2] == "snnk":
    model = get_snnk_model(model, SNNKConfig(adapter=AdapterPart()))
batch = {"input_ids": torch.ones(16, 128, dtype=torch.long), "labels": torch.zeros(16, dtype=torch.long)}
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

def step():
    model.train()(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def forward():
    with torch.no_grad():
        model.eval()(**batch)

def growth(run):
    run()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    Path("/proc/self/clear_refs").write_text("5")
    run()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 - before

print(json.dumps([growth(step), growth(forward)]))
"""
MEMORY = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is told by Linux alone")


@MEMORY
@pytest.mark.parametrize("method", ["full", "snnk"])
def test_peak_memory_of_a_process(root, method):
    """Resident memory of a fresh process during one step and one forward pass, dropout included."""
    sizes = {"vocab_size": 500, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    done = run_python(["-c", PEAK, json.dumps(sizes | {"intermediate_size": 1024}), method], cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    training, inference = json.loads(done.stdout.splitlines()[-1])
    assert training > 5e7  # beside which the noise of a process, some 100 kB, is small
    bert = BertConfig(**sizes, intermediate_size=1024)
    config, task = SNNKConfig(adapter=AdapterPart()), CLASSIFIER
    row = estimate_cost(bert, config, task=task, batch_size=16, length=128, device="cpu").row(method)
    assert row.training_bytes - row.weight_bytes - row.optimizer_bytes == pytest.approx(training, rel=0.05)
    assert row.inference_bytes - row.weight_bytes == pytest.approx(inference, rel=0.05)


TRAFFIC = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification
from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model

rank, store, sizes = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
batch = {"input_ids": torch.ones(2, 7, dtype=torch.long), "labels": torch.zeros(2, dtype=torch.long)}

def patched():
    return get_snnk_model(BertForSequenceClassification(BertConfig(**sizes)), SNNKConfig(adapter=AdapterPart()))

class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            name = func._schema.name.removeprefix("c10d::")
            self.bytes[name] = self.bytes.get(name, 0) + max(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))

reduced = []
def hook(state, bucket):
    reduced.append(bucket.buffer().nbytes)
    return allreduce_hook(None, bucket)

ddp = torch.nn.parallel.DistributedDataParallel(patched())
ddp.register_comm_hook(None, hook)
with Collectives() as seen:
    ddp(**batch).loss.backward()
share = 1 / 2  # (n - 1) / n: what a collective over n processes in a ring sends, as a part of the whole
found = {"ddp": 2 * share * sum(reduced), "buffers": share * seen.bytes["broadcast_"]}

sharded = patched()
for layer in sharded.base_model.model.bert.encoder.layer:
    fully_shard(layer)
fully_shard(sharded, reshard_after_forward=True)
with Collectives() as seen:
    sharded(**batch).loss.backward()
found["fsdp"] = share * (seen.bytes["_allgather_base_"] + seen.bytes["_reduce_scatter_base_"])
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


def test_bytes_that_two_processes_send(root, tmp_path):
    """DDP through a hook that sees its buckets, FSDP2 through its collectives."""
    sizes = {key: value for key, value in TEXT.items() if key != "max_position_embeddings"}
    arguments = ["-c", TRAFFIC]
    ranks = [start_python([*arguments, str(r), str(tmp_path / "store"), json.dumps(sizes)], cwd=root) for r in range(2)]
    said = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    found = json.loads(said[0].splitlines()[-1])
    config, task = SNNKConfig(adapter=AdapterPart()), CLASSIFIER
    row = estimate_cost(BertConfig(**sizes), config, task=task, batch_size=2, length=7, processes=2).row("snnk")
    assert row.ddp_bytes == found["ddp"]
    assert row.ddp_buffer_bytes == found["buffers"]
    assert row.fsdp_bytes == pytest.approx(found["fsdp"], rel=0.05)  # FSDP pads what does not divide


# --- large models -----------------------------------------------------------------------------------------------------

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LLAMA = {
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
}
BIG: dict[str, tuple[Any, str, int, dict[str, Any]]] = {
    "bert-large": (BertConfig(**LARGE), "BertForMaskedLM", 335_174_458, {}),
    "vit-l": (ViTConfig(**LARGE, num_labels=1000), "ViTForImageClassification", 304_326_632, {}),
    "llama-8b": (
        LlamaConfig(**LLAMA),
        "LlamaForCausalLM",
        8_030_261_248,
        {"batch_size": 1, "length": 4096, "dtype": "bfloat16"},
    ),
}


@pytest.mark.slow
@MEMORY
@pytest.mark.parametrize("name", BIG)
def test_large_models_cost_seconds_and_no_memory(tmp_path, name):
    config, architecture, parameters, arguments = BIG[name]
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    Path("/proc/self/clear_refs").write_text("5")
    start = time.process_time()
    report = estimate_cost(tmp_path / "config.json", SNNKConfig(adapter=AdapterPart()), **arguments)
    assert time.process_time() - start < 20
    lines = Path("/proc/self/status").read_text().splitlines()
    assert int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 - resident < 3e8
    assert report.row("full").parameters == parameters  # as published
    assert [row.method for row in report.rows] == ["full", "lora", "snnk", "bundle"]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A small model's config.json, and snnk.yaml."""
    monkeypatch.chdir(tmp_path)
    tiny_config = BertConfig(**TEXT, architectures=["BertForSequenceClassification"])
    tiny_config.save_pretrained(tmp_path / "model")
    Path("snnk.yaml").write_text("adapter:\n  num_features: 4\n")
    return tmp_path


def command(*arguments: str) -> int:
    """The exit code of `snnk cost`."""
    with pytest.raises(SystemExit) as left:
        app(["cost", *arguments])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_command_prints_the_table_or_json(folder, capsys):
    options = ["--config", "snnk.yaml", "--batch-size", "2", "--length", "7", "--processes", "4"]
    report = estimate_cost("model", ADAPTER, batch_size=2, length=7, processes=4)
    assert command("model/config.json", *options) == 0
    shown = capsys.readouterr().out
    for line in report.cells():
        assert all(cell in shown for cell in line)
    assert command("model/config.json", *options, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == report.to_dict()
    assert printed["inputs"] == {"input_ids": [2, 7]}


def test_command_takes_low_rank_layers_and_default_adapters(folder, capsys):
    Path("snnk.yaml").write_text("low_rank: {targets: ffn, rank: 4}\n")
    for options, config in (
        (["--config", "snnk.yaml"], SNNKConfig(low_rank=LowRankPart(targets="ffn", rank=4))),
        ([], SNNKConfig(adapter=AdapterPart())),
    ):
        assert command("model", *options, "--length", "7", "--json") == 0
        assert json.loads(capsys.readouterr().out) == estimate_cost("model", config, length=7).to_dict()


WRONG = {
    "no model": (["nowhere/at-all"], {}, "no config could be read"),
    "no yaml": (["model", "--config", "absent.yaml"], {}, "absent.yaml cannot be read"),
    "no mapping": (["model"], {"snnk.yaml": "- 1"}, "holds list"),
    "a recipe": (["model"], {"snnk.yaml": "method: {adapter: {}}"}, "below 'method:'"),
    "unknown field": (["model"], {"snnk.yaml": "adaptr: {}"}, "did you mean 'adapter'"),
    "faulty part": (["model"], {"snnk.yaml": "adapter: {num_features: 0}"}, "num_features is 0"),
    "does not fit": (["model"], {"snnk.yaml": "adapter: {layers: [7]}"}, "the model has 2 layers"),
    "too long": (["model", "--length", "99"], {}, "positions for 40 tokens"),
    "no batch": (["model", "--batch-size", "0"], {}, "batch_size is 0"),
    "no images": (["model", "--image-size", "8"], {}, "has no images"),
    "damaged json": (["bad"], {"bad/config.json": "{"}, "no config could be read"),
    "no model type": (["bad"], {"bad/config.json": "{}"}, "no config could be read"),
    "heads": (["bad"], {"bad/config.json": {"hidden_size": 30, "num_attention_heads": 4}}, "cannot be built"),
    "negative": (["bad"], {"bad/config.json": {"hidden_size": -4}}, "cannot be built"),
    "architecture": (["bad"], {"bad/config.json": {"architectures": ["BertForMiracles"]}}, "give a task"),
    "quantized": (["bad"], {"bad/config.json": {"quantization_config": {"quant_method": "gptq"}}}, "quantized"),
    "bundle": (["bad"], {"bad/config.json": {"snnk_plan": {}}}, "bundle"),
    "adapter": (["bad"], {"bad/adapter_config.json": "{}"}, "holds an adapter"),
    "family": (["bad"], {"bad/config.json": {"model_type": "t5", "architectures": ["T5Model"]}}, "t5"),
}


@pytest.mark.parametrize("case", WRONG)
def test_faults_are_told_with_exit_code_2(folder, capsys, case):
    arguments, files, message = WRONG[case]
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        plain = content if isinstance(content, str) else json.dumps({"model_type": "bert", **content})
        Path(name).write_text(plain)
    given = arguments if "--config" in arguments else [*arguments, "--config", "snnk.yaml"]
    assert command(*given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_a_part_that_reads_numbers_is_told():
    @PARTS_REGISTRY.register("reads_numbers")
    @dataclass
    class ReadsNumbers(Part):
        def plan(self, context: PatchContext) -> list[Patch]:
            linear = context.linear("classifier", "the head")
            return [Patch("classifier", None, train=bool(linear.weight.norm() > 0))]

    try:
        with pytest.raises(UnsupportedError, match="patching the model is not possible on the meta device"):
            estimate_cost(builder_of(tiny("bert")).config, SNNKConfig(parts=[ReadsNumbers()]), task=CLASSIFIER)
    finally:
        PARTS_REGISTRY._members.pop("reads_numbers")


def test_the_command_prints_what_its_page_shows(root, tmp_path):
    page = (root / "docs/guides/cost.md").read_text(encoding="utf-8")
    settings, shown = re.search(r"```yaml\n(.*?)```\n\n```console\n(.*?)```", page, re.DOTALL).groups()
    command, expected = shown.split("\n", 1)
    BertConfig(**LARGE, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "bert-large-uncased")
    (tmp_path / "snnk.yaml").write_text(settings)
    done = run_python(["-m", "snnk_cli", *shlex.split(command.removeprefix("$ snnk "))], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == expected.split(), done.stdout
