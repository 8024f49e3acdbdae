"""Studies are read whole, all that they name is there, pages are those of their reports; wrong settings are refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lib.finetuning import Finetuning
from papers import study
from papers.lib.study import PAPERS, STUDIES, entries, expanded, load
from papers.programs import (
    finetune_kernel,
    fit_picture,
    fit_potential,
    pretrain_mlm,
    train_copy,
    train_lowrank,
    train_lra,
    train_mlp,
)
from recipe_world import RECIPES

from snnk_cli.config import dump_yaml, load_config

CARDS = RECIPES.parent / "model_cards"
BY_ATTENTION = (train_lra.LongRange, pretrain_mlm.PretrainMasked)  # whose methods are named by their attention
EXPERIMENTS = (
    *(*BY_ATTENTION, Finetuning, finetune_kernel.FinetuneKernel, train_copy.TrainCopy, train_mlp.TrainMlp),
    *(fit_picture.FitPicture, fit_potential.FitPotential, train_lowrank.LowRankTraining),
)
KINDS = {RECIPES / kind.program: kind for kind in EXPERIMENTS}
# Names of tasks in studies, where they are not those of the settings.
NAMED_OTHERWISE = {"text": "lra_text", "retrieval": "lra_retrieval", "image": "lra_image", "imagenet": "imagenet1k"}
NAMED_OTHERWISE |= {**dict.fromkeys(("copy_128", "copy_256"), "copy"), "pretraining": "stdlib_docs"}
NAMED_OTHERWISE |= dict.fromkeys(("siren", "siren_three", "siren_photograph"), "china")
WITH_PAGE = [name for name in STUDIES if load(name).page]
KEYS = {"about", "program", "config", "settings", "methods", "tasks", "further", "seeds", "page", "shared", "draws"}
KEYS |= {"rates_from", "rates", "rates_of", "only", "without", "needs", "pretraining"}


@pytest.mark.parametrize("name", STUDIES)
def test_it_names_what_there_is(name: str) -> None:
    given = entries(name)
    assert given.keys() <= KEYS
    assert set(given.get("only", ())) <= given["methods"].keys()
    found = load(name)
    assert set(found.chosen) <= found.tasks.keys()
    assert not found.page or (PAPERS / "pages" / f"{found.page}.py").is_file()
    for task in found.tasks.values():
        assert task.program.is_file()
        assert task.config.is_file()
        for method, settings in task.methods.items():
            assert all(re.fullmatch(r"[a-z_.0-9]+=.+", setting) for setting in settings), method
            assert "<" not in "".join([method, *settings])


@pytest.mark.parametrize("name", STUDIES)
def test_settings_of_every_method_are_those_of_its_recipe(name: str) -> None:
    """They are valid, of this task, and no two methods of a task are the same."""
    for title, task in load(name).tasks.items():
        kind = KINDS[task.program]
        configs = {method: load_config(kind.settings, task.config, given) for method, given in task.methods.items()}
        assert {config.task for config in configs.values()} == {NAMED_OTHERWISE.get(title, title)}
        assert len({dump_yaml(config) for config in configs.values()}) == len(configs), title
        if kind in BY_ATTENTION and name != "fmm":  # whose methods are near fields and ranks: test_copy.py
            labels = {method: config.method.label().replace("-", "_") for method, config in configs.items()}
            assert labels == {method: {"elu": "elu_orf"}.get(method, method) for method in configs}
        if kind is train_lowrank.LowRankTraining:  # four starts, two rank scales and decays; the dense network
            assert len({config.method.label() for config in configs.values()}) == len(configs) == 4 * 2 * 2 + 1


def test_a_name_with_places_stands_for_all_combinations() -> None:
    of = {"a": ["x", "y"], "b": {"": {"n": 1}, "_two": {"n": 2}}}
    settings = ["s=<a>", ["t=<b.n>"]]
    assert expanded({"<a><b>": {"for": of, "settings": settings}, "z": ["u=1", ["v=2"]]}) == {
        "x": ["s=x", "t=1"],
        "x_two": ["s=x", "t=2"],
        "y": ["s=y", "t=1"],
        "y_two": ["s=y", "t=2"],
        "z": ["u=1", "v=2"],
    }


@pytest.mark.parametrize("words", [["run", "none"], ["page"], ["show", "glue"]])
def test_what_is_no_study_is_refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        study.main([*words])
    assert stop.value.code == 2
    assert "usage: study.py" in capsys.readouterr().err


@pytest.mark.parametrize("name", WITH_PAGE)
def test_a_page_needs_a_report(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["page", name, "--runs", str(tmp_path / "none"), "--out", str(tmp_path / "empty")]) == 2
    assert f"start: python recipes/papers/study.py run {name}" in capsys.readouterr().err
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize("folder", [file.stem for file in CARDS.glob("*.jsonl") if file.with_suffix("").is_dir()])
def test_the_stored_page_is_that_of_the_stored_reports(folder: str, tmp_path: Path) -> None:
    """Rendered from the lines alone, without a run."""
    for file in CARDS.glob("*.jsonl"):
        shutil.copy(file, tmp_path)
    name = folder.removesuffix("_gpu")
    assert study.main(["page", name, "--runs", str(tmp_path / "none"), "--out", str(tmp_path / folder)]) == 0
    assert (tmp_path / folder / "README.md").read_bytes() == (CARDS / folder / "README.md").read_bytes()
    assert all(png.stat().st_size > 1000 for png in (tmp_path / folder).glob("*.png"))


def test_a_study_without_a_page_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["page", "glue_rates"]) == 2
    assert "glue_rates has no page of its own" in capsys.readouterr().err


# Program and settings file -> what is given besides, and what is said.
WRONG: dict[tuple[Any, str], list[tuple[list[str], list[str]]]] = {
    (train_copy, "copy/copy"): [
        (["data.piece=7", "model.layout=gpt"], ["data.piece is 7, which does not divide", "model.layout"]),
        (["data.length=17", "model.heads=3"], ["data.length is 17; expected an even number", "model.heads is 3"]),
        (["method.attention=sofmax"], ["method.attention", "softmax"]),
        (["method.attention={component: elu, projection: orf, near_field: 0}"], ["near_field is 0"]),
    ],
    (pretrain_mlm, "pretrain_mlm"): [
        (["task=wiki"], ["wiki"]),
        (["data.max_length=16", "data.positions=8"], ["positions is 8; expected at least data.max_length, 16"]),
        (["model.dim=24", "model.heads=7"], ["heads is 7, which does not divide dim 24"]),
        (["method.attention=sofmax"], ["softmax"]),
        (["task=wikitext"], ["data.dir is null; expected the folder of wiki.train.tokens"]),
    ],
    (fit_picture, "pictures/siren"): [
        (["method.layers=[0, 1]"], ["method.layers names [1]; model.hidden is 1"]),
        (["method.snnk.init=zero"], ["snnk.init is 'zero'; expected one of nystrom, paper, random"]),
        (["method.snnk.component=sine"], ["sine"]),
        (["method.kind=low_rank", "method.snnk=null"], ["snnk is None; expected num_features"]),
        (["data.file=/nowhere.png"], ["cannot be read as an image"]),
    ],
    (fit_potential, "potential/two_bodies"): [
        (["method.snnk.projection=gausian", "data.frequency=0"], ["gausian", "data.frequency is 0.0"]),
        (["method.layers=[2]"], ["method.layers names [2]; model.hidden is 1"]),
    ],
    (train_mlp, "mlp/columns"): [
        (["task=rte"], ["task"]),
        (["method.snnk.component=rellu"], ["rellu"]),
        (["method.kind=sparse"], ["method.kind"]),
    ],
}
CASES = [(*program, *case) for program, cases in WRONG.items() for case in cases]


@pytest.mark.parametrize(("program", "file", "given", "messages"), CASES, ids=[" ".join(case[2]) for case in CASES])
def test_wrong_settings_of_a_program_are_named_and_nothing_is_written(
    program: Any, file: str, given: list[str], messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(RECIPES / f"papers/configs/{file}.yaml")
    assert program.main([config, f"output.dir={tmp_path / 'run'}", *given]) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages), error
    assert not (tmp_path / "run").exists()
