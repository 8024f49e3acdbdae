"""A baseline for our linear attention: FastAttention of performer-pytorch in transformers' encoder.

    out_i = Σ_j m_j (φ(q_i)·φ(k_j)) v_j / Σ_j φ(q_i)·φ(k_j),        x̂ = x / d^¼,
    φ(x) = (exp(W x̂ − |x̂|²/2 − c) + 10⁻⁴) / √nb_features

Choromanski et al. 2021, FAVOR+, as https://github.com/lucidrains/performer-pytorch (version 1.1.4) computes it: W has
orthogonal blocks of rows with the lengths of Gaussian ones; c is the greatest entry of W x̂, per query, and over all
keys of a sequence and head. Time and memory grow as the length times nb_features. Four things are peculiar to it:

Rows. Its orthogonal blocks have the signs that a QR factorisation happens to give, so row j of a block leans towards
-e_j: its features are biased estimates of softmax attention, unlike rows times random signs (or projection orf of this
package). In tests/papers/test_performer_peer.py the error stops falling at about 3 %. Used unchanged.

Masks. Its attention sets the values of padding to zero (m) but keeps the keys in the denominator and in c, so padding
dilutes the output; ours excludes both. Batches of similar length (train.group_by_length) have little padding.

Redrawing. Its Performer redraws W after 1000 forward passes of training (`feature_redraw_interval`), in all layers,
from torch's global generator. Its ProjectionUpdater does so here too. The count, W and the generator's state are in the
checkpoints, so a resumed run redraws like an uninterrupted one; evaluations neither count nor redraw.

Dropout. Weights are never formed, so model.attention_dropout has no effect, as in ours.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from papers.lib.lra_settings import PERFORMER, PerformerSection
from snnk_peft.errors import ConfigError
from snnk_peft.parts.attention.interface import padding_mask
from snnk_peft.projections.base_drawn import site_generator

ATTENTION, UPDATER = "performer_attention", "performer_updater"  # names of the modules in the encoder


def require_performer() -> Any:
    """Import performer_pytorch, before any data are read; a ConfigError if that fails."""
    try:
        import performer_pytorch
    except ImportError as error:
        raise ConfigError(
            f"method.attention is {PERFORMER}, whose library cannot be imported ({error}); expected version 1.1.4: "
            "pip install performer-pytorch (and setuptools, whose distutils it uses, from Python 3.12 on)"
        ) from error
    return performer_pytorch


def use_performer(encoder: PreTrainedModel, settings: PerformerSection, seed: int) -> None:
    """Add a FastAttention to every attention module of a fresh encoder, redrawn as that library does.

    The first W of a layer is drawn from (seed, path of the layer), so that everything else is initialised as for other
    methods with the same seed.

    Raises:
        ConfigError: the library is not installed.
    """
    library = require_performer()
    # Register both, or the function would silently get no mask.
    AttentionInterface.register(PERFORMER, performer_attention)
    AttentionMaskInterface.register(PERFORMER, padding_mask)
    encoder.set_attn_implementation(PERFORMER)
    for path, module in list(encoder.named_modules()):
        if hasattr(module, "attention_head_size"):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(site_generator(seed, path).initial_seed())
                fast = library.FastAttention(module.attention_head_size, nb_features=settings.nb_features, causal=False)
            module.add_module(ATTENTION, fast)
    # The updater needs these two; the encoder itself, which contains the updater, would make a cycle of modules.
    view = SimpleNamespace(modules=encoder.modules, parameters=encoder.parameters)
    encoder.add_module(UPDATER, library.ProjectionUpdater(view, settings.feature_redraw_interval))
    encoder.register_forward_pre_hook(_count_and_redraw)


def _count_and_redraw(encoder: nn.Module, inputs: Any) -> None:
    encoder.get_submodule(UPDATER).redraw_projections()  # type: ignore[operator]


def performer_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for a layer: q, k and v (B, H, L, d) -> (B, L, H, d).

    Args:
        module: the attention module, which holds a FastAttention.
        query: queries.
        key: keys.
        value: values.
        attention_mask: (B, L) of bool from `padding_mask`, or None without padding.
        scaling: factor on q·k; the library supports only 1/√d.
        **kwargs: further arguments of transformers, including dropout.
    """
    assert scaling is None or math.isclose(scaling, query.shape[-1] ** -0.5)
    if attention_mask is not None:
        value = value.masked_fill(~attention_mask[:, None, :, None], 0.0)
    out = module.get_submodule(ATTENTION)(query, key, value)
    return out.transpose(1, 2).contiguous(), None
