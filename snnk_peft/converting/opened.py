"""The model given to `convert`: a transformers model, its folder or Hub id, or a SentenceTransformer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoTokenizer

from snnk_peft.arguments import in_words
from snnk_peft.converting.door import Opened
from snnk_peft.converting.sentence_encoders import is_sentence_encoder, opened_sentence_encoder
from snnk_peft.errors import ConfigError
from snnk_peft.tuner.given_model import plain_model


def opened(model: Any, reader: Any = None, pooling: str | None = None) -> Opened:
    """Take apart the given object without changing it.

    Args:
        model: a transformers model, a SentenceTransformer, or the folder or Hub id of either.
        reader: the tokenizer or image processor; None looks for the one saved with the model.
        pooling: "mean", "first" or "last"; None for the model's own, or else the mean.

    Raises:
        ConfigError: not a model, or an untrained one.
    """
    if is_sentence_encoder(model):
        return opened_sentence_encoder(model, reader, pooling)
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        model = loaded(name)
    else:
        model = plain_model(model)
        name = getattr(getattr(model, "config", None), "_name_or_path", "")
    missing = ""
    if reader is None:
        reader, missing = _found_reader(name, getattr(model, "main_input_name", "input_ids"))
    return Opened(model, reader, pooling or "mean", lambda plain: plain, None, missing)


def loaded(name: str) -> Any:
    """Load the model of a folder or Hub id with the class that its config names.

    Raises:
        ConfigError: no such model, or one without weights for its head.
    """
    folder = Path(name).expanduser()
    try:
        with torch.random.fork_rng(devices=[]):
            config = AutoConfig.from_pretrained(name)
            named = (config.architectures or [""])[0]
            kind: Any = getattr(transformers, named, AutoModel)
            model, told = kind.from_pretrained(name, output_loading_info=True)
    except (OSError, ValueError) as error:
        where = "" if folder.is_dir() else f" (there is no such folder in {Path.cwd()}, so it was taken for a Hub id)"
        raise ConfigError(f"no model could be read from {name!r}{where}: {error}") from error
    if fresh := sorted(told["missing_keys"]):
        raise ConfigError(
            f"{name} has no weights for {', '.join(fresh[:4])} of its {type(model).__name__}; expected a trained model"
        )
    return model.eval()


def _found_reader(name: str, main: str) -> tuple[Any, str]:
    """Load the tokenizer or image processor saved with a model, or return why there is none."""
    images = main == "pixel_values"
    what, auto = ("an image processor", AutoImageProcessor) if images else ("a tokenizer", AutoTokenizer)
    remedy = f"give {what} as tokenizer={auto.__name__}.from_pretrained(...), or batches of model inputs as data"
    if not name:
        return None, f"the model does not say where it was loaded from, so {what} cannot be found beside it; {remedy}"
    try:
        return auto.from_pretrained(name), ""
    except Exception as error:  # transformers and the Hub raise many kinds if there is none
        reason = " ".join(str(error).split())[:200]
        return None, f"there is no {what.partition(' ')[2]} beside the model in {name!r} ({reason}); {remedy}"


def check_reader(reader: Any) -> list[str]:
    """Return a message if the object is neither a tokenizer nor an image processor."""
    if reader is None or callable(reader):
        return []
    return [
        f"tokenizer is {in_words(reader)}; expected a tokenizer or an image processor of transformers, such as "
        "AutoTokenizer.from_pretrained(name)"
    ]
