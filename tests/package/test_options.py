"""Options: values of parts, components, projections and recipe settings are declared once and checked in one way."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any

import pytest
import torch
import yaml

from snnk_cli.config import describe, load_config
from snnk_cli.settings import FinetuneConfig
from snnk_peft import COMPONENTS, PROJECTIONS, SNNKConfig, build_feature_map
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import FeatureMapSpec
from snnk_peft.feature_map.base import SHARED_ARGUMENTS, pair_faults
from snnk_peft.options import MOST_SEED, Option, documented, fits_type, option, options_of, value_faults
from snnk_peft.parts import PARTS
from tests.tensor_sizes import LargestTensor


class Thing:
    """A thing.

    Args:
        **kwargs: more.
    """

    def __init__(
        self,
        count: Annotated[int, Option("how many.", low=1, high=8)],
        rate: Annotated[float | None, Option("how fast.", above=0, below=1)] = None,
        kind: Annotated[str, Option("which.", choices=("red", "green"))] = "red",
        order: Annotated[int, Option("of the kernel.", choices=(0, 1))] = 0,
        fast: Annotated[bool, Option("whether.")] = True,
        names: Annotated[list[str] | None, Option("what they are called.")] = None,
        every: Annotated[int | str, Option("when.", choices=("epoch",), low=1)] = "epoch",
        plain: object = None,
    ): ...


@dataclass
class Things:
    """The same things as settings of a recipe."""

    count: int = option(MISSING, "how many", low=1, high=8)
    rate: float | None = option(None, "how fast", above=0, below=1)
    kind: str = option("red", "which", choices=("red", "green"))
    order: int = option(0, "of the kernel", choices=(0, 1))
    fast: bool = option(True, "whether")
    names: list[str] | None = option(None, "what they are called")
    every: int | str = option("epoch", "when", choices=("epoch",), low=1)


@dataclass
class File:
    """A file of settings with one section."""

    things: Things = field(default_factory=Things)


WRONG = [
    ("count", 0, "an integer >= 1 and <= 8"),
    ("count", 9, "an integer >= 1 and <= 8"),
    ("count", 2.0, "an integer >= 1 and <= 8"),
    ("count", True, "an integer >= 1 and <= 8"),
    ("count", None, "an integer >= 1 and <= 8"),
    ("rate", 0.0, "a number > 0 and < 1, or None"),
    ("rate", 1.0, "a number > 0 and < 1, or None"),
    ("rate", math.nan, "a number > 0 and < 1, or None"),
    ("rate", "much", "a number > 0 and < 1, or None"),
    ("kind", "gren", "'red' or 'green'. Did you mean 'green'?"),
    ("kind", None, "'red' or 'green'"),
    ("kind", [], "'red' or 'green'"),
    ("order", 2, "0 or 1"),
    ("order", True, "0 or 1"),
    ("fast", 1, "True or False"),
    ("names", "a", "a list, or None"),
    ("names", [1], "a list, or None"),
    ("every", "epok", "'epoch' or an integer >= 1. Did you mean 'epoch'?"),
    ("every", 0, "'epoch' or an integer >= 1"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG, ids=str)
@pytest.mark.parametrize("cls", [Thing, Things])
def test_a_value_that_does_not_fit(cls: type, name: str, value: Any, expected: str) -> None:
    assert value_faults("thing.", options_of(cls), {name: value}) == [f"thing.{name} is {value!r}; expected {expected}"]


@pytest.mark.parametrize("cls", [Thing, Things])
def test_values_that_fit(cls: type) -> None:
    first = {"count": 8, "rate": None, "kind": "green", "order": 1, "fast": False, "names": ["a"], "every": "epoch"}
    second = first | {"count": 1, "rate": 0.5, "names": None, "every": 3}
    assert value_faults("", options_of(cls), first) + value_faults("", options_of(cls), second) == []


def test_what_is_not_declared_is_known_but_not_checked() -> None:
    assert value_faults("", options_of(Thing), {"plain": torch.zeros(2), "other": 1}) == []
    assert "plain" in options_of(Thing)
    assert "other" not in options_of(Thing)


@pytest.mark.parametrize(("name", "value", "expected"), WRONG, ids=str)
@pytest.mark.parametrize("door", ["file", "override"])
def test_settings_of_recipes_speak_yaml(door: str, name: str, value: Any, expected: str) -> None:
    text = yaml.safe_dump(value).split("\n")[0]
    given = (
        ({"things": {"count": 1, name: value}}, [])
        if door == "file"
        else (None, ["things.count=1", f"things.{name}={text}"])
    )
    with pytest.raises(ConfigError) as caught:
        load_config(File, *given)
    words = expected.replace("None", "null").replace("True or False", "true or false")
    assert caught.value.faults == [f"things.{name} is {value!r}; expected {words}"]


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        ([[1, "mean"], [-1, "max"]], list[list[int | str]], True),
        ([[1, "mean"], [-1, 0.5]], list[list[int | str]], False),
        ([1, "mean"], list[list[int | str]], False),
        ([1, None, {}], list[Any], True),
        (None, int | None, True),
    ],
)
def test_types_within_types(value: Any, kind: Any, fits: bool) -> None:
    assert fits_type(value, kind) is fits


def test_numbers_as_people_write_them() -> None:
    assert load_config(File, {"things": {"count": 1, "rate": "1e-3"}}).things.rate == 1e-3
    with pytest.raises(ConfigError, match=r"things.count is missing: how many"):
        load_config(File, {"things": {}})
    assert "  things.kind ('red'): which One of: red, green." in describe(File)


def test_the_help_becomes_the_docstring() -> None:
    text = inspect.getdoc(documented(Thing))
    assert text.startswith("A thing.\n\nArgs:\n    count: how many.\n    rate: how fast.\n")
    assert text.rstrip().endswith("every: when.\n    **kwargs: more.")
    assert "norms:" in inspect.getdoc(PROJECTIONS["orf"])
    assert "kernel:" in inspect.getdoc(COMPONENTS["posrf"])


# --- components and projections ---------------------------------------------------------------------------------------

MEMBERS = [
    (kind, name) for kind, registry in (("component", COMPONENTS), ("projection", PROJECTIONS)) for name in registry
]


def own_options(kind: str, name: str) -> dict[str, Option]:
    """The parameters of a member that a config can give."""
    cls = (COMPONENTS if kind == "component" else PROJECTIONS)[name]
    taken = () if kind == "component" else (*SHARED_ARGUMENTS, *cls.layer_arguments)
    return {parameter: known for parameter, known in options_of(cls).items() if parameter not in taken}


def partner(kind: str, name: str) -> dict[str, str]:
    """A pair that the member is part of."""
    if kind == "component":
        return {"component": name, "projection": next(p for p in PROJECTIONS if COMPONENTS[name].fits(PROJECTIONS[p]))}
    return {"component": next(c for c in COMPONENTS if COMPONENTS[c].fits(PROJECTIONS[name])), "projection": name}


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_every_parameter_is_declared(kind: str, name: str) -> None:
    """With help, a type, and a default that fits; and something does not fit."""
    cls = (COMPONENTS if kind == "component" else PROJECTIONS)[name]
    for parameter, known in own_options(kind, name).items():
        assert known.help, f"{name}.{parameter} has no help"
        assert known.checked, f"{name}.{parameter} is not checked"
        assert known.fault("x", {1, 2}) is not None, f"{name}.{parameter} takes anything"
        defaults = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
        default = next(
            inspect.signature(made).parameters[parameter].default
            for made in defaults
            if parameter in inspect.signature(made).parameters
        )
        assert known.fault("x", default) is None, f"{name}.{parameter}: the default does not fit"


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_all_wrong_values_are_refused_before_anything_is_built(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = COMPONENTS if kind == "component" else PROJECTIONS
    options = own_options(kind, name)
    if not options:
        pytest.skip("no parameters")
    sizes = () if kind == "component" else (6, 12)
    pair, given = partner(kind, name), {parameter: {1, 2} for parameter in options}
    with pytest.raises(ConfigError) as caught:
        registry[name](*sizes, **given)
    for parameter, known in options.items():
        assert any(f.endswith(f" {parameter} is {{1, 2}}; expected {known.expected()}") for f in caught.value.faults)
    for cls in (COMPONENTS[pair["component"]], PROJECTIONS[pair["projection"]]):
        monkeypatch.setattr(cls, "__init__", lambda *_, **__: pytest.fail("built"))
    params = {f"{kind}_params": given}
    faults = FeatureMapSpec(**pair, num_features=12, **params).faults("there")
    wanted = {f"there: {name} {key} is {{1, 2}}; expected {known.expected()}" for key, known in options.items()}
    assert set(faults) == wanted


CALLS = {
    "component_params": {"kernel": "sofmax", "A": 1, "b": 2},
    "projection_params": {"norms": "chy", "nroms": "chi"},
}
FAULTS = {
    "gerf kernel is 'sofmax'; expected 'softmax' or 'gaussian'. Did you mean 'softmax'?",
    "gerf A is 1; expected a number < 0.125",
    "component 'gerf' parameter 'b' is unknown; valid: A, kernel, s",
    "orf norms is 'chy'; expected 'chi', 'chi_pairs' or 'sqrt_dim'. Did you mean 'chi'?",
    "projection 'orf' parameter 'nroms' is unknown; valid: norms, redraw_every. Did you mean 'norms'?",
}


@pytest.mark.parametrize("door", ["build", "config", "file", "override"])
def test_all_faults_at_once_through_every_door(door: str) -> None:
    part = {"component": "gerf", "projection": "orf", **CALLS, "init": "random"}
    file = {"task": "rte", "output": {"dir": "x"}}
    doors: dict[str, tuple[str, Callable[[], Any]]] = {
        "build": ("", lambda: build_feature_map("gerf", "orf", 6, 12, **CALLS)),
        "config": ("adapter: ", lambda: SNNKConfig(adapter=part)),
        "file": ("method.adapter: ", lambda: load_config(FinetuneConfig, file | {"method": {"adapter": part}})),
        "override": (
            "method.adapter: ",
            lambda: load_config(FinetuneConfig, file, [f"method.adapter={json.dumps(part)}", "train.epochs=-1"]),
        ),
    }
    where, call = doors[door]
    with pytest.raises(ConfigError) as caught:
        call()
    more = {"train.epochs is -1; expected an integer >= 0"} if door == "override" else set()
    assert set(caught.value.faults) == {where + fault for fault in FAULTS} | more


@pytest.mark.parametrize(
    ("name", "args"), [("arccos", (2,)), ("trigrf", ("phase", "cauchy")), ("gerf", (-0.1, -1, "gaussian"))]
)
def test_positional_arguments_and_params(name: str, args: tuple[Any, ...]) -> None:
    made = COMPONENTS[name](*args)
    assert tuple(made.params.values()) == args
    assert COMPONENTS[name](**made.params).params == made.params
    with pytest.raises(ConfigError, match=f"component '{name}' parameter 'x' is unknown"):
        build_feature_map(name, "orf", 4, 4, component_params={"x": 1})


MEMBERS = [(name, kind[name]) for kind in (COMPONENTS, PROJECTIONS, PARTS) for name in kind.names()]
INTEGERS = [
    pytest.param(cls, name, known, id=f"{member}.{name}")
    for member, cls in [*MEMBERS, ("feature_map", FeatureMapSpec)]
    for name, known in options_of(cls).items()
    # Sizes of parts are those of their feature maps, which check them.
    if known.checked and int in known.kinds() and not any(isinstance(choice, int) for choice in known.choices)
]


@pytest.mark.parametrize(("cls", "name", "known"), INTEGERS)
def test_no_integer_is_unlimited(cls, name, known):
    """A number in a file decides how much memory or time is asked for."""
    for value in (10**30, 10**12):
        fault = known.fault(name, value)
        assert fault is not None or (value <= MOST_SEED and name == "seed"), f"{name} may be {value}"


SIZED = [
    (kind, member, name, known.high)
    for kind, registry in (("component", COMPONENTS), ("projection", PROJECTIONS))
    for member in registry.names()
    for name, known in options_of(registry[member]).items()
    if known.high is not None and name not in SHARED_ARGUMENTS
]


@pytest.mark.parametrize(("kind", "member", "name", "high"), SIZED)
def test_the_largest_integer_is_affordable(kind, member, name, high):
    """Or refused for the number of rows."""
    rows = 256
    component = member if kind == "component" else next(c for c in COMPONENTS.names() if not pair_faults(c, member))
    matrix = member if kind == "projection" else next(p for p in PROJECTIONS.names() if not pair_faults(member, p))
    params = {f"{kind}_params": {name: high}}
    with LargestTensor(1 << 24), contextlib.suppress(ConfigError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        FeatureMapSpec(component, matrix, rows, dim=16, **params).build()(torch.randn(2, 16))
