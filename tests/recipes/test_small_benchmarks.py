"""calibrate_memory.py, fused_products.py and snnk_layer.py on small sizes: what is there makes sense."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.fresh_process import run_python
from tests.tiny_families import build, main_head

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "recipes" / "benchmarks"
PASSES = ("forward", "training")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a stretch of time")
def test_memory_of_calibration_beside_a_forward_pass(tmp_path: Path) -> None:
    build("bert", main_head("bert"), vocab_size=2000).save_pretrained(tmp_path / "model")
    output = tmp_path / "metrics.json"
    given = ["--model", str(tmp_path / "model"), "--tokens", "2000", "--length", "10", "--output", str(output)]
    done = run_python([str(BENCHMARKS / "calibrate_memory.py"), *given, "--parts", "narrow heads", "low rank"])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(output.read_text())["rows"]
    assert [row["run"] for row in rows] == ["forward pass", "narrow heads", "low rank"]
    assert all(row["peak MB"] > row["growth MB"] >= 0 for row in rows)
    assert rows[0]["times forward"] == 1.0
    assert rows[1]["times forward"] == pytest.approx(rows[1]["peak MB"] / rows[0]["peak MB"])


def test_the_peak_is_that_of_the_work(tmp_path: Path) -> None:
    (tmp_path / "holder.py").write_text(
        "def hold(megabytes):\n    return lambda: len(b'x' * (megabytes * 1_000_000))\n"
    )
    code = f"import sys; sys.path[:0] = {[str(BENCHMARKS), str(tmp_path)]!r}\n"
    done = run_python(["-c", code + "import _bench, holder; print(*_bench.peak_of_process(holder.hold, 200))"])
    assert done.returncode == 0, done.stderr[-3000:]
    before, growth = map(int, done.stdout.split())
    assert before > 50e6
    assert 190e6 < growth < 260e6
    (tmp_path / "holder.py").write_text("def hold(megabytes):\n    raise OSError(megabytes)\n")
    done = run_python(["-c", code + "import _bench, holder; print(*_bench.peak_of_process(holder.hold, 200))"])
    assert done.returncode == 1
    assert "ended with code 1" in done.stderr  # and is not waited for


def test_one_product_instead_of_several(tmp_path: Path) -> None:
    output = tmp_path / "metrics.json"
    given = ["--shapes", "1x4", "--repetitions", "1", "--output", str(output)]
    done = run_python([str(BENCHMARKS / "fused_products.py"), *given])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        assert row["ms apart"] > 0
        assert row["ms as one"] > 0
        # One repetition: the ratio is of these two, and the sign of what is saved that of their difference. How large
        # it is says nothing here; a busy processor makes it any number.
        assert row["speed-up of the products"] == pytest.approx(row["ms apart"] / row["ms as one"])
        assert (row["share of the model's time saved"] > 0) == (row["ms apart"] > row["ms as one"])


def test_attentions_that_are_compared_by_length_are_what_they_are_called() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(BENCHMARKS)!r})
import attention, torch
q, k, v = attention.tensors(48)
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
torch.testing.assert_close(attention.formed(q, k, v), exact, rtol=1e-4, atol=1e-5)
attention.MAPS_LENGTHS, attention.LONGEST_FORMED = (32, 64), 32
attention.peak_growth = lambda work, *given: work(*given)() or 2**20 * given[1]
for row in attention.maps(1):
    print(row["length"], row["attention"], row["peak_MiB"], row["memory_of_softmax"], row["ms"] > 0)
"""
    done = run_python(["-c", code])
    assert done.returncode == 0, done.stderr[-3000:]
    maps = ["posrf-orf", "posrf-gmm", "posrf-generative", "posrf-fastfood_learned"]
    expected = [f"32 {name} 32.0 1.0 True" for name in ["softmax", *maps, "softmax, weights formed"]]
    assert done.stdout.splitlines() == [*expected, *(f"64 {name} 64.0 1.0 True" for name in ["softmax", *maps])]


def test_make_benchmarks_leaves_out_what_needs_a_model() -> None:
    """A program with a required option would stop all that come after it."""
    asked = ["make", "--dry-run", "benchmarks"]
    told = subprocess.run(asked, cwd=BENCHMARKS.parent.parent, capture_output=True, text=True, check=True).stdout
    run = {Path(name).name for name in re.findall(r"recipes/benchmarks/\w+\.py", told)}
    programs = {path.name: path.read_text(encoding="utf-8") for path in BENCHMARKS.glob("[a-z]*.py")}
    assert "fused_products.py" in run
    assert run <= programs.keys()
    assert not [name for name in run if "required=True" in programs[name]]


def test_one_layer_against_its_stand_in(tmp_path: Path) -> None:
    """Numbers of parameters by formula; memory: both outputs in a forward pass, and gradients of weights and input."""
    output, d, m, tokens = tmp_path / "metrics.json", 768, 16, 2 * 512
    given = ["--widths", "64", str(d), "--features", str(m), "--shape", "2x512", "--repetitions", "1"]
    done = run_python([str(BENCHMARKS / "snnk_layer.py"), *given, "--output", str(output)])
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(output.read_text())["rows"]
    rows = {(row["section"], row["width"], row["pass"], row["layer"]): row for row in told}
    names = [("layer", name) for name in ("linear, gelu", "linear, relu", f"snnk, {m}")]
    names += [("pair", name) for name in ("linear, gelu", f"snnk, {m}")]
    wanted = {(section, width, way, name) for section, name in names for width in (64, d) for way in PASSES}
    assert rows.keys() == wanted
    assert len(told) == len(wanted)
    for (section, width, way, name), row in rows.items():
        own = width * m + width if name.startswith("snnk") else width * width + width
        assert row["trained numbers"] == own * (2 if section == "pair" and not name.startswith("snnk") else 1)
        base = rows[section, width, way, "linear, gelu"]
        assert row["speed-up"] == pytest.approx(base["ms"] / row["ms"])  # one repetition: of these two
        assert row["ms"] > 0
    if not Path("/proc/self/clear_refs").exists():
        assert all(row["peak MiB"] is None for row in told)
        return
    out, weight, features = (4 * size / 2**20 for size in (tokens * d, d * d, tokens * m))
    assert rows["layer", d, "forward", "linear, gelu"]["peak MiB"] == pytest.approx(2 * out, abs=0.6)
    assert rows["layer", d, "forward", f"snnk, {m}"]["peak MiB"] == pytest.approx(out + features, abs=0.6)
    # Forward leaves the Linear's output for the backward pass, and the activation's; that one is gone by the time when
    # gradients of weight and input are there.
    assert rows["layer", d, "training", "linear, gelu"]["peak MiB"] > 2 * out + weight - 0.6
    assert rows["layer", d, "training", f"snnk, {m}"]["peak MiB"] < 2.5 * out
