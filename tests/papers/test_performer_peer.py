"""The peer performer-pytorch in train_lra.py: against its formula, against softmax, and as a run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from data import TASKS
from data.listops import write_listops
from papers.lib.lra_model import LongRangeClassifier, build_classifier
from papers.lib.lra_settings import AttentionMethod, LongRangeConfig, LongRangeModel, PerformerSection
from papers.lib.study import load
from papers.programs import train_lra
from recipe_world import same_tensors
from safetensors.torch import load_file

from snnk_cli.config import load_config
from snnk_peft.errors import ConfigError

SIZES = LongRangeModel(dim=16, hidden_dim=16, heads=2, layers=2, dropout=0.0, attention_dropout=0.5)


@pytest.fixture
def library() -> Any:
    """The peer; its import needs distutils, which Python 3.12 left to setuptools."""
    return pytest.importorskip("performer_pytorch", reason="pip install performer-pytorch", exc_type=ImportError)


def classifier(
    features: int = 64, interval: int | None = 1000, seed: int = 0, sharpness: float = 10
) -> LongRangeClassifier:
    """A small one; sharper than fresh ones, whose attention hardly looks at its input."""
    method = AttentionMethod("performer_pytorch", PerformerSection(features, interval))
    torch.manual_seed(0)
    model = build_classifier(TASKS["listops"], SIZES, method, 32, seed=seed)
    with torch.no_grad():
        for layer in model.encoder.encoder.layer:
            layer.attention.self.query.weight.mul_(sharpness)
            layer.attention.self.key.weight.mul_(sharpness)
    return model


def projections(model: LongRangeClassifier) -> list[torch.Tensor]:
    return [layer.attention.self.performer_attention.projection_matrix for layer in model.encoder.encoder.layer]


def attention_of(model: LongRangeClassifier, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the first layer's attention gives (B, L, width), and its input."""
    seen: list[torch.Tensor] = []
    module = model.encoder.encoder.layer[0].attention.self
    hook = module.register_forward_hook(lambda _, inputs, output: seen.extend((output[0], inputs[0])))
    with torch.no_grad():
        model(torch.randint(1, 16, mask.shape)[:, None], mask.long()[:, None])
    hook.remove()
    return seen[0], seen[1]


def by_hand(
    model: LongRangeClassifier, hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor | None
) -> torch.Tensor:
    """The formula in fp64, one query at a time; softmax without padding if there are no features."""
    module = model.encoder.encoder.layer[0].attention.self
    heads, out = 2, torch.zeros_like(hidden, dtype=torch.float64)
    width = hidden.shape[-1] // heads
    q, k, v = (getattr(module, name)(hidden).double().detach() for name in ("query", "key", "value"))
    for b in range(len(hidden)):
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            keys, values = k[b, :, part] / width**0.25, v[b, :, part]
            if features is not None:
                W = features.double()
                exponent = keys @ W.T
                psi = (exponent - keys.square().sum(-1, keepdim=True) / 2 - exponent.max()).exp() + 1e-4
            for i in range(hidden.shape[1]):
                query = q[b, i, part] / width**0.25
                if features is None:
                    weights = (keys @ query)[mask[b]].exp()
                    out[b, i, part] = weights @ values[mask[b]] / weights.sum()
                    continue
                exponent = W @ query
                phi = (exponent - query.square().sum() / 2 - exponent.max()).exp() + 1e-4
                weights = psi @ phi
                out[b, i, part] = (weights * mask[b]) @ values / weights.sum()
    return out


@pytest.mark.parametrize("padded", [0, 5])
def test_attention_is_the_formula_with_padding_as_the_library_has_it(library: Any, padded: int) -> None:
    model = classifier().eval()
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[1, 12 - padded :] = False
    found, hidden = attention_of(model, mask)
    expected = by_hand(model, hidden, mask, projections(model)[0])
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-6)
    assert found.std() > 1e-3
    without = by_hand(model, hidden, torch.ones_like(mask), projections(model)[0])
    assert torch.allclose(found.double(), without, rtol=1e-3, atol=1e-6) is not bool(padded)


def test_more_features_come_closer_to_softmax_as_one_over_their_root_once_rows_have_random_signs(library: Any) -> None:
    mask = torch.ones(2, 12, dtype=torch.bool)
    errors: dict[str, dict[int, float]] = {"as drawn": {}, "signed": {}}
    for features in (64, 1024):
        squares: dict[str, list[torch.Tensor]] = {"as drawn": [], "signed": []}
        for seed in range(24):
            # With weak logits, whose kernel has light tails: with strong ones the law shows from many more features on.
            model = classifier(features, seed=seed, sharpness=5).eval()
            for rows, found in squares.items():
                if rows == "signed":
                    for value in projections(model):
                        value.mul_(2.0 * torch.randint(0, 2, (features, 1)) - 1)
                torch.manual_seed(1)  # of the tokens
                out, hidden = attention_of(model, mask)
                exact = by_hand(model, hidden, mask, None)
                found.append((out - exact).square().mean() / exact.square().mean())
        for rows, found in squares.items():
            errors[rows][features] = torch.stack(found).mean().sqrt().item()
    # Sixteen times as many features: a quarter of the error. 24 draws know a root mean square to about a sixth.
    assert 4 / 1.5 < errors["signed"][64] / errors["signed"][1024] < 4 * 1.5, errors
    assert errors["signed"][1024] < 0.03, errors
    # As the library draws them, rows lean towards -e_j (below), and more of them do not take that away.
    assert errors["as drawn"][1024] > 1.25 * errors["signed"][1024], errors


def test_rows_of_the_library_lean_as_the_signs_of_its_factorisation_do(library: Any) -> None:
    blocks = torch.cat([matrix for seed in range(60) for matrix in projections(classifier(seed=seed))]).view(-1, 8, 8)
    mean, error = blocks.mean(0), blocks.std(0) / len(blocks) ** 0.5
    assert (mean.diag()[:-1] < -0.3).all()  # the last sign is that of a determinant
    off = ~torch.eye(8, dtype=torch.bool)
    assert (mean[off].abs() < 5 * error[off]).all()


def test_features_are_drawn_from_seed_and_layer_and_leave_all_else_as_it_was(library: Any) -> None:
    model, again, other = classifier(), classifier(), classifier(seed=1)
    first, second = projections(model)
    assert first.shape == (64, 8)
    assert torch.equal(first, projections(again)[0])
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, projections(other)[0])
    # Blocks of orthogonal rows whose squared lengths are chi-square with 8 degrees of freedom.
    gram = first[:8] @ first[:8].T
    torch.testing.assert_close(gram, gram.diag().diag(), rtol=0, atol=1e-4)
    lengths = torch.cat([first, second]).square().sum(-1)
    assert abs(lengths.mean() - 8) < 4 * (16 / len(lengths)) ** 0.5
    torch.manual_seed(0)
    softmax = build_classifier(TASKS["listops"], SIZES, AttentionMethod(), 32, seed=0)
    for name, value in softmax.named_parameters():
        if ".query." not in name and ".key." not in name:  # which `classifier` stretches
            assert torch.equal(value, model.get_parameter(name)), name
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in softmax.named_parameters()}


def test_features_are_redrawn_in_training_only(library: Any) -> None:
    model = classifier(interval=3)
    ids, mask = torch.randint(1, 16, (2, 1, 8)), torch.ones(2, 1, 8).long()
    before = [value.clone() for value in projections(model)]

    def changed() -> list[bool]:
        return [not torch.equal(a, b) for a, b in zip(before, projections(model), strict=True)]

    model.eval()
    for _ in range(8):
        model(ids, mask)
    assert changed() == [False, False]
    model.train()
    for _ in range(3):
        model(ids, mask)
    assert changed() == [False, False]
    model(ids, mask)
    assert changed() == [True, True]
    fixed = classifier(interval=None).train()
    kept = projections(fixed)[0].clone()
    for _ in range(8):
        fixed(ids, mask)
    assert torch.equal(kept, projections(fixed)[0])


def run_settings(folder: Path) -> list[str]:
    """Command-line arguments of a small run into `folder`/run."""
    write_listops(
        folder,
        {"train": 200, "validation": 20, "test": 20},
        seed=3,
        **{"min_length": 4, "max_length": 24, "max_depth": 3, "max_args": 4},
    )
    content = {
        "task": "listops",
        "data": {"dir": str(folder), "max_length": 24},
        "model": {"dim": 16, "hidden_dim": 16, "layers": 1},
        "method": {"attention": "performer_pytorch", "performer": {"nb_features": 16, "feature_redraw_interval": 4}},
        "train": {
            **{"steps": 12, "batch_size": 8, "eval_every": 6, "save_every_steps": 3, "keep_checkpoints": 9},
            **{"warmup_steps": 0, "learning_rate": 1e-2},
        },
        "output": {"dir": str(folder / "run")},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return [str(file)]


def test_a_run_continues_bit_for_bit_across_a_redrawing(library: Any, tmp_path: Path) -> None:
    arguments = run_settings(tmp_path)
    assert train_lra.main(arguments) == 0
    report = json.loads((tmp_path / "run/metrics.json").read_text())
    assert report["method"] == "performer_pytorch"
    assert report["config"]["method"]["performer"] == {"nb_features": 16, "feature_redraw_interval": 4}
    tensors = {step: load_file(tmp_path / f"run/checkpoints/step-{step:07d}/model.safetensors") for step in (3, 6, 12)}
    name = "encoder.encoder.layer.0.attention.self.performer_attention.projection_matrix"
    assert not torch.equal(tensors[3][name], tensors[6][name])
    assert not torch.equal(tensors[6][name], tensors[12][name])
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    resume = [*arguments, f"output.dir={tmp_path / 'again'}", "--resume", "--checkpoint", "step-0000003"]
    assert train_lra.main(resume) == 0
    assert same_tensors(load_file(tmp_path / "again/checkpoints/step-0000012/model.safetensors"), tensors[12])


def test_without_the_library_the_run_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "performer_pytorch", None)  # what an import then finds is that there is none
    assert train_lra.main(run_settings(tmp_path)) == 2
    assert "pip install performer-pytorch" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_its_settings_are_strict_and_the_sweep_names_as_many_features_as_ours_has() -> None:
    base = {"task": "listops", "output": {"dir": "x"}}
    config = load_config(LongRangeConfig, base, load("lra").tasks["listops"].methods["performer_pytorch"])
    ours = load_config(LongRangeConfig, base, load("lra").tasks["listops"].methods["posrf_orf"])
    assert config.method.performer.nb_features == ours.method.snnk_config(0).attention.num_features
    assert config.method.label() == "performer_pytorch"
    assert config.method.snnk_config(0) is None
    with pytest.raises(ConfigError, match="did you mean 'performer_pytorch'"):
        load_config(LongRangeConfig, base, ["method.attention=performer_pytorhc"])
    with pytest.raises(ConfigError, match=r"performer\.nb_features"):
        load_config(LongRangeConfig, base, ["method.performer.nb_features=0"])
