"""Claims of papers, results of the stored runs, and verdicts by one rule for all.

A comparison is a list of differences, one per seed. Its interval is mean ± t SE, t the 97.5 % point of Student's
distribution with n − 1 degrees of freedom: wide for three seeds, as it should be.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import t

from papers.lib.reports import Run, read_runs
from snnk_cli.files import read_json
from snnk_cli.tables import mean_and_error

HOLDS, DIRECTION, FAILS, UNTESTED = "holds", "holds in direction", "does not hold", "not testable here"
VERDICTS = (HOLDS, DIRECTION, FAILS, UNTESTED)


class NotMeasuredError(Exception):
    """Raised if a report that a claim needs is not stored yet."""


class Measured(NamedTuple):
    """Our result for a claim.

    Attributes:
        ours: figures, formatted.
        verdict: one of `VERDICTS`.
    """

    ours: str
    verdict: str

    def of(self, what: str) -> Measured:
        """Return the same, with the figures said to be of `what`."""
        return Measured(f"{what} {self.ours}", self.verdict)


class Claim(NamedTuple):
    """A row of the page.

    Attributes:
        where: place in the paper.
        claim: the claim in a sentence.
        printed: the paper's figures.
        measure: returns our result from the stored reports; raises `NotMeasuredError`.
        scale: scale of our experiment.
        page: file or folder with the details, from the root of the repository.
        command: command to measure it, without `python recipes/`.
    """

    where: str
    claim: str
    printed: str
    measure: Callable[[Store], Measured]
    scale: str
    page: str
    command: str


class Store:
    """The stored reports of a repository, read once per study.

    Args:
        root: root of the repository.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._read_already: dict[str, dict[Run, dict[str, Any]]] = {}

    def figures(self, name: str) -> Any:
        """Return the content of a metrics.json.

        Args:
            name: folder below recipes/, such as `papers/programs/results/pointwise`.
        """
        return self._read(self.root / "recipes" / name / "metrics.json")

    def on_gpu(self, step: str) -> tuple[str, Any]:
        """Return the GPU's name and the figures of a step of `make gpu`; raises `NotMeasuredError` if there are none.

        Args:
            step: step of recipes/gpu.py.
        """
        report = self.figures("benchmarks/results/gpu")
        found = next((entry for entry in report["steps"] if entry["step"] == step and "figures" in entry), None)
        if found is None:
            raise NotMeasuredError(f"recipes/benchmarks/results/gpu: {step}")
        return report["card"]["name"], found["figures"]

    def reports(self, page: str, task: str, method: str) -> dict[int, dict[str, Any]]:
        """Return seed -> report of a sweep's runs, at least one."""
        found = {seed: report for (*place, seed), report in self._runs(page).items() if place == [task, method]}
        if not found:
            raise NotMeasuredError(f"model_cards/{page}/{task}/{method}")
        return found

    def methods(self, page: str, task: str) -> list[str]:
        """Return the names of all methods with reports."""
        return sorted({method for of, method, _ in self._runs(page) if of == task})

    def _runs(self, page: str) -> dict[Run, dict[str, Any]]:
        if page not in self._read_already:
            self._read_already[page] = read_runs(self.root / "model_cards" / page)
        return self._read_already[page]

    def values(self, page: str, task: str, method: str, key: str, factor: float = 1.0) -> dict[int, float]:
        """Return seed -> a figure of its report, times `factor`; a dot in `key` descends into a dictionary."""
        return {seed: factor * _at(report, key) for seed, report in self.reports(page, task, method).items()}

    def differences(
        self, page: str, task: str, first: str, second: str, key: str, factor: float = 1.0
    ) -> dict[int, float]:
        """Return seed -> figure of the first method minus that of the second, for seeds that both have."""
        one, other = self.values(page, task, first, key, factor), self.values(page, task, second, key, factor)
        found = {seed: one[seed] - other[seed] for seed in one if seed in other}
        if not found:
            raise NotMeasuredError(f"model_cards/{page}/{task}: no seed of both {first} and {second}")
        return found

    def mean_differences(
        self, page: str, tasks: Iterable[str], first: str, second: str, key: str = "score", factor: float = 100.0
    ) -> list[float]:
        """Return the mean over tasks of `differences`, for every seed that all tasks have."""
        by_task = [self.differences(page, task, first, second, key, factor) for task in tasks]
        seeds = sorted(set.intersection(*map(set, by_task))) if by_task else []
        if not seeds:
            raise NotMeasuredError(f"model_cards/{page}: no seed of all tasks for {first} and {second}")
        return [statistics.mean(found[seed] for found in by_task) for seed in seeds]

    @staticmethod
    def _read(file: Path) -> Any:
        if not file.is_file():
            raise NotMeasuredError(str(file.name))
        return read_json(file)


def _at(report: dict[str, Any], key: str) -> float:
    value: Any = report
    for part in key.split("."):
        value = value[part]
    return float(value)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % interval; infinite ends for a single value."""
    mean, error = mean_and_error(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf

    wide = float(t.ppf(0.975, len(values) - 1)) * error
    return mean, mean - wide, mean + wide


def in_words(values: Sequence[float], unit: str = "", form: str = "+.1f") -> str:
    """Format mean, interval and number of values."""
    mean, low, high = interval(values)
    unit = f" {unit}" if unit else ""
    if len(values) < 2:
        return f"{mean:{form}}{unit} (one seed)"
    return f"{mean:{form}}{unit} ({low:{form}} to {high:{form}}; n = {len(values)})"


def gain(values: Iterable[float], least: float = 0.0, unit: str = "points", form: str = "+.1f") -> Measured:
    """Judge the claim that differences are above 0, and on average at least `least`, if the paper says so.

    Holds: the whole interval is above 0 and the mean at least `least`. In direction: the interval is above 0 and the
    mean smaller. Does not hold: the whole interval is at 0 or below. Otherwise the seeds do not decide.
    """
    values = list(values)
    mean, low, high = interval(values)
    if low > 0:
        verdict = HOLDS if mean >= least else DIRECTION
    else:
        verdict = FAILS if high <= 0 else UNTESTED
    return Measured(in_words(values, unit, form) + (UNDECIDED if verdict == UNTESTED else ""), verdict)


def as_good(values: Iterable[float], margin: float, unit: str = "points", form: str = "+.1f") -> Measured:
    """Judge the claim that differences are not below −`margin`.

    Holds: the whole interval is above −`margin`. Does not hold: it is below. Otherwise the seeds do not decide.
    """
    values = list(values)
    _, low, high = interval(values)
    verdict = HOLDS if low > -margin else FAILS if high < -margin else UNTESTED
    return Measured(in_words(values, unit, form) + (UNDECIDED if verdict == UNTESTED else ""), verdict)


def unchanged(values: Iterable[float], margin: float, unit: str = "%", form: str = "+.0f") -> Measured:
    """Judge the claim that differences are within ±`margin`: holds if their interval is; fails if it is outside."""
    values = list(values)
    _, low, high = interval(values)
    inside, outside = -margin < low and high < margin, low > margin or high < -margin
    verdict = HOLDS if inside else FAILS if outside else UNTESTED
    return Measured(in_words(values, unit, form) + (UNDECIDED if verdict == UNTESTED else ""), verdict)


UNDECIDED = "; the seeds do not decide"


def ratio(value: float, printed: float, unit: str) -> Measured:
    """Judge the claim of a reduction by `printed` percent, where `value` percent was measured."""
    verdict = HOLDS if value >= printed else DIRECTION if value > 0 else FAILS
    return Measured(f"{abs(value):.1f} % {'less' if value > 0 else 'more'} {unit}", verdict)


def all_of(*parts: Measured, where: str = "") -> Measured:
    """Combine figures under one claim with the least favourable verdict; undecided ones count if no other fails.

    Raises:
        NotMeasuredError: there is no part; `where` says what is not stored.
    """
    if not parts:
        raise NotMeasuredError(where)
    order = [HOLDS, DIRECTION, UNTESTED, FAILS]
    return Measured("; ".join(part.ours for part in parts), max((part.verdict for part in parts), key=order.index))
