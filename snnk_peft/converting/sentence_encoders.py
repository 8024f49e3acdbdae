"""Conversion of a SentenceTransformer: its encoder is converted, everything else stays.

sentence-transformers is imported only if such a model is given. The modules after the encoder (pooling, layers,
normalisation) run unchanged on the states of both models, so the results of `encode` are compared.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor, nn

from snnk_peft.arguments import in_words
from snnk_peft.bundling.code_file import FILE_NAME
from snnk_peft.converting.door import Opened
from snnk_peft.errors import ConfigError, UnsupportedError
from snnk_peft.model_card import write_model_card

MODULES = "modules.json"  # in the folder of every SentenceTransformer
HOME = "sentence-transformers/"  # owner on the Hub of names without one


def is_sentence_encoder(given: Any) -> bool:
    """Return whether the object is a SentenceTransformer, its folder, or its id on the Hub."""
    if isinstance(given, (str, os.PathLike)):
        folder, name = Path(given).expanduser(), os.fspath(given)
        if folder.exists():
            return (folder / MODULES).is_file()
        return any(_on_hub(each) for each in ([name] if "/" in name else [name, HOME + name]))
    return any(base.__module__.partition(".")[0] == "sentence_transformers" for base in type(given).__mro__)


def _on_hub(name: str) -> bool:
    try:
        hf_hub_download(name, MODULES)
    except (OSError, ValueError):  # no such repository or file, no network, no valid name
        return False
    return True


class SentenceEncoder:
    """A SentenceTransformer taken apart: `model` is converted, `closed` puts the conversion in its place.

    Args:
        given: a SentenceTransformer, which is not changed, or its folder or id on the Hub.

    Raises:
        ConfigError: sentence-transformers is not installed, or cannot read the folder.
        UnsupportedError: the first module holds no transformers model for texts in torch.

    Attributes:
        model: the transformers model of the first module.
        prompts: prompts that precede the texts, the default one first; "" for none.
    """

    def __init__(self, given: Any):
        self.given = given = _sentence_transformer(given)
        first = given[0]
        self.model: Any = getattr(first, "model", None)
        backend = given.get_backend()
        if backend != "torch" or not isinstance(self.model, nn.Module):
            raise UnsupportedError(
                f"the first module of the SentenceTransformer is {type(first).__name__}, with backend {backend!r}; "
                "expected a Transformer that holds a torch model. Load it with backend='torch'; of a Router, convert "
                "each encoder as a SentenceTransformer of its own"
            )
        if "text" not in given.modalities or first.module_output_name != "token_embeddings":
            raise UnsupportedError(
                f"the encoder reads {', '.join(map(str, given.modalities))} and gives {first.module_output_name}; "
                "expected texts, and token_embeddings for a Pooling module. Convert the transformers model inside of "
                "it, st[0].model, on batches of its inputs"
            )
        prompts = given.prompts
        default = prompts[given.default_prompt_name] if given.default_prompt_name else ""
        self.prompts = tuple(dict.fromkeys([default, *(prompt for prompt in prompts.values() if prompt)]))
        self._after = [copy.deepcopy(module).eval().float().requires_grad_(False) for module in list(given)[1:]]

    def pooling(self, states: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the vectors of `encode`, (batch, dim), for states (batch, tokens, hidden); differentiable."""
        mask = inputs.get("attention_mask")
        mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device) if mask is None else mask
        lengths = self._prompt_lengths(inputs["input_ids"], mask)
        found: Any = None
        for length in lengths.unique().tolist():  # one, unless pooling leaves prompts out
            rows = (lengths == length).nonzero().squeeze(1)
            features = {**inputs, "attention_mask": mask, "token_embeddings": states}
            if len(rows) < len(states):
                features = {name: value[rows] for name, value in features.items()}
            if length:
                features["prompt_length"] = length
            for module in self._after:
                features = module(features)
            vectors: Tensor = features["sentence_embedding"]
            found = vectors.new_zeros(len(states), vectors.shape[1]) if found is None else found
            found = found.index_copy(0, rows, vectors)
        return found

    def _prompt_lengths(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the number of prompt tokens that pooling leaves out, (batch,)."""
        found = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        if all(getattr(module, "include_prompt", True) for module in self._after):
            return found
        read = [self.given.preprocess(["x"], prompt=prompt) for prompt in self.prompts if prompt]
        for features in sorted(read, key=lambda each: int(each["prompt_length"])):
            start = features["input_ids"][0, : int(features["prompt_length"])].to(ids.device)
            for row, (text, real) in enumerate(zip(ids, mask.bool(), strict=True)):
                if torch.equal(text[real][: len(start)], start):
                    found[row] = len(start)
        return found

    def closed(self, model: nn.Module) -> Any:
        """Return a copy of the SentenceTransformer with another encoder."""
        made = copy.deepcopy(self.given, {id(self.model): model}).eval()
        made._model_card_text = _card(model)  # written by `save_pretrained` instead of the original's
        return made


def _card(model: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for name in (MODULES, FILE_NAME):  # which will be next to it
            (Path(folder) / name).touch()
        card = write_model_card(folder, report=model.bundle_report, title="Sentence encoder, converted without labels")
        return card.read_text(encoding="utf-8")


def opened_sentence_encoder(model: Any, reader: Any, pooling: str | None) -> Opened:
    """Take a SentenceTransformer apart; see `snnk_peft.converting.opened.opened`."""
    if given := [name for name, value in (("tokenizer", reader), ("pooling", pooling)) if value is not None]:
        raise ConfigError(
            f"{' and '.join(given)} given beside a SentenceTransformer, which has its own; expected none. Leave it "
            "out, or change the SentenceTransformer"
        )
    encoder = SentenceEncoder(model)
    return Opened(
        encoder.model,
        encoder.given.tokenizer,
        encoder.pooling,
        encoder.closed,
        encoder.given.max_seq_length,
        prompts=encoder.prompts,
    )


def _sentence_transformer(given: Any) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ConfigError(
            f"{given} is a SentenceTransformer (it has {MODULES}), and sentence-transformers cannot be imported: "
            f"{error}. Install it: pip install 'snnk-peft[embeddings]'"
        ) from error
    if isinstance(given, SentenceTransformer):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise UnsupportedError(
            f"{in_words(given)} is no SentenceTransformer; of sentence-transformers, only this one can be converted. "
            "Take its transformers model out, convert that, and put it back"
        )
    try:
        return SentenceTransformer(os.fspath(given))
    except (OSError, ValueError) as error:
        raise ConfigError(f"no SentenceTransformer could be read from {os.fspath(given)!r}: {error}") from error
