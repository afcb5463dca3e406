"""Checks of a user's loss: it may not train parameters of its own, or write into its targets."""

import torch
from torch import Tensor

from oobleck.planner.job.own import OwnModelSpec
from oobleck.worker.models import own
from oobleck.worker.models.tree import Tree, flatten, map_tensors
from oobleck.worker.runtime import code
from oobleck.worker.runtime.problem import Problem


def look_at_loss(spec: OwnModelSpec, output: Tree, targets: Tree) -> list[Problem]:
    """Return problems of the loss. `output`: leaves that require gradients as the last layer's."""
    given = map_tensors(lambda tensor: tensor.clone(), output)
    told = map_tensors(lambda tensor: tensor.clone(), targets)
    versions = [tensor._version for tensor in flatten(told)]
    try:
        with torch.random.fork_rng(devices=[]), code.running("model: the loss"):
            found = own.user_model(spec).loss(given, told)
            tensors = flatten(found)
    except Exception:  # noqa: BLE001  # a user's loss may raise anything; `_loss` reports it
        return []
    if versions != [tensor._version for tensor in flatten(told)]:
        return [_problem("writes into its targets; make new tensors, as y = y * 2 for y *= 2")]
    leaf = _other_leaf(tensors, {id(tensor) for tensor in flatten(output)})
    if leaf is None:
        return []
    return [
        _problem(
            f"has a parameter of its own, of shape {list(leaf.shape)}, which would not be trained; "
            "make it a parameter of the last layer, and return it with that layer's output"
        )
    ]


def _problem(sentence: str) -> Problem:
    return Problem(where="loss", sentence=sentence)


def _other_leaf(tensors: list[Tensor], given: set[int]) -> Tensor | None:
    """Return a leaf in the graph of `tensors` that is not one of `given`; None if there is none."""
    left = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and id(leaf) not in given:
            return leaf
        left += [before for before, _ in node.next_functions]
    return None
