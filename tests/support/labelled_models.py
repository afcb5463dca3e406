"""Sentences, most of them with a label, and the classifier of transformers that learns them."""

import torch
from torch import Tensor

NAME, LENGTH, LABELS = "BertForSequenceClassification", 6, 3
CONFIG: dict[str, object] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": LENGTH,
    "num_labels": LABELS,
}


class Sentences:
    def __init__(self, size: int = 96) -> None:
        draws = torch.Generator().manual_seed(3)
        self.words = torch.randint(24, (size, LENGTH), generator=draws)
        self.labels = torch.randint(LABELS, (size,), generator=draws)
        self.labels[::5] = -100

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index], self.labels[index]
