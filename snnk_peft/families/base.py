"""What a model family is: module paths of one architecture, as plain data.

Paths that start with "{base}" are relative to the encoder inside a task model (`BertForSequenceClassification.bert`)
or to the model itself if it is the bare encoder. Paths of the `layer` group are relative to one Transformer layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import transformers
from torch import nn

from snnk_peft.errors import UnsupportedError


@dataclass(frozen=True)
class ModelFamily:
    """Module paths of one architecture.

    Args:
        name: the `model_type` of the transformers config.
        layers: path of the list of Transformer layers.
        attention: in a layer, the module that holds query, key and value projections.
        query: in a layer, the projection that makes the queries, an nn.Linear of its own, or None.
        value: likewise for the values.
        attention_adapter: in a layer, the module behind which a sequential adapter of the attention block goes: the
            last one before the residual sum.
        ffn_in: in a layer, the expansion, an nn.Linear.
        activation: in a layer, the activation module behind it.
        ffn_out: in a layer, the contraction, an nn.Linear.
        ffn_adapter: in a layer, the module behind which a sequential adapter of the FFN goes.
        ffn_norm: in a layer, the LayerNorm whose output the expansion reads; its bias and weight are the mean and
            standard deviation of the FFN's inputs.
        last_norm: in the last layer, the LayerNorm whose output the pooler reads, or None if unknown.
        pooler: path of the pooler's dense layer, or None if the architecture has none.
        pooler_activation: path of the activation module behind it, or None if the model calls a function there: then
            the function stays, and only the dense layer is replaced.
        classifier: path of the task head that is trained along with adapters.
        classifier_of_pooler: path of the Linear that reads the pooler's output, for bundling, or None.
        head_output: path of the task head's last Linear where the pooler's dense layer is inside `classifier`; with a
            pooler part this is what is trained in full.
        causal: whether attention is causal.
        gated: whether the FFN multiplies two expansions (GeGLU, SwiGLU); it is then no expansion and activation that
            could be replaced or get a neighbour, and `ffn_in` names what holds the gate.
    """

    name: str
    layers: str
    attention: str
    attention_adapter: str
    ffn_in: str
    activation: str
    ffn_out: str
    ffn_adapter: str
    ffn_norm: str
    last_norm: str | None = None
    query: str | None = None
    value: str | None = None
    pooler: str | None = None
    pooler_activation: str | None = None
    classifier: str | None = "classifier"
    classifier_of_pooler: str | None = None
    head_output: str | None = None
    causal: bool = False
    gated: bool = False

    def path(self, model: nn.Module, template: str) -> str:
        """`template` with "{base}." filled in for this model: the encoder's attribute name, or nothing."""
        prefix = getattr(model, "base_model_prefix", "")
        inside = bool(prefix) and hasattr(model, prefix)
        return template.replace("{base}.", f"{prefix}." if inside else "")

    def layer_paths(self, model: nn.Module) -> list[str]:
        """Paths of the Transformer layers."""
        path = self.path(model, self.layers)
        layers = module_at(model, path, f"the layers of family {self.name!r}")
        return [f"{path}.{index}" for index in range(len(layers))]  # type: ignore[arg-type]


def unwrap(module: nn.Module) -> nn.Module:
    """The original module inside wrappers that keep it as `base_layer`."""
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        module = inner
    return module


def module_at(model: nn.Module, path: str, what: str, expected: type[nn.Module] = nn.Module) -> nn.Module:
    """The (unwrapped) module at a path.

    Args:
        model: the model to look in.
        path: dotted path.
        what: what the module is, for the message.
        expected: its class.

    Raises:
        UnsupportedError: nothing there, or something of another class; names path, classes and version.
    """
    try:
        module = unwrap(model.get_submodule(path))
    except AttributeError as error:
        raise UnsupportedError(
            f"{what}: no module at {path!r} in {type(model).__name__} (transformers {transformers.__version__}): "
            f"{error}. If the architecture differs, describe it with ModelFamily and register_family"
        ) from error
    if not isinstance(module, expected):
        raise UnsupportedError(
            f"{what}: {type(model).__name__} has a {type(module).__name__} at {path!r}; expected {expected.__name__} "
            f"(transformers {transformers.__version__})"
        )
    return module
