"""The recipe that trains a tiny Llama on bytes, from end to end."""

from __future__ import annotations

import json

import pytest
from papers.programs import tiny_llama


@pytest.mark.slow
def test_the_recipe_trains_bundles_and_generates(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    out = tmp_path / "run"
    assert tiny_llama.main(["--text", str(text), "--steps", "5", "--output", str(out), "--near-field", "4"]) == 0
    figures = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    assert figures["bits_per_byte"]["after"] < figures["bits_per_byte"]["before"] - 1
    assert figures["reload_parity_error"] < 1e-5
    assert figures["cache"] == "RecurrentCache"
    assert figures["sample"].startswith("Return the ")
    sizes = {name: [row["cache_bytes"] for row in rows.values()] for name, rows in figures["decoding"].items()}
    assert sizes["recurrent"][0] == sizes["recurrent"][1] < sizes["growing"][0] < sizes["growing"][1]
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert {entry.name for entry in tmp_path.iterdir()} == {"text.txt", "run"}
    for arguments, messages in (
        (["--output", str(out), "--steps", "0"], ["replace it with --overwrite", "--steps is 0"]),
        (["--output", str(tmp_path), "--overwrite"], ["holds more than a run: run, text.txt"]),
        (["--output", str(tmp_path / "new"), "--text", str(tmp_path / "none")], ["cannot be read"]),
        ([], ["--output is missing"]),
    ):
        assert tiny_llama.main(arguments) == 2
        errors = capsys.readouterr().err
        assert all(message in errors for message in messages)
