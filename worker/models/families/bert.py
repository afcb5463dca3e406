"""BERT of transformers, `BertForMaskedLM`, as layers. All tokens are of type 0: one segment."""

from torch import Tensor, nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertLayer, BertPredictionHeadTransform

from oobleck.core.job.model import ModelSpec
from oobleck.worker.models.base import Dropout, Family, Layer
from oobleck.worker.models.families.foreign import adapt, configuration, draw, table
from oobleck.worker.models.linear import Linear


class Embedding(Layer):
    """Token, position and type embedding, normed: int64 ids (b, T) to (b, T, hidden)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(BertConfig, spec)
        hidden = config.hidden_size
        self.word_embeddings = table(config.vocab_size, hidden, config.pad_token_id)
        self.position_embeddings = table(config.max_position_embeddings, hidden)
        self.token_type_embeddings = table(config.type_vocab_size, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob, layer, "embedding")

    def compute(self, x: Tensor) -> Tensor:
        embedded = self.word_embeddings(x) + self.token_type_embeddings.weight[0]
        embedded = embedded + self.position_embeddings.weight[: x.shape[1]]
        dropped: Tensor = self.dropout(self.LayerNorm(embedded))
        return dropped


class _Key(Linear):
    """The key projection, with its bias cut from autograd: see `gpt2`."""

    def offset(self) -> Tensor:
        assert self.bias is not None, "it was asked for"
        offset: Tensor = self.bias.detach()
        return offset


class Block(Layer):
    """Self-attention over all tokens and an MLP, each normed after its sum."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(BertConfig, spec)
        self.block = adapt(BertLayer(config, layer_idx=layer - 1), layer)
        attention = self.block.get_submodule("attention.self")
        attention.key = _Key(config.hidden_size, config.hidden_size, bias=True)

    def compute(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


class Head(Layer):
    """Transform and projection to the vocabulary: (b, T, hidden) to logits (b, T, vocabulary)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(BertConfig, spec)
        self.transform = adapt(BertPredictionHeadTransform(config), layer)
        self.decoder = Linear(config.hidden_size, config.vocab_size, bias=True)

    def compute(self, x: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.transform(x))
        return logits


FAMILY = Family(
    embedding=Embedding,
    block=Block,
    head=Head,
    tied=("word_embeddings.weight", "decoder.weight"),
    initialise=draw,
)
