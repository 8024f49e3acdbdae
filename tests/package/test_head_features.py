"""What heads read of hidden states, against loops over examples, in every padding and precision."""

from __future__ import annotations

import pytest
import torch

from snnk_peft.errors import ConfigError
from snnk_peft.heads.features import PAIR_POOLS, POOLS, HeadFeatures, HeadReader, pooled

LENGTHS = (5, 1, 3)


def states(side: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Three examples of several lengths, padded with what must not count."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.full((3, 5, 4), 1e4, dtype=dtype)
    mask = torch.zeros(3, 5, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        place = slice(5 - length, 5) if side == "left" else slice(0, length)
        hidden[row, place] = torch.randn(length, 4, generator=generator, dtype=torch.float64).to(dtype)
        mask[row, place] = 1
    return hidden, mask


ORACLES = {
    "mean": lambda tokens: tokens.mean(0),
    "max": lambda tokens: tokens.max(0).values,
    "first": lambda tokens: tokens[0],
    "last": lambda tokens: tokens[-1],
}


SINGLE = [pool for pool in POOLS if pool not in PAIR_POOLS]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pool", SINGLE)
def test_padding_does_not_count(pool: str, side: str) -> None:
    hidden, mask = states(side)
    expected = torch.stack([ORACLES[pool](row[counted.bool()]) for row, counted in zip(hidden, mask, strict=True)])
    torch.testing.assert_close(pooled(hidden, mask, pool), expected)
    whole = torch.stack([ORACLES[pool](row) for row in hidden])
    torch.testing.assert_close(pooled(hidden, None, pool), whole)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pool", PAIR_POOLS)
def test_two_texts_are_averaged_apart(pool: str, side: str) -> None:
    """Of the example with one token all of it is the first text, and the mean of the second is zero."""
    hidden, mask = states(side)
    second = torch.zeros_like(mask)
    expected = []
    for row, counted in enumerate(mask.bool()):
        places = counted.nonzero().flatten()
        split = (len(places) + 1) // 2
        second[row, places[split:]] = 1
        a = hidden[row, places[:split]].mean(0)
        b = hidden[row, places[split:]].mean(0) if len(places) > split else torch.zeros(4, dtype=hidden.dtype)
        expected.append((a - b).abs() if pool == "apart" else a * b)
    second = torch.where(mask.bool(), second, 1 - second)  # what padding says must not count
    torch.testing.assert_close(pooled(hidden, mask, pool, second), torch.stack(expected))
    with pytest.raises(ValueError, match="expected a mask of the second text"):
        pooled(hidden, mask, pool)


def test_default_views_of_pairs() -> None:
    alone = HeadFeatures.across(6)
    pairs = HeadFeatures.across(6, pairs=True)
    assert pairs.views == (*alone.views, (4, "apart"), (4, "product"), (6, "apart"), (6, "product"))
    assert pairs.of_pairs
    assert not alone.of_pairs


@pytest.mark.parametrize("pool", SINGLE)
def test_half_precision_is_pooled_in_float32(pool: str) -> None:
    hidden, mask = states("right", torch.bfloat16)
    found = pooled(hidden, mask, pool)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, pooled(hidden.float(), mask, pool))


def test_views_stand_side_by_side() -> None:
    layers = [states("right")[0] * factor for factor in (1, 2, 3)]
    mask = states("right")[1]
    reader = HeadReader(HeadFeatures([(0, "mean"), (-1, "max"), (1, "first")]), 4, 3)
    expected = [pooled(layers[0], mask, "mean"), pooled(layers[2], mask, "max"), pooled(layers[1], mask, "first")]
    torch.testing.assert_close(reader(layers, mask), torch.cat(expected, -1))
    assert reader.out_dim == 12


def test_through_a_feature_map() -> None:
    spec = {"component": "relu", "projection": "orf", "num_features": 6, "seed": 3}
    hidden, mask = states("right", torch.float32)
    reader = HeadReader(HeadFeatures([(0, "mean"), (0, "first")], spec), 4, 1)
    found, plain = reader([hidden], mask), HeadReader(HeadFeatures([(0, "mean"), (0, "first")]), 4, 1)([hidden], mask)
    assert found.shape == (3, reader.out_dim)
    torch.testing.assert_close(found[:, -8:], plain)
    rows = reader.stage.feature_map.projection.materialize()
    normal = torch.nn.functional.layer_norm(plain, (8,)) * 8**-0.5
    expected = (normal @ rows.T).relu() * reader.stage.feature_map.projection.amplitudes()
    torch.testing.assert_close(found[:, :6], expected, rtol=1e-4, atol=1e-5)


def test_faults() -> None:
    for views, told in (
        ((), "one at least"),
        ([("mean", 1)], "expected a pair"),
        ([(1, "average"), (0.5, "mean")], "2 faults"),
    ):
        with pytest.raises(ConfigError, match=told):
            HeadFeatures(views)
    with pytest.raises(ConfigError, match="feature_map"):
        HeadFeatures(feature_map={"component": "sofmax", "projection": "orf", "num_features": 2})
    with pytest.raises(ConfigError, match=r"hidden states 7, -8; the model has 7, 0 to 6 or -7 to -1"):
        HeadReader(HeadFeatures([(7, "mean"), (-8, "max"), (-7, "mean")]), 4, 7)
