"""Statistics of a head add: merged, continued and forgotten, against one fit from scratch and scikit-learn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import Ridge

from snnk_peft.errors import ConfigError
from snnk_peft.heads.statistics import KINDS, HeadStatistics

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
        ((vectors, targets.double()), "expected integer class indices"),
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
