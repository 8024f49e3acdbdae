"""Rows of adapters from gradients: the solver against NumPy, `calibrate_adapters` against PyTorch's own gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from accelerate import cpu_offload
from peft import PeftModel
from torch import nn
from transformers import AlbertConfig, AlbertForSequenceClassification

import snnk_peft.calibrating.adapters as module
from snnk_peft import AdapterPart, FFNPart, SNNKConfig, bundle, calibrate_adapters, get_snnk_model
from snnk_peft.errors import ConfigError, NumericalError
from snnk_peft.solvers.gradient_rows import GradientMoments, gradient_rows
from tests.tiny_models import same, tiny

DIM, OUT, TOKENS = 12, 9, 4000


def moments_of(x: torch.Tensor, g: torch.Tensor) -> GradientMoments:
    """Of tokens that are one example each; every second hundred judges."""
    sums = GradientMoments(x.shape[1], g.shape[1])
    for index in range(0, len(x), 100):
        judges = index // 100 % 2 == 1
        sums.add(x[index : index + 100], g[index : index + 100], judges)
        sums.examples[judges] += 100
    return sums


def planted(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of very different variances, and gradients that depend on three directions of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, DIM, generator=generator).double() * torch.logspace(0, 1.5, DIM).double() + 0.5
    directions = torch.randn(3, DIM, generator=generator).double() / torch.logspace(0, 1.5, DIM).double()
    mixing = torch.randn(OUT, 3, generator=generator).double()
    noise = 0.1 * torch.randn(TOKENS, OUT, generator=generator).double()
    return x, x @ directions.T @ mixing.T + noise


def test_rows_and_slopes_are_those_of_numpy() -> None:
    x, g = planted(1)
    before = torch.randn(4, DIM, generator=torch.Generator().manual_seed(5)).double()
    found = gradient_rows(moments_of(x, g), before, ridges=(0.1,), refit=False)

    judging = (torch.arange(TOKENS) // 100 % 2 == 1).numpy()
    X, Y = x.numpy(), g.numpy()
    C = X.T @ X / len(X)
    fitted, judge = (Y[part].T @ X[part] / part.sum() for part in (~judging, judging))
    ridge = 0.1 * np.trace(C) / DIM * np.eye(DIM)
    root = np.linalg.inv(scipy.linalg.sqrtm(C + ridge).real)
    rows = np.linalg.svd(fitted @ root)[2][:4] @ root
    signs = np.sign(rows @ X.mean(0))
    np.testing.assert_allclose(found.rows.numpy(), rows * signs[:, None], rtol=1e-6, atol=1e-9)

    def slope(W: np.ndarray) -> float:
        """Of Σ D ⊙ G along the step that lowers ‖D x‖² the most per unit, by the normal equations in full."""
        A = np.linalg.lstsq(W @ C @ W.T, W @ fitted.T, rcond=None)[0].T
        moved = X @ (A @ W).T
        return float((A @ W * judge).sum() / np.sqrt((moved**2).sum(1).mean()))

    assert found.slope == pytest.approx(slope(rows), rel=1e-8)
    assert found.slope_before == pytest.approx(slope(before.numpy()), rel=1e-8)
    D = fitted @ np.linalg.inv(C + ridge)
    whole = (D * judge).sum() / np.sqrt(((X @ D.T) ** 2).sum(1).mean())
    assert found.slope_of_all == pytest.approx(whole, rel=1e-8)


def test_no_rows_do_better_on_what_they_are_made_from() -> None:
    """If the examples judge themselves, the slope is the root of the sum of the leading squared singular values."""
    x, g = planted(2)
    sums = GradientMoments(DIM, OUT)
    for judges in (False, True):
        sums.add(x, g, judges)
        sums.examples[judges] += TOKENS
    generator = torch.Generator().manual_seed(0)
    C = (x.T @ x / TOKENS).numpy()
    values = np.linalg.svd((g.T @ x / TOKENS).numpy() @ np.linalg.inv(scipy.linalg.sqrtm(C).real))[1]
    for m in (1, 2, 5):
        found = gradient_rows(sums, torch.randn(m, DIM, generator=generator), ridges=(1e-12,))
        assert found.slope == pytest.approx(np.sqrt((values[:m] ** 2).sum()), rel=1e-6)
        assert found.slope_before < found.slope


def test_more_rows_than_outputs() -> None:
    x, g = planted()
    found = gradient_rows(moments_of(x, g[:, :2]), torch.randn(5, DIM))
    assert torch.linalg.matrix_rank(found.rows[:2]) == 2
    assert not found.rows[2:].any()  # which the library would choose: drawn rows stay there


def test_noise_is_regularised() -> None:
    """Of few examples of many coordinates the held-out ones choose a ridge, and it pays."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 100, generator=generator).double() * torch.logspace(0, -3, 100).double()
    g = x[:, :1] + torch.randn(200, 6, generator=generator).double()
    sums = moments_of(x, g)
    chosen = gradient_rows(sums, torch.randn(2, 100))
    bare = gradient_rows(sums, torch.randn(2, 100), ridges=(1e-12,))
    assert chosen.ridge >= 1e-2
    assert chosen.slope > 1.5 * bare.slope


def test_without_gradient() -> None:
    x, g = planted()
    with pytest.raises(NumericalError, match="the loss has no gradient here"):
        gradient_rows(moments_of(x, 0 * g), torch.randn(3, DIM))


# --- models -----------------------------------------------------------------------------------------------------------

PLACEMENTS = ("query_value", "parallel", "houlsby", "pfeiffer")


def part(placement: str = "query_value", projection: str = "free", **changes: Any) -> AdapterPart:
    return AdapterPart("gelu", projection, num_features=4, placement=placement, **changes)


def batches(count: int = 8, padded: int = 0) -> list[dict[str, torch.Tensor]]:
    """Of two kinds of text, each with words of its own."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        labels = torch.randint(2, (8,), generator=generator)
        ids = torch.randint(3, 50, (8, 9), generator=generator) + 49 * labels[:, None]
        mask = torch.ones_like(ids)
        mask[::3, 5:] = 0
        ids = torch.where(mask == 1, ids, 0)
        more = torch.zeros(len(ids), padded, dtype=ids.dtype)
        made.append({"input_ids": torch.cat((ids, more), 1), "attention_mask": torch.cat((mask, more), 1)})
        made[-1]["labels"] = labels
    return made


def louder(model: Any) -> Any:
    """Ten times the weights that a fresh model has, so that attention and head tell tokens apart."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(10)
    return model


def patched(placement: str = "query_value", projection: str = "free", family: str = "bert", **changes: Any) -> Any:
    base = louder(tiny(family))
    return get_snnk_model(base, SNNKConfig(adapter=part(placement, projection, **changes), task_type="SEQ_CLS"))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def places(layer: Any, placement: str) -> list[tuple[nn.Module, nn.Module, bool]]:
    """Of one layer of a plain BERT: where adapters read, where they add, and whether they read what was added to."""
    attention = layer.attention.self
    behind = [(layer.attention.output.dense,) * 2, (layer.output.dense,) * 2]
    return {
        "query_value": [(attention.query, attention.query, False), (attention.value, attention.value, False)],
        "parallel": [(layer.intermediate.dense, layer.output.dense, False)],
        "houlsby": [(*each, True) for each in behind],
        "pfeiffer": [(*behind[1], True)],
    }[placement]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_moments_are_the_gradients_of_pytorch(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix D = 0 of a plain model, which adds D x where the adapter adds, has the gradient G."""
    seen: dict[str, GradientMoments] = {}
    settle = module._settle

    def keep(adapter: Any, moments: GradientMoments, *rest: Any) -> Any:
        seen[adapter.path] = moments
        return settle(adapter, moments, *rest)

    monkeypatch.setattr(module, "_settle", keep)
    calibrate_adapters(patched(placement), batches(), progress=False)

    plain = louder(tiny("bert"))
    matrices: list[torch.Tensor] = []
    for layer in plain.bert.encoder.layer:
        for reads, adds, behind in places(layer, placement):
            matrix = torch.zeros(adds.out_features, reads.out_features if behind else reads.in_features)
            matrices.append(matrix.requires_grad_())
            inputs: list[torch.Tensor] = []

            def read(m: Any, args: Any, inputs: list = inputs) -> None:
                inputs.append(args[0].detach())

            def add(m: Any, args: Any, out: Any, D: Any = matrix, behind: bool = behind, inputs: list = inputs) -> Any:
                x = out.detach() if behind else inputs.pop()
                return out + nn.functional.layer_norm(x, x.shape[-1:]) @ D.T

            if not behind:
                reads.register_forward_pre_hook(read)
            adds.register_forward_hook(add)
    expected = [torch.zeros_like(matrix) for matrix in matrices]
    for batch in batches():
        for total, found in zip(expected, torch.autograd.grad(plain(**batch).loss, matrices), strict=True):
            total += found / len(batches())
    assert len(seen) == len(expected)
    for moments, G in zip(seen.values(), expected, strict=True):
        torch.testing.assert_close(moments.gradient.float(), G, rtol=1e-3, atol=1e-7)
        assert float(G.norm()) > 1e-4


@pytest.mark.filterwarnings("ignore:.*held-out rows are also among:snnk_peft.errors.NumericalWarning")
@pytest.mark.parametrize("projection", ["free", "informed"])
def test_fewer_directions_than_rows(projection: str) -> None:
    """One sentence of two tokens: the gradient has two directions for four rows, the others stay as drawn.

    In the last layer [CLS] is what is read, so the queries' gradient is that of one token: one direction.
    """
    model = patched(projection=projection)
    (batch,) = batches(1)
    batch = {"input_ids": batch["input_ids"][:1, :2], "labels": batch["labels"][:1]}
    drawn = [value for name, value in model.state_dict().items() if name.endswith("feature_map.projection.weight")]
    for value in drawn:  # four rows of their own span both directions, and cannot be exchanged for better ones
        value.copy_(value[:1] * torch.arange(1.0, 5.0)[:, None])
    before = state(model)
    report = calibrate_adapters(model, [batch] * 4, progress=False)
    after = state(model)
    assert sum(slot.taken for slot in report.slots) >= 3
    assert all(value.isfinite().all() for value in after.values() if value.is_floating_point())
    for slot in report.slots:
        (path,) = [name for name in before if f"{slot.path}.snnk" in name and "feature_map.projection." in name]
        assert before[path].shape[0] == 4
        made = 1 if slot.path == "bert.encoder.layer.1.attention.self.query" else 2
        assert (after[path] == before[path]).all(1).sum() == (4 - made if slot.taken else 4)


@pytest.mark.filterwarnings("ignore:.*held-out rows are also among:snnk_peft.errors.NumericalWarning")
@pytest.mark.parametrize("projection", ["free", "informed"])
def test_rows_that_are_as_good_stay(projection: str) -> None:
    """Four rows span the two directions there are; what is as good but for rounding is not exchanged."""
    model = patched(projection=projection)
    (batch,) = batches(1)
    batch = {"input_ids": batch["input_ids"][:1, :2], "labels": batch["labels"][:1]}
    before = state(model)
    report = calibrate_adapters(model, [batch] * 8, progress=False)
    assert not any(slot.taken for slot in report.slots)
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())


@pytest.mark.parametrize("projection", ["free", "informed"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_are_exchanged_and_nothing_else(placement: str, projection: str) -> None:
    model = patched(placement, projection).train()
    before, inputs = state(model), {key: value for key, value in batches(1)[0].items() if key != "labels"}
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
    model.train()
    random_state = torch.get_rng_state()
    report = calibrate_adapters(model, batches(), progress=False)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    changed = {key for key, value in state(model).items() if not torch.equal(value, before[key])}
    assert {key.rpartition(".")[2] for key in changed} <= {"weight", "means"}
    assert all(".feature_map.projection.weight" in key or key.endswith("means") for key in changed)
    taken = [slot for slot in report.slots if slot.taken]
    assert taken
    assert sum(key.endswith("means") for key in changed) == len(taken)
    assert sum(key.endswith("projection.weight") for key in changed) == len(taken)
    assert all(slot.slope_after > slot.slope_before for slot in taken)
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, expected)
    assert f"{report.slots[0].path} " in str(report)
    assert len(report.to_dict()["slots"]) == len(report.slots)


def test_rows_are_worth_more_after_training_too() -> None:
    """As many steps from the made rows reach a lower loss than from drawn ones, which stay."""

    def loss_after(calibrated: bool) -> float:
        model = patched("query_value", "informed", normalize=False, scaling=1.0)
        if calibrated:
            calibrate_adapters(model, batches(12), progress=False)
        readouts = [value for name, value in model.named_parameters() if name.endswith("readout.A")]
        optimizer = torch.optim.SGD(readouts, lr=0.5)
        for _ in range(30):
            loss = sum(model(**batch).loss for batch in batches(12)) / 12
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    assert loss_after(True) < loss_after(False) - 0.002


def test_features_stay_centred() -> None:
    """What is subtracted are the means over the inputs: of a Gaussian with the measured mean and variance."""
    torch.manual_seed(0)
    model = patched("houlsby", "informed")
    calibrate_adapters(model, batches(), progress=False)
    stage = next(m for m in model.modules() if type(m).__name__ == "FeatureStage")
    mean, std = torch.tensor([0.5, -0.2, 0.0, 1.0]), torch.tensor([1.0, 0.5, 2.0, 0.3])
    stage.recenter(mean, std)
    z = mean + std * torch.randn(400_000, 4)
    torch.testing.assert_close(stage.means, torch.nn.functional.gelu(z).mean(0) / 2, rtol=0, atol=3e-3)


def test_groups_of_adapters_make_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = patched(), patched()
    calibrate_adapters(whole, batches(), progress=False)
    monkeypatch.setattr(module, "ROOM", 1)
    reads = 0

    def counted() -> Any:
        nonlocal reads
        reads += 1
        return iter(batches())

    calibrate_adapters(parts, counted, progress=False)
    assert reads == 1 + 4
    torch.testing.assert_close(state(parts), state(whole), rtol=0, atol=0)


def test_padding_changes_nothing() -> None:
    short, long = patched(), patched()
    one = calibrate_adapters(short, batches(), progress=False)
    other = calibrate_adapters(long, batches(padded=4), progress=False)
    assert [slot.tokens for slot in one.slots] == [slot.tokens for slot in other.slots]
    torch.testing.assert_close(state(short), state(long), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """The same directions as in fp32, up to the rounding of the gradients."""
    exact = patched(normalize=False)
    half = get_snnk_model(
        louder(tiny("bert")).to(dtype), SNNKConfig(adapter=part(normalize=False), task_type="SEQ_CLS")
    )
    fine, coarse = (calibrate_adapters(model, batches(16), progress=False).slots for model in (exact, half))
    for one, other in zip(fine, coarse, strict=True):
        assert other.slope_of_all == pytest.approx(one.slope_of_all, rel=0.1, abs=1e-4)
    assert all(torch.isfinite(value).all() for value in half.state_dict().values())


@pytest.mark.parametrize("family", ["vit", "roberta", "distilbert"])
def test_other_families(family: str) -> None:
    model = patched(family=family)
    made = batches()
    if family == "vit":
        pictures = torch.randn(8, 8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        made = [{"pixel_values": x, "labels": (x.mean((1, 2, 3)) > 0).long()} for x in pictures]
    assert sum(slot.taken for slot in calibrate_adapters(model, made, progress=False).slots) > 0


def test_layers_that_run_several_times_and_nothing_trained() -> None:
    sizes = {"hidden_size": 32, "embedding_size": 16, "num_attention_heads": 2, "intermediate_size": 64}
    config = AlbertConfig(vocab_size=100, num_hidden_layers=3, max_position_embeddings=40, **sizes)
    torch.manual_seed(0)
    model = get_snnk_model(AlbertForSequenceClassification(config), SNNKConfig(adapter=part()))
    model.requires_grad_(False)
    report = calibrate_adapters(model, batches(), progress=False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert report.slots[0].tokens == 3 * int(sum(batch["attention_mask"].sum() for batch in batches()))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_fixed_rows_are_saved_and_bundled(placement: str, tmp_path: Any) -> None:
    model = patched(placement, "informed")
    calibrate_adapters(model, batches(), progress=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("readout.A"):
                parameter.normal_(std=0.1)
    inputs = {key: value for key, value in batches(1)[0].items() if key != "labels"}
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(louder(tiny("bert")), tmp_path).eval()
        assert same(again(**inputs).logits, expected)
        torch.testing.assert_close(bundle(model)(**inputs).logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: patched(projection="orf"), "the adapter's projection is orf, so there are no rows to make"),
        (lambda: get_snnk_model(tiny("bert"), SNNKConfig(ffn=FFNPart(num_features=8))), "has no active adapter"),
        (lambda: tiny("bert"), "has no active adapter"),
    ],
)
def test_nothing_to_make(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrate_adapters(make(), batches(), progress=False)


def test_trained_adapters_are_refused() -> None:
    model = patched()
    with torch.no_grad():
        next(value for name, value in model.named_parameters() if name.endswith("readout.A")).fill_(0.1)
    before = state(model)
    with pytest.raises(ConfigError, match=r"layer.0.attention.self.query have been trained"):
        calibrate_adapters(model, batches(), progress=False)
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)


def test_batches_without_labels() -> None:
    model = patched()
    with pytest.raises(ConfigError, match=r"batch 0 holds input_ids, attention_mask, of which .* makes no loss"):
        calibrate_adapters(model, [{k: v for k, v in b.items() if k != "labels"} for b in batches()], progress=False)


@pytest.mark.parametrize("held_out", [0, 1, 1.5])
def test_held_out_is_a_fraction(held_out: float) -> None:
    with pytest.raises(ConfigError, match="held_out is"):
        calibrate_adapters(patched(), batches(), held_out=held_out, progress=False)


@pytest.mark.parametrize("ridges", [(), (0.1, 0.0)])
def test_ridges_are_positive(ridges: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="expected a list of finite numbers > 0"):
        calibrate_adapters(patched(), batches(), ridges=ridges, progress=False)


@pytest.mark.parametrize("whole", [False, True], ids=["base offloaded", "all offloaded"])
def test_offloaded_models(whole: bool) -> None:
    """An adapter on an offloaded base gets the rows that it gets in memory; an offloaded adapter is refused."""
    expected = patched()
    calibrate_adapters(expected, batches(), progress=False)
    config = SNNKConfig(adapter=part(), task_type="SEQ_CLS")
    if whole:
        with pytest.raises(ConfigError, match="are offloaded to memory or disk"):
            calibrate_adapters(cpu_offload(patched(), torch.device("cpu")), batches(), progress=False)
        return
    model = get_snnk_model(cpu_offload(louder(tiny("bert")), torch.device("cpu")), config)
    calibrate_adapters(model, batches(), progress=False)
    found, wanted = ({k: v for k, v in state(m).items() if "feature_map" in k} for m in (model, expected))
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = get_snnk_model(tiny("bert", num_labels=1), SNNKConfig(adapter=part()))
    wrong = [{**batch, "labels": batch["labels"].float()} for batch in batches()]
    wrong[5]["labels"] = wrong[5]["labels"] / 0
    before = state(model)
    with pytest.raises(ValueError, match=r"batch 5: the loss is nan"):
        calibrate_adapters(model, wrong, progress=False)
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)
