"""Launches of the package's Triton kernels as data, to compile them without a GPU or time them at other sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from snnk_peft.functional.adapter_sum import AdapterForm
from snnk_peft.functional.device_kernels.triton_adapter import kernels as adapter
from snnk_peft.functional.device_kernels.triton_adapter import launches as adapter_launches
from snnk_peft.functional.device_kernels.triton_exponential import causal, decode, key_sums, launches, queries
from snnk_peft.functional.device_kernels.triton_linear import causal as linear_causal
from snnk_peft.functional.device_kernels.triton_linear import decode as linear_decode
from snnk_peft.functional.device_kernels.triton_linear import launches as linear_launches
from snnk_peft.functional.device_kernels.triton_linear import sums as linear_sums
from snnk_peft.functional.device_kernels.triton_near import kernels as near
from snnk_peft.functional.device_kernels.triton_near import launches as near_launches
from snnk_peft.functional.device_kernels.triton_shared import launching

HEADS, DIM, FEATURES = 12, 64, 64
WIDTH, SINKS = 64, 4


class Launch(NamedTuple):
    """A kernel launch; `name` is the key of its sizes in launching.TABLE, or "combine"."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


class _Watched:
    """A stand-in for a kernel that records its launches."""

    def __init__(self, name: str, kernel: Any, found: list[Launch], runs: bool):
        self._name, self._kernel, self._found, self._runs = name, kernel, found, runs

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            name = "causal_sums" if self._name == "key_pass" and _of_causal(options) else self._name
            self._found.append(Launch(name, self._kernel, grid, args, options))
            if self._runs:
                self._kernel[grid](*args, **options)

        return launch


def _of_causal(options: dict[str, Any]) -> bool:
    return bool(options["QUERIES"])


@contextlib.contextmanager
def watched(runs: bool) -> Iterator[list[Launch]]:
    """Record kernel launches in a context; with `runs`, also execute them."""
    found: list[Launch] = []
    with contextlib.ExitStack() as stack:
        for module, names in (
            (key_sums, {"key_pass": "key_pass", "combine": "combine", "key_back": "key_back"}),
            (queries, {"query_pass": "query_pass", "query_back": "query_back"}),
            (
                causal,
                {"forward_pass": "causal_forward", "query_back": "causal_query_back", "key_back": "causal_key_back"},
            ),
            (near, {"forward_pass": "near_forward", "query_back": "near_query_back", "key_back": "near_key_back"}),
            (decode, {"token_pass": "token_pass"}),
            (adapter, {name: f"adapter_{name}" for name in ("forward_pass", "backward_pass", "product_pass")}),
            *(
                (module, {name: f"linear_{name}" for name in names})
                for module, names in (
                    (linear_sums, ("sums_pass", "combine", "sums_back")),
                    (linear_causal, ("forward_pass", "query_back", "key_back")),
                    (linear_decode, ("token_pass",)),
                )
            ),
        ):
            for name, known in names.items():
                kernel = _Watched(known, getattr(module, name), found, runs)
                stack.enter_context(mock.patch.object(module, name, kernel))
        yield found


def every_launch(
    device: str, dtype: torch.dtype, length: int, *, m: int = FEATURES, d: int = DIM, learned: bool = False,
    masked: bool = False,
) -> list[Launch]:  # fmt: skip
    """Collect launches of attention on one sequence: forward and backward (not causal, causal, joint), and decoding.

    Nothing is executed on the meta device.

    Args:
        device: "meta", or the device on which the kernels run.
        dtype: dtype of queries, keys and values.
        length: tokens.
        m: number of features.
        d: dimension of queries, keys and values.
        learned: also compute gradients of the rows.
        masked: use a mask.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape) if device == "meta" else torch.randn(shape, generator=generator)

    q, k, v, g = (normal(1, HEADS, length, d).to(device, dtype) for _ in range(4))
    rows, offset = (normal(m, d) * d**-0.25).to(device), normal(m).to(device)
    mask = torch.ones(1, length, dtype=torch.bool, device=device) if masked else None
    given = q, k, v, rows, offset, rows, 0.5 * d**-0.5, mask
    with watched(device != "meta") as found:
        _, *means = launches.attention(*given, None, None)
        launches.attention_back(g, None, None, *given, None, None, *means, learned, learned)
        out, lse, *behind = launches.causal_attention(*given, None, None, dtype)
        launches.causal_attention_back(g, None, None, None, *given, None, None, out, lse, *behind, learned, learned)
        known = torch.full((1, length), SINKS, device=device)
        beside = k[:, :, :SINKS], v[:, :, :SINKS], known, out.float(), lse
        joint = q, k, v, WIDTH, mask, True, d**-0.5, *beside
        near_launches.near_attention_back(g, *joint, near_launches.near_attention(*joint)[1])
        token, own = (x[:, :, :1] for x in (q, k)), None if mask is None else mask[:, :1]
        decode.few_tokens(*token, v[:, :, :1], rows, offset, rows, offset, 0.5 * d**-0.5, own, *behind, False)
    return found


def every_linear_launch(
    device: str, dtype: torch.dtype, length: int, *, m: int = FEATURES, d: int = DIM, scaled: bool = False,
    masked: bool = False, values: torch.dtype | None = None,
) -> list[Launch]:  # fmt: skip
    """Collect the same launches for precomputed features.

    Args:
        device: "meta", or the device on which the kernels run.
        dtype: dtype of the features.
        length: tokens.
        m: number of features.
        d: dimension of the values.
        scaled: use scales of keys and compute their gradients.
        masked: use a mask.
        values: dtype of the values, if it differs.
    """
    q, k = (torch.rand(1, HEADS, length, m, device=device).to(dtype) for _ in range(2))
    v, g = (torch.randn(1, HEADS, length, d, device=device).to(values or dtype) for _ in range(2))
    mask = torch.ones(1, length, dtype=torch.bool, device=device) if masked else None
    scales = torch.randn(1, HEADS, length, device=device) if scaled else None
    keys = k, v, mask, scales
    with watched(device != "meta") as found:
        sums = linear_launches.key_sums(*keys, None, None, None)
        linear_launches.key_sums_back(*sums[:2], *keys, sums[2], scaled)
        out, den, rho, *behind = linear_launches.causal_attention(q, *keys, *sums)
        saved = out, den, rho, behind[2]
        linear_launches.causal_attention_back(g, *sums[:2], q, *keys, *sums, *saved, scaled, True)
        one = (None if x is None else x[:, :, :1] if x.dim() > 2 else x[:, :1] for x in (q, *keys))
        linear_decode.few_tokens(*one, *sums)
    return found


class _Gelu:
    in_kernels = "gelu"


def every_adapter_launch(
    device: str, dtype: torch.dtype, tokens: int, *, m: int = 16, dim: int = 768, learned: bool = False
) -> list[Launch]:
    """Collect the launches of an adapter's training step with inputs in fp32, as under autocast.

    Args:
        device: "meta", or the device on which the kernels run.
        dtype: dtype of the matrix products.
        tokens: rows of the input.
        m: number of features.
        dim: dimension of input and output.
        learned: also compute gradients of the rows, whose inputs are then unnormalised, and of a bias.
    """
    x, g = (torch.randn(tokens, dim, device=device) for _ in range(2))
    matrix, low = torch.randn(dim, m, device=device), torch.randn(m, dim, device=device).to(dtype)
    bias, centres = (torch.randn(m, device=device) if there else None for there in (learned, not learned))
    form: AdapterForm = AdapterForm(_Gelu(), not learned, 1.0, 1.0, 1.0, dtype)  # type: ignore[arg-type]
    with watched(device != "meta") as found:
        _, z, features, *moments = adapter_launches.forward(x, x, low, bias, centres, matrix, form)
        adapter_launches.backward(g, x, low, bias, matrix, z, *moments, form, True, True, learned)
        adapter_launches.product(g, features, 1.0, dtype)
    return found


@contextlib.contextmanager
def parts_of(tokens: int) -> Iterator[None]:
    """Cut every sequence into parts of `tokens` tokens in a context."""
    kinds = dict.fromkeys(launching.FEWEST, tokens)
    with mock.patch.dict(launching.FEWEST, kinds), mock.patch.dict(launching.LONGEST, kinds):
        yield
