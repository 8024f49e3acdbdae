"""A model family: module paths of one architecture, as plain data.

Paths that start with "{base}" are relative to the encoder inside a task model (`BertForSequenceClassification.bert`)
or to the model itself if it is the bare encoder. Paths of the `layer` group are relative to one Transformer layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from snnk_peft.arguments import in_words
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.functional.at_hand import at_hand
from snnk_peft.options import fits_type
from snnk_peft.registry import NamedOptions, Registry


@dataclass(frozen=True)
class ModelFamily(NamedOptions):
    """Module paths of one architecture.

    Args:
        name: the `model_type` of the transformers config.
        layers: path of the list of Transformer layers; "*" stands for every index of a list of lists. A layer that
            the model runs several times (ALBERT) is one entry: a slot in it acts in every run.
        attention: in a layer, the module that holds the query, key and value projections.
        query: in a layer, the query projection, a separate nn.Linear, or None.
        value: the same for values.
        key: the same for keys, if attention multiplies the outputs of query and key directly; None if something comes
            in between (rotary positions, a norm), or if the scale is computed from the head size at every call.
        attention_out: in a layer, the Linear that reads the concatenated outputs of the heads.
        attention_adapter: in a layer, the module after which a sequential adapter of the attention block is placed, the
            last one before the residual sum.
        ffn_in: in a layer, the expansion, an nn.Linear or transformers' Conv1D.
        activation: in a layer, the activation module after it, or None if the model calls a function there: then the
            expansion can neither be replaced nor get a parallel branch.
        ffn_out: in a layer, the contraction, an nn.Linear or Conv1D.
        ffn_adapter: in a layer, the module after which a sequential adapter of the FFN is placed.
        ffn_norm: in a layer, the LayerNorm whose output the expansion reads; its bias and weight are the mean and
            standard deviation of the FFN's inputs. None if unused, because the FFN is gated or `activation` is None.
        last_norm: in the last layer, the LayerNorm whose output the pooler reads, or None if unknown. A path that
            starts with "{base}." is the encoder's own; if it is replaced or absent, inputs are assumed to be standard
            normal.
        pooler: path of the pooler's dense layer, or None if the architecture has none.
        pooler_activation: path of the activation module after it, or None if the model calls a function there: then
            the function stays, and only the dense layer is replaced.
        pooled_heads: paths of the Linears that read one vector per image without a pooler in between; a model without
            a pooler gets a new one in front of each of these it has.
        classifier: path of the task head, which is trained along with adapters.
        classifier_of_pooler: path of the Linear that reads the pooler's output, for bundling, or None.
        head_output: path of the task head's last Linear if the pooler's dense layer is inside `classifier`; with a
            pooler part, this Linear is trained in full.
        causal: whether attention is causal.
        gated: whether the FFN is ffn_out(activation(a) * b) with two expansions a and b (GeGLU, SwiGLU); there is then
            no expansion and activation that could be replaced or get a parallel branch, and `ffn_in` computes a.
        ffn_up: in a layer with a gated FFN, the Linear that computes b; None if `ffn_in` computes a and b, in this
            order.
        encoder: attribute of the task models that holds the encoder, if not their `base_model_prefix`.
        sizes: field of the config that holds the sizes of the layers, if not the config itself.
        excludes: name of a module outside this description (CLIP's text model next to the image encoder, a decoder
            after the encoder); a model that has one is rejected.
        expects: fields of the config, with the values for which the description holds.
        rotary: whether queries and keys have rotary positions that pair the first half of a head's rotated dimensions
            with the second, as in Llama.
        attention_backend: True if attention is called through transformers' AttentionInterface although the model class
            does not declare it.

    Raises:
        ConfigError: a value of the wrong type.
    """

    name: str
    layers: str
    attention: str
    attention_adapter: str
    ffn_in: str
    activation: str | None
    ffn_out: str
    ffn_adapter: str
    ffn_norm: str | None
    last_norm: str | None = None
    query: str | None = None
    value: str | None = None
    key: str | None = None
    attention_out: str | None = None
    pooler: str | None = None
    pooler_activation: str | None = None
    pooled_heads: tuple[str, ...] = ()
    classifier: str | None = "classifier"
    classifier_of_pooler: str | None = None
    head_output: str | None = None
    causal: bool = False
    gated: bool = False
    ffn_up: str | None = None
    encoder: str | None = None
    sizes: str | None = None
    excludes: str | None = None
    expects: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rotary: bool = False
    attention_backend: bool = False

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        faults = [
            f"{each.name} is {getattr(self, each.name)!r}; expected {each.type}"
            for each in fields(self)
            if not fits_type(getattr(self, each.name), kinds[each.name])
        ]
        if faults:
            raise ConfigError(f"ModelFamily: {fault}" for fault in faults)

    def path(self, model: nn.Module, template: str) -> str:
        """Return `template` with "{base}." replaced by this model's encoder attribute, or removed."""
        prefix = str(self.encoder or getattr(model, "base_model_prefix", ""))
        inside = bool(prefix) and hasattr(model, prefix)
        return template.replace("{base}.", f"{prefix}." if inside else "")

    def layer_paths(self, model: nn.Module) -> list[str]:
        """Return the paths of the Transformer layers.

        Raises:
            UnsupportedError: no layers at the expected path, or a model that this family does not describe.
        """
        self._check(model)
        paths = [""]
        for part in self.path(model, self.layers).split(".*."):
            lists = [f"{path}.{part}" if path else part for path in paths]
            paths = [
                f"{path}.{index}"
                for path in lists
                for index in range(len(module_at(model, path, f"the layers of family {self.name!r}")))  # type: ignore[arg-type]
            ]
        return paths

    def config_of(self, model: nn.Module) -> Any:
        """Return the config, or the part of it that holds the sizes of the layers."""
        return model.config if self.sizes is None else getattr(model.config, self.sizes)

    def _check(self, model: nn.Module) -> None:
        what = f"{type(model).__name__} (family {self.name!r})"
        names = [path for path, _ in model.named_modules()] if self.excludes else []
        beside = next((path for path in names if path.rpartition(".")[2] == self.excludes), None)
        if beside is not None:
            both = getattr(model.config, "is_encoder_decoder", False)
            raise UnsupportedError(
                f"{what} has {beside!r} beside the layers that this family describes, and a part would change only "
                "one side of it. "
                + (
                    "Encoder-decoders are not supported; patch the encoder alone: "
                    "get_snnk_model(model.get_encoder(), config)"
                    if both
                    else "Patch the part of the model that you mean, itself a transformers model, alone"
                )
            )
        for key, value in self.expects.items():
            given = getattr(self.config_of(model), key, value)
            if given != value:
                raise UnsupportedError(
                    f"{what} has config.{key} = {given!r}, which lays its modules out in another way; this family "
                    f"describes {value!r}. Describe yours with ModelFamily and register_family"
                )


def head_sizes(config: Any) -> tuple[int, int, int]:
    """Return the numbers of query heads and key heads, and the head size, from the config of a model's layers."""
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


BUNDLE_TYPE = "snnk_"  # before the model_type of bundles
WITHOUT_FAMILY = (
    'Without a family, low rank goes onto any Linear or convolution: LowRankPart(targets="*", rank_scale=0.5)'
)
FAMILIES: Registry[ModelFamily] = Registry("model family", "snnk_peft.families")
_DESCRIBED: set[str] = set()  # names registered by users


def register_family(family: ModelFamily) -> ModelFamily:
    """Register an architecture under `family.name`, the `model_type` of its transformers config.

    Args:
        family: the module paths of the architecture. It replaces your own earlier family of the same name.

    Raises:
        ConfigError: the package has a different family of this name; not a ModelFamily.

    Example:
        >>> from snnk_peft import FAMILIES, ModelFamily, register_family
        >>> import dataclasses
        >>> mine = register_family(dataclasses.replace(FAMILIES["bert"], name="my-bert"))
        >>> FAMILIES["my-bert"].ffn_in
        'intermediate.dense'
    """
    if not isinstance(family, ModelFamily):
        raise ConfigError(f"family is {in_words(family)}; expected ModelFamily(name=..., layers=..., ...)")
    if family.name in _DESCRIBED or (family.name in FAMILIES and FAMILIES[family.name] == family):
        FAMILIES._members[family.name] = family  # allows corrections, for example in a notebook
    else:
        FAMILIES.register(family.name, family)
        _DESCRIBED.add(family.name)
    return family


def family_of(model: nn.Module) -> ModelFamily:
    """Return the family of a transformers model, by its config's model_type.

    Raises:
        UnsupportedError: not a transformers model, or an unknown architecture; says how to describe it.
    """
    if (family := known_family(model)) is not None:
        return family
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    name, known = type(model).__name__, ", ".join(FAMILIES.names())
    if model_type is None:
        raise UnsupportedError(
            f"{name} has no config.model_type; expected a transformers model of one of the families {known}"
            f"{held_model(model)}. {WITHOUT_FAMILY}"
        )
    # A model_type is never a typo, so no "did you mean".
    if not getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"unknown model family {model_type!r}. Available: {known}. To add {name}, describe its module paths with "
            "snnk_peft.ModelFamily and snnk_peft.register_family, and try the description with snnk_peft.check_family. "
            f"{WITHOUT_FAMILY}"
        )
    encoder: Any = getattr(model, "get_encoder", lambda: model)()
    raise UnsupportedError(
        f"{name} (model_type {model_type!r}) is an encoder-decoder or a part of one, and these are not supported; "
        f"expected one stack of layers, of one of the families {known}. "
        + (
            f"Describe the module paths of its {type(encoder).__name__} (model.get_encoder()) with "
            "snnk_peft.ModelFamily and snnk_peft.register_family, try the description with snnk_peft.check_family, and "
            "patch that alone"
            if (family := known_family(encoder)) is None
            else f"Its encoder is a {type(encoder).__name__} of the family {family.name!r}; patch that alone: "
            "get_snnk_model(model.get_encoder(), config)"
        )
        + f". {WITHOUT_FAMILY}"
    )


def held_model(model: nn.Module) -> str:
    """Return a sentence about the transformers model inside another module, or an empty string."""
    held = next(((path, each) for path, each in model.named_modules() if isinstance(each, PreTrainedModel)), None)
    return "" if held is None else f". It holds one, a {type(held[1]).__name__} at {held[0]!r}: give that"


def known_family(model: nn.Module) -> ModelFamily | None:
    """Return the family of a model, or None for an unknown architecture."""
    model_type = str(getattr(getattr(model, "config", None), "model_type", None)).removeprefix(BUNDLE_TYPE)
    return FAMILIES[model_type] if model_type in FAMILIES.names() else None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the original module inside wrappers, which hold it as `base_layer`."""
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        module = inner
    return module


def plain_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield every module of the unpatched model with its path, ignoring wrappers."""
    original = unwrap(model)
    if isinstance(kept := getattr(original, "original_module", None), nn.Module):  # PEFT's modules_to_save
        original = unwrap(kept)
    yield path, original
    for name, child in original.named_children():
        yield from plain_modules(child, f"{path}.{name}" if path else name)


def as_linear(module: nn.Module) -> nn.Module:
    """Return the module; for transformers' Conv1D (transposed weight), an nn.Linear that shares its tensors."""
    if not isinstance(module, Conv1D):
        return module
    linear = nn.Linear(module.nx, module.nf, device="meta")
    with at_hand(module):
        linear.weight = nn.Parameter(module.weight.detach().T, requires_grad=False)
        linear.bias = nn.Parameter(module.bias.detach(), requires_grad=False)
    return linear


def module_at(model: nn.Module, path: str, what: str, expected: type[nn.Module] = nn.Module) -> nn.Module:
    """Return the (unwrapped) module at a path.

    Raises:
        UnsupportedError: no module there, or one of another class; names path, classes and version.
    """
    try:
        module = unwrap(model.get_submodule(path))
    except AttributeError as error:
        raise UnsupportedError(
            f"{what}: no module at {path!r} in {type(model).__name__} (transformers {transformers.__version__}): "
            f"{error}. If the architecture differs, describe it with ModelFamily and register_family"
        ) from error
    if expected is nn.Linear:
        module = as_linear(module)
    if not isinstance(module, expected):
        raise UnsupportedError(
            f"{what}: {type(model).__name__} has a {type(module).__name__} at {path!r}; expected {expected.__name__} "
            f"(transformers {transformers.__version__})"
        )
    return module
