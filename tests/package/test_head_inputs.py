"""Heads are given what users have: columns of tables, names, lists, gaps; taken where it can be, refused in words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from snnk_peft import ClosedFormHead, fit_closed_form
from snnk_peft.errors import ConfigError, NumericalWarning
from snnk_peft.heads.fitted import FittedHead, expected_calibration_error
from snnk_peft.heads.statistics import HeadStatistics
from tests.tiny_models import tiny

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
