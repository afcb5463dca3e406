"""Tiny models of transformers, whole and as our layers with the same weights."""

import copy
import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from oobleck.model import Model
from oobleck.worker.models.huggingface.architecture import TASKS, Architecture, configuration
from oobleck.worker.models.huggingface.causal_lm import causal_lm, foreign_names

LENGTH = 16
#: Keys that a family's config may have; a window is shorter than a row.
SIZES: dict[str, object] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "sliding_window": 6,
    "pad_token_id": None,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_num_experts": 4,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "image_size": 16,
    "patch_size": 4,
}
LABELS = 3
_LATENT = {"num_key_value_heads": 4}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
#: What single families need, beside or in place of those.
KEYS: dict[str, dict[str, object]] = {
    "AXK1ForCausalLM": _LATENT,
    "AXK2ForCausalLM": _LATENT,
    "CTRLLMHeadModel": {"dff": 48},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Dots3NoteForCausalLM": _LATENT,
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "Emu3ForCausalLM": {"pad_token_id": 0},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {
        "attention_types": [[["global", "local", "global"], 1]],
        "window_size": 6,
    },
    "Gemma2ForCausalLM": {"layer_types": _MIXED},
    "Gemma3ForCausalLM": {"layer_types": _MIXED},
    "Glm4MoeLiteForCausalLM": _LATENT,
    "GraniteForCausalLM": {
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.5,
    },
    "LongcatFlashForCausalLM": _LATENT,
    "MiniCPM3ForCausalLM": _LATENT,
    "ModernBertDecoderForCausalLM": {"pad_token_id": 0},
    "Olmo3ForCausalLM": {"layer_types": _MIXED},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"use_sliding_window": True, "max_window_layers": 1},
    "SmolLM3ForCausalLM": {"no_rope_layer_interval": 2},
    "YoutuForCausalLM": _LATENT,
}


def keys_of(name: str, **more: object) -> dict[str, Any]:
    """Keys of a tiny config of that architecture."""
    kind = getattr(transformers, name).config_class
    # Position tables of some need the number, and heads of rows look for it.
    if name not in TASKS["causal"] and name not in TASKS["image"]:
        more = {"pad_token_id": 1, **more}
    if any(name in TASKS[task] for task in ("token", "sequence", "image")):
        more = {"num_labels": LABELS, **more}
    fields = {field.name for field in dataclasses.fields(kind)}
    if name in TASKS["causal"] and "is_decoder" in fields:
        more = {"pad_token_id": 1, "is_decoder": True, **more}
    keys: dict[str, Any] = {}
    alike = (one for one in KEYS if one == name or one.split("For")[0] == name.split("For")[0])
    for key, value in {**SIZES, **KEYS.get(next(alike, name), {}), **more}.items():
        own = key if key in fields else kind.attribute_map.get(key, key)
        if own in fields or key in more:
            keys[own] = value
    return keys


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same model twice."""

    architecture: Architecture
    model: Model
    layers: list[nn.Module]
    whole: Any

    def names(self, number: int) -> dict[str, str]:
        return foreign_names(self.architecture, number)

    def forward(self, ids: Tensor) -> Any:
        return chain(self.layers, ids)


def chain(layers: Sequence[nn.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


@lru_cache(maxsize=2)
def pair(name: str, **more: object) -> Pair:
    """In float64. Weights are off their initial values, so that all of them matter."""
    length = None if name in TASKS["image"] else LENGTH
    model = causal_lm(name, keys_of(name, **more), sequence_length=length)
    architecture = model.layers[0].args[0]  # type: ignore[index,union-attr]
    whole = getattr(transformers, name)(copy.deepcopy(configuration(architecture)))
    torch.manual_seed(1)
    layers = [build().double() for build in model.layers]  # type: ignore[operator]
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for front, back in model.tied:
            of(layers, back).copy_(of(layers, front))
    found = Pair(architecture, model, layers, whole.double())
    state: dict[str, Tensor] = {}
    for number, layer in enumerate(layers):
        names = found.names(number)
        state |= {names[key]: value for key, value in layer.state_dict().items()}
    whole.load_state_dict(state)
    return found


def of(layers: Sequence[nn.Module], place: str) -> nn.Parameter:
    """The parameter that an entry of `tied` names."""
    number, _, name = place.partition(".")
    return layers[int(number)].get_parameter(name)


def compare(name: str, *, tolerance: float = 1e-9, **more: object) -> None:
    """Assert that logits, losses and gradients of the layers are those of the whole model."""
    both = pair(name, **more)
    for module in [both.whole, *both.layers]:
        module.zero_grad()
        module.eval()  # some heads drop where no key of the config says so
    ids, targets = batch(both)
    output = both.forward(ids)
    logits = both.whole(ids).logits
    close(output[0] if isinstance(output, tuple) else output, logits, tolerance)
    found = both.model.loss(output, targets)
    # Of labels of rows, numbers have no weights.
    mine = found[0] / found[1] if isinstance(found, tuple) else found
    rows = zip(ids, targets, logits, strict=True)
    expected = torch.stack([_their_loss(both, *row) for row in rows])
    close(mine, expected, tolerance)
    mine.mean().backward()
    expected.mean().backward()
    gradients: dict[str, Tensor] = {}
    ties = {back: front for front, back in both.model.tied}
    tied = both.whole.get_expanded_tied_weights_keys()
    for number, layer in enumerate(both.layers):
        names = both.names(number)
        for key, parameter in layer.named_parameters():
            if not parameter.requires_grad:
                continue
            front = ties.get(f"{number}.{key}")
            full = both.names(0)[front.removeprefix("0.")] if front else names[key]
            if parameter.grad is not None:
                full = tied.get(full, full)
                gradients[full] = gradients.get(full, torch.tensor(0.0)) + parameter.grad
    # What is next to nothing beside other gradients has their rounding.
    least = 0.1 * max(gradient.abs().max().item() for gradient in gradients.values())
    for full, parameter in both.whole.named_parameters(remove_duplicate=False):
        if full in tied:
            continue
        assert (parameter.grad is None) == (full not in gradients), full
        if parameter.grad is not None:
            close(gradients[full], parameter.grad, tolerance, full, least)


def batch(both: Pair) -> tuple[Tensor, Tensor]:
    """Inputs and targets of three rows."""
    draws = torch.Generator().manual_seed(2)
    task = both.architecture.task
    if task == "image":
        pixels = torch.randn(3, 3, 16, 16, generator=draws, dtype=torch.float64)
        return pixels, torch.tensor([2, 0, 1])
    ids, targets = torch.randint(2, 64, (2, 3, LENGTH), generator=draws)
    if task == "sequence":
        ids[1, 9:] = 1  # padding behind a row
        return ids, torch.tensor([2, 0, 1])
    if task == "token":
        targets %= LABELS
    targets[1, 3:7] = -100
    return ids, targets


def _their_loss(both: Pair, row: Tensor, targets: Tensor, logits: Tensor) -> Tensor:
    """What transformers trains for a batch of that row alone; in float64, where it rounds to
    float32."""
    if both.architecture.task == "causal":
        out = both.whole(row[None], labels=row[None], shift_labels=targets[None])
    else:
        out = both.whole(row[None], labels=targets[None])
    exact = nn.functional.cross_entropy(logits, targets)
    if getattr(out, "aux_loss", None) is not None:
        exact = exact + both.whole.config.router_aux_loss_coef * out.aux_loss
    close(exact, out.loss, 1e-5)
    return exact


def close(
    mine: Tensor, theirs: Tensor, tolerance: float, what: str = "", least: float = 1e-6
) -> None:
    scale = max(theirs.detach().abs().max().item(), least)
    difference = (mine - theirs).detach().abs().max().item()
    assert difference <= tolerance * scale, f"{what}: {difference} of {scale}"
