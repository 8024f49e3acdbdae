"""The slots of linear attention, which provide the kernel of an attention module and its fit for `calibrate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from snnk_peft.errors import UnsupportedError
from snnk_peft.families.base import unwrap
from snnk_peft.layers.attention_term import AttentionTerm
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.kernel_attention import KernelAttention
from snnk_peft.layers.slots import FitOptions, FitPlace, Fitter, FoldPlace, Slot
from snnk_peft.parts.attention.cache import use_recurrent_cache
from snnk_peft.parts.attention.fit import AttentionFitter, HeadsReader
from snnk_peft.parts.attention.interface import NAME as ATTENTION
from snnk_peft.parts.attention.joint_fit import JointFitter


class Attend(Slot):
    """Slot that provides an attention module's linear attention to parts/attention/interface.py."""

    def __init__(self, kernel: KernelAttention):
        super().__init__()
        self.kernel = kernel

    def forward(self, base: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the original, which itself calls the attention function."""
        return base(*args, **kwargs)

    def placed(self, layer: Any, model: Any) -> None:
        """Let the module ask for its kernel; softmax layers stay softmax layers."""
        unwrap(layer.base_layer).snnk_owner = ActiveKernel(layer)  # type: ignore[assignment]
        if model.config._attn_implementation != ATTENTION:
            model.snnk_attention_before = model.config._attn_implementation
            model.set_attn_implementation(ATTENTION)
        if model.config._attn_implementation != ATTENTION:
            raise UnsupportedError(
                f"{type(model).__name__} keeps its attention implementation "
                f"{model.config._attn_implementation!r} and would ignore an AttentionPart"
            )
        use_recurrent_cache(model)

    def fold(self, place: FoldPlace) -> None:
        """Move the feature maps into the attention module; linear attention has no smaller form."""
        kept = "softmax attention" if self.kernel.near_field is None else "softmax attention over all tokens"
        terms = " + ".join(_in_words(cast(AttentionTerm, term)) for term in self.kernel.terms)
        if self.kernel.joint is not None:
            terms += f" beyond {self.kernel.near_field} neighbours and {self.kernel.joint.sinks} sinks"
        place.add("snnk_kernel", self.kernel, kept, f"linear attention, {terms}")


class FittedAttend(Attend):
    """Linear attention over rows that `calibrate` computes."""

    def __init__(self, kernel: KernelAttention, readout: HeadsReader | None, part: Any):
        super().__init__(kernel)
        self.readout, self.part = readout, part

    def after_fit(self) -> None:
        self.part.fitted_length = self.kernel.fitted_length

    def fitter(self, place: FitPlace, options: FitOptions) -> Fitter:
        """Return the fitter: rows in closed form, optional steps, then the output projection."""
        kind = AttentionFitter if self.kernel.joint is None else JointFitter
        if self.readout is None:
            return kind(self.kernel, None, None, place, options)
        return kind(self.kernel, self.readout.slot(), self.readout.path, place, options)


def _in_words(term: AttentionTerm) -> str:
    features = FeatureStage(term.pairs()[0][0]).in_words()
    apart = "" if term.key_maps is None else ", queries and keys apart"
    return f"{features}{' per head' if len(term.feature_maps) > 1 else ''}{apart}"


class ActiveKernel:
    """Provider of a module's linear attention to the attention function; not a module, so nothing is saved twice."""

    def __init__(self, layer: Any):
        self.layer = layer

    def __call__(self) -> KernelAttention | None:
        """Return the kernel of the last active adapter that has one here, or None for softmax."""
        kernels = [slot.kernel for slot in self.layer.active_slots() if isinstance(slot, Attend)]
        return kernels[-1] if kernels else None
