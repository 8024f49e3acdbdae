"""Save adapters: the whole folder or none of it, with its config tied to its weights.

PEFT writes weights, config and card one after the other into the folder itself; transformers writes the config first.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peft import PeftModel

from snnk_peft.config import CONFIG, FREE, WEIGHTS, SNNKConfig
from snnk_peft.errors import ConfigError
from snnk_peft.model_card import mend_card
from snnk_peft.saved_folder import written_whole
from snnk_peft.stamps import stamp_together

CARD = "README.md"


@contextlib.contextmanager
def saved_adapters(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A context with a folder to save adapters to, in it and in folders below; at its end they are in `folder`.

    Raises:
        ConfigError: it cannot be written to; what was there before is unchanged.
    """
    target = Path(folder)
    with written_whole(target) as staged:
        for card in [target / CARD, *target.glob(f"*/{CARD}")]:  # those that users have edited stay
            if card.is_file():
                (copy := staged / card.relative_to(target)).parent.mkdir(exist_ok=True)
                shutil.copyfile(card, copy)
        yield staged
        for weights in staged.rglob(WEIGHTS):
            if (config := weights.with_name(CONFIG)).is_file():
                stamp_together(config, FREE, [weights])


def watch_saving() -> None:
    """Let `PeftModel.save_pretrained` write SNNK adapters whole, and cards that the Hub takes; once."""
    PeftModel.create_or_update_model_card = _keeping_cards(PeftModel.create_or_update_model_card)  # type: ignore[method-assign]
    PeftModel.save_pretrained = _saving_whole(PeftModel.save_pretrained)  # type: ignore[method-assign]


def _keeping_cards(original: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT replaces the tags of a card that is there, and names a local base model; the Trainer calls it too."""

    @functools.wraps(original)
    def create_or_update_model_card(self: PeftModel, output_dir: str) -> None:
        config = next(iter(self.peft_config.values()), None)
        if not isinstance(config, SNNKConfig):
            original(self, output_dir)
            return
        card = Path(output_dir) / CARD
        if not card.is_file():
            original(self, output_dir)
        mend_card(card, config.base_model_name_or_path)

    return create_or_update_model_card


def _saving_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: PeftModel, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        ours = any(isinstance(config, SNNKConfig) for config in self.peft_config.values())
        if not ours or not given.arguments["is_main_process"]:
            return original(self, *args, **kwargs)
        folder = given.arguments["save_directory"]
        if not given.arguments["safe_serialization"]:
            raise ConfigError(
                f"safe_serialization is False for {folder}; SNNK adapters are saved as {WEIGHTS}, the only file that "
                "is read. Leave it out"
            )
        with saved_adapters(folder) as staged:
            given.arguments["save_directory"] = str(staged)
            return original(*given.args, **given.kwargs)

    return save_pretrained
