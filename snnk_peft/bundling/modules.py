"""The building blocks of a bundled model, and how it is rebuilt from plain data.

A bundled model is a transformers model in which some modules were exchanged after construction. The exchange is the
plan, {module path: spec}, stored in the config; a spec describes the module at that path:

    keep                    the module that is there                       x -> original(x)
    identity                nothing (an activation that a feature map contains)
    linear                  one matrix, several of the original ones multiplied together
    convolution             one kernel, of one or two dimensions; one of the two of a low-rank layer
    features                a FeatureStage                                 x -> Φ(x)
    adapter                 a residual block                               x -> x + Φ(x) Mᵀ
    sequence                one after the other
    beside                  features next to a module's output             x -> [module(x), Φ(x)]
    leading                 a module acting on the first entries only      [h, z] -> [module(h), z]
    heads                   the module that is there, splitting into heads of another size
    mean_first              the layer that is there, giving the mean over the tokens in the first one's place
    attention               linear attention inside an attention module    see bundling/attention.py

This module is also part of the self-contained code file of every saved bundle, so it needs torch and the feature maps,
but neither PEFT nor anything else of this package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from snnk_peft.bundling.plan import plan_faults, spec_faults
from snnk_peft.config_size import building_within, weights_of
from snnk_peft.digests import (
    DIGESTS,
    content_faults,
    entry_faults,
    layout_faults,
    layout_of,
    open_tensors,
    refuse,
    start_digests,
)
from snnk_peft.errors import ConfigError
from snnk_peft.json_files import check_limits
from snnk_peft.layers.feature_stage import FeatureStage
from snnk_peft.layers.folded import Beside, FoldedAdapter, Leading, put_mean_first, resize_heads
from snnk_peft.projections.base import Projection

Spec = dict[str, Any]


def spec_of(module: nn.Module, kept: nn.Module | None = None) -> Spec:
    """Return the spec from which `build_module` builds a module of this structure.

    Args:
        module: made of the classes above, FeatureStage, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Identity, nn.Sequential.
        kept: the original module at this place; its spec is "keep" wherever it occurs inside.
    """
    if module is kept:
        return {"kind": "keep"}
    if isinstance(module, FeatureStage):
        return {"kind": "features", "stage": module.spec()}
    if isinstance(module, FoldedAdapter):
        return {"kind": "adapter", "stage": module.stage.spec()}
    if isinstance(module, Beside):
        return {"kind": "beside", "module": spec_of(module.module, kept), "stage": module.stage.spec()}
    if isinstance(module, Leading):
        return {"kind": "leading", "module": spec_of(module.module, kept), "width": module.width}
    if isinstance(module, nn.Sequential):
        return {"kind": "sequence", "modules": [spec_of(part, kept) for part in module]}
    if isinstance(module, nn.Linear):
        return {"kind": "linear", "in": module.in_features, "out": module.out_features, "bias": module.bias is not None}
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and module.groups == 1:
        return {
            "kind": "convolution",
            "in": module.in_channels,
            "out": module.out_channels,
            "kernel": list(module.kernel_size),
            "stride": list(module.stride),
            "padding": module.padding if isinstance(module.padding, str) else list(module.padding),
            "dilation": list(module.dilation),
            "padding_mode": module.padding_mode,
            "bias": module.bias is not None,
        }
    if isinstance(module, nn.Identity):
        return {"kind": "identity"}
    raise TypeError(f"a bundle cannot hold a {type(module).__name__}")


def _adapter(spec: Spec, present: nn.Module) -> nn.Module:
    stage = FeatureStage.from_spec(spec["stage"])
    return FoldedAdapter(stage, nn.Linear(stage.out_dim, stage.dim, bias=False))


def _convolution(spec: Spec, present: nn.Module) -> nn.Module:
    kind: Any = nn.Conv1d if len(spec["kernel"]) == 1 else nn.Conv2d
    padding = spec["padding"] if isinstance(spec["padding"], str) else tuple(spec["padding"])
    sizes = {"stride": tuple(spec["stride"]), "dilation": tuple(spec["dilation"]), "padding": padding}
    return kind(
        spec["in"], spec["out"], tuple(spec["kernel"]), **sizes, bias=spec["bias"], padding_mode=spec["padding_mode"]
    )


BUILDERS: dict[str, Callable[[Spec, nn.Module], nn.Module]] = {
    "keep": lambda spec, present: present,
    "identity": lambda spec, present: nn.Identity(),
    "linear": lambda spec, present: nn.Linear(spec["in"], spec["out"], bias=spec["bias"]),
    "convolution": _convolution,
    "features": lambda spec, present: FeatureStage.from_spec(spec["stage"]),
    "adapter": _adapter,
    "sequence": lambda spec, present: nn.Sequential(*[build_module(part, present) for part in spec["modules"]]),
    "beside": lambda spec, present: Beside(
        build_module(spec["module"], present), FeatureStage.from_spec(spec["stage"])
    ),
    "leading": lambda spec, present: Leading(build_module(spec["module"], present), spec["width"]),
    "heads": lambda spec, present: resize_heads(present, spec["size"]),
    "mean_first": lambda spec, present: put_mean_first(present),
}


# Kinds that are added where the original model has no module.
ADDITIONS: set[str] = set()
# Kind -> function applied to every model that contains it.
FINISHERS: dict[str, Callable[[Any], None]] = {}


def build_module(spec: Spec, present: nn.Module) -> nn.Module:
    """Build the module that `spec` describes; `present` is the current module at this place.

    Raises:
        ConfigError: everything that is wrong with the spec.
    """
    if faults := spec_faults("the spec", spec):
        raise ConfigError([f"{fault}. config.json was changed, or a newer snnk_peft wrote it" for fault in faults])
    return BUILDERS[spec["kind"]](spec, present)


def install_plan(model: nn.Module, plan: Mapping[str, Spec]) -> None:
    """Exchange the planned modules of a freshly constructed model.

    Raises:
        ConfigError: everything that is wrong with the plan, or every path that the model lacks.
    """
    if faults := plan_faults(plan):
        raise ConfigError([f"{fault}. config.json was changed, or a newer snnk_peft wrote it" for fault in faults])
    absent = []
    for path, spec in plan.items():
        parent, _, leaf = path.rpartition(".")
        try:
            present = model.get_submodule(parent if spec["kind"] in ADDITIONS else path)
            if not leaf:
                raise AttributeError(path)
        except AttributeError:
            absent.append(f"the bundle's plan names {path!r}, which {type(model).__name__} does not have")
            continue
        setattr(model.get_submodule(parent), leaf, build_module(spec, present))
    if absent:
        raise ConfigError(absent)


def head_outputs(model: Any) -> set[str]:
    """Return the paths of the Linears outside the encoder whose outputs are the labels, in a freshly built model."""
    inside, labels = f"{model.base_model_prefix}.", getattr(model.config, "num_labels", None)
    linears = [(path, part) for path, part in model.named_modules() if isinstance(part, nn.Linear)]
    return {path for path, part in linears if not path.startswith(inside) and part.out_features == labels}


def with_outputs(modules: Mapping[str, Spec], heads: set[str], config: Any) -> dict[str, Spec]:
    """Return the plan with the head's number of outputs set to the config's number of labels, which may change."""
    if not isinstance(modules, Mapping):
        return modules  # rejected when it is installed
    changed = dict(modules)
    for path, spec in modules.items():
        if not isinstance(spec, Mapping):
            continue
        if spec.get("kind") == "pooled_head":
            changed[path] = {**spec, "outputs": config.num_labels}
        elif path in heads and spec.get("kind") == "linear":
            changed[path] = {**spec, "out": config.num_labels}
        elif path in heads and spec.get("kind") == "sequence" and isinstance(spec.get("modules"), list):
            *before, last = spec["modules"] or [None]
            if isinstance(last, Mapping) and last.get("kind") == "linear":
                changed[path] = {**spec, "modules": [*before, {**last, "out": config.num_labels}]}
    return changed


def finish_loading(model: nn.Module, dtype: torch.dtype) -> None:
    """Draw the matrices that are stored as a seed (checksums are verified on loading); cast everything to `dtype`."""
    for module in model.modules():
        if isinstance(module, Projection) and not module.save:
            module.redraw(module.checksum.device)  # type: ignore[arg-type]
        if isinstance(module, FeatureStage):
            module.to(dtype)


@contextlib.contextmanager
def original_config(config: Any, original: type[Any]) -> Iterator[None]:
    """Let `config` pass as an instance of `original` in a context.

    Some heads of transformers build their inner model with `AutoModel.from_config(config)`, which chooses by the
    config's class. The inner model of a bundle is an original one, in which the bundle then exchanges modules.
    """
    bundled = type(config)
    config.__class__ = original
    try:
        yield
    finally:
        config.__class__ = bundled


CONFIG_FILE = "config.json"
# Raised by constructors of transformers that do not say which entry they could not use.
BARE = (TypeError, KeyError, AttributeError, IndexError, AssertionError, ArithmeticError, RuntimeError, MemoryError)
# Entries of config.json that users may edit, and those that loaders and the Hub write.
FREE_ENTRIES = {"_commit_hash", "_name_or_path", "auto_map", "custom_pipelines", "id2label", "label2id", "name_or_path"}
FREE_ENTRIES.add("transformers_version")


class BundledConfig:
    """Mixin of the config classes of bundles: config.json must be unchanged since saving."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a config as transformers does, after checking the entries against their digest.

        Raises:
            ConfigError: an entry does not fit its digest.
        """
        if not isinstance(config_dict, Mapping):
            raise ConfigError(f"config.json is {str(config_dict)[:100]!r}; expected the object of a {cls.__name__}")
        check_limits(config_dict, f"config.json of a {cls.__name__}")
        for name in ("id2label", "label2id"):  # users may edit them
            if not isinstance(config_dict.get(name), (Mapping, type(None))):
                raise ConfigError(f"config.json: {name} is {str(config_dict[name])[:100]!r}; expected an object")
        for name in ("dtype", "torch_dtype"):
            kind = config_dict.get(name)
            known = isinstance(getattr(torch, kind, None), torch.dtype) if isinstance(kind, str) else False
            if not known and not isinstance(kind, (torch.dtype, Mapping, type(None))):
                raise ConfigError(f"config.json: {name} is {str(kind)[:100]!r}; expected a type such as 'float32'")
        content = dict(config_dict)
        saved = content.pop(DIGESTS, None)
        if saved is not None:
            remedy = f"was changed. If that is meant, remove {DIGESTS!r} from it; otherwise copy or download it again"
            refuse(f"config.json of a {cls.__name__}", remedy, entry_faults(content, saved, FREE_ENTRIES))
        try:
            return super().from_dict(content, **kwargs)  # type: ignore[misc]
        except ConfigError:
            raise
        except (*BARE, ValueError) as error:
            raise ConfigError(
                f"config.json of a {cls.__name__} cannot be read ({type(error).__name__}: {error}); it was changed, or "
                "is of another version of transformers"
            ) from error


@contextlib.contextmanager
def checked_files(model: nn.Module, files: Sequence[str], quantized: bool, fresh: set[str]) -> Iterator[None]:
    """Check a bundle's weights while they are loaded in a context: ConfigError if they do not fit or are damaged.

    Digests are computed in parallel with loading and compared at the end.

    Args:
        model: as built from the config.
        files: the weights file, or its shards.
        quantized: whether the modules expect another dtype than the files have.
        fresh: tensors that are not loaded and so may have another number of rows in the files.
    """
    expected = {key: (tuple(value.shape), value.dtype) for key, value in model.state_dict().items()}
    what = f"does not fit {type(model).__name__}, or is damaged"
    with contextlib.ExitStack() as stack:
        opened = {path: stack.enter_context(open_tensors(path)) for path in files}
        for path, file in opened.items():
            layout = layout_of(file)
            free = {key: of for key, of in layout.items() if key in fresh and of[0][1:] == expected[key][0][1:]}
            wanted = {**expected, **free}
            refuse(path, what, [] if quantized else layout_faults(layout, wanted))
        digests = {path: start_digests(file) for path, file in opened.items()}
        try:
            yield
        finally:  # damage may be the cause of whatever else went wrong
            for path, file in opened.items():
                refuse(path, what, content_faults(path, file, digests[path], Path(path).with_name(CONFIG_FILE)))


def _name(key: Any) -> str:
    """Return a tensor's name from transformers' loading info, which adds both shapes where they differ."""
    return key if isinstance(key, str) else str(key[0])


class BundledModel:
    """Mixin that makes a transformers model class build itself from the plan in its config.

    Loading is strict: a tensor that is missing, left over or of another shape is an error, never a random weight.
    Only a head for other labels may be asked for: `num_labels=5, ignore_mismatched_sizes=True` starts it anew.
    """

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        plan = getattr(config, "snnk_plan", None)
        name = type(self).__name__
        if not isinstance(plan, Mapping) or not {"model_class", "modules"} <= set(plan):
            raise ConfigError(f"the config of {name} has no complete snnk_plan; bundles are made by snnk_peft.bundle")
        if plan["model_class"] != name:
            raise ConfigError(
                f"this bundle is a {plan['model_class']} and cannot be loaded as {name}, because what was folded "
                "depends on the task head; use the Auto class that matches"
            )
        original = type(self)._original()
        with original_config(config, original.config_class):
            try:
                super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
            except ConfigError:
                raise
            except (*BARE, ValueError) as error:
                raise ConfigError(
                    f"the config builds no {original.__name__} ({type(error).__name__}: {error}): config.json was "
                    "changed, or is of another version of transformers"
                ) from error
        outputs = head_outputs(self)
        install_plan(self, with_outputs(plan["modules"], outputs, config))  # type: ignore[arg-type]
        for kind in {spec["kind"] for spec in plan["modules"].values()} & set(FINISHERS):
            FINISHERS[kind](self)

    @classmethod
    def _original(cls) -> Any:
        """Return the transformers class that this one was made from."""
        return next(base for base in cls.__mro__ if not issubclass(base, BundledModel) and base is not cls)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # transformers searches the source file of the class for this; the original's is what matters.
        return cls._original()._can_set_attn_implementation()

    @classmethod
    def get_init_context(cls, *args: Any, **kwargs: Any) -> list[Any]:
        """Skip weight initialisation: loading is strict, so every tensor comes from the file."""
        return [*super().get_init_context(*args, **kwargs), no_init_weights()]  # type: ignore[misc]

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **options: Any
    ) -> Any:
        """Load the files that transformers found; `expected_keys` is given for adapters only."""
        load = super(BundledModel, type(model))._load_pretrained_model  # type: ignore[misc]
        files = checkpoint_files if checkpoint_files and "expected_keys" not in options else ()
        fresh = model._head_tensors() if load_config.ignore_mismatched_sizes else set()
        with checked_files(model, files, load_config.is_quantized, fresh):
            return load(model, state_dict, checkpoint_files, load_config, **options)

    def _head_tensors(self) -> set[str]:
        """Return the names of the tensors outside the encoder with one row per label, which a new task replaces."""
        inside = f"{self.base_model_prefix}."  # type: ignore[attr-defined]
        tensors = self.state_dict().items()  # type: ignore[attr-defined]
        return {
            name
            for name, value in tensors
            if not name.startswith(inside) and value.ndim and len(value) == self.config.num_labels
        }

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but strictly.

        Raises:
            ConfigError: the files do not hold exactly the tensors of this bundle, or a redrawn matrix differs.
        """
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        with building_within(*weights_of(source, kwargs.get("subfolder"))):
            model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        fresh = model._head_tensors() if kwargs.get("ignore_mismatched_sizes") else set()
        faults = [
            f"{what}: {', '.join(sorted(str(key) for key in keys))}"
            for field, what in (
                ("missing_keys", "tensors missing from the file"),
                ("unexpected_keys", "tensors that the bundle does not have"),
                ("mismatched_keys", "tensors of another shape"),
                ("error_msgs", "errors while loading"),
            )
            if (keys := [key for key in info.get(field) or () if _name(key) not in fresh])
        ]
        if faults:
            raise ConfigError([f"{fault}. The folder is incomplete or was changed" for fault in faults])
        finish_loading(model, model.dtype)
        return (model, info) if output_loading_info else model
