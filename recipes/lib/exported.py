"""Exported files as models: what scores a model scores them too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class ExportedFile(torch.nn.Module):
    """A file of `snnk_peft.export`, run by ONNX Runtime (.onnx, on the processor) or by torch.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        if path.suffix == ".onnx":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            names = [entry.name for entry in session.get_inputs()]
            outputs = [entry.name for entry in session.get_outputs()]

            def run(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
                found = session.run(None, {name: batch[name].cpu().numpy() for name in names})
                return {name: torch.from_numpy(value) for name, value in zip(outputs, found, strict=True)}
        else:
            program = torch.export.load(path).module()

            def run(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
                with torch.no_grad():
                    return dict(program(**batch))

        self.run = run

    def forward(self, **batch: torch.Tensor) -> SimpleNamespace:
        """The outputs by name."""
        return SimpleNamespace(**self.run(batch))
