"""Why runs stayed on a plateau: with a head whose bias starts at zero, the encoder learns the labels' mean.

The gradient of the first steps is the same for all examples. Whatever is trained inside the encoder adds one vector to
the hidden states of all of them, the LayerNorms behind it shrink the rest, and what told the examples apart is gone
before it has been read. Adapters with a large readout, as ReLU features beside queries and values have, get there
first; on STS-B they stayed (three seeds: .778, .403, .075). A head that starts at the mean has no such gradient.
"""

from __future__ import annotations

import pytest
import torch
from lib.peers import start_at_prior

from snnk_peft import AdapterPart, SNNKConfig, get_snnk_model
from tests.tiny_models import tiny

STEPS, EXAMPLES, TOKENS = 100, 256, 8


def trained(seed: int, prior: bool) -> tuple[float, float, float]:
    """Spread of the [CLS] vectors over the examples before and after, and the correlation that was learned.

    The spread is the mean distance to the mean vector, in lengths of the vectors.
    """
    torch.manual_seed(seed)
    base = tiny("bert", num_labels=1)
    words = base.config.vocab_size
    ids = torch.randint(5, words, (EXAMPLES, TOKENS))
    signal = (ids[:, 1:] > words // 2).float().mean(1)
    labels = 2.5 + 1.5 * (signal - signal.mean()) / signal.std()  # mean and deviation of STS-B
    if prior:
        start_at_prior(base, labels)
    adapter = AdapterPart(component="relu", num_features=8, projection="free", placement="query_value")
    model = get_snnk_model(base, SNNKConfig(adapter=adapter, task_type="SEQ_CLS", seed=seed)).eval()
    weights = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=5e-3)

    def look() -> tuple[float, torch.Tensor]:
        with torch.no_grad():
            output = model(input_ids=ids, output_hidden_states=True)
        vectors = output.hidden_states[-1][:, 0]
        return float(((vectors - vectors.mean(0)).norm(dim=1) / vectors.norm(dim=1)).mean()), output.logits[:, 0]

    before, _ = look()
    for _ in range(STEPS):
        chosen = torch.randint(0, EXAMPLES, (32,))
        model(input_ids=ids[chosen], labels=labels[chosen]).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after, predicted = look()
    return before, after, float(torch.corrcoef(torch.stack([predicted, labels]))[0, 1])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_head_at_the_mean_keeps_the_examples_apart(seed: int) -> None:
    before, collapsed, little = trained(seed, prior=False)
    same, kept, learned = trained(seed, prior=True)
    assert same == pytest.approx(before, abs=0.01)  # same model, same data
    assert collapsed < 0.5 * before
    assert kept > before
    assert learned > little + 0.2
