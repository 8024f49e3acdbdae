"""What ends calibrate early leaves the model bit for bit as it was; passes that begin at stored inputs; autocast."""

from __future__ import annotations

import copy
import gc
import hashlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import snnk_peft
from snnk_peft import (
    AdapterPart,
    AttentionPart,
    FFNPart,
    LowRankPart,
    NarrowFFNPart,
    NarrowHeadsPart,
    PoolerPart,
    SNNKConfig,
    bundle,
    calibrate,
    calibrate_adapters,
    fit_closed_form,
    get_snnk_model,
)
from snnk_peft.bundling.report import probe_inputs
from snnk_peft.calibrating.attention import fit_attention
from snnk_peft.calibrating.guards import all_or_nothing
from snnk_peft.calibrating.stored_inputs import StoredInputs
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.families import FAMILIES
from snnk_peft.layers.slots import Fitter
from tests.package.test_calibrate import tiny_bert
from tests.tiny_families import build, main_head
from tests.tiny_models import half_padded, logits, tiny
from tests.two_linears_part import LeastSquares, TwoLinearsPart

VOCABULARY = 60
CENTROIDS = AttentionPart("mixture", "centroids", num_features=6, layers=[0])
JOINT = AttentionPart(
    "mixture", "centroids", num_features=6, near_field=2, near_field_normalisation="joint", sinks=1, layers=[0]
)
KINDS: dict[str, list[Any]] = {
    "attention, FFN and pooler": [CENTROIDS, FFNPart(num_features=6), PoolerPart(num_features=6)],
    "heads": [NarrowHeadsPart(head_dim=4)],
    "narrow FFN": [NarrowFFNPart(keep=0.5)],
    "near and far": [JOINT],
    "low rank": [LowRankPart(rank=4, targets="ffn")],
}


def patched(parts: list[Any], **config: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24, "vocab_size": VOCABULARY}
    return get_snnk_model(tiny("bert", **sizes, **config), SNNKConfig(parts=parts))


def texts(count: int = 5, length: int = 9) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(count):
        ids = torch.randint(2, VOCABULARY, (8, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[::2, -3:] = 0
        found.append({"input_ids": ids * mask, "attention_mask": mask})
    return found


def everything(model: nn.Module) -> dict[str, Any]:
    """Tensors bit for bit, and which objects all modules hold: hooks, flags, children, owners."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            inside = [(key, id(each)) for key, each in value.items()] if isinstance(value, dict) else []
            found[f"{path}/{name}"] = (id(value), inside)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        numbers = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        found[name] = (id(tensor), tensor.requires_grad, tensor.grad, hashlib.sha256(numbers).hexdigest())
    return found


class Interrupted:
    """Ctrl-C at the n-th line of the package that runs; counts the lines otherwise."""

    folder = str(Path(snnk_peft.__file__).parent)

    def __init__(self, moment: int | None = None):
        self.moment, self.lines = moment, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.folder):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.moment:
                raise KeyboardInterrupt
        return self

    def run(self, function: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        finally:
            sys.settrace(before)


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_at_any_moment(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, data = patched(KINDS[kind]).train(), texts()
    model.base_model.model.classifier.register_forward_pre_hook(lambda module, args: None)  # one of the user's
    model(**data[0])
    calibrate(copy.deepcopy(model), data, progress=False)  # registries are filled when they are first used
    whole, finished = Interrupted(), copy.deepcopy(model)
    whole.run(lambda: calibrate(finished, data, progress=False))
    before = everything(model)
    moments = torch.linspace(1, whole.lines - 1, 10).long().tolist()
    for moment in moments:
        with pytest.raises(KeyboardInterrupt):
            Interrupted(moment).run(lambda: calibrate(model, data, progress=False))
        assert everything(model) == before, f"line {moment} of {whole.lines}"
    calibrate(model, data, progress=False)  # and it still works
    for name, value in model.state_dict().items():
        assert torch.equal(value, finished.state_dict()[name]), name
    assert everything(model) != before
    gc.collect()
    assert not list(tmp_path.iterdir())


def _attention(model: nn.Module, data: list[dict[str, torch.Tensor]]) -> Any:
    return fit_attention(model, data, steps=4, progress=False)


def _rows(model: nn.Module, data: list[dict[str, torch.Tensor]]) -> Any:
    return calibrate_adapters(model, data, progress=False)


LEARNED = AttentionPart("softmax_pm", "free", num_features=6)
DOORS = {
    "fit_attention": (LEARNED, _attention),
    "calibrate_adapters": (AdapterPart("gelu", "free", num_features=4, placement="query_value"), _rows),
    "fit_closed_form": (PoolerPart(num_features=6), fit_closed_form),
}


@pytest.mark.parametrize("door", DOORS)
def test_ctrl_c_in_other_doors_that_fit(door: str) -> None:
    part, fit = DOORS[door]
    model: Any = patched([part]).train()
    if door == "fit_closed_form":
        model = bundle(model).train()
    data = [{**batch, "labels": batch["input_ids"][:, 0] % 2} for batch in texts()]
    fit(copy.deepcopy(model), data)
    whole, finished = Interrupted(), copy.deepcopy(model)
    whole.run(lambda: fit(finished, data))
    before = everything(model)
    last = whole.lines - 40  # further on, it has done what it does, and tells of it
    for moment in torch.linspace(1, last, 25).long().tolist():
        with pytest.raises(KeyboardInterrupt):
            Interrupted(moment).run(lambda: fit(model, data))
        assert everything(model) == before, f"line {moment} of {whole.lines}"
    fit(model, data)  # and it still works
    assert all(torch.equal(value, finished.state_dict()[name]) for name, value in model.state_dict().items())
    assert everything(model) != before


def test_an_error_in_the_last_slot_takes_the_first_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_snnk_model(tiny("bert", num_labels=3), SNNKConfig(parts=[TwoLinearsPart("*.intermediate.dense")]))
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": torch.randint(3, 90, (4, 7), generator=generator)} for _ in range(4)]
    before, fit = everything(model), LeastSquares.fit
    fits = []

    def failing(self: Fitter, given: Any) -> Any:
        fits.append(fit(self, given))
        self.slot.U.weight.grad = torch.ones_like(self.slot.U.weight)
        if len(fits) == 2:
            raise RuntimeError("out of luck")
        return fits[-1]

    monkeypatch.setattr(LeastSquares, "fit", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        calibrate(model, data, progress=False)
    assert fits[0].error_after < fits[0].error_before  # it was changed
    assert everything(model) == before


def test_a_second_ctrl_c_does_not_stop_the_restoration() -> None:
    model = patched(KINDS["heads"]).eval()
    before = everything(model)
    restoring = Interrupted(60)  # far in the restoration: the block itself has a few lines only

    def interrupted() -> None:
        with all_or_nothing(model):
            for name, parameter in model.named_parameters():
                if "snnk_slots" in name:
                    parameter.data.zero_()
            model.train()
            sys.settrace(restoring)
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        sys.settrace(None)
    assert restoring.lines >= 60
    assert everything(model) == before


def test_memory_for_it_is_what_the_slots_hold() -> None:
    """The copies that are alive while calibration runs, against the numbers in the slots."""
    model = patched([FFNPart(num_features=6)])
    slots = {id(t): t for n, t in [*model.named_parameters(), *model.named_buffers()] if "snnk_slots" in n}
    made = []
    clone = torch.Tensor.clone

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(tensor.numel())
        return clone(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", counted)
        with all_or_nothing(model):
            pass
    assert sum(made) == sum(tensor.numel() for tensor in slots.values())


# --- bad input ------------------------------------------------------------------------------------------------------


def refused(model: nn.Module, batches: Any, message: str, error: type[Exception] = ConfigError) -> None:
    before = everything(model)
    with pytest.raises(error, match=message):
        calibrate(model, batches, progress=False)
    assert everything(model) == before


def without_masks(batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": batch["input_ids"]} for batch in batches]


@pytest.fixture
def model() -> nn.Module:
    return patched([FFNPart(num_features=6)])


def forbid_forward(model: nn.Module) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model ran")

    model.get_base_model().bert.forward = never


@pytest.mark.parametrize(("wrong", "at"), [(VOCABULARY, 3), (-100, 0)])
def test_token_ids_beyond_the_vocabulary(model: nn.Module, wrong: int, at: int) -> None:
    forbid_forward(model)
    data = texts(6)
    data[at]["input_ids"][5, 2] = wrong
    message = (
        f"batch {at} has token id {wrong} .row 5, place 2.; the model's embeddings have 60 rows, expected ids from"
    )
    refused(model, data, message)
    for batch in data:
        batch["input_ids"][1, 1] = VOCABULARY + 7
    refused(model, data, "(?s)5 faults:.*batch 3 has.*and 2 more")


def test_padding_without_masks(model: nn.Module) -> None:
    forbid_forward(model)
    message = "batch 0 has no attention_mask, and 4 of its 8 rows begin or end with padding .token 0."
    refused(model, without_masks(texts()), message)
    left = [{"input_ids": batch["input_ids"].flip(1)} for batch in texts()]
    refused(model, left, message)


def test_padding_by_the_token_that_ends_a_text() -> None:
    model = patched([FFNPart(num_features=6)], pad_token_id=None, eos_token_id=0)
    refused(model, without_masks(texts()), "begin or end with padding .token 0.")


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: {"input_ids": ids, "attention_mask": torch.ones_like(ids)},  # these are real, it is said
        lambda ids: {"input_ids": ids[:, :-2]},  # one at the end may be a token like any other
        lambda ids: {"input_ids": ids.clamp_min(1)},  # the padding token is not there
    ],
)
def test_what_may_be_text_is_text(model: nn.Module, change: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> None:
    calibrate(model, [change(batch["input_ids"]) for batch in texts()], progress=False)


def test_masks_that_do_not_fit(model: nn.Module) -> None:
    data = [{**batch, "attention_mask": batch["attention_mask"][:, 1:]} for batch in texts(6)]
    refused(model, data, r"(?s)batch 0 has an attention_mask \(8, 8\) for input_ids \(8, 9\).*and 2 more")


def test_exhausted_iterators(model: nn.Module) -> None:
    iterator = iter(texts())
    refused(model, iterator, "list_iterator, which can be read only once")
    refused(model, lambda: iterator, "batches gave 5 when first read, and 0 when read again; expected the same")
    refused(model, lambda: iterator, "batches is empty")
    counts = itertools.count(8, -1)
    refused(model, lambda: texts(next(counts)), "batches gave 8 when first read, and [56] when read again")
    more = itertools.count(5)
    refused(model, lambda: texts(next(more)), "batches gave 5 when first read, and more than 5 when read again")


def test_another_order_is_noticed(model: nn.Module) -> None:
    data, turns = texts(), itertools.count()

    def turned() -> Iterator[dict[str, torch.Tensor]]:
        return iter(data if next(turns) % 2 else data[::-1])

    with pytest.warns(NumericalWarning, match="batch 0 is not what it was when batches was first read.*shuffle=False"):
        calibrate(model, turned, progress=False)


@pytest.mark.parametrize(
    ("part", "path"),
    [
        (FFNPart(num_features=6), "bert.encoder.layer.0.intermediate.dense"),
        (CENTROIDS, "bert.encoder.layer.0.attention.self"),
        (NarrowHeadsPart(head_dim=4), "bert.encoder.layer.0.attention"),
    ],
)
def test_activations_that_are_not_finite(part: Any, path: str) -> None:
    """A token whose embedding overflows, in one batch; slot and batch are named, and the model stays."""
    model, data = patched([part]), texts()
    with torch.no_grad():
        model.get_base_model().bert.embeddings.word_embeddings.weight[1] = torch.tensor([3e38, -3e38] * 8)
    data[3]["input_ids"][2, :2] = 1
    refused(model, data, f"{path}, batch 3: .* hold NaN or infinity; expected finite", ValueError)


def test_what_overflows_inside_a_layer_is_named_too() -> None:
    model, data = patched([FFNPart(num_features=6)]), texts()
    with torch.no_grad():
        model.get_base_model().bert.encoder.layer[0].intermediate.dense.base_layer.weight[0] = 3e38
    message = r"bert.encoder.layer.0.intermediate.dense, batch 0: hidden activations hold NaN or infinity"
    refused(model, data, message, ValueError)


# === passes that begin at the layer whose inputs are stored ===========================================================


LAYERS = 4


def given(model, count: int = 5) -> list[dict[str, torch.Tensor]]:
    """Batches that differ, with padding where there is text."""
    made = []
    for number in range(count):
        generator, batch = torch.Generator().manual_seed(number), probe_inputs(model)
        for name, value in batch.items():
            if value.is_floating_point():
                batch[name] = torch.randn(value.shape, generator=generator)
            elif name == "input_ids":
                batch[name] = torch.randint(4, 50, value.shape, generator=generator)
        made.append(batch)
    return made


def calibrated(
    model, config, batches, monkeypatch, *, full: bool, metric: str = "local"
) -> tuple[dict[str, torch.Tensor], int]:
    """What the slots hold afterwards, and how often the first layer ran."""
    family = FAMILIES[model.config.model_type]
    patched = get_snnk_model(copy.deepcopy(model), copy.deepcopy(config))
    first = patched.get_base_model().get_submodule(f"{family.layer_paths(model)[0]}.{family.attention}")
    runs: list[int] = []
    first.register_forward_pre_hook(lambda module, args: runs.append(1))
    with monkeypatch.context() as patch:
        if full:
            patch.setattr(StoredInputs, "load", lambda *args: None)
        calibrate(patched, batches, metric=metric, progress=False)
    return {name: value for name, value in patched.state_dict().items() if "snnk_slots" in name}, len(runs)


@pytest.mark.parametrize("family", sorted({"bert", "gpt2", "llama", "modernbert", "mpnet", "deberta-v2", "vit"}))
@pytest.mark.parametrize("metric", ["local", "output"])
def test_what_is_fitted_is_the_same(family, metric, monkeypatch):
    layers = {"n_layer": LAYERS} if family == "gpt2" else {"num_hidden_layers": LAYERS}
    model = build(family, main_head(family), **layers)
    config = SNNKConfig(parts=[NarrowFFNPart()], modules_to_save=[])
    batches = given(model)
    short, few = calibrated(model, config, batches, monkeypatch, full=False, metric=metric)
    full, many = calibrated(model, config, batches, monkeypatch, full=True, metric=metric)
    for name, value in full.items():
        torch.testing.assert_close(short[name], value, rtol=1e-4, atol=1e-5)
    if metric == "output":  # besides: one pass for gradients, two runs to find each sum, and the original's passes
        assert many == 1 + len(batches) + LAYERS * len(batches) + (LAYERS - 1) * (2 + len(batches))
        assert few < many or family == "deberta-v2"
        return
    assert many == 1 + LAYERS * len(batches)
    if family == "deberta-v2":  # whose layers give more than they are given; the first look at this costs three runs
        assert few == many + 3
        return
    # To see the order; the first pass; the second, which begins here, its first batch three times; checks of others.
    assert few == 1 + len(batches) + len(batches) + 2 + LAYERS - 2


def test_a_pooler_behind_the_layers(monkeypatch):
    model = build("bert", "BertForSequenceClassification")
    config = SNNKConfig(ffn=FFNPart(num_features=6), pooler=PoolerPart(num_features=6), modules_to_save=[])
    short, few = calibrated(model, config, given(model), monkeypatch, full=False)
    full, many = calibrated(model, config, given(model), monkeypatch, full=True)
    assert few < many
    for name, value in full.items():
        torch.testing.assert_close(short[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:batch .* is not what it was")
def test_other_batches_than_before_run_in_full(monkeypatch):
    """A loader that shuffles: what was stored belongs to other texts."""
    model = build("llama", "LlamaForSequenceClassification", num_hidden_layers=LAYERS)
    config = SNNKConfig(parts=[NarrowFFNPart()], modules_to_save=[])
    found = []
    for full in (False, True):
        batches, reads = given(model), []

        def turning(batches=batches, reads=reads):
            reads.append(1)
            return batches[len(reads) % 5 :] + batches[: len(reads) % 5]

        found.append(calibrated(model, config, turning, monkeypatch, full=full))
    (short, few), (full_slots, many) = found
    assert few == many
    assert all(torch.equal(short[name], value) for name, value in full_slots.items())


def test_layers_that_tell_each_other_more_run_in_full(monkeypatch):
    """The third layer adds what the first one saw, which no hidden state holds."""
    model = build("bert", "BertForSequenceClassification", num_hidden_layers=LAYERS)
    layers, told = model.bert.encoder.layer, {}

    def tell(module, args):
        told["mean"] = args[0].mean(1, keepdim=True)

    layers[0].register_forward_pre_hook(tell)
    layers[2].attention.register_forward_pre_hook(lambda module, args: (args[0] + told["mean"], *args[1:]))
    config = SNNKConfig(parts=[NarrowFFNPart()], modules_to_save=[])
    short, _ = calibrated(model, config, given(model), monkeypatch, full=False)
    full, _ = calibrated(model, config, given(model), monkeypatch, full=True)
    assert all(torch.equal(short[name], value) for name, value in full.items())


def test_a_full_disk_costs_time_only(monkeypatch):
    model = build("llama", "LlamaForSequenceClassification", num_hidden_layers=LAYERS)
    config, batches = SNNKConfig(parts=[NarrowFFNPart()], modules_to_save=[]), given(model)
    full, many = calibrated(model, config, batches, monkeypatch, full=True)

    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr("snnk_peft.calibrating.stored_inputs.save_file", fail)
    with pytest.warns(RuntimeWarning, match="No space left.*Set TMPDIR") as warned:
        short, few = calibrated(model, config, batches, monkeypatch, full=False)
    assert len([each for each in warned if "TMPDIR" in str(each.message)]) == 1
    assert few == many
    assert all(torch.equal(short[name], value) for name, value in full.items())


def test_what_was_stored_is_deleted(monkeypatch, tmp_path):
    """Also by Ctrl-C."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    patched = get_snnk_model(
        build("bert", "BertForSequenceClassification"), SNNKConfig(parts=[NarrowFFNPart()], modules_to_save=[])
    )
    seen: list[int] = []

    def look(module, args):
        seen.append(len(list(tmp_path.rglob("*.safetensors"))))
        if len(seen) == 4:
            raise KeyboardInterrupt

    patched.get_base_model().bert.encoder.layer[0].attention.register_forward_pre_hook(look)
    with pytest.raises(KeyboardInterrupt):
        calibrate(patched, given(patched.get_base_model()), metric="local", progress=False)
    assert seen == [0, 1, 2, 3]
    assert not list(tmp_path.iterdir())


# === within the caller's autocast, which keeps copies of weights until it ends ========================================


EIGHT_CENTROIDS = AttentionPart("mixture", "centroids", num_features=8)
EIGHT_JOINT = AttentionPart("mixture", "centroids", 8, near_field=2, near_field_normalisation="joint", sinks=1)
CASES: dict[str, dict[str, Any]] = {
    "ffn": {"ffn": FFNPart(num_features=8)},
    "narrow_ffn": {"parts": [NarrowFFNPart(num_features=24)]},
    "pooler": {"pooler": PoolerPart(num_features=8)},
    "attention": {"attention": EIGHT_CENTROIDS},
    "joint": {"attention": EIGHT_JOINT},
    "narrow_heads": {"parts": [NarrowHeadsPart(head_dim=8)]},
    "low_rank": {"parts": [LowRankPart("ffn", rank=8)]},
}
STEPPED = ("ffn", "narrow_ffn", "attention", "joint")


def patched_case(name: str) -> Any:
    return get_snnk_model(tiny_bert(), SNNKConfig(**CASES[name], modules_to_save=[])).eval()


def lowered() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_what_is_fitted_counts_at_once(name):
    model = patched_case(name)
    with lowered():
        before = logits(model, half_padded()[0])  # autocast has its copies now
        calibrate(model, half_padded(), progress=False)
        within = logits(model, half_padded()[0])
    assert not torch.equal(within, before)
    with lowered():
        assert torch.equal(logits(model, half_padded()[0]), within)


@pytest.mark.parametrize("name", STEPPED)
def test_steps_descend(name):
    """As far as without autocast, in the first layer: what later ones reach depends on where it ended."""
    expected, *_ = calibrate(patched_case(name), half_padded(), steps=60, progress=False).slots
    closed, *_ = calibrate(patched_case(name), half_padded(), progress=False).slots
    with lowered():
        found, *_ = calibrate(patched_case(name), half_padded(), steps=60, progress=False).slots
    gained = closed.error_after - expected.error_after
    assert found.error_after < expected.error_after + max(0.5 * gained, 0.05 * closed.error_after)


def test_an_interrupted_fit_leaves_no_copies():
    """The first layer is fitted, and run, when the second one fails."""
    model = patched_case("ffn")
    layers = model.get_base_model().bert.encoder.layer
    fitted = [p for p in layers[0].parameters() if p.requires_grad]
    start = [each.clone() for each in fitted]

    def fail(*_: object) -> None:
        if not all(map(torch.equal, fitted, start)):
            raise RuntimeError("power cut")

    with lowered():
        before = logits(model, half_padded()[0])
        hook = layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="power cut"):
            calibrate(model, half_padded(), progress=False)
        hook.remove()
        assert torch.equal(logits(model, half_padded()[0]), before)


@pytest.mark.parametrize("name", CASES)
def test_a_bundle_is_compared_in_full_precision(name):
    model = patched_case(name)
    with lowered():
        calibrate(model, half_padded(), progress=False)
        small = bundle(model).eval()
    torch.testing.assert_close(logits(small, half_padded()[0]), logits(model, half_padded()[0]), rtol=1e-4, atol=1e-5)
