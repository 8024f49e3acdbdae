"""recipes/papers/programs/pointwise.py: one output of a layer, estimated."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

DRAWS = 200


def test_errors_are_those_of_theory(tmp_path: Path, root: Path) -> None:
    """Unbiased, and the spread of the arc-cosine layer is √((½ K₂)/(½ K₁)² − 1)/√p, from Cho and Saul's kernels."""
    main = runpy.run_path(str(root / "recipes/papers/programs/pointwise.py"))["main"]
    main(["--inputs", "60", "--projections", "16", "64", "--draws", str(DRAWS), "--output", str(tmp_path)])
    rows = {(r["layer"], r["projections"]): r for r in json.loads((tmp_path / "metrics.json").read_text())["rows"]}
    assert len(rows) == 4
    assert all(r["error of the mean"] < 5 * r["standard error of the mean"] for r in rows.values())
    w, x = torch.rand(2, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 60**0.5
    t = math.acos(float(w @ x / (w.norm() * x.norm())))
    first = math.sin(t) + (math.pi - t) * math.cos(t)
    second = 3 * math.sin(t) * math.cos(t) + (math.pi - t) * (1 + 2 * math.cos(t) ** 2)
    for p in (16, 64):
        spread = math.sqrt((2 * math.pi * second / first**2 - 1) / p)
        found = rows["arc-cosine layer, relu", p]["standard error of the mean"] * DRAWS**0.5
        assert found == pytest.approx(spread, rel=0.3)
        sine = rows["sine layer, urf", p]["standard error of the mean"] * DRAWS**0.5
        # At the best scale the second moment is at most e^{2‖w‖‖x‖} (the sine of one atom).
        assert 0 < sine < math.sqrt(math.exp(2 * float(w.norm() * x.norm())) / p) / float(torch.sin(w @ x + 0.5))
    assert (tmp_path / "error.png").stat().st_size > 10_000


def test_faults(root: Path) -> None:
    main = runpy.run_path(str(root / "recipes/papers/programs/pointwise.py"))["main"]
    with pytest.raises(SystemExit, match="2 faults:\n  - --projections has 0; expected at least 1\n  - --draws is 1"):
        main(["--projections", "0", "8", "--draws", "1"])
