"""The settings of recipes/papers/programs/pretrain_mlm.py, section by section."""

from __future__ import annotations

from dataclasses import dataclass, field

from papers.lib.lra_settings import AttentionMethod, LongRangeTrain, ModelSizes
from snnk_cli.config import option
from snnk_cli.settings import RunOutput

FILES = ("imdb", "wikitext")  # texts read from official files
TEXTS = ("stdlib_docs", "film_reviews", *FILES)


@dataclass
class MaskedData:
    """The texts to read, and how to mask them."""

    dir: str | None = option(
        None, "folder with the official files (imdb, wikitext: wiki.{train,valid}.tokens); stdlib_docs needs none"
    )
    vocabulary: int = option(8000, "word pieces, at most; the decoder costs in proportion", low=16)
    max_length: int = option(128, "tokens of a window", low=8)
    positions: int = option(128, "tokens that the model has positions for, >= max_length", low=8)
    share: float = option(0.15, "of the pieces that are asked for", above=0, high=0.9)
    max_eval_windows: int = option(256, "held-out windows that are scored, evenly over the text", low=1)


@dataclass
class MaskedModelSection(ModelSizes):
    """The encoder, trained from scratch. The default sizes are those of Learning the Transformer Kernel, Table 8.

    BERT's heads are dim / heads = 30 wide; in the paper they are 64 wide.
    """

    dim: int = option(300, "width of the residual stream", low=1)
    hidden_dim: int = option(512, "width of the feed-forward blocks", low=1)
    heads: int = option(10, "attention heads; must divide dim", low=1)
    layers: int = option(3, "layers", low=1)
    dropout: float = option(0.1, "on embeddings and blocks", low=0, high=0.9)
    attention_dropout: float = option(0.1, "on softmax weights (linear attention has none)", low=0, high=0.9)
    positions: str = option("sinusoidal", "position embedding", choices=("learned", "sinusoidal"))


@dataclass
class MaskedTrain(LongRangeTrain):
    """The optimisation, counted in optimizer steps."""

    learning_rate: float = option(5e-4, "peak learning rate of AdamW", above=0, high=10)


@dataclass
class MaskedConfig:
    """All settings of recipes/papers/programs/pretrain_mlm.py."""

    output: RunOutput
    task: str = option("stdlib_docs", "the text", choices=TEXTS)
    data: MaskedData = field(default_factory=MaskedData)
    model: MaskedModelSection = field(default_factory=MaskedModelSection)
    method: AttentionMethod = field(default_factory=AttentionMethod)
    train: MaskedTrain = field(default_factory=MaskedTrain)

    def check(self) -> list[str]:
        data = self.data
        if data.positions >= data.max_length:
            return []
        return [f"data.positions is {data.positions}; expected at least data.max_length, {data.max_length}"]
