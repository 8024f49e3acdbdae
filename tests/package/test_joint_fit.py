"""`calibrate` of a far field that joins an exact near field, by oracles that know nothing of its code."""

from __future__ import annotations

import copy
import json
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from sklearn.linear_model import Ridge
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from snnk_peft import AttentionPart, SNNKConfig, bundle, calibrate, get_snnk_model
from snnk_peft.errors import ConfigError
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.solvers.centroids import Scores, descend
from snnk_peft.solvers.joint_centroids import (
    RIDGE,
    NearScores,
    best_joint,
    fitted_factor,
    joint_centroids,
    joint_divergence,
    joint_output_error,
)
from tests.fresh_process import run_python

JOINT = {"component": "mixture", "projection": "centroids", "near_field_normalisation": "joint"}
WIDTH, SINKS = 3, 1


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scores(batches: int = 6, length: int = 24, causal: bool = True, groups: int = 2, dim: int = 4) -> list[NearScores]:
    """Queries and keys with a mean, two query heads to a key head; the last tokens of the first row are padding."""
    found, drawn = [], generator()
    for _ in range(batches):
        q = torch.randn(2, groups, 2, length, dim, generator=drawn) + 1.0
        k, v = (torch.randn(2, groups, length, dim, generator=drawn) + 1.0 for _ in range(2))
        counted = torch.ones(2, length, dtype=torch.bool)
        counted[0, -4:] = False
        pairs = counted[:, None, None, None].expand(-1, 1, 1, length, -1)
        if causal:
            pairs = pairs & torch.ones(length, length, dtype=torch.bool).tril()
        exact = (q @ k.mT.unsqueeze(2)).masked_fill(~pairs, -1e9).softmax(-1)
        found.append(NearScores.of(Scores(q, k, v, exact @ v.unsqueeze(2), pairs, counted), WIDTH, SINKS))
    return found


# --- the closed form ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_as_many_centres_as_queries_give_softmax(causal):
    """Each query is a centre of its own, whose weights are e^{c·k} on the scale of the near field."""
    given = scores(1, 12, causal)
    count = int(given[0].affected.sum())
    maps = joint_centroids(given, count, 10_000, generator())
    assert joint_divergence(maps.sharpened(1e-4), given[0]).max() < 1e-4
    assert joint_divergence(maps, given[0]).min() > 1e-2  # τ = 1 mixes the centres


def test_near_and_far_are_all_that_is_seen():
    """Against a loop over pairs."""
    for causal in (True, False):
        each = scores(1, 12, causal)[0]
        for b in range(2):
            for i in range(8):
                for j in range(12):
                    seen = (j < 8 or b == 1) and (not causal or j <= i)
                    near = seen and (abs(i - j) < WIDTH or j < SINKS)
                    assert bool(each.near[b, 0, i, j]) == near
                    assert bool(each.far[b, 0, i, j]) == (seen and not near)


def test_sinks_are_the_first_tokens_that_count():
    counted = torch.ones(1, 12, dtype=torch.bool)
    counted[0, :5] = False
    pairs = counted[:, None, None, None].expand(-1, 1, 1, 12, -1)
    q = k = torch.zeros(1, 1, 12, 2)
    each = NearScores.of(Scores(q.unsqueeze(2), k, k, q.unsqueeze(2), pairs, counted), 1, 2)
    assert each.near[0, 0, 11].nonzero().flatten().tolist() == [5, 6, 11]


def test_divergence_and_error_written_out():
    given = scores(2)
    maps = best_joint(joint_centroids(given, 5, 100, generator()), given)
    each = given[1]
    total, wrong, outputs, queries = torch.zeros(4), [], [], 0
    for b in range(2):
        for i in range(20 if b == 0 else 24):
            affected = bool(each.far[b, 0, i].any())
            queries += affected
            for h in range(4):
                q, near, far = each.q[b, h, i], each.near[b, 0, i], each.far[b, 0, i]
                phi = (maps.query_rows[h] @ q + maps.query_bias[h]).softmax(-1)
                g = (maps.factor[h, :-1] @ q + maps.factor[h, -1]).exp()
                found = torch.where(far, g * (each.k[b, h] @ maps.key_rows[h].T).exp() @ phi, (each.k[b, h] @ q).exp())
                found = found * (near | far)
                exact = (each.k[b, h] @ q).masked_fill(~(near | far), -1e9).softmax(-1)
                found = found / found.sum()
                wrong.append((found - exact) @ each.v[b, h])
                outputs.append(exact @ each.v[b, h])
                if affected:
                    kept = near | far
                    total[h] += (exact[kept] * (exact[kept] / found[kept]).log()).sum()
    torch.testing.assert_close(joint_divergence(maps, each), total / queries, rtol=1e-3, atol=1e-5)
    wanted = torch.stack(outputs).unflatten(0, (-1, 4)).flatten(1)
    expected = torch.stack(wrong).square().sum() / (wanted - wanted.mean(0)).square().sum()
    torch.testing.assert_close(joint_output_error(maps, each, None), expected, rtol=1e-3, atol=1e-5)
    readout = torch.randn(3, 16, generator=generator())
    missing = torch.stack(wrong).unflatten(0, (-1, 4)).flatten(1) @ readout.T
    expected = missing.square().sum() / ((wanted - wanted.mean(0)) @ readout.T).square().sum()
    torch.testing.assert_close(joint_output_error(maps, each, readout), expected, rtol=1e-3, atol=1e-5)


def test_the_factor_is_that_of_scikit_learn():
    drawn = generator()
    q, missing = torch.randn(2, 50, 3, generator=drawn), torch.randn(2, 50, generator=drawn)
    share = torch.rand(2, 50, generator=drawn)
    found = fitted_factor(q, missing, share)
    for head in range(2):
        weights = (share[head] * (1 - share[head]) + 1e-4).double()
        penalty = RIDGE * float((weights[:, None] * q[head].double() ** 2).sum(0).mean())
        model = Ridge(alpha=penalty).fit(q[head], missing[head], sample_weight=weights)
        wanted = torch.tensor([*model.coef_, model.intercept_], dtype=torch.float32)
        torch.testing.assert_close(found[head], wanted, rtol=1e-4, atol=1e-5)


def test_each_stage_lowers_the_divergence():
    given, drawn = scores(8), generator()
    start = joint_centroids(given, 8, 1000, drawn)
    fitted = best_joint(start, given)
    without = fitted._replace(factor=torch.zeros_like(fitted.factor))
    moved = descend(fitted, lambda maps: joint_divergence(maps, given[0]).sum(), 40)
    stages = [
        torch.stack([joint_divergence(each, batch) for batch in given[:1]]).mean()
        for each in (start, without, fitted, moved)
    ]
    assert stages[2] < 0.9 * min(stages[:2])
    assert stages[3] < 0.9 * stages[2]


# --- models ---------------------------------------------------------------------------------------------------------


def vivid(name: str) -> Any:
    """A small random model whose attention is far from uniform."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"vocab_size": 300, "initializer_range": 0.2}
    if name == "llama":
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes, **tokens)).eval()
    return BertForSequenceClassification(BertConfig(max_position_embeddings=64, **sizes)).eval()


def sentences(count: int = 10, length: int = 40) -> list[dict[str, torch.Tensor]]:
    found, drawn = [], generator(1)
    for number in range(count):
        ids = torch.randint(5, 100, (3, length + number % 3), generator=drawn)
        mask = torch.ones_like(ids)
        mask[0, -6:] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def converted(name: str, steps: int = 0, **fields: Any) -> tuple[Any, Any]:
    part = AttentionPart(**{**JOINT, "num_features": 12, "near_field": 4, "sinks": 2, **fields})
    model = get_snnk_model(vivid(name), SNNKConfig(attention=part, modules_to_save=[])).eval()
    return model, calibrate(model, sentences(), steps=steps, progress=False)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_model_comes_closer_to_what_it_was(name):
    """Than without a far field, and before the fit; twice the same; better with steps."""
    plain, given = vivid(name), sentences()[0]

    def apart(model: Any) -> float:
        with torch.no_grad():
            missing = model(**given).logits - plain(**given).logits
        kept = given["attention_mask"].bool() if name == "llama" else slice(None)
        return float(missing[kept].square().mean())

    part = AttentionPart(**JOINT, num_features=12, near_field=4, sinks=2)
    untrained = get_snnk_model(vivid(name), SNNKConfig(attention=part, modules_to_save=[])).eval()
    before = apart(untrained)
    for module in untrained.modules():
        if isinstance(module, KernelAttention):
            module.joint.factor.data[..., -1] = -1e4
    near_alone = apart(untrained)
    model, report = converted(name)
    assert apart(model) < 0.7 * min(near_alone, before)
    assert all(slot.error_after < slot.error_before for slot in report.slots)
    assert all(slot.divergence_after < slot.divergence_before for slot in report.slots)
    again, _ = converted(name)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    _, stepped = converted(name, steps=30)
    assert sum(s.divergence_after for s in stepped.slots) < sum(s.divergence_after for s in report.slots)


def test_what_is_fitted_is_saved(tmp_path: Path):
    model, _ = converted("llama")
    given = sentences()[0]
    logits = model(**given).logits
    model.save_pretrained(tmp_path / "adapter")
    found = PeftModel.from_pretrained(vivid("llama"), tmp_path / "adapter").eval()
    torch.testing.assert_close(found(**given).logits, logits)
    small = bundle(model).eval()
    small.save_pretrained(tmp_path / "bundle")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "bundle").eval()
    assert torch.equal(found(**given).logits, small(**given).logits)


def test_sequences_that_are_all_near_are_refused():
    model = get_snnk_model(
        vivid("llama"),
        SNNKConfig(attention=AttentionPart(**JOINT, num_features=8, near_field=64, sinks=4), modules_to_save=[]),
    ).eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=r"has 42 tokens, all within near_field=64 and\s+sinks=4"):
        calibrate(model, sentences(), progress=False)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


@pytest.mark.parametrize("room", [42, 43])
def test_positions_that_were_never_seen_are_told(room):
    """A warning, once for all layers; the longest sequence here has 42 tokens."""
    model = vivid("llama")
    model.config.max_position_embeddings = room
    patched = get_snnk_model(
        model, SNNKConfig(attention=AttentionPart(**JOINT, num_features=8, near_field=4), modules_to_save=[])
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        calibrate(patched.eval(), sentences(), progress=False)
    told = [each for each in found if "has 42 tokens, and the model takes 43" in str(each.message)]
    assert len(told) == (room == 43)
    assert all(each.category is UserWarning and each.filename == __file__ for each in told)


# --- the benchmark --------------------------------------------------------------------------------------------------


def test_the_benchmark(tmp_path: Path):
    """On a random Llama and a stand-in of IMDb's archive."""
    pytest.importorskip("rich", reason="pip install snnk-peft[recipes]")
    recipes = Path(__file__).resolve().parents[2] / "recipes"
    special = ["<pad>", "<s>", "</s>"]
    words = {word: number for number, word in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    by_bytes = Tokenizer(models.BPE(vocab=words, merges=[]))
    by_bytes.pre_tokenizer, by_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=by_bytes, **names).save_pretrained(tmp_path / "model")
    vivid("llama").save_pretrained(tmp_path / "model")
    with tarfile.open(tmp_path / "imdb.tar.gz", "w:gz") as archive:
        for split in ("train", "test"):
            for number in range(4):
                review = tmp_path / f"{number}_7.txt"
                review.write_text("a film about the sea, and what comes of it. <br />" * 20, encoding="utf-8")
                archive.add(review, f"aclImdb/{split}/{'pos' if number % 2 else 'neg'}/{review.name}")
    output = tmp_path / "metrics.json"
    given = {
        "model": tmp_path / "model",
        "data": tmp_path / "imdb.tar.gz",
        "window": 6,
        "sinks": 2,
        "features": 6,
        "tokens": 160,
        "length": 32,
        "steps": 2,
        "uptraining": 3,
        "test-tokens": 96,
        "written": 4,
        "repetitions": 1,
        "output": output,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words += ["--lengths", "32", "48", "--behind", "16", "64", "--autocast"]
    done = run_python([str(recipes / "benchmarks" / "convert_models.py"), "llama", *words])
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    near = "window 6, 2 sinks"
    names = ["original", f"{near}, no far field", f"{near}, 6 features", f"{near}, 6 features, 3 steps"]
    assert [row["model"] for row in found["rows"]] == names
    assert found["rows"][3]["perplexity at 32"] != found["rows"][2]["perplexity at 32"]
    assert found["rows"][3]["seconds of conversion"] > found["rows"][2]["seconds of conversion"] > 0
    assert all(row["perplexity at 32"] > 1 for row in found["rows"])
    first, second, *behind = [row["cache bytes"] for row in found["decoding"]]
    assert behind[0] > 2 * first
    assert behind[1] == second
    assert len(found["calibration"]["slots"]) == 2
    assert set(found["written"]) == {"original", "converted"}
