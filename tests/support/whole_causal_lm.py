"""A model of transformers trained whole, from labels as data sets for it have them."""

from pathlib import Path

import numpy as np
import torch
import transformers

from oobleck.model import initial
from oobleck.worker.data.objective import Order
from oobleck.worker.models.huggingface.causal_lm import causal_lm, foreign_names
from support.plain_loop import BATCH, RATE, SEED

LENGTH, WORDS = 8, 32
CONFIG = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
}
NAME = "LlamaForCausalLM"
#: Of a job file.
MODEL = {"architecture": NAME, "config": CONFIG, "sequence_length": LENGTH}


def write(folder: Path, rows: int = 64) -> None:
    """Rows of tokens and their labels: of most rows, few are learned."""
    draws = np.random.default_rng(2)
    ids = draws.integers(WORDS, size=(rows, LENGTH))
    asked = np.arange(LENGTH) < draws.integers(LENGTH + 1, size=(rows, 1))
    np.save(folder / "input_ids.npy", ids)
    np.save(folder / "labels.npy", np.where(asked, -100, ids))


def train(folder: Path, steps: int) -> tuple[list[float], list[int]]:
    """Losses, and how many labels each step has learned; in float64 as far as transformers is."""
    ids, labels = (torch.from_numpy(np.load(folder / f"{n}.npy")) for n in ("input_ids", "labels"))
    model = _whole()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    order, losses, learned = Order.of(len(ids), 0.0), [], []
    for step in range(1, steps + 1):
        rows = torch.from_numpy(order.of_step(SEED, step, range(BATCH), BATCH).astype(np.int64))
        optimizer.zero_grad()
        loss = model(ids[rows], labels=labels[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        learned.append(int((labels[rows][:, 1:] != -100).sum()))
    return losses, learned


def _whole() -> transformers.PreTrainedModel:
    """With the weights that a job begins with."""
    made = causal_lm(NAME, CONFIG, sequence_length=LENGTH)
    architecture = made.layers[0].args[0]  # type: ignore[index,union-attr]
    model = getattr(transformers, NAME)(transformers.LlamaConfig(**CONFIG))
    layers = initial(lambda: causal_lm(NAME, CONFIG, sequence_length=LENGTH), SEED)
    for number, layer in enumerate(layers):
        names = foreign_names(architecture, number)
        state = {names[name]: value for name, value in layer.state_dict().items()}
        assert not model.load_state_dict(state, strict=False).unexpected_keys
    whole: transformers.PreTrainedModel = model.double()
    return whole
