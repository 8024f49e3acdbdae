"""Settings that a training program refuses: they are named, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from papers.programs import fit_picture, fit_potential, pretrain_mlm, train_copy, train_mlp
from recipe_world import RECIPES

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
        (["method.kind=low_rank", "method.snnk=null"], ["snnk is None; expected its num_features"]),
        (["data.file=/nowhere.png"], ["cannot be read as a picture"]),
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
def test_they_are_named_and_nothing_is_written(
    program: Any, file: str, given: list[str], messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(RECIPES / f"papers/configs/{file}.yaml")
    assert program.main([config, f"output.dir={tmp_path / 'run'}", *given]) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages), error
    assert not (tmp_path / "run").exists()
