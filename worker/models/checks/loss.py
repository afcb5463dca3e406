"""Checks of a user's loss: it gives a number and a weight per row, each of that row alone. It may
not train parameters of its own, or write into its targets."""

import torch
from torch import Tensor

from oobleck.core.job.model import OwnModelSpec
from oobleck.model import at_step
from oobleck.worker.models import own
from oobleck.worker.models.checks.rows import (
    ANYWHERE,
    PER_ROW,
    Batches,
    close,
    crowded,
    finite,
    leaf,
    same_row,
)
from oobleck.worker.models.checks.runs import changed, kept
from oobleck.worker.models.tree import Tree, flatten, map_tensors, unflatten
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import Problem


def check_loss(spec: OwnModelSpec, output: Batches, targets: Batches) -> list[Problem]:
    """Return problems of the loss at the job's first step. `output`: leaves that require gradients
    as the last layer's."""
    found = _look_at_rows(spec, output, targets)
    with at_step(1):
        return found + _look_at_tensors(spec, output.one, targets.one)


def weighs(spec: OwnModelSpec, targets: Tree) -> bool:
    """Return whether the loss gives weights, by its result for made-up outputs; False if it fails
    on them. `targets`: of some rows."""
    rows, sketch = len(flatten(targets)[0]), spec.description.layers[-1].output
    made = (torch.ones((rows, *t.shape), dtype=getattr(torch, t.dtype)) for t in sketch.tensors)
    try:
        with torch.no_grad(), at_step(1):
            output = unflatten(sketch.structure, made)
            copies = map_tensors(lambda tensor: tensor.clone(), targets)
            return own.row_losses(spec, output, copies, rows)[1] is not None
    except Exception:  # noqa: BLE001  # `check_loss` tells what the loss raises on real outputs
        return False


def _look_at_rows(spec: OwnModelSpec, output: Batches, targets: Batches) -> list[Problem]:
    """Return problems of the numbers per row."""
    weighs = False

    def of(output: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        nonlocal weighs
        rows = len(flatten(targets)[0])
        # No leaf, as on a worker: in-place writes fail on a leaf.
        x = map_tensors(lambda tensor: tensor.clone(), output)
        with at_step(1):
            sums, weights = own.row_losses(spec, x, targets, rows)
        weighs = weights is not None
        return sums, torch.ones(rows) if weights is None else weights

    torch.manual_seed(0)
    one, before = of(output.one, targets.one), kept(own.user_model(spec).loss)
    again, after = of(output.one, targets.one), kept(own.user_model(spec).loss)
    sums, weights = one
    if not sums.is_floating_point():
        return [_problem(f"gives {sums.dtype}; give floats")]
    if bool((weights < 0).any()):
        return [_problem("gives a weight below 0; give 0 to a row without anything to learn")]
    if not sums.requires_grad:
        return [
            _problem(
                "has no gradient, so that nothing would be trained; compute it from what the last "
                "layer gives, without detach, argmax or item"
            )
        ]
    found = [] if finite(one) else [_problem("is not finite with the initial weights", True)]
    whole = [number for number, layer in enumerate(spec.description.layers) if layer.whole]
    if whole and weighs:
        # The weight of the batch is known, and divided by, behind the last backward.
        sentence = (
            f"gives weights, and a hook of layer {whole[0]} does not give the same for parts of a "
            "gradient, as one that clamps does not: it would see the gradient before the division "
            "by the weight of the batch; give one number per row, or leave out the hook"
        )
        found.append(_problem(sentence))
    alike = same_row(one, again, exact=True)
    if names := changed(before, after):
        sentence = (
            f"keeps something else after each call ({names[0]}), and workers call it in another "
            "order on other plans; oobleck.model.step() is the number of the step"
        )
        found.append(_problem(sentence, alike))
    elif not alike:
        return [*found, _problem("draws random numbers; a layer may, a loss may not")]
    if not alike:
        return found
    try:
        with code.running("loss", " cannot be differentiated"):
            sums.mean().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except Exception as error:  # noqa: BLE001  # a user's loss may raise anything
        found.append(_problem(f"its backward fails: {code.described(error)}"))
    return found


_BY_ROW = (
    "compute each row's from that row alone, as torch's losses do with reduction=\"none\" and a "
    "mean over the other dimensions. That goes for each term, as an auxiliary or balancing loss "
    f"of means over the batch. {PER_ROW}"
)


def influence_in_loss(
    spec: OwnModelSpec, output: Batches, targets: Batches, step: int, *, initial: bool
) -> Problem | None:
    """Return a problem if a row's loss or weight changes with the other rows, with their number, or
    at another place. `initial`: with the initial weights; for outputs of others errors and infinite
    numbers are no problem, since training may never give such. Raises JobError."""
    row = output.row
    beside, place = ("with the other rows", _BY_ROW, True), "as row {} of more rows"
    others = [(output.other, targets.other, row, *beside)]
    if not initial:
        others += [(crowded(output, sign), targets.one, row, *beside) for sign in (1.0, -1.0)]
    for position in (row, output.later):
        more = (
            output.both(),
            targets.both(),
            position,
            place.format(position),
            ANYWHERE,
            False,
        )
        others.append(more)
    others.append((output.alone(), targets.alone(), 0, "when it is alone", _BY_ROW, False))
    first = _row_loss(spec, output.one, targets.one, row, step, initial=initial)
    for x, t, position, how, advice, exact in others:
        again = _row_loss(spec, x, t, position, step, initial=initial)
        if first is None or again is None:
            continue
        for what, mine, other in zip(("loss", "weight"), first[:2], again[:2], strict=True):
            if not close(mine, other, exact=exact):
                seen = f"{mine.item():.4g} becomes {other.item():.4g}"
                return _problem(f"row {row}'s {what} changes {how} ({seen}); {advice}")
        pairs = zip(first[2], again[2], strict=True)
        if any(not close(a, b, exact=False) for a, b in pairs):
            return _problem(f"the gradient of row {row}'s loss changes {how}; {advice}")
    return None


def _row_loss(
    spec: OwnModelSpec, output: Tree, targets: Tree, row: int, step: int, *, initial: bool
) -> tuple[Tensor, Tensor, list[Tensor]] | None:
    """Return the loss of `row`, its weight, and the gradients of its loss in that row of `output`.
    None if it fails or is not finite with other weights than the initial ones."""
    given = map_tensors(lambda tensor: leaf(tensor.clone(), tensor.requires_grad), output)
    x = map_tensors(lambda tensor: tensor.clone(), given)
    torch.manual_seed(0)
    try:
        with at_step(step):
            losses, weights = own.row_losses(spec, x, targets, len(flatten(targets)[0]))
        with code.running("loss", " cannot be differentiated"):
            losses[row].backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except Exception:
        if initial:
            raise
        return None
    gradients = [t.grad[row : row + 1] for t in flatten(given) if t.grad is not None]
    loss = losses[row].detach()
    weight = torch.ones(()) if weights is None else weights[row]
    return (loss, weight, gradients) if initial or finite([loss, weight, *gradients]) else None


def _look_at_tensors(spec: OwnModelSpec, output: Tree, targets: Tree) -> list[Problem]:
    """Return problems of the tensors that the loss writes into, and of those it trains. `output`:
    leaves."""
    given = map_tensors(lambda tensor: tensor.clone(), output)
    copies = map_tensors(lambda tensor: tensor.clone(), targets)
    versions = [tensor._version for tensor in flatten(copies)]
    try:
        with torch.random.fork_rng(devices=[]), code.running("model: the loss"):
            found = own.user_model(spec).loss(given, copies)
            tensors = flatten(found)
    except Exception:  # noqa: BLE001  # a user's loss may raise anything; `_look_at_rows` tells it
        return []
    if versions != [tensor._version for tensor in flatten(copies)]:
        return [_problem("writes into its targets; make new tensors, as y = y * 2 for y *= 2")]
    own_one = _other_leaf(tensors, {id(tensor) for tensor in flatten(output)})
    if own_one is None:
        return []
    return [
        _problem(
            f"has a parameter of its own, of shape {list(own_one.shape)}, which would not be "
            "trained; make it a parameter of the last layer, and return it with that layer's output"
        )
    ]


def _problem(sentence: str, warning: bool = False) -> Problem:
    return Problem(where="loss", sentence=sentence, warning=warning)


def _other_leaf(tensors: list[Tensor], given: set[int]) -> Tensor | None:
    """Return a leaf in the graph of `tensors` that is not one of `given`; None if there is none."""
    left = [tensor.grad_fn for tensor in tensors]
    seen = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found = getattr(node, "variable", None)
        if isinstance(found, Tensor) and id(found) not in given:
            return found
        left += [before for before, _ in node.next_functions]
    return None
