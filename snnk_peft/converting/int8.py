"""A model as an ONNX file with int8 Linears: its answers, seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from snnk_peft.converting.examples import Batches
from snnk_peft.exporting.export import export
from snnk_peft.exporting.program import onnx_options

FILE = "model_int8.onnx"
GIVEN = 4  # batches on which the file is checked against the model


def exported(model: Any, folder: Path, batches: Batches) -> Path:
    """Write the file; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    export(model, "onnx", folder / FILE, batches=batches[:GIVEN], int8=True)
    return folder / FILE


def runner(file: Path) -> Callable[..., dict[str, torch.Tensor]]:
    """Load a file as a function of model inputs, with as many threads as torch uses."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), onnx_options(), providers=["CPUExecutionProvider"])
    reads, gives = ([each.name for each in side()] for side in (session.get_inputs, session.get_outputs))

    def run(**inputs: Any) -> dict[str, torch.Tensor]:
        found = session.run(gives, {name: inputs[name].cpu().numpy() for name in reads})
        return {name: torch.from_numpy(value) for name, value in zip(gives, found, strict=True)}

    return run


def bytes_of(file: Path) -> int:
    """Return the size of a file, including weights that are stored in a second one."""
    return sum(each.stat().st_size for each in file.parent.glob(f"{file.name}*"))
