"""Peers of conversion, each against a brute-force form of what its paper describes: Fisher pruning, MoDeGPT, SVD."""

from __future__ import annotations

import copy
import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from snnk_peft import LowRankPart, SNNKConfig, calibrate, get_snnk_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "recipes/benchmarks"
LAYER = "bert.encoder.layer.0"


def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the peers, as the program sees them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("blocks", "distilling", "fisher_pruning", "modegpt")
    return SimpleNamespace(**{name: importlib.import_module(f"_peers.{name}") for name in names})


def teacher(seed: int = 0) -> BertForSequenceClassification:
    """Tiny, with weights large enough for attention to differ between tokens, and biases."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "LayerNorm" not in name:
                parameter.normal_(0, 0.4)
    return model


def sentences(count: int = 4, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Batches of six padded sentences of up to nine tokens, with labels."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        lengths = torch.randint(3, 10, (6, 1), generator=generator)
        mask = (torch.arange(9) < lengths).long()
        ids = torch.randint(1, 50, (6, 9), generator=generator) * mask
        batches.append(
            {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (6,), generator=generator)}
        )
    return batches


def logits(model, batches):
    with torch.no_grad():
        return torch.cat([model(b["input_ids"], b["attention_mask"]).logits for b in batches])


def seen_by(model, path, batches):
    """Real tokens that reach a module, (tokens, dim), fp64."""
    found = []
    module = model.get_submodule(path)
    handle = module.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    logits(model, batches)
    handle.remove()
    real = [b["attention_mask"].bool() for b in batches]
    return torch.cat([x[mask] for x, mask in zip(found, real, strict=True)]).double()


@pytest.fixture
def peers(monkeypatch):
    return modules(monkeypatch)


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_walking_block_by_block_is_the_forward_pass(peers):
    model, batches = teacher(), sentences()
    states = peers.blocks.entering(model, batches)
    for layer in peers.blocks.encoder_layers(model):
        with torch.no_grad():
            states = [peers.blocks.behind_ffn(layer, peers.blocks.behind_attention(layer, state)) for state in states]
    for state, batch in zip(states, batches, strict=True):
        wanted = model.bert(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        torch.testing.assert_close(state.x[state.real], wanted[batch["attention_mask"].bool()])


def test_what_is_cut_out_is_what_a_zero_mask_removes(peers):
    model, batches = teacher(), sentences()
    masked = copy.deepcopy(model)
    for index, (heads, units) in enumerate([([0, 2], [3, 5, 20]), ([], [])]):
        layer, other = (peers.blocks.encoder_layers(m)[index] for m in (model, masked))
        peers.blocks.keep_heads(layer, torch.tensor(heads, dtype=torch.long))
        peers.blocks.keep_units(layer, torch.tensor(units, dtype=torch.long))
        with torch.no_grad():
            gone = [i for i in range(16) if i // 4 not in heads]
            other.attention.output.dense.weight[:, gone] = 0
            other.output.dense.weight[:, [i for i in range(24) if i not in units]] = 0
    torch.testing.assert_close(logits(model, batches), logits(masked, batches))
    assert peers.blocks.encoder_layers(model)[0].attention.self.query.out_features == 8


def test_a_share_counts_multiply_adds(peers):
    cost = peers.blocks.Cost.of(teacher().config, tokens=9)
    # Of a layer: four projections of 16 x 16, two products of 16 numbers with 9 tokens, two matrices of 16 x 24.
    assert cost.total == 2 * (4 * 256 + 2 * 16 * 9 + 2 * 16 * 24)
    kept = cost.unit_share(0.7)
    attention = cost.heads * cost.head
    assert attention + kept * 24 * cost.unit == pytest.approx(0.7 * cost.total / 2)
    with pytest.raises(ValueError, match=r"share is 0.2; expected more than 0.6"):
        cost.unit_share(0.2)


# --- Kwon et al. ----------------------------------------------------------------------------------------------------


def test_mask_gradients_are_those_of_single_examples(peers):
    """A finite difference of one sentence's loss when one head or unit is scaled."""
    model, batches = teacher().double(), sentences(1)
    (found,) = peers.fisher_pruning.mask_gradients(model, batches)
    assert found.heads.shape == (6, 2, 4)
    assert found.units.shape == (6, 2, 24)

    def loss(example, path, columns, factor):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.get_submodule(path).weight[:, columns] *= factor
            given = {name: each[example : example + 1] for name, each in batches[0].items()}
            return float(other(**given).loss)

    for example, layer, index in [(0, 0, 1), (4, 1, 3)]:
        for kind, path, columns in (
            ("heads", "attention.output.dense", slice(4 * index, 4 * index + 4)),
            ("units", "output.dense", slice(index, index + 1)),
        ):
            path = f"bert.encoder.layer.{layer}.{path}"
            slope = (loss(example, path, columns, 1 + 1e-5) - loss(example, path, columns, 1 - 1e-5)) / 2e-5
            assert float(getattr(found, kind)[example, layer, index]) == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_fisher_is_the_mean_over_examples_whatever_the_batches(peers):
    model, batches = teacher(), sentences(2)
    blocks = peers.fisher_pruning.fisher_blocks(model, batches)
    single = [{name: each[i : i + 1] for name, each in batch.items()} for batch in batches for i in range(6)]
    gradients = [each.units[0] for each in peers.fisher_pruning.mask_gradients(model, single)]
    wanted = sum(g[:, :, None] * g[:, None, :] for g in gradients) / 12
    torch.testing.assert_close(blocks.units.float(), wanted, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("budget", [0, 13, 29, 41, 1000])
def test_search_is_the_best_of_all_masks(peers, budget):
    generator = torch.Generator().manual_seed(budget)
    heads, units = torch.rand(2, 2, generator=generator) * 4, torch.rand(2, 3, generator=generator)
    kept = peers.fisher_pruning.search(peers.fisher_pruning.Masks(heads, units), 7, 3, budget)
    flat, costs = torch.cat((heads.flatten(), units.flatten())), torch.tensor([7] * 4 + [3] * 6)
    masks = torch.tensor(list(itertools.product([0, 1], repeat=10)))
    affordable = masks[masks @ costs <= budget].float()
    mine = torch.cat((kept.heads.flatten(), kept.units.flatten()))
    assert int(mine.long() @ costs) <= budget
    assert float(mine.float() @ flat) == pytest.approx(float((affordable @ flat).max()))


def test_rearrangement_sees_that_two_units_say_the_same(peers):
    """Diagonal scores drop both of a pair that stand in for each other; together they are dear."""
    g = torch.randn(400, 5, generator=torch.Generator().manual_seed(0)).double()
    g[:, 0] = 0.5 * g[:, 4]
    g[:, 1] = g[:, 0]
    g[:, 2] *= 0.6
    block = g.T @ g / 400

    def pruned(kept):
        z = (~kept).double()
        return float(z @ block @ z)

    start = torch.ones(5, dtype=torch.bool)
    start[block.diagonal().topk(2, largest=False).indices] = False
    assert not start[:2].any()
    found = peers.fisher_pruning.rearrange(block, start)
    every = [torch.tensor([i not in gone for i in range(5)]) for gone in itertools.combinations(range(5), 2)]
    assert pruned(found) == pytest.approx(min(map(pruned, every)))
    assert pruned(found) < 0.7 * pruned(start)


@pytest.mark.parametrize("groups", [12, 3])
def test_tuned_masks_solve_the_stacked_least_squares(peers, groups):
    generator = torch.Generator().manual_seed(0)
    values, weight, target = (torch.randn(*s, generator=generator).double() for s in ((30, 12), (5, 12), (30, 5)))
    mask = peers.fisher_pruning.damped(*peers.fisher_pruning.normal_equations(values, weight, target, groups))
    # Column i: what group i adds, over all tokens and outputs; a row per entry that pulls it to one.
    each = torch.einsum("tc,oc->toc", values, weight).view(30, 5, groups, -1).sum(-1)
    A = np.concatenate([each.reshape(-1, groups).numpy(), np.eye(groups)])
    b = np.concatenate([target.numpy().ravel(), np.ones(groups)])
    np.testing.assert_allclose(mask.numpy(), np.linalg.lstsq(A, b, rcond=None)[0], atol=1e-10)


def test_pruning_keeps_the_budget_and_tuning_helps(peers):
    model, batches = teacher(), sentences(8)
    fisher = peers.fisher_pruning
    small = fisher.prune(model, batches, 0.6)
    cost = peers.blocks.Cost.of(model.config)
    layers = peers.blocks.encoder_layers(small)
    spent = sum(layer.attention.output.dense.in_features // 4 * cost.head for layer in layers)
    spent += sum(layer.output.dense.in_features * cost.unit for layer in layers)
    assert 0.6 * cost.total - cost.head - cost.unit < spent <= 0.6 * cost.total + 1
    # Cut out at random, and tuned: what the last layer gives comes closer.
    small = copy.deepcopy(model)
    for layer in peers.blocks.encoder_layers(small):
        peers.blocks.keep_heads(layer, torch.tensor([0, 2, 3]))
        peers.blocks.keep_units(layer, torch.arange(0, 24, 2))
    before = _last_error(peers, small, model, batches)
    assert fisher.tune(small, model, batches) == 4
    assert _last_error(peers, small, model, batches) < 0.9 * before


def _last_error(peers, small, model, batches):
    """Squared error of what the last layer gives, real tokens."""
    ends = []
    for each in (small, model):
        states = peers.blocks.entering(each, batches)
        with torch.no_grad():
            for layer in peers.blocks.encoder_layers(each):
                states = [peers.blocks.behind_ffn(layer, peers.blocks.behind_attention(layer, s)) for s in states]
        ends.append(torch.cat([state.x[state.real] for state in states]))
    return float((ends[0] - ends[1]).square().mean())


def test_tuning_ends_at_masks_out_of_range(peers):
    """A contraction a hundred times too small asks for masks of a hundred: nothing is tuned from there on."""
    model, batches = teacher(), sentences()
    small = copy.deepcopy(model)
    layer = peers.blocks.encoder_layers(small)[0]
    with torch.no_grad():
        layer.output.dense.weight.mul_(0.01)
    kept = layer.output.dense.weight.clone()
    assert peers.fisher_pruning.tune(small, model, batches) == 1
    assert torch.equal(layer.output.dense.weight, kept)


# --- MoDeGPT --------------------------------------------------------------------------------------------------------


def test_leverage_scores_and_contraction(peers):
    model, batches = teacher(), sentences()
    hidden = seen_by(model, f"{LAYER}.output.dense", batches)
    weight = model.get_submodule(f"{LAYER}.output.dense").weight.detach().double()
    moment = hidden.T @ hidden
    chosen = torch.empty(0)
    for count in (14, 6, 10):
        chosen = peers.modegpt.leverage_units(moment, count)
        tail = np.sort(np.linalg.svd(moment.numpy(), compute_uv=False))[: 24 - count].sum() / count
        scores = np.diag(moment.numpy() @ np.linalg.inv(moment.numpy() + tail * np.eye(24)))
        assert chosen.tolist() == sorted(np.argsort(scores)[-count:].tolist())
    found = peers.modegpt.nystrom_contraction(weight, moment, chosen)
    wanted = np.linalg.lstsq(hidden[:, chosen].numpy(), (hidden @ weight.T).numpy(), rcond=None)[0].T
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-8)


def test_value_and_output_are_the_best_product_of_their_rank(peers):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 8, generator=generator).double() * torch.linspace(0.1, 3, 8)
    x[:, 7] = x[:, 0] - x[:, 1]  # a direction without inputs, as behind a layer norm
    value, out = (torch.randn(*s, generator=generator).double() for s in ((4, 8), (8, 4)))
    V, W = peers.modegpt.svd_pair(value, out, peers.modegpt.square_roots(x.T @ x), 2)
    product = (x @ value.T @ out.T).numpy()
    error = np.linalg.norm(product - (x @ V.T @ W.T).numpy())
    # Eckart, Young: no product of rank 2 comes closer.
    assert error == pytest.approx(np.linalg.norm(np.linalg.svd(product, compute_uv=False)[2:]))


def test_narrow_heads_keep_the_dimensions_of_largest_products(peers):
    model, batches = teacher(), sentences()
    layer = peers.blocks.encoder_layers(model)[0]
    old = copy.deepcopy(layer.attention.self)
    x = seen_by(model, f"{LAYER}.attention.self.query", batches)
    moment = torch.cat((x, x.new_ones(len(x), 1)), 1)
    moment = moment.T @ moment
    peers.modegpt.narrow_heads(layer, moment, 3)
    with torch.no_grad():
        q, k = (each.double()(x) for each in (copy.deepcopy(old.query), copy.deepcopy(old.key)))
    for head in range(4):
        rows = range(4 * head, 4 * head + 4)
        scores = [float(q[:, i].norm() * k[:, i].norm()) for i in rows]
        kept = [i for i in rows if scores[i - 4 * head] > min(scores)]
        new = slice(3 * head, 3 * head + 3)
        assert torch.equal(layer.attention.self.query.weight[new], old.query.weight[kept])
        assert torch.equal(layer.attention.self.key.bias[new], old.key.bias[kept])


def test_nothing_removed_is_the_teacher(peers):
    """Full width through all three decompositions: value biases have moved, answers have not."""
    model, batches = teacher(), sentences()
    same = copy.deepcopy(model)
    for layer, path in zip(peers.blocks.encoder_layers(same), (LAYER, LAYER.replace("0", "1")), strict=True):
        x = seen_by(model, f"{path}.attention.self.query", batches)
        one = torch.cat((x, x.new_ones(len(x), 1)), 1)
        peers.modegpt.narrow_heads(layer, one.T @ one, 4)
        hidden = seen_by(model, f"{path}.output.dense", batches)
        every = torch.arange(24)
        weight = peers.modegpt.nystrom_contraction(layer.output.dense.weight, hidden.T @ hidden, every)
        peers.blocks.keep_units(layer, every, weight)
    torch.testing.assert_close(logits(same, batches), logits(model, batches), rtol=1e-3, atol=1e-4)


def test_sparsity_goes_where_little_changes(peers):
    influences = torch.tensor([0.6, 0.1, 0.3]).double()
    even = peers.modegpt.allocate(influences, 0.4, float("inf"))
    torch.testing.assert_close(even, torch.full((3,), 0.4).double())
    found = peers.modegpt.allocate(influences, 0.4, 1.0)
    torch.testing.assert_close(found, 1.2 * torch.softmax(-influences, 0))
    # One layer would lose more than all of it: it stops at the limit, and the mean is kept.
    steep = peers.modegpt.allocate(influences, 0.6, 0.1)
    assert float(steep.mean()) == pytest.approx(0.6)
    assert float(steep.max()) == pytest.approx(peers.modegpt.MOST)
    assert steep.argsort().tolist() == influences.argsort(descending=True).tolist()
    model, batches = teacher(), sentences()
    states = [model.bert(b["input_ids"], b["attention_mask"], output_hidden_states=True).hidden_states for b in batches]
    real = torch.cat([b["attention_mask"].bool().flatten() for b in batches])
    a, b = (torch.cat([state[i].flatten(0, 1) for state in states])[real] for i in (0, 1))
    with torch.no_grad():
        assert float(peers.modegpt.influence(model, batches)[0]) == pytest.approx(
            1 - float(torch.cosine_similarity(a, b).mean()), rel=1e-4
        )


def test_decomposition_keeps_the_share(peers):
    model, batches = teacher(), sentences()
    small = peers.modegpt.decompose(model, batches, 0.5, float("inf"))
    for layer in peers.blocks.encoder_layers(small):
        assert layer.attention.self.query.out_features == 8
        assert layer.output.dense.in_features == 12
    assert logits(small, batches).isfinite().all()


# --- activation-aware SVD, and the paper's start, trained -------------------------------------------------------------


@pytest.mark.slow
def test_low_rank_part_is_the_svd_whitened_by_the_input_covariance():
    """The published recipe, with a Cholesky factor: truncate W L, multiply by L⁻¹; what is left goes into the bias."""
    model, batches = teacher(), sentences(10)
    patched = get_snnk_model(
        copy.deepcopy(model), SNNKConfig(parts=[LowRankPart("ffn", rank=3, activation="identity")], modules_to_save=[])
    )
    calibrate(patched, batches, metric="local", progress=False)
    path = f"{LAYER}.intermediate.dense"
    x = seen_by(model, path, batches)
    dense = model.get_submodule(path)
    W, centred = dense.weight.detach().double(), x - x.mean(0)
    # The norm before it takes the mean out of its inputs: a little is added for the factor to exist.
    L = torch.linalg.cholesky(centred.T @ centred / len(x) + 1e-9 * torch.eye(16))
    U, s, Vt = torch.linalg.svd(W @ L)
    wanted = U[:, :3] * s[:3] @ Vt[:3] @ torch.linalg.inv(L)
    layer = patched.get_submodule(f"base_model.model.{path}").snnk_slots["default"][0].layer
    found = layer.weight_matrix().detach().double()
    torch.testing.assert_close(centred @ found.T, centred @ wanted.T, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        off = (layer(x.float()) - dense(x.float())).mean(0)
    torch.testing.assert_close(off, torch.zeros(24), rtol=0, atol=1e-4)


def test_distillation_comes_nearer_within_its_time(peers):
    model, batches = teacher(), sentences(6)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected, distances = logits(model, batches).log_softmax(-1), []
    for steps in (60, 1):
        clock = itertools.count()
        made = peers.distilling.distil(model, batches, 1, steps, rate=3e-3, size=6, clock=lambda: float(next(clock)))
        given = logits(made, batches).log_softmax(-1)
        distances.append(float((expected.exp() * (expected - given)).sum(-1).mean()))
        assert next(clock) == steps + 1
    assert distances[0] < 0.7 * distances[1]
    assert len(made.bert.encoder.layer) == made.config.num_hidden_layers == 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[name])
