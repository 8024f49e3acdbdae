"""The low-rank part through every door: planned, trained, fitted, folded, saved, loaded elsewhere; and bad input."""

from __future__ import annotations

import re

import peft
import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments
from transformers.exporters import DynamoConfig, DynamoExporter

from snnk_peft import AdapterPart, FFNPart, LowRankPart, NormsPart, SNNKConfig, bundle, calibrate, get_snnk_model
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.layers import low_rank as low_rank_layers
from snnk_peft.parts.low_rank.slot import LowRankSlot
from tests.elsewhere import check_elsewhere, save_known
from tests.tiny_families import build
from tests.tiny_models import inputs_for, logits, tiny, trained

WHERE = "base_model.model."


def resnet(labels: int = 3) -> ResNetForImageClassification:
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=labels)).eval()


def pictures(count: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))}


def texts(seed: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 100, (8, 12), generator=torch.Generator().manual_seed(seed))}


def slots(model: nn.Module) -> dict[str, LowRankSlot]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, LowRankSlot)}
    return {name.removeprefix(WHERE).partition(".snnk_slots")[0]: slot for name, slot in found.items()}


def low_rank(model: nn.Module, *parts: LowRankPart, **options) -> peft.PeftModel:
    return get_snnk_model(model, SNNKConfig(parts=list(parts), **options)).eval()


# --- which modules, and which rank ------------------------------------------------------------------------------------

ROLES = {
    ("bert", "ffn"): ["intermediate.dense", "output.dense"],
    ("bert", "attention"): [f"attention.{name}" for name in ("self.query", "self.key", "self.value", "output.dense")],
    ("llama", "ffn"): ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
    ("llama", "attention"): ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"],
    ("gpt2", "ffn"): ["mlp.c_fc", "mlp.c_proj"],
    ("gpt2", "attention"): ["attn.c_attn", "attn.c_proj"],
    ("vit", "ffn"): ["mlp.fc1", "mlp.fc2"],
}  # fmt: skip
PREFIX = {"bert": "bert.encoder.layer", "llama": "model.layers", "gpt2": "transformer.h", "vit": "vit.layers"}


@pytest.mark.parametrize(("family", "role"), ROLES)
def test_roles_and_full_rank(family, role):
    """Every module of the role in one layer; at full rank nothing changes, in the model and in its bundle."""
    decoders = {"llama": "LlamaForSequenceClassification", "gpt2": "GPT2ForSequenceClassification"}
    model = build(family, decoders[family]) if family in decoders else tiny(family)
    batch = inputs_for(model)
    if family == "llama":
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    with torch.no_grad():
        expected = model(**batch)[0]
    patched = low_rank(model, LowRankPart(role, rank_scale=1.0, layers="top-1"), modules_to_save=[])
    assert sorted(slots(patched)) == sorted(f"{PREFIX[family]}.1.{name}" for name in ROLES[family, role])
    for form in (patched, bundle(patched)):
        with torch.no_grad():
            torch.testing.assert_close(form(**batch)[0], expected, rtol=1e-4, atol=1e-5)


def test_ranks():
    part = lambda **rank: LowRankPart("*.intermediate.dense", **rank)  # noqa: E731
    ranks = lambda **rank: [slot.layer.rank for slot in slots(low_rank(tiny("bert"), part(**rank))).values()]  # noqa: E731
    assert ranks() == [8, 8]  # a quarter of min(64, 32)
    assert ranks(rank_scale=0.05) == [2, 2]
    assert ranks(rank_scale=0.001) == [1, 1]
    assert ranks(rank=5) == [5, 5]
    assert ranks(energy=1.0) == [32, 32]
    found = ranks(energy=0.7)
    for layer, rank in zip(tiny("bert").bert.encoder.layer, found, strict=True):
        squares = torch.linalg.svdvals(layer.intermediate.dense.weight.double()).square()
        share = squares.cumsum(0) / squares.sum()
        assert share[rank - 1] >= 0.7 > share[rank - 2]


def test_patterns_name_what_to_leave_out():
    part = LowRankPart(["resnet.*", "!*.embedder.*", "!*shortcut*"], kind="conv", rank=2)
    found = slots(low_rank(resnet(), part))
    assert len(found) == 4
    assert all(".layer." in path for path in found)
    assert sorted(slots(low_rank(resnet(), LowRankPart("*", kind="linear", rank=2), modules_to_save=[]))) == [
        "classifier.1"
    ]


class Depthwise(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1, groups=2), nn.Flatten(), nn.Linear(8, 6), nn.Linear(6, 6)
        )
        self.twin = nn.Linear(6, 6)
        self.twin.weight = self[4].weight


def test_all_that_cannot_be_factorised_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        low_rank(Depthwise(), LowRankPart("*", rank=6))
    faults = caught.value.faults
    for fault, text in zip(faults, (
        r"'0', which targets='*' matches, is a depthwise convolution, 4 groups of 1 channels",
        r"'1', which targets='*' matches, is a grouped convolution, 2 groups of 2 channels",
        r"'4', which targets='*' matches, shares its weight",
        r"'twin', which targets='*' matches, shares its weight",
    ), strict=True):  # fmt: skip
        assert f"parts[0]: {text}" in fault, fault
    with pytest.raises(ConfigError, match=r"'3', .* is a 6 × 8 matrix of full rank 6; expected rank <= 6, given 7"):
        low_rank(Depthwise(), LowRankPart("3", rank=7))
    model = Depthwise()
    with pytest.raises(ConfigError, match=r"targets is 'heads.\*', which matches nothing in Depthwise .* one of these"):
        low_rank(model, LowRankPart("heads.*"))
    with pytest.raises(ConfigError, match=r"matches '2' \(Flatten\) in Depthwise and no module of kind 'all'"):
        low_rank(model, LowRankPart("2"))
    assert not any(isinstance(module, LowRankSlot) for module in model.modules())


def test_modules_that_are_read_and_not_called():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(ConfigError, match=r"'self_attn.out_proj', .* read by nn.MultiheadAttention and never called"):
        low_rank(model, LowRankPart("self_attn.*"))
    with pytest.raises(ConfigError, match=r"'linear1', .* fast path .*set_fastpath_enabled\(False\)"):
        low_rank(model, LowRankPart("linear1"))
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        patched, x = low_rank(model, LowRankPart("linear1", rank=1)), torch.randn(2, 3, 8)
        with torch.no_grad():
            changed = patched(x)
            with patched.disable_adapter():
                assert not torch.allclose(patched(x), changed)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)

    class Standardized(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._conv_forward(x, self.weight / self.weight.std(), self.bias)

    with pytest.raises(ConfigError, match=r"is a Standardized with a forward\(\) of its own"):
        low_rank(nn.Sequential(Standardized(3, 4, 3)), LowRankPart("*"))


def test_faults_of_the_options():
    with pytest.raises(ConfigError) as caught:
        SNNKConfig(
            low_rank=LowRankPart(rank=3, energy=0.5, init="spectrum", layers="top-1", targets="*.dense"),
            parts=[
                LowRankPart(rank_scale=1.5),
                LowRankPart(init="data"),
                LowRankPart([]),
                LowRankPart(activation="gelo"),
            ],
        )
    for fault, text in zip(caught.value.faults, (
        "low_rank has rank=3 and energy=0.5; expected one of them",
        "low_rank.init is 'spectrum'; expected 'baseline', ",
        "low_rank.layers is 'top-1' with targets='*.dense'; expected 'all'",
        "parts[0].rank_scale is 1.5; expected a number > 0 and <= 1",
        "parts[1].init is 'data', and a part starts before it has seen any; choose another start",
        "parts[2].targets is empty",
        "parts[3].activation is 'gelo'; expected 'identity', 'relu', ",
    ), strict=True):  # fmt: skip
        assert fault.startswith(text), fault
    with pytest.raises(UnsupportedError, match="has no pooler"):
        low_rank(build("gpt2", "GPT2Model"), LowRankPart("pooler"))


# --- starts, training, calibration ------------------------------------------------------------------------------------


def test_a_start_that_asks_what_follows():
    """In a ReLU network of Gaussian inputs the start by function loses less of the output than that by weights."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(24, 64, bias=False), nn.ReLU()), torch.randn(20000, 24)
    with torch.no_grad():
        expected, lost = net(x), {}
    for init in ("spectral", "function"):
        patched = low_rank(net, LowRankPart("0", rank=2, init=init, activation="relu"))
        with torch.no_grad():
            lost[init] = float((patched(x) - expected).square().mean())
        patched.unload()
    assert lost["function"] < 0.98 * lost["spectral"]


def test_the_optimizer_sees_the_factors_alone(tmp_path):
    """Training in an own loop and by the Trainer; the adapter file then brings them to another copy."""
    data = [{"pixel_values": p, "labels": i % 3} for i, p in enumerate(pictures(12)["pixel_values"])]
    model = low_rank(resnet(), LowRankPart("resnet.encoder.*", rank=3), modules_to_save=[])
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names
    assert all(name.endswith((".layer.U", ".layer.V")) for name in names)  # no bias before BatchNorm
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    batch = {"pixel_values": torch.stack([d["pixel_values"] for d in data]), "labels": torch.arange(12) % 3}
    losses = []
    for _ in range(5):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=data).train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == set(names)
    model.eval().save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(resnet(), tmp_path / "adapter").eval()
    for name, slot in slots(again).items():
        assert torch.equal(slot.layer.U, slots(model)[name].layer.U)


def test_loading_factorises_nothing(tmp_path, monkeypatch):
    """The file brings the factors, also those of ranks that weights decided which are others by now."""
    model = low_rank(tiny("bert"), LowRankPart("ffn", energy=0.6))
    ranks = [slot.layer.rank for slot in slots(model).values()]
    assert len(set(ranks)) > 1
    expected = logits(model, texts(0))
    model.save_pretrained(tmp_path)
    assert SNNKConfig.from_pretrained(tmp_path).parts[0].ranks is not None
    monkeypatch.setattr(low_rank_layers, "factorize", None)
    base = tiny("bert")
    with torch.no_grad():
        for layer in base.bert.encoder.layer:
            layer.intermediate.dense.weight[1:] *= 0.01  # one direction now has nearly all energy
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert [slot.layer.rank for slot in slots(again).values()] == ranks
    assert torch.equal(logits(again, texts(0)), expected)


def test_calibrate_fits_convolutions_and_linears_on_what_they_get():
    batches = [pictures(8, seed) for seed in range(5)]
    for split in ("spatial", "channel"):
        model = low_rank(resnet(), LowRankPart("resnet.*", rank_scale=0.4, split=split), modules_to_save=[])
        with model.disable_adapter():
            expected = logits(model, batches[0])
        before = (logits(model, batches[0]) - expected).square().sum()
        report = calibrate(model, batches, progress=False)
        assert len(report.slots) == len(slots(model)) > 5
        assert all(slot.error_after < slot.error_before + 0.02 for slot in report.slots)
        assert sum(s.error_after for s in report.slots) < 0.7 * sum(s.error_before for s in report.slots)
        assert (logits(model, batches[0]) - expected).square().sum() < 0.5 * before


def test_calibrate_finds_inputs_of_low_rank():
    """Inputs of five dimensions: five columns say all, which the weights alone cannot know; the bias takes the mean."""
    torch.manual_seed(0)
    net, basis = nn.Sequential(nn.Linear(16, 24)), torch.randn(5, 16)
    batches = [{"input": torch.randn(32, 4, 5) @ basis + 3} for _ in range(5)]
    model = low_rank(net, LowRankPart("*", rank=5))
    report = calibrate(model, batches, progress=False)
    assert report.slots[0].error_before > 0.3
    assert report.slots[0].error_after < 1e-8
    x = batches[0]["input"]
    with torch.no_grad():
        torch.testing.assert_close(model(x), net[0].base_layer(x), rtol=1e-4, atol=1e-4)
        measured = (model(x) - net[0].base_layer(x)).square().sum()
    assert measured < 1e-8 * net[0].base_layer(x).square().sum()


@pytest.mark.parametrize("split", ["channel", "spatial"])
def test_calibrate_looks_behind_the_activation(split):
    """What a ReLU lets through counts, also where rows of the factors are parts of outputs."""
    torch.manual_seed(0)
    net, lost = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()), {}
    batches = [{"input": torch.randn(16, 3, 12, 12) * torch.tensor([1, 2, 0.5]).view(3, 1, 1)} for _ in range(5)]
    with torch.no_grad():
        expected = net(batches[0]["input"])
    for activation in (None, "relu"):
        model = low_rank(net, LowRankPart("0", rank=2, split=split, activation=activation, frobenius_decay=0.1))
        assert slots(model)["0"].layer.frobenius_decay == 0.1  # where FrobeniusDecay looks
        report = calibrate(model, batches, progress=False)
        with torch.no_grad():
            lost[activation] = float((model(batches[0]["input"]) - expected).square().sum())
        model.unload()
    assert lost["relu"] < 0.98 * lost[None]
    spread = float((expected - expected.mean((0, 2, 3), keepdim=True)).square().sum())
    assert report.slots[0].error_after == pytest.approx(lost["relu"] / spread, rel=0.1)  # errors behind it are told


# --- bundles ----------------------------------------------------------------------------------------------------------

BUNDLES = {
    "bert": [LowRankPart("ffn", rank=3), LowRankPart("attention", rank_scale=0.9), LowRankPart("pooler", rank=2)],
    "resnet": [LowRankPart(["resnet.encoder.*", "!*shortcut*"], rank=3), LowRankPart("*shortcut*", split="channel")],
}


def bundled(name: str):
    base, batch = (tiny("bert"), texts(0)) if name == "bert" else (resnet(), pictures(3))
    model = trained(low_rank(base, *BUNDLES[name], modules_to_save=[]), std=0.3).eval()
    return bundle(model), batch, logits(model, batch)


def test_a_bundle_is_plain_and_loads_in_a_fresh_process(tmp_path):
    folders = []
    for name in BUNDLES:
        small, batch, expected = bundled(name)
        torch.testing.assert_close(logits(small, batch), expected, rtol=1e-4, atol=1e-5)
        folders.append(save_known(small, batch, tmp_path / name))
        if name == "bert":
            layer = small.bert.encoder.layer[0]
            assert type(layer.attention.self.query) is nn.Linear  # 29 of 32: cheaper in one piece
            assert [type(m) for m in layer.intermediate.dense] == [nn.Linear, nn.Linear]
            after = {line.paths[0]: line.after for line in small.bundle_report.folded}
            assert after["bert.encoder.layer.0.intermediate.dense"] == "Linear 32→3 + Linear 3→64"
            assert small.num_parameters() < 0.8 * tiny("bert").num_parameters()
        else:
            pair = small.resnet.encoder.stages[0].layers[0].layer[0].convolution
            assert [m.kernel_size for m in pair] == [(3, 1), (1, 3)]
    check_elsewhere(*folders)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    model = low_rank(tiny("bert").to(dtype), *BUNDLES["bert"])
    assert all(slot.layer.U.dtype == torch.float32 for slot in slots(model).values())  # as PEFT keeps what is trained
    before = logits(model, texts(0))
    assert before.dtype == dtype
    small = bundle(model)
    assert {p.dtype for p in small.parameters()} == {dtype}
    torch.testing.assert_close(logits(small, texts(0)), before, rtol=0.1, atol=0.05)
    calibrate(model, [texts(seed) for seed in range(3)], progress=False)
    assert torch.isfinite(logits(model, texts(0))).all()


def test_beside_other_parts():
    """Low rank where others want to multiply their matrices in, and inside of what others are put behind."""
    for others in (
        [FFNPart(num_features=6, layers=[0]), AdapterPart(num_features=4)],
        [AdapterPart(num_features=4, placement="parallel")],
        [AdapterPart(num_features=4, placement="query_value")],
    ):
        parts = [LowRankPart("*.output.dense", rank=4), LowRankPart("*.query", rank=4), *others]
        config = SNNKConfig(parts=parts, modules_to_save=[])
        model = trained(get_snnk_model(tiny("bert"), config), std=0.2).eval()
        expected = logits(model, texts(0))
        torch.testing.assert_close(logits(bundle(model), texts(0)), expected, rtol=1e-4, atol=1e-5)
        with model.disable_adapter():
            assert torch.equal(logits(model, texts(0)), logits(tiny("bert"), texts(0)))
    both = [LowRankPart("ffn"), FFNPart(num_features=6)]
    with pytest.raises(ConfigError, match=r"parts\[0\] and parts\[1\] both replace 'bert.encoder.layer.0.interm"):
        get_snnk_model(tiny("bert"), SNNKConfig(parts=both))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", BUNDLES)
def test_exported(name):
    small, batch, expected = bundled(name)
    program = DynamoExporter().export(small, dict(batch), config=DynamoConfig(dynamic=True))
    torch.testing.assert_close(program(**batch).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", [["*", "!*.layer.7.*"], ["*.query", "*.qeury"]])
def test_a_pattern_that_matches_nothing_is_refused_by_name(targets):
    idle = targets[-1].removeprefix("!")
    with pytest.raises(ConfigError, match=re.escape(repr(idle))):
        get_snnk_model(tiny("bert"), SNNKConfig(low_rank=LowRankPart(targets=targets, rank=2), modules_to_save=[]))


@pytest.mark.parametrize(
    ("part", "targets"),
    [(LowRankPart, ["*", "!*.layers.0.*"]), (LowRankPart, "*.layers.1.*"), (NormsPart, "*.layers.1.*")],
)
@pytest.mark.parametrize("model_class", ["LlamaModel", "LlamaForCausalLM"])
def test_a_pattern_means_the_same_layer_of_a_bare_model(model_class, part, targets):
    """Its path is "layers.0" there and "model.layers.0" behind a head."""
    size = {"rank": 2} if part is LowRankPart else {}
    model = get_snnk_model(build("llama", model_class), SNNKConfig(parts=[part(targets, **size)], modules_to_save=[]))
    changed = {path for path in model.peft_config["default"].target_modules if "layers." in path}
    assert changed
    assert all("layers.1." in path for path in changed)
