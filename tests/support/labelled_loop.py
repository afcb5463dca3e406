"""transformers' own classifier in a plain loop, by its own loss."""

import torch
import transformers
from torch import nn

from oobleck.model import initial
from oobleck.worker.data.objective import Order
from oobleck.worker.models.huggingface.causal_lm import causal_lm, foreign_names
from support.labelled_models import CONFIG, LENGTH, NAME, Sentences
from support.plain_loop import BATCH, RATE, SEED


def whole_model() -> nn.Module:
    """transformers' model in float64 with the weights that a job begins with."""
    model = causal_lm(NAME, CONFIG, sequence_length=LENGTH)
    architecture = model.layers[0].args[0]  # type: ignore[index,union-attr]
    whole = getattr(transformers, NAME)(
        transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **CONFIG)
    )
    state = {
        foreign_names(architecture, number)[name]: value
        for number, layer in enumerate(initial(lambda: model, SEED))
        for name, value in layer.state_dict().items()
    }
    whole.load_state_dict(state)
    found: nn.Module = whole.double()
    return found


def plain_loop(steps: int) -> list[float]:
    """The losses, in one process."""
    whole, data = whole_model(), Sentences()
    order = Order.of(len(data), 0.0)
    decayed = [p for p in whole.parameters() if p.dim() > 1]
    rest = [p for p in whole.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(1, steps + 1):
        rows = [data[int(i)] for i in order.of_step(SEED, step, range(BATCH), BATCH)]
        words, labels = (torch.stack([row[side] for row in rows]) for side in (0, 1))
        optimizer.zero_grad()
        loss = whole(words, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
