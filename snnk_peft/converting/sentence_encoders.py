"""A SentenceTransformer in, one out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from snnk_peft.converting.door import Opened
from snnk_peft.errors import UnsupportedError


def is_sentence_encoder(model: Any) -> bool:
    """Whether this is a SentenceTransformer, or the folder of one, which has modules.json."""
    if isinstance(model, (str, os.PathLike)):
        return (Path(model).expanduser() / "modules.json").is_file()
    return any(base.__module__.partition(".")[0] == "sentence_transformers" for base in type(model).__mro__)


def opened_sentence_encoder(model: Any, reader: Any, pooling: str | None) -> Opened:
    """Take a SentenceTransformer apart; see `snnk_peft.converting.opened.opened`."""
    raise UnsupportedError("a SentenceTransformer is not taken yet; give its transformers model, model[0].auto_model")
