"""Linear attention on a device, bidirectional, causal and recurrent, and generation, against fp64 on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from snnk_peft import COMPONENTS, PROJECTIONS, build_feature_map, bundle
from snnk_peft.attention import RecurrentCache
from snnk_peft.layers.kernel_attention import KernelAttention
from tests.attention_models import causal_model, in_pieces, left_padded, patched
from tests.gpu.agreement import TOLERANCE, agree, every_dtype, gradients_agree

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::snnk_peft.errors.NumericalWarning")]
LENGTH, PIECES = 150, [70, 1, 1, 78]  # more than two chunks of tokens; a prompt, single tokens, a second turn
CAUSAL = [name for name in COMPONENTS if not COMPONENTS[name].adapts]
# Half precision does not survive weights with signs that sum to nearly 0, on any device.
CASES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}".replace("torch.", ""))
    for name in COMPONENTS
    for dtype in (TOLERANCE if COMPONENTS[name].positive else (torch.float32,))
]
components = pytest.mark.parametrize(("component", "dtype"), CASES)
causal_components = pytest.mark.parametrize(
    ("component", "dtype"), [case for case in CASES if case.values[0] in CAUSAL]
)


def kernel_of(component: str, near_field: int | None = None) -> KernelAttention:
    projection = next(name for name in ("orf", *PROJECTIONS.names()) if COMPONENTS[component].fits(PROJECTIONS[name]))
    rows = max(32, COMPONENTS[component]().fewest_rows())
    return KernelAttention([build_feature_map(component, projection, 16, rows)], 4, near_field=near_field)


def tensors(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q (2, 4, L, 16), k and v (2, 2, L, 16); a mask (2, L) with padding on the left."""
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, :20] = False
    return [(torch.randn(2, heads, LENGTH, 16) / 2).to(dtype) for heads in (4, 2, 2)], mask


def compare(component: str, dtype: torch.dtype, device: str, causal: bool) -> None:
    """Outputs and gradients."""
    rounded = kernel_of(component, near_field=4).to(dtype)
    truth, found = copy.deepcopy(rounded).double(), copy.deepcopy(rounded).to(device)
    given, mask = tensors(dtype)
    here = [tensor.double().requires_grad_() for tensor in given]
    there = [tensor.to(device, copy=True).requires_grad_() for tensor in given]
    expected, out = truth(*here, mask, causal=causal), found(*there, mask.to(device), causal=causal)
    assert (out.device.type, out.dtype) == (device, dtype)
    # Weights with signs may sum to nearly 0: then results are larger than all values, and so are their errors.
    cancelled = max(1.0, float(expected.detach().abs().max() / given[2].abs().max()))
    agree(out, expected, dtype, times=cancelled)
    direction = torch.randn_like(expected).to(dtype)
    expected.backward(direction.double())
    out.backward(direction.to(device))
    for mine, theirs in zip(there, here, strict=True):
        agree(mine.grad, theirs.grad, dtype, times=4 * cancelled**2)
    gradients_agree(found, truth, dtype, times=cancelled**2)


@components
def test_bidirectional_attention(component, dtype, device):
    compare(component, dtype, device, causal=False)


@causal_components
def test_causal_attention(component, dtype, device):
    compare(component, dtype, device, causal=True)


@causal_components
def test_token_by_token(component, dtype, device):
    rounded = kernel_of(component, near_field=4).to(dtype)
    truth, found = copy.deepcopy(rounded).double(), copy.deepcopy(rounded).to(device)
    given, mask = tensors(dtype)
    with torch.no_grad():
        out, _ = in_pieces(found, [t.to(device) for t in given], PIECES, mask.to(device))
        expected = truth(*[t.double() for t in given], mask, causal=True)
    agree(out, expected, dtype, times=max(1.0, float(expected.abs().max() / given[2].abs().max())))


@every_dtype
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation_with_the_recurrent_cache(family, dtype, device):
    """Every token that is generated is, but for rounding, the most likely one behind those before it."""
    model = patched(causal_model(family), num_features=16, near_field=3).to(dtype).eval()
    truth, found = copy.deepcopy(model).double(), model.to(device)
    inputs = left_padded()
    prompt = inputs["input_ids"].shape[1]
    there = {name: value.to(device) for name, value in inputs.items()}
    cache = RecurrentCache(found)
    written = found.generate(**there, past_key_values=cache, max_new_tokens=10, do_sample=False)
    assert written.device.type == device
    assert {tensor.device.type for layer in cache.layers for tensor in layer.state.sums[0]} == {device}
    ids = written.cpu()
    mask = torch.cat((inputs["attention_mask"], torch.ones_like(ids[:, prompt:])), 1)
    places = (mask.cumsum(-1) - 1).clamp_min(0)  # as `generate` counts them
    with torch.no_grad():
        logits = truth(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    logits = logits[:, prompt - 1 : -1]
    chosen = logits.gather(-1, ids[:, prompt:, None]).squeeze(-1)
    slack = 4 * TOLERANCE[dtype] * float(logits.abs().max())
    assert bool((chosen >= logits.amax(-1) - slack).all())


def test_every_way_to_generate(device):
    """By default, in a bundle, with all keys kept, and with beams: the same tokens as on the CPU."""
    here = patched(causal_model("llama"), num_features=16)
    there = copy.deepcopy(here).to(device)
    inputs = left_padded()
    placed = {name: value.to(device) for name, value in inputs.items()}
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = here.generate(**inputs, **options)
    keeping = {"past_key_values": DynamicCache(config=there.config)}
    for model, more in ((there, {}), (there, keeping), (bundle(there), {})):
        assert torch.equal(model.generate(**placed, **options, **more).cpu(), expected)
    beams = {**options, "num_beams": 3}
    assert torch.equal(there.generate(**placed, **beams).cpu(), here.generate(**inputs, **beams))
    torch.manual_seed(0)
    sampled = there.generate(**placed, max_new_tokens=10, do_sample=True)
    assert sampled.shape == expected.shape
