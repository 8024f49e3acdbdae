"""Compile every Triton kernel for a GPU that need not be there: registers, spills and shared memory.

python -m tests.compile_kernels bfloat16,float32 [80 90]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

from lib.kernel_launches import Launch, every_adapter_launch, every_launch, every_linear_launch

from snnk_peft.functional.device_kernels.triton_shared import launching

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NAMES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bool: "*i1",
    torch.int64: "*i64",
}


def compiled(kernel: Any, capability: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What a launch with these arguments would compile, on the meta device."""
    told = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    fixed = {kernel.arg_names[place]: given[kernel.arg_names[place]] for place in kernel.constexprs}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = given[name]
        if name in fixed:
            signature[name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[name] = NAMES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], fixed[name] = "constexpr", 1
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and name not in fixed):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=attributes)
    return triton.compile(source, GPUTarget("cuda", capability, 32), told)


def usage(made: Any) -> dict[str, int]:
    """REG, STACK (bytes of spills) and shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    words = dict(w.split(":") for line in said.splitlines() if "REG" in line for w in line.split() if w.count(":") == 1)
    counts = {name: sass.count(name) for name in ("HGMMA", "HMMA", "LDL", "STL")}
    return {"registers": int(words["REG"]), "stack": int(words["STACK"]), "shared": made.metadata.shared, **counts}


def all_usages(capability: int, dtype: torch.dtype, **more: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """Name and usage of every different launch; arguments as `every_launch`."""
    with mock.patch.object(launching, "capability", return_value=capability // 10):
        launches = every_launch("meta", dtype, 65536, **more)
    yield from _usages(capability, launches)


def linear_usages(capability: int, dtype: torch.dtype, **more: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """The same of features that are loaded; arguments as `every_linear_launch`."""
    yield from _usages(capability, every_linear_launch("meta", dtype, 65536, **more))


def adapter_usages(capability: int, dtype: torch.dtype, **more: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """The same of a step of adapters; arguments as `every_adapter_launch`."""
    yield from _usages(capability, every_adapter_launch("meta", dtype, 4096, **more))


def _usages(capability: int, launches: list[Launch]) -> Iterator[tuple[str, dict[str, int]]]:
    done = set()
    for launch in launches:
        key = launch.name, str([(x.dtype if isinstance(x, torch.Tensor) else x) for x in launch.options.values()])
        if key not in done:
            done.add(key)
            yield launch.name, usage(compiled(launch.kernel, capability, launch.args, dict(launch.options)))


if __name__ == "__main__":
    for capability in map(int, sys.argv[2:] or ["90"]):
        for dtype in (getattr(torch, name) for name in sys.argv[1].split(",")):
            for more in ({}, {"learned": True, "masked": True}):
                for name, found in all_usages(capability, dtype, **more):
                    print(capability, str(dtype)[6:], more, f"{name:18s}", found, flush=True)
            for more in ({}, {"scaled": True, "masked": True, "values": torch.bfloat16}):
                for name, found in linear_usages(capability, dtype, **more):
                    print(capability, str(dtype)[6:], more, f"{name:20s}", found, flush=True)
