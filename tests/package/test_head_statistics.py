"""Statistics of closed-form heads: sums that add and subtract, features that are read, and inputs that are refused."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from snnk_peft import ClosedFormHead, fit_closed_form
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.heads.features import PAIR_POOLS, POOLS, HeadFeatures, HeadReader, pooled
from snnk_peft.heads.fitted import FittedHead, expected_calibration_error
from snnk_peft.heads.statistics import HEADER, KINDS, HeadStatistics
from tests.tiny_models import tiny

F64 = torch.float64


def examples(kind: str, n: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    vectors = torch.randn(n, 7, dtype=F64, generator=generator) + 30  # where plain sums of squares would cancel
    scores = vectors @ torch.randn(7, 3, dtype=F64, generator=generator)
    scores = scores - scores.mean(0) + torch.randn(n, 3, dtype=F64, generator=generator)
    return vectors, {"classes": scores.argmax(1), "labels": (scores > 0).long(), "numbers": scores}[kind]


def counted(kind: str, *shares: slice) -> HeadStatistics:
    vectors, targets = examples(kind)
    found = HeadStatistics(7, 3, kind)
    for share in shares:
        found.add(vectors[share], targets[share])
    return found


def same(one: HeadStatistics, other: HeadStatistics) -> None:
    assert one.count == other.count
    for ridge in (1e-3, 10.0):
        first, second = one.moments.solve(ridge), other.moments.solve(ridge)
        torch.testing.assert_close(first.weight, second.weight, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(first.bias, second.bias, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_shards_in_any_order_are_one(kind: str) -> None:
    shards = [counted(kind, slice(start, start + 3)) for start in range(0, 300, 3)]
    order = torch.randperm(100, generator=torch.Generator().manual_seed(5)).tolist()
    merged = shards[order[0]]
    for index in order[1:]:
        merged.merge(shards[index])
    same(merged, counted(kind, slice(None)))


@pytest.mark.parametrize("kind", KINDS)
def test_added_later_and_forgotten(kind: str, tmp_path: Path) -> None:
    vectors, targets = examples(kind)
    found = counted(kind, slice(0, 200))
    found.save(tmp_path / "head.safetensors")
    found = HeadStatistics.load(tmp_path / "head.safetensors")
    found.add(vectors[200:], targets[200:])
    same(found, counted(kind, slice(None)))
    person = [3, 50, 51, 299]
    found.remove(vectors[person], targets[person])
    rest = [index for index in range(300) if index not in person]
    never = HeadStatistics(7, 3, kind)
    never.add(vectors[rest], targets[rest])
    same(found, never)


def test_everything_can_be_forgotten_and_no_more() -> None:
    vectors, targets = examples("numbers")
    found = counted("numbers", slice(0, 10))
    with pytest.raises(ConfigError, match="11 tokens are to be removed of 10"):
        found.remove(vectors[:11], targets[:11])
    found.remove(vectors[:10], targets[:10])
    fresh = HeadStatistics(7, 3, "numbers")
    assert all(torch.equal(a, b) for a, b in zip(found.moments.tensors().values(), fresh.moments.tensors().values()))
    found.add(vectors[10:], targets[10:])
    same(found, counted("numbers", slice(10, None)))


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    first = HeadStatistics(7, 3, "classes", {"model": "minilm", "views": [[-1, "mean"]]})
    first.add(*examples("classes"))
    first.save(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    again = HeadStatistics.load(path)
    assert (again.kind, again.origin, again.count) == (first.kind, first.origin, 300)
    assert all(torch.equal(a, b) for a, b in zip(first.moments.tensors().values(), again.moments.tensors().values()))
    again.merge(first)
    assert again.count == 600

    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        HeadStatistics.load(damaged)
    save_file(load_file(path), tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="holds no statistics of a head"):
        HeadStatistics.load(tmp_path / "other.safetensors")
    with pytest.raises(ConfigError, match="only safetensors files are read"):
        HeadStatistics.load(tmp_path / "head.pt")


def test_what_does_not_fit_changes_nothing() -> None:
    found = counted("classes", slice(None))
    before = {name: tensor.clone() for name, tensor in found.moments.tensors().items()}
    vectors, targets = examples("classes")
    for other, told in (
        (HeadStatistics(7, 3, "labels"), "kind is 'labels' there and 'classes' here"),
        (HeadStatistics(7, 3, "classes", {"model": "another"}), "origin is"),
        (HeadStatistics(6, 3, "classes"), "cannot merge moments"),
    ):
        with pytest.raises(ConfigError, match=told):
            found.merge(other)
        with pytest.raises(ConfigError, match=told):
            found.take_away(other)
    for given, told in (
        ((vectors, targets + 1), "labels run from 1 to 3"),
        ((vectors[:, :6], targets), "do not fit"),
        ((vectors, targets + 0.5), "expected integer class indices"),
    ):
        with pytest.raises(ConfigError, match=told):
            found.add(*given)
        with pytest.raises(ConfigError, match=told):
            found.remove(*given)
    with pytest.raises(ValueError, match="NaN"):
        found.add(vectors * torch.nan, targets)
    twice = counted("classes", slice(None), slice(None))
    with pytest.raises(ConfigError, match="600 tokens are to be removed of 300"):
        found.take_away(twice)
    with pytest.raises(ConfigError, match="zeros and ones"):
        HeadStatistics(7, 3, "labels").add(vectors, torch.full((300, 3), 2))
    with pytest.raises(ConfigError, match=r"expected \(examples, 3\)"):
        HeadStatistics(7, 3, "numbers").add(vectors, torch.zeros(300, 2))
    with pytest.raises(ConfigError, match="expected one of classes, labels, numbers"):
        HeadStatistics(7, 3, "class")
    with pytest.raises(ConfigError, match="2 classes at least"):
        HeadStatistics(7, 1, "classes")
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.moments.tensors().items())


def with_dead_columns(dtype: torch.dtype = F64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Vectors and targets of 40 examples that stay, and of 400 others without which many ReLU columns are constant."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 60, generator=generator, dtype=dtype)
    kept = 0.4 * torch.randn(40, 12, generator=generator, dtype=dtype) + 2 * torch.randn(12, generator=generator)
    others = 2 * torch.randn(400, 12, generator=generator, dtype=dtype)
    found = []
    for inputs in (kept.to(dtype), others):
        labels = (inputs[:, 0] + inputs[:, 1] > (inputs[:, 0] + inputs[:, 1]).median()).long()
        found += [torch.relu(inputs @ rows), labels]
    assert int((found[0].std(0) == 0).sum()) > 10
    return tuple(found)


def of(*pairs: tuple[torch.Tensor, torch.Tensor], remember: bool = False) -> HeadStatistics:
    found = HeadStatistics(pairs[0][0].shape[1], 2, "classes", remember=remember)
    for vectors, targets in pairs:
        found.add(vectors, targets)
    return found


def through_a_file(statistics: HeadStatistics, path: Path) -> HeadStatistics:
    statistics.save(path)
    return HeadStatistics.load(path)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("way", ["at once", "one by one", "merged", "saved", "added later"])
def test_forgetting_is_exact_where_a_column_becomes_constant(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Against a head that never saw the others: the same labels for all of them, and the same scores."""
    kept, wanted, others, told = with_dead_columns(dtype)
    path = tmp_path / "head.safetensors"
    found = of((others[:200], told[:200]), (kept, wanted), (others[200:], told[200:]))
    if way == "one by one":
        for index in torch.randperm(400, generator=torch.Generator().manual_seed(1)).tolist():
            found.remove(others[index : index + 1], told[index : index + 1])
    elif way == "merged":  # what was forgotten in a shard is still rounding in the whole
        shard = of((kept[20:], wanted[20:]), (others, told))
        shard.take_away(of((others, told)))
        found = of((kept[:20], wanted[:20]))
        found.merge(shard)
    elif way == "saved":
        found = through_a_file(found, path)
        found.remove(others[:300], told[:300])
        found = through_a_file(found, path)
        found.remove(others[300:], told[300:])
        found = through_a_file(found, path)
    elif way == "added later":
        found = of((kept[:30], wanted[:30]), (others, told))
        found.remove(others, told)
        found.add(kept[30:], wanted[30:])
    else:
        found.remove(others, told)
    never = FittedHead(of((kept, wanted)))
    head = FittedHead(found)
    everything = torch.cat((kept, others))
    assert torch.equal(head.scores(everything).argmax(1), never.scores(everything).argmax(1))
    torch.testing.assert_close(head.scores(everything), never.scores(everything), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(head.scores(kept), never.scores(kept), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.variance(kept), never.variance(kept), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(
        head.leave_one_out(kept, wanted), never.leave_one_out(kept, wanted), rtol=1e-5, atol=1e-5
    )


def test_columns_far_from_zero_become_constant_too() -> None:
    """Their rounding is that of their mean: 10⁶ standard deviations away, a ten-thousandth of one is lost."""
    kept, wanted, others, told = with_dead_columns()
    found = of((kept + 1e6, wanted), (others + 1e6, told))
    found.remove(others + 1e6, told)
    diagonal = found.moments.normal_equations()[0].diagonal()
    constant = kept.std(0) == 0
    assert torch.equal(diagonal[constant], torch.zeros(int(constant.sum()), dtype=F64))
    assert bool((diagonal[kept.std(0) > 0.01] > 0).all())


def test_statistics_without_the_rounding_still_load(tmp_path: Path) -> None:
    path, older = tmp_path / "head.safetensors", tmp_path / "older.safetensors"
    counted("classes", slice(None)).save(path)
    with safe_open(path, "pt") as file:
        header = {name: text for name, text in file.metadata().items() if name == HEADER}
    tensors = load_file(path)
    del tensors["rounding"]
    save_file(tensors, older, header)
    same(HeadStatistics.load(older), counted("classes", slice(None)))


def test_what_was_never_counted_is_noticed_where_it_shows() -> None:
    vectors, targets = examples("classes")
    found = counted("classes", slice(0, 200))
    before = {name: tensor.clone() for name, tensor in found.moments.tensors().items()}
    many = int((targets[:200] == 1).sum())
    with pytest.raises(ConfigError, match=rf"{many + 1} examples of class 1 are to be forgotten of {many}"):
        found.remove(vectors[: many + 1], torch.ones(many + 1, dtype=torch.long))
    with pytest.raises(ConfigError, match="7 of 7 features would keep a negative variance"):
        found.remove(1e3 * vectors[:20], targets[:20])
    vectors, targets = examples("labels")
    several = counted("labels", slice(0, 200))
    without = int((targets[:200, 2] == 0).sum())
    with pytest.raises(ConfigError, match=rf"{without + 1} examples without label 2 are to be forgotten of {without}"):
        several.remove(vectors[: without + 1], torch.zeros(without + 1, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.moments.tensors().items())


def test_with_digests_only_what_was_counted_is_forgotten(tmp_path: Path) -> None:
    kept, wanted, others, told = with_dead_columns()
    found = of((kept, wanted), (others, told), (others[:1], told[:1]), remember=True)
    found = through_a_file(found, tmp_path / "head.safetensors")
    changed = others[:3].clone()
    changed[1, 5] += 1e-12
    with pytest.raises(ConfigError, match="1 of 3 examples that are to be forgotten were not counted"):
        found.remove(changed, told[:3])
    with pytest.raises(ConfigError, match="1 of 1 examples"):
        found.remove(others[:1], 1 - told[:1])
    found.remove(others[:1], told[:1])
    found.remove(others[:1], told[:1])  # was counted twice
    with pytest.raises(ConfigError, match="1 of 1 examples"):
        found.remove(others[:1], told[:1])
    found.take_away(of((others[1:], told[1:]), remember=True))
    never = of((kept, wanted), remember=True)
    assert found.digests == never.digests
    torch.testing.assert_close(FittedHead(found).scores(kept), FittedHead(never).scores(kept))
    with pytest.raises(ConfigError, match="remember is False there and True here"):
        found.merge(of((kept, wanted)))


def test_a_full_disk_is_told_with_the_path_and_the_older_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    counted("classes", slice(None)).save(path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            counted("classes", slice(None)).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    with pytest.raises(OSError, match="No such file or directory") as raised:
        counted("classes", slice(None)).save(tmp_path / "missing" / "head.safetensors")
    assert raised.value.filename == str(tmp_path / "missing" / "head.safetensors")


# === features =========================================================================================================


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


# === labels and inputs ================================================================================================


NAMES = ["bad", "fair", "good"]
N = 24
IDS = torch.randint(3, 100, (N, 6), generator=torch.Generator().manual_seed(1))
LABELS = (IDS[:, 1] % 3).tolist()
LABELS[:3] = [0, 1, 2]

Fit = Callable[[Any, Any], torch.Tensor]  # (rows, labels of them) -> the weight of the fitted head


def of_vectors(rows: Any, labels: Any) -> torch.Tensor:
    statistics = HeadStatistics(6, 3, "classes", {"names": NAMES})
    statistics.add(rows.float(), labels)
    return FittedHead(statistics).weight


def of_a_model(rows: Any, labels: Any) -> torch.Tensor:
    head = ClosedFormHead(tiny("bert", num_labels=3), names=NAMES)
    head.add([{"input_ids": rows, "labels": labels}])
    return head.fit().weight


def in_place(rows: Any, labels: Any) -> torch.Tensor:
    model = tiny("bert", num_labels=3, id2label=dict(enumerate(NAMES)))
    fit_closed_form(model, [{"input_ids": rows, "labels": labels}])
    return model.classifier.weight.detach()


DOORS = {"statistics": of_vectors, "ClosedFormHead": of_a_model, "fit_closed_form": in_place}
of_every_door = pytest.mark.parametrize("fit", DOORS.values(), ids=DOORS)

TAKEN = {
    "a list": LABELS,
    "an array": np.array(LABELS, dtype=np.int8),
    "a column": pd.Series(LABELS, index=range(100, 100 + N)),
    "one column of a table": pd.DataFrame({"label": LABELS}),
    "integers after a gap": pd.Series([float(each) for each in LABELS]),
    "names": [NAMES[each] for each in LABELS],
    "a column of names": pd.Series([NAMES[each] for each in LABELS]),
    "categories": pd.Series([NAMES[each] for each in LABELS], dtype="category"),
    "nullable integers": pd.Series(LABELS, dtype="Int64"),
    "scalars": [torch.tensor(each) for each in LABELS],
}


@of_every_door
@pytest.mark.parametrize("given", TAKEN.values(), ids=TAKEN)
def test_labels_of_classes_are_taken_as_they_come(fit: Fit, given: Any) -> None:
    torch.testing.assert_close(fit(IDS, given), fit(IDS, torch.tensor(LABELS)), rtol=0, atol=0)


REFUSED = {
    "a gap": (pd.Series([*LABELS[:-1], None]), "NaN or infinity, the first in row 23"),
    "a missing name": ([*[NAMES[each] for each in LABELS[:-1]], None], "1 of 24 .* are missing, the first in row 23"),
    "a nullable gap": (pd.Series([*LABELS[:-1], None], dtype="Int64"), "1 of 24 .*, the first in row 23"),
    "an unknown name": (["god" if each == 2 else NAMES[each] for each in LABELS], "unknown class in .* 'god'; did you"),
    "a class too many": ([*LABELS[:-1], 3], "0 to 3; expected 0 to 2, one of 3 classes .*1 of 24 .*row 23"),
    "ignored words": ([*LABELS[:-1], -100], "-100 to 2; expected 0 to 2"),
    "halves": ([0.5, *LABELS[1:]], "expected integer class indices|integer class indices"),
    "lists of lists": ([[each, each] for each in LABELS], "integer class indices"),
    "ragged": ([[each] * each for each in LABELS], "rows of different lengths"),
    "dates": (pd.Series(pd.to_datetime(["2026-01-01"] * N)), "are datetime64.*; expected numbers"),
    "one too few": (LABELS[:-1], r"24 vectors and 23 targets|\(23,\); expected one per example, of which there are 24"),
    "None": (None, "missing|expected one"),
    "a number": (1, "expected one entry, or one row of numbers, per example"),
    "objects": ([object()] * N, "entries that are no numbers"),
}


@of_every_door
@pytest.mark.parametrize(("given", "told"), REFUSED.values(), ids=REFUSED)
def test_labels_that_are_none_are_refused(fit: Fit, given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        fit(IDS, given)


def test_names_without_classes_to_be_found_in() -> None:
    statistics = HeadStatistics(6, 3, "classes")
    with pytest.raises(ConfigError, match="are texts such as 'bad', 'fair', 'good'; expected numbers: class indices"):
        statistics.add(IDS.float(), [NAMES[each] for each in LABELS])


@of_every_door
def test_one_example_is_no_head(fit: Fit) -> None:
    with pytest.raises(ConfigError, match="1 example"):
        fit(IDS[:1], LABELS[:1])


@of_every_door
@pytest.mark.filterwarnings("ignore:1 of the 1 different rows of batches occur with more than one label")
def test_equal_rows_and_classes_without_examples_are_said(fit: Fit) -> None:
    with pytest.warns(NumericalWarning, match="all 24 vectors are the same"):
        assert not fit(IDS[:1].expand(N, -1), LABELS).any()
    with pytest.warns(NumericalWarning, match="none of 24 examples is of class 'fair'; expected .* all 3 classes"):
        fit(IDS, [min(2 * each, 2) for each in LABELS])
    with pytest.warns(NumericalWarning, match="of class 'bad', 'fair'; all are of one class"):
        assert fit(IDS, [2] * N).isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        fit(IDS, LABELS)


def test_a_table_of_vectors_and_several_labels() -> None:
    table = pd.DataFrame(IDS.numpy(), columns=list("abcdef"))
    wanted = pd.DataFrame({"one": IDS[:, 0].numpy() % 2 == 1, "two": IDS[:, 1].numpy() % 2})
    found, expected = HeadStatistics(6, 2, "labels"), HeadStatistics(6, 2, "labels")
    found.add(table, wanted.astype(bool))
    found.add(table, wanted.astype(object))
    expected.add(IDS.double(), IDS[:, :2] % 2)
    expected.add(IDS.double(), IDS[:, :2] % 2)
    head, other = FittedHead(found), FittedHead(expected)
    torch.testing.assert_close(head.scores(table), other.scores(IDS.double()))
    with pytest.raises(ConfigError, match="vectors hold entries that are no numbers"):
        found.add(table.assign(a="text"), wanted)
    with pytest.raises(ConfigError, match=r"vectors \(24, 5\) do not fit; expected \(examples, 6\)"):
        head.scores(table.drop(columns="a"))
    with pytest.raises(ConfigError, match=r"labels are \(24, 1\); expected \(examples, 2\)"):
        found.add(table, wanted[["one"]])
    with pytest.raises(ConfigError, match="labels run from 0 to 2; expected zeros and ones"):
        found.add(table, 2 * wanted)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_that_are_none(wrong: float) -> None:
    vectors, targets = IDS.double(), IDS[:, :1].double()
    statistics = HeadStatistics(6, 1, "numbers")
    statistics.add(vectors, pd.Series(targets[:, 0].numpy()))
    head = FittedHead(statistics)
    spoiled, missing = vectors.clone(), targets.clone()
    spoiled[5, 2], missing[7, 0] = wrong, wrong
    with pytest.raises(ConfigError, match="1 of 24 numbers hold NaN or infinity, the first in row 7"):
        statistics.add(vectors, missing)
    for door in (partial(statistics.add, targets=targets), head.scores, head.variance):
        with pytest.raises(ConfigError, match="1 of 24 vectors hold NaN or infinity, the first in row 5"):
            door(spoiled)
    with pytest.raises(ConfigError, match="24 vectors and 23 targets"):
        head.leave_one_out(vectors, targets[1:])
    assert statistics.count == 24


def test_batches_that_do_not_fit_those_before() -> None:
    model = tiny("bert", num_labels=3)
    head = ClosedFormHead(model, names=NAMES)
    with pytest.raises(ConfigError, match="batch 1: labels run from 0 to 4; expected 0 to 2"):
        head.add([{"input_ids": IDS, "labels": LABELS}, {"input_ids": IDS, "labels": [4, *LABELS[1:]]}])
    assert head.statistics.count == 0
    with pytest.raises(ConfigError, match="batch 1 has targets that are numbers, those before it class indices"):
        fit_closed_form(model, [{"input_ids": IDS, "labels": LABELS}, {"input_ids": IDS, "labels": torch.rand(N, 3)}])
    with pytest.raises(ConfigError, match="batch 1: targets run from 0 to 4"):
        fit_closed_form(model, [{"input_ids": IDS, "labels": LABELS}, {"input_ids": IDS, "labels": [4, *LABELS[1:]]}])


@pytest.mark.parametrize("names", ["ab", ["a", "a", "b"], []])
def test_names_have_to_differ(names: Any) -> None:
    with pytest.raises(ConfigError, match="expected different texts, one per class"):
        ClosedFormHead(tiny("bert", num_labels=3), names=names)


def test_truth_values_are_two_classes() -> None:
    truth = [each > 0 for each in LABELS]
    model, other = tiny("bert", num_labels=2), tiny("bert", num_labels=2)
    fit_closed_form(model, [{"input_ids": IDS, "labels": truth}])
    fit_closed_form(other, [{"input_ids": IDS, "labels": torch.tensor(truth).long()}])
    assert torch.equal(model.classifier.weight, other.classifier.weight)


def test_calibration_error_of_what_is_none() -> None:
    even = torch.full((4, 2), 0.5)
    for given, told in (
        ((even[:0], []), "one at least"),
        ((even, [0, 1, 0]), "4 probabilities and 3 labels"),
        ((even * float("nan"), [0, 1, 0, 1]), "4 of 4 probabilities hold NaN"),
        ((even, [0, 1, 2, 1]), "expected 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=told):
            expected_calibration_error(*given)


@pytest.mark.parametrize("fit", [of_a_model, in_place], ids=["ClosedFormHead", "fit_closed_form"])
def test_one_text_with_two_labels_is_told_with_counts(fit: Fit) -> None:
    rows = torch.cat((IDS, IDS[:2], IDS[1:2]))  # the first with another label, the second twice with its own
    labels = [*LABELS, 2, *LABELS[1:2], *LABELS[1:2]]
    told = r"1 of the 24 different rows of batches occur with more than one label \(2 of 27 rows\)"
    with pytest.warns(NumericalWarning, match=told):
        fit(rows, labels)


def test_one_text_with_two_numbers_is_no_contradiction() -> None:
    """Two people may rate one text differently; the mean is right."""
    model = tiny("bert", num_labels=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        fit_closed_form(model, [{"input_ids": torch.cat((IDS, IDS)), "labels": torch.rand(2 * N)}])
        head = ClosedFormHead(model, kind="numbers", names=["score"])
        head.add([{"input_ids": torch.cat((IDS, IDS)), "labels": torch.rand(2 * N)}])
