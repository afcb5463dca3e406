"""Models of transformers as a job meets them: described in one process, begun in another one.

    python -m support.fresh Qwen3ForCausalLM BertForMaskedLM

prints a line for each: a JSON list of the name and of what went wrong, if anything. Each process is
forked from this one, which has loaded transformers and has built nothing.
"""

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial

import torch
import torch._dynamo  # with what layers of transformers need, a second of each fork
import transformers
import transformers.models.llama.modeling_llama

from oobleck.model import Model, initial
from oobleck.worker.models.huggingface.causal_lm import causal_lm
from oobleck.worker.state.model_state import ModelState
from support import causal, exports


def in_a_fork(function: Callable[[], bytes]) -> bytes:
    """What it returns in a process of its own. Raises RuntimeError with its last words."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 0
        try:
            told = function()
        except BaseException:  # noqa: BLE001  # it is told, and the process ends
            status, told = 1, traceback.format_exc(limit=-3).encode()
        with os.fdopen(writer, "wb") as file:
            file.write(told)
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        told = file.read()
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError(told.decode())
    return told


def digest(values: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(values):
        found.update(name.encode() + values[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def described(name: str) -> bytes:
    """As where a job is submitted: its description, and the weights that it is to begin with."""
    job = exports.job_of(causal.keys_of(name), architecture=name)

    def make() -> Model:
        return causal_lm(name, causal.keys_of(name), sequence_length=job.model.sequence_length)

    layers = initial(make, job.training.seed)
    weights = {n: p for n, p in layers.named_parameters(remove_duplicate=False) if p.requires_grad}
    return json.dumps([job.model.described, digest(weights)]).encode()


def begun(name: str, description: str) -> bytes:
    """As on a node: all layers, with their initial weights."""
    job = exports.job_of(causal.keys_of(name), description, architecture=name)
    state = ModelState(job, torch.device("cpu"))
    weights = {}
    for layer in reversed(range(job.model.layer_count)):
        state.initialise(layer)
        module = state.module(layer).module
        weights |= {
            f"{layer}.{n}": p
            for n, p in module.named_parameters(remove_duplicate=False)
            if p.requires_grad
        }
    return digest(weights).encode()


def main() -> None:
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:]:
        wrong = ""
        try:
            description, expected = json.loads(in_a_fork(partial(described, name)))
            if in_a_fork(partial(begun, name, description)).decode() != expected:
                wrong = "it begins with other weights"
        except RuntimeError as error:
            wrong = str(error)
        sys.stdout.write(f"{json.dumps([name, wrong])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
