"""Statistics of a head add: merged, continued and forgotten, against one fit from scratch and scikit-learn."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.linear_model import Ridge

from snnk_peft.errors import ConfigError
from snnk_peft.heads.fitted import FittedHead
from snnk_peft.heads.statistics import HEADER, KINDS, HeadStatistics

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
def test_the_head_is_that_of_scikit_learn(kind: str) -> None:
    vectors, targets = examples(kind)
    wanted = torch.eye(3, dtype=F64)[targets] if kind == "classes" else targets.double()
    expected = Ridge(alpha=2.0).fit(vectors.numpy(), wanted.numpy())
    found = counted(kind, slice(None)).moments.solve(2.0)
    torch.testing.assert_close(found.weight, torch.from_numpy(expected.coef_), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.bias, torch.from_numpy(expected.intercept_), rtol=1e-8, atol=1e-8)


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
