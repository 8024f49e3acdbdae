"""Dispatch of the expensive operations: plain torch everywhere, and device-specific kernels where they apply.

Each of OPERATIONS is a function in torch that works in eager mode, compiled, exported, on the meta device and with
gradients. A device kernel is another function for one of them, with the same arguments, results of the same shapes and
dtypes, and states that the torch form can continue from. Callers need not know. Kernels of this package are files in
`device_kernels/`, imported at the first call on their device type; others call `register_kernel` themselves. The
environment variable SNNK_DEVICE_KERNELS=off disables all of them, =all also enables those that are tested without a
card but have not yet run on one, and `form_that_ran` reports which form an operation used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from snnk_peft.errors import ConfigError

OPERATIONS = (
    "adapter_sum",
    "causal_exponential_attention",
    "causal_linear_attention",
    "exponential_attention",
    "hadamard_transform",
    "key_means",
    "key_sums",
    "near_attention",
    "normalized_linear",
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class DeviceKernel(NamedTuple):
    """A kernel that replaces the torch form of an operation; see `register_kernel`."""

    function: Callable[..., Any]
    serves: Callable[..., bool] | None
    differentiable: bool
    name: str


DEVICE_KERNELS: dict[tuple[str, str], DeviceKernel] = {}  # by (operation, device type)
SWITCH = "SNNK_DEVICE_KERNELS"  # in the environment, "off": always the torch form; "all": untried kernels too
_DISCOVERED: set[str] = set()
_RAN: dict[str, str] = {}


def register_kernel(
    operation: str, *, device: str, serves: Callable[..., bool] | None = None, differentiable: bool = False
) -> Callable[[AnyFunction], AnyFunction]:
    """Register the decorated function as the kernel of an operation on a device type.

    It is called with the unchanged arguments of the torch form (`__wrapped__` of the function of that name):
    strides, dtypes and autocast are the caller's. Exceptions are passed on to the caller. To be
    compiled in one graph, it and `serves` must be traceable; a `torch.library.custom_op` and a Triton kernel are.

    Args:
        operation: one of OPERATIONS.
        device: type of the device of the first argument, such as "cuda".
        serves: whether the kernel supports a call, checked with the same arguments every time; None for always. If
            it does not, the torch form runs.
        differentiable: whether its results carry gradients; if not, the torch form runs where they are needed.

    Raises:
        ConfigError: no such operation or device type, or another kernel is registered.
    """
    if operation not in OPERATIONS:
        raise ConfigError(f"there is no operation {operation!r} to register a kernel for; expected one of {OPERATIONS}")
    if device != _device_type(device):
        raise ConfigError(f"device is {device!r}; expected a type without an index, such as {_device_type(device)!r}")
    if (known := DEVICE_KERNELS.get((operation, device))) is not None:
        raise ConfigError(
            f"{operation} on {device!r} has a kernel, {known.name}; expected one. Let one kernel call the other, or "
            "remove its file"
        )

    def add(function: AnyFunction) -> AnyFunction:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        kernel = DeviceKernel(function, serves, differentiable, f"{function.__module__}.{name}")
        DEVICE_KERNELS[operation, device] = kernel
        return function

    return add


def dispatched(torch_form: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate an operation so that a suitable kernel for the device of its first argument runs instead."""
    operation, first = torch_form.__name__, next(iter(inspect.signature(torch_form).parameters))
    assert operation in OPERATIONS

    @functools.wraps(torch_form)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        given: Any = args[0] if args else kwargs[first]
        device = given.device.type
        kernel = DEVICE_KERNELS.get((operation, device)) if _discover(device) else None
        if kernel is None or not _runs(kernel, args, kwargs):
            _note(operation, "torch")
            return torch_form(*args, **kwargs)
        _note(operation, kernel.name)
        found: Result = kernel.function(*args, **kwargs)
        return found

    return call


def takes_untried() -> bool:
    """Return True if kernels that have not yet run on any card are allowed."""
    return os.environ.get(SWITCH) == "all"


def has_kernels(device: str) -> bool:
    """Return True if any operation has a kernel for this device type."""
    return _discover(device) and any(place == device for _, place in DEVICE_KERNELS)


def form_that_ran(operation: str) -> str | None:
    """Return the form that the last call of an operation took: "torch", the name of a kernel's function, or None.

    A compiled function reports the form used when it was traced.
    """
    return _RAN.get(operation)


@torch.compiler.assume_constant_result  # Dynamo of torch 2.11 evaluates is_exporting() to True in all it compiles
def exporting() -> bool:
    """Return True while a graph is traced for export; a branch on the input length would fix that length."""
    return getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()


def traced() -> bool:
    """Return True while this code is compiled, traced or exported."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or exporting()


def plain_call() -> bool:
    """Return True if torch runs eagerly here: no tracing, no transform, no dispatch mode."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
    )


# A compiler must not follow imports; it runs these two while tracing, and then reads DEVICE_KERNELS.
@torch.compiler.assume_constant_result
def _note(operation: str, form: str) -> None:
    _RAN[operation] = form


@torch.compiler.assume_constant_result
def _discover(device: str) -> bool:
    """Import the kernels of this package for a device type, once; return False if kernels are disabled.

    The code of a bundle has no such folder.
    """
    if os.environ.get(SWITCH) == "off":
        return False
    if device in _DISCOVERED:
        return True
    for module in pkgutil.iter_modules([str(Path(__file__).with_name("device_kernels"))]):
        if not module.ispkg and _device_type(module.name.split("_")[0]) == device:
            importlib.import_module(f"{__name__.rpartition('.')[0]}.device_kernels.{module.name}")
    _DISCOVERED.add(device)
    return True


def _device_type(name: str) -> str:
    try:
        return torch.device(name).type
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is given as the device type of a kernel; {error}") from error


def _runs(kernel: DeviceKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if exporting() or torch.jit.is_tracing():  # an export must consist of torch's own operators
        return False
    if not kernel.differentiable and wants_gradient((*args, *kwargs.values())):
        return False
    return kernel.serves is None or kernel.serves(*args, **kwargs)


def wants_gradient(given: Any) -> bool:
    """Return True if any tensor in the nested tuples from which a result is computed needs a gradient."""
    return torch.is_grad_enabled() and _has_gradient(given)


def _has_gradient(given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return given.requires_grad
    return isinstance(given, tuple) and any(_has_gradient(part) for part in given)
