"""Low-rank layers against dense ones: full rank is the original, less is the best approximation of the weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from snnk_peft.errors import ConfigError
from snnk_peft.functional.nonlinearity import nonlinearity
from snnk_peft.layers.low_rank import SPLITS, LowRankConv1d, LowRankConv2d, LowRankLinear, low_rank_class
from snnk_peft.low_rank import InputMoments
from snnk_peft.low_rank.rearranged import rearranged_factors
from snnk_peft.low_rank.risk import gaussian_risk
from snnk_peft.solvers.low_rank_fit import principal_factors

# Kernel, stride, padding, dilation, padding mode; for sequences the first of each pair.
SETTINGS = [
    ((3, 5), (2, 1), (1, 2), (1, 2), "zeros"),
    ((3, 4), 1, "same", (1, 2), "zeros"),
    ((3, 4), 1, "same", (2, 1), "reflect"),
    ((2, 3), (1, 2), "valid", 1, "zeros"),
    ((3, 2), (1, 2), (1, 2), 1, "circular"),
    ((1, 1), 1, 0, 1, "zeros"),
]


def convolution(dimensions: int, setting: tuple, **options) -> nn.Module:
    torch.manual_seed(0)
    cut = [value[:dimensions] if isinstance(value, tuple) else value for value in setting[:4]]
    return (nn.Conv1d, nn.Conv2d)[dimensions - 1](4, 7, *cut, padding_mode=setting[4], **options).double()


def inputs(dimensions: int) -> torch.Tensor:
    return torch.randn(2, 4, *(13, 11)[:dimensions], generator=torch.Generator().manual_seed(1)).double()


def full_rank(layer) -> int:
    return min(len(layer.U), len(layer.V))


@pytest.mark.parametrize(("dimensions", "split", "setting"), [*itertools.product((1, 2), SPLITS, SETTINGS)])
def test_full_rank_is_the_dense_convolution(dimensions, split, setting):
    conv, x = convolution(dimensions, setting), inputs(dimensions)
    cls = low_rank_class(conv)
    thin = cls.from_dense(conv, full_rank(cls.like(conv, 1, split=split)), split=split)
    expected = conv(x)
    torch.testing.assert_close(thin.kernel(), conv.weight.data, rtol=0, atol=1e-12)
    for form in (thin, thin.factored(), thin.dense()):
        torch.testing.assert_close(form(x), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(thin(x[0]), expected[0], rtol=0, atol=1e-12)
    patches = thin.patches(x) @ conv.weight.flatten(1).T + conv.bias
    torch.testing.assert_close(patches.reshape(2, -1, 7).transpose(1, 2), expected.flatten(2), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dimensions", "split"), [*itertools.product((1, 2), SPLITS)])
def test_lower_rank_is_the_nearest_kernel(dimensions, split):
    """Against the singular values of a matrix whose entries are put in place one by one."""
    conv = convolution(dimensions, SETTINGS[0])
    kernel = conv.weight.detach().reshape(7, 4, *((1,) if dimensions == 1 else ()), *conv.kernel_size)
    height, width = kernel.shape[2:]
    apart = split == "spatial"
    matrix = torch.zeros(7 * (width if apart else 1), 4 * height * (1 if apart else width)).double()
    for o, i, a, b in itertools.product(range(7), range(4), range(height), range(width)):
        row, column = (o * width + b, i * height + a) if apart else (o, (i * height + a) * width + b)
        matrix[row, column] = kernel[o, i, a, b]
    values = torch.linalg.svdvals(matrix)
    for rank in (1, 3):
        thin = low_rank_class(conv).from_dense(conv, rank, split=split)
        torch.testing.assert_close(thin.weight_matrix(), thin.matrix_of(thin.kernel()))
        lost = (thin.kernel() - conv.weight).square().sum()
        torch.testing.assert_close(lost, values[rank:].square().sum())
        x = inputs(dimensions)
        torch.testing.assert_close(thin(x), thin.dense()(x))
        torch.testing.assert_close(thin(x), thin.factored()(x))


def test_linear():
    torch.manual_seed(0)
    dense, x = nn.Linear(6, 9).double(), torch.randn(2, 5, 6).double()
    values = torch.linalg.svdvals(dense.weight)
    for rank in (2, 6):
        thin = LowRankLinear.from_dense(dense, rank)
        torch.testing.assert_close((thin.weight_matrix() - dense.weight).square().sum(), values[rank:].square().sum())
        for form in (thin.factored(), thin.dense()):
            torch.testing.assert_close(form(x), thin(x))
    torch.testing.assert_close(thin(x), dense(x))
    assert LowRankLinear.from_dense(nn.Linear(6, 9, bias=False), 2).bias is None


def test_the_start_from_scratch_keeps_the_variance():
    thin = LowRankLinear(400, 300, rank=200)
    again, other = LowRankLinear(400, 300, rank=200), LowRankLinear(400, 300, rank=200, seed=1)
    assert torch.equal(thin.U, again.U)
    assert not torch.equal(thin.U, other.U)
    # 120 000 products of 200 terms; the variance of the mean square is dominated by that of the factors.
    assert float(thin.weight_matrix().detach().var()) == pytest.approx(1 / 400, rel=0.05)
    before = torch.get_rng_state()
    LowRankConv2d(3, 5, 3, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_output_has_the_type_of_the_input():
    for layer, x in ((LowRankLinear(4, 5, 2), torch.ones(3, 4)), (LowRankConv1d(4, 5, 3, 2), torch.ones(3, 4, 9))):
        expected = layer(x)
        for dtype in (torch.float16, torch.bfloat16):
            assert layer(x.to(dtype)).dtype == dtype
            assert layer.to(dtype)(x.to(dtype)).dtype == dtype
            torch.testing.assert_close(layer(x.to(dtype)).float(), expected, rtol=0.05, atol=0.05)
            layer.float()


@pytest.mark.parametrize(("split", "stride"), [*itertools.product(SPLITS, (1, 2, (1, 2), (2, 1)))])
def test_the_cheaper_form_is_kept(split, stride):
    """Counted multiply-adds decide, not numbers of parameters: a stride may come after the first of the two."""
    steps = (stride, stride) if isinstance(stride, int) else stride
    conv, x = nn.Conv2d(16, 16, 3, padding=1, stride=stride), torch.zeros(1, 16, 12, 12)
    pixels = 144 // (steps[0] * steps[1])
    seen = set()
    for rank in range(1, full_rank(LowRankConv2d.like(conv, 1, split=split)) + 1):
        thin = LowRankConv2d.like(conv, rank, split=split)
        counts = []
        for form in (thin.factored(), conv):
            with FlopCounterMode(display=False) as counter:
                form(x)
            counts.append(counter.get_total_flops() // 2)
        assert counts == [count * pixels for count in thin.macs()]
        assert isinstance(thin.fold(), nn.Sequential) == (counts[0] < counts[1])
        seen.add(counts[0] < counts[1])
    assert seen == {True, False}
    assert isinstance(LowRankLinear(8, 8, 3).fold(), nn.Sequential)
    assert isinstance(LowRankLinear(8, 8, 4).fold(), nn.Linear)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="rank is 5; expected an integer from 1 to 4, the full rank of a 9 × 4"):
        LowRankLinear(4, 9, 5)
    with pytest.raises(ConfigError, match="rank is 0"):
        LowRankConv2d(4, 9, 3, 0)
    with pytest.raises(ConfigError, match="split is 'rows'; expected one of 'spatial', 'channel'"):
        LowRankConv2d(4, 9, 3, 2, split="rows")
    with pytest.raises(ConfigError, match="has 2 groups of 2 channels; expected one group"):
        LowRankConv2d.from_dense(nn.Conv2d(4, 8, 3, groups=2), 2)
    with pytest.raises(
        ConfigError, match=r"init is 'spectral_gnorm' for the activation 'relu'.*expected split='channel'"
    ):
        LowRankConv2d.from_dense(nn.Conv2d(4, 8, 3), 2, "spectral_gnorm", activation="relu")
    assert LowRankConv2d.from_dense(nn.Conv2d(4, 8, 3), 2, "spectral_gnorm").rank == 2  # no activation: nothing to ask


# --- the best factors for a second moment -----------------------------------------------------------------------------


def moments(dim: int) -> torch.Tensor:
    """Of inputs whose directions differ by orders of magnitude; the last one never occurs."""
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(dim, dim, generator=generator).double() * torch.logspace(0, -3, dim).double()
    mixing[:, -1] = 0
    return mixing @ mixing.T


def lost(difference: torch.Tensor, moment: torch.Tensor) -> float:
    return float(((difference @ moment) * difference).sum())


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_no_factors_are_better_for_the_inputs(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)).double()
    moment = moments(shape[1])
    values, vectors = torch.linalg.eigh(moment)
    root = vectors * values.clamp_min(0).sqrt()
    for rank in (1, 3, 5):
        U, V = principal_factors(weight, moment, rank)
        tail = float(torch.linalg.svdvals(weight @ root)[rank:].square().sum())  # Eckart-Young behind S^½
        total = lost(weight, moment)
        assert lost(U @ V.T - weight, moment) == pytest.approx(tail, abs=1e-10 * total)
        torch.testing.assert_close(U.T @ U, V.T @ V)


def test_a_kernel_of_two_factors_is_found_again():
    """The start is spoilt; where the kernel is a product, L-BFGS comes back; else it improves on the weights' best."""
    conv = convolution(2, ((3, 3), 1, 1, 1, "zeros"))
    thin = LowRankConv2d.from_dense(conv, 3)
    U, V = thin.U.data, thin.V.data
    weight, inputs = thin.product(U, V), InputMoments(torch.arange(36.0).double() / 36, moments(36))
    generator = torch.Generator().manual_seed(5)
    start = tuple(f + 0.1 * torch.randn(f.shape, generator=generator).double() for f in (U, V))
    *found, _ = rearranged_factors(weight, start, thin.product, bias=conv.bias, inputs=inputs)
    assert lost(thin.product(*found) - weight, moments(36)) < 1e-4 * lost(thin.product(*start) - weight, moments(36))
    dense = conv.weight.detach().flatten(1)
    *best, bias = rearranged_factors(dense, (U, V), thin.product, bias=conv.bias, inputs=inputs)
    assert lost(thin.product(*best) - dense, moments(36)) < 0.9 * lost(weight - dense, moments(36))
    torch.testing.assert_close(bias + thin.product(*best) @ inputs.mean, conv.bias + dense @ inputs.mean)


@pytest.mark.parametrize("bias", [True, False])
def test_a_split_kernel_starts_from_the_function_of_whole_outputs(bias):
    """Real Gaussian images through ReLU, where rows of the split matrix are parts of outputs."""
    conv = convolution(2, ((3, 3), 1, 0, 1, "zeros"), bias=bias)
    x = torch.randn(64, 4, 12, 12, generator=torch.Generator().manual_seed(7)).double()
    error = {}
    for init in ("spectral", "function"):
        thin = LowRankConv2d.from_dense(conv, 2, init, activation="relu")
        with torch.no_grad():
            error[init] = float((thin(x).relu() - conv(x).relu()).square().sum() / conv(x).relu().square().sum())
    assert error["function"] < 0.985 * error["spectral"]
    found, energy = gaussian_risk(
        nonlinearity("relu"), conv.weight.flatten(1), thin.product(thin.U, thin.V), conv.bias, thin.bias
    )
    assert error["function"] == pytest.approx(float((found / energy).detach()), rel=0.02)  # 6400 · 7 outputs, dependent


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kernel", [1, 3])
def test_kernels_lie_in_memory_as_dense_ones(kernel, split):
    """Views that pass for channels last crash oneDNN's backward pass on some processors; strides are what decides."""
    layer = LowRankConv2d(3, 12, kernel, 2, stride=2, padding=kernel // 2, split=split)
    for found in layer._kernels():
        assert found.stride() == torch.empty(found.shape).stride()
    pictures = torch.randn(2, 3, 8, 8, requires_grad=True)
    out = layer(pictures)
    assert out.stride() == torch.empty(out.shape).stride()
    out.square().sum().backward()
    assert pictures.grad.isfinite().all()
