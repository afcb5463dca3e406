"""Layers that pass tuples, lists and dicts of tensors train as plain autograd does, cut anywhere.

The layers are made by hand, and so is what the state, the mailbox and the transport do with them.
"""

import copy
import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from oobleck.planner.job.description import Description, LayerSketch, TensorSketch, TreeSketch
from oobleck.planner.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.planner.programs.instructions import Share
from oobleck.worker.models import Layer
from oobleck.worker.models.linear import Linear
from oobleck.worker.models.tree import flatten, map_tensors, structure
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.step.stage import StageRunner
from oobleck.worker.step.wire import wire

CPU = torch.device("cpu")
ROWS, LENGTH, WIDTH, WORDS = 3, 4, 6, 11


class Prepare(Layer):
    """Has no parameter, and nothing with a gradient: a mask, and where in the row a word is."""

    def compute(self, x):
        places = torch.arange(LENGTH).expand(len(x["ids"]), LENGTH)
        return [x["ids"], x["scale"].to(self.dtype).tanh(), (x["ids"] > 2, places)]


class Embed(Layer):
    def __init__(self, layer):
        super().__init__(layer)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def compute(self, x):
        ids, scale, (mask, places) = x
        return (self.words(ids) + self.places[places], scale, mask)


class Mix(Layer):
    """A part that may be left for later and one that may not; the input goes on beside them."""

    def __init__(self, layer):
        super().__init__(layer)
        self.one = Linear(WIDTH, WIDTH, bias=True)
        self.other = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.one.weight)
        nn.init.normal_(self.one.bias)

    def compute(self, x):
        hidden, scale, mask = x
        mixed = self.one(hidden).tanh() * mask[..., None] + self.other(hidden)
        return {"hidden": mixed, "skip": hidden, "scale": scale, "rows": mixed.sum((1, 2))}


class Squash(Layer):
    """No parameter either; one of what it gives is used by nobody after it."""

    def compute(self, x):
        hidden = x["hidden"].sigmoid() * x["rows"][:, None, None].cos()
        return [hidden, {"skip": x["skip"], "scale": x["scale"]}, hidden.exp()]


class Merge(Layer):
    """Gives one tensor."""

    def __init__(self, layer):
        super().__init__(layer)
        self.linear = nn.Linear(2, WIDTH)

    def compute(self, x):
        hidden, beside, _ = x
        return hidden + beside["skip"] * self.linear(beside["scale"])[:, None]


class Plain(Layer):
    def __init__(self, layer):
        super().__init__(layer)
        self.linear = Linear(WIDTH, WIDTH)
        nn.init.normal_(self.linear.weight)

    def compute(self, x):
        return x + self.linear(x)


class Head(Layer):
    def __init__(self, layer):
        super().__init__(layer)
        self.norm = nn.LayerNorm(WIDTH)
        self.words = Linear(WIDTH, WORDS)
        nn.init.normal_(self.words.weight)

    def compute(self, x):
        return {"words": self.words(self.norm(x)), "mean": x.mean((1, 2))}

    def row_losses(self, output, targets):
        words, value = targets
        found = nn.functional.cross_entropy(output["words"].mT, words, reduction="none")
        return found.mean(1) + (output["mean"] - value).square()


KINDS = [Prepare, Embed, Mix, Squash, Merge, Plain, Head]
LAST = len(KINDS) - 1


@dataclass(frozen=True)
class OwnModel:
    description: Description

    @property
    def layer_count(self):
        return len(self.description.order)


def sketch(tree):
    return TreeSketch(
        tensors=tuple(
            TensorSketch(
                shape=tuple(one.shape[1:]),
                dtype=str(one.dtype).removeprefix("torch."),
                gradient=one.requires_grad,
            )
            for one in flatten(tree)
        ),
        structure=structure(tree),
    )


class Chain:
    """The layers, a micro-batch of data, and what plain autograd makes of them."""

    def __init__(self, precision, **training):
        torch.manual_seed(3)
        self.modules = [kind(layer) for layer, kind in enumerate(KINDS)]
        dtype = torch.float64 if precision == "fp64" else torch.float32
        self.modules[0].dtype = dtype
        for module in self.modules:
            module.to(dtype)
        ids = torch.randint(WORDS, (ROWS, LENGTH))
        self.inputs = {"ids": ids, "scale": torch.randn(ROWS, 2)}
        self.targets = (ids.flip(1), torch.randn(ROWS, dtype=dtype))
        self.loss, self.gradients, outputs = self.plain()
        self.job = self.describe(outputs, precision, training)

    def plain(self):
        modules = copy.deepcopy(self.modules)
        x, outputs = self.inputs, []
        for module in modules:
            x = module(x, keys(range(ROWS)))
            outputs.append(x)
        loss = modules[-1].row_losses(x, self.targets).mean()
        loss.backward()
        return loss.item(), gradients([modules]), outputs

    def describe(self, outputs, precision, training):
        kinds = tuple(
            LayerSketch(
                name=kind.__name__,
                parameters=0,
                tied=0,
                largest=0,
                flops=1.0,
                kept_bytes=0,
                output=sketch(output),
                draws=False,
            )
            for kind, output in zip(KINDS, outputs, strict=True)
        )
        description = Description(
            kinds=kinds,
            order=tuple(range(len(kinds))),
            inputs=sketch(self.inputs),
            targets=sketch(self.targets),
            tied=(),
            code="",
        )
        return JobSpec(
            name="own",
            model=OwnModel(description),
            data=DataSpec(text=("none",)),
            training=TrainingSpec(
                steps=1, global_batch=2 * ROWS, microbatch=ROWS, precision=precision, **training
            ),
        )

    def run(self, cuts, shares, *, split=False, by_layer=True, lowest=0):
        """Loss and gradients where the model is cut after `cuts`, and each stage's rows are shared
        by so many workers."""
        bounds = itertools.pairwise([0, *(cut + 1 for cut in cuts), len(KINDS)])
        ranges = [range(start, stop) for start, stop in bounds]
        stages = [
            [Worker(self, layers, part, parts) for part in range(parts)]
            for layers, parts in zip(ranges, shares, strict=True)
        ]
        sent, loss = self.inputs, None
        for stage in stages:
            made = [
                worker.forward(sent, split=split, by_layer=by_layer, lowest=lowest)
                for worker in stage
            ]
            assert not any(one.requires_grad for one in made)
            if stage is not stages[-1]:
                sent = torch.cat(made)
                assert sent.shape[1:] == wire(self.job, stage[0].layers[-1]).values.shape
        loss = sum(one.item() for one in made)
        gradient = None
        for stage in reversed(stages):
            if stage[0].layers[-1] < lowest:
                break
            made = [worker.backward(gradient, split=split) for worker in stage]
            if stage[0].layers[0] > lowest:
                assert [one is None for one in made] == [not worker.rows for worker in stage]
                gradient = torch.cat([one for one in made if one is not None])
                packing = wire(self.job, stage[0].layers[0] - 1).gradients
                assert gradient.shape == (ROWS, *packing.shape)
                assert gradient.dtype == packing.dtype
            else:
                assert all(one is None for one in made)
        for worker in (worker for stage in stages for worker in stage):
            added = {layer for layer in worker.layers if worker.state.layers[layer].added}
            assert added == {layer for layer in worker.layers if layer >= lowest}
        return loss, gradients([[m for w in stage for m in w.modules] for stage in stages])


class Worker:
    """One of those that share a stage, with modules of its own."""

    def __init__(self, chain, layers, part, parts):
        self.layers = layers
        self.chain = chain
        self.rows = Share(part, part + 1, parts).of_rows(ROWS)
        self.modules = [copy.deepcopy(chain.modules[layer]) for layer in layers]
        self.state = SimpleNamespace(
            module=lambda layer: self.modules[layer - layers[0]],
            layers={layer: SimpleNamespace(added=set()) for layer in layers},
        )
        self.runner = StageRunner(self.state, layers, chain.job, CPU)

    def own(self, tree):
        return map_tensors(lambda one: one[self.rows.start : self.rows.stop], tree)

    def forward(self, x, **how):
        targets = self.own(self.chain.targets) if self.runner.last else None
        return self.runner.forward(0, self.own(x), keys(self.rows), targets, **how)

    def backward(self, gradient, *, split):
        own = None if gradient is None else self.own(gradient)
        if not split:
            return self.runner.backward(0, own)
        made = self.runner.backward_input(0, own)
        self.runner.backward_weight(0)
        return made


def keys(rows):
    return RowKeys(seed=0, step=1, positions=tuple(rows))


def gradients(stages):
    """By layer and name, summed over those that share a stage."""
    found = {}
    for modules in stages:
        for module in modules:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    key = f"{module.layer}.{name}"
                    found[key] = found.get(key, 0) + parameter.grad
    return found


CUTS = [(), *((cut,) for cut in range(LAST)), (1, 3), tuple(range(LAST))]
SHARES = {
    "alone": lambda stages: [1] * stages,
    "in pairs": lambda stages: [2] * stages,
    "1, 2, 1": lambda stages: [1 + number % 2 for number in range(stages)],
    "2, 1, 2": lambda stages: [2 - number % 2 for number in range(stages)],
    "some without rows": lambda stages: [(5, 2, 3)[number % 3] for number in range(stages)],
}


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_any_cut_makes_the_gradients_of_plain_autograd(recompute, split):
    chain = Chain("fp64", recompute=recompute)
    assert len(chain.gradients) == 12, "every parameter has one"
    for cuts in CUTS:
        for by_layer in (True, False):
            loss, found = chain.run(cuts, [1] * (len(cuts) + 1), split=split, by_layer=by_layer)
            assert loss == pytest.approx(chain.loss, rel=1e-13)
            check(found, chain.gradients)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_rows_may_be_shared(shares, split):
    chain = Chain("fp64")
    for cuts in CUTS:
        loss, found = chain.run(cuts, shares(len(cuts) + 1), split=split)
        assert loss == pytest.approx(chain.loss, rel=1e-13)
        check(found, chain.gradients)


@pytest.mark.parametrize("lowest", range(1, LAST + 1))
def test_what_is_below_the_lowest_wanted_layer_gets_nothing(lowest):
    """So the first layers with a graph may be any, also those without a parameter."""
    chain = Chain("fp64")
    expected = {name: one for name, one in chain.gradients.items() if int(name[0]) >= lowest}
    for cuts in CUTS:
        for by_layer in (True, False):
            _, found = chain.run(cuts, [1] * (len(cuts) + 1), by_layer=by_layer, lowest=lowest)
            check(found, expected)


def test_bf16_gives_the_same_bits_wherever_it_is_cut():
    chain = Chain("bf16")
    loss, expected = chain.run((), [1])
    assert loss != chain.loss, "it does compute in bfloat16"
    assert loss == pytest.approx(chain.loss, rel=2e-2)
    for cuts in CUTS:
        for by_layer in (True, False):
            again, found = chain.run(cuts, [1] * (len(cuts) + 1), by_layer=by_layer)
            assert again == loss
            for name, gradient in expected.items():
                assert torch.equal(found[name], gradient) or not by_layer, (cuts, name)


def test_a_split_backward_leaves_what_can_be_left_for_later():
    chain = Chain("fp64")
    stage = Worker(chain, range(LAST + 1), 0, 1)
    stage.forward(chain.inputs, split=True)
    stage.runner.backward_input(0)
    late = {"2.one.weight", "5.linear.weight", "6.words.weight"}
    found = gradients([stage.modules])
    check(found, {name: one for name, one in chain.gradients.items() if name not in late})
    stage.runner.backward_weight(0)
    check(gradients([stage.modules]), chain.gradients)


@pytest.mark.parametrize("adding", range(3, LAST + 1))
def test_what_is_not_asked_to_add_passes_gradients_through(adding):
    chain = Chain("fp64")
    bottom, top = Worker(chain, range(3), 0, 1), Worker(chain, range(3, LAST + 1), 0, 1)
    sent = bottom.forward(chain.inputs)
    rows, targets = keys(range(ROWS)), chain.targets
    top.runner.forward(0, sent, rows, targets, adding=frozenset({adding}))
    bottom.backward(top.backward(None, split=False), split=False)
    found = gradients([bottom.modules, top.modules])
    wanted = {0, 1, 2, adding}
    check(found, {name: one for name, one in chain.gradients.items() if int(name[0]) in wanted})


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        (lambda output, targets: output["mean"].mean(), r"gives \(\) for 3 rows"),
        (lambda output, targets: output["words"].sum(1), r"gives \(3, 11\) for 3 rows"),
    ],
)
def test_a_loss_that_is_not_one_per_row_is_refused(losses, why):
    head = Worker(Chain("fp64"), range(LAST, LAST + 1), 0, 1)
    head.modules[0].row_losses = losses
    with pytest.raises(JobError, match=why):
        head.forward(torch.zeros(ROWS, LENGTH, WIDTH, dtype=torch.float64))


def test_another_shape_than_was_described_is_refused_at_a_cut():
    chain = Chain("fp64")
    stage = Worker(chain, range(3), 0, 1)
    stage.modules[2].compute = lambda x: {"hidden": x[0][:, :2], "skip": x[0], "scale": x[1]}
    with pytest.raises(JobError, match=r'layer 2 of the model gives \{"hidden":null,"skip"'):
        stage.forward(chain.inputs)
    stage.modules[2].compute = lambda x: {
        "hidden": x[0][:, :2],
        "skip": x[0],
        "scale": x[1],
        "rows": x[1].sum(1),
    }
    with pytest.raises(JobError, match=r"gives torch.float64 \(3, 2, 6\).*\(3, 4, 6\)"):
        stage.forward(chain.inputs)
