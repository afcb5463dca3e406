"""Facts that an export of a model of transformers needs, found out where transformers is.

Owns which tensors and what config.json make `from_pretrained` load the model as it was trained;
`oobleck.host.storage.exported` puts the names together. Must not know checkpoints or files.
"""

import json
from collections.abc import Iterator

import torch

from oobleck.core.job.code import NO_ARGUMENTS, Json
from oobleck.core.job.description import Foreign
from oobleck.core.job.own import OwnModelSpec
from oobleck.worker.models.huggingface import pretrained
from oobleck.worker.models.huggingface.architecture import Architecture, choose, fresh_configuration
from oobleck.worker.models.huggingface.causal_lm import build, foreign_names
from oobleck.worker.models.huggingface.lora import adapter_config
from oobleck.worker.models.huggingface.unsplit import take_apart
from oobleck.worker.models.own import without_draws


def foreign(spec: OwnModelSpec) -> Foreign:
    """Return these facts for a model that is named by its architecture. Raises JobError."""
    chosen = choose(spec.architecture, json.loads(spec.config or NO_ARGUMENTS), spec.weights)
    parts = take_apart(chosen, torch.get_default_dtype())
    blocks = f"{parts.prefix}{parts.name}."
    if spec.lora is not None:
        config = adapter_config(chosen, spec.lora)
        return Foreign(config=config, blocks=blocks, adapters=True)
    return Foreign(
        config=_config(chosen),
        blocks=blocks,
        kept=tuple(_kept(chosen, len(parts.layers) + 2)) if chosen.weights is not None else (),
    )


def _config(architecture: Architecture) -> Json:
    config = fresh_configuration(architecture)
    config.architectures = [architecture.name]
    keys = json.loads(config.to_json_string())
    # transformers takes the weights' own then: they are of the precision that was trained in.
    keys.pop("dtype", None)
    return Json(json.dumps(keys))


def _kept(architecture: Architecture, count: int) -> Iterator[tuple[str, str]]:
    """Tensors of an export that are not trained, and their names in the files that the model began
    with, which alone have them. Raises JobError."""
    for number in range(count):
        with torch.device("meta"), without_draws():
            layer = build(architecture, number)
        names = foreign_names(architecture, number)
        parameters = layer.named_parameters(remove_duplicate=False)
        trained = {names[name] for name, p in parameters if p.requires_grad}
        kept = [full for full in names.values() if full not in trained]
        # Several may come from the same pieces.
        yield from dict.fromkeys(
            pair for full in kept for pair in pretrained.stored(architecture, full, trained)
        )
