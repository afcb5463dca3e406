"""A chain of layers that pass trees of tensors, made by hand, and what plain autograd makes of it.

What the state, the mailbox and the transport do between the stages of such a chain is done by hand
here, so that a test can cut it anywhere.
"""

import copy
import itertools
from types import SimpleNamespace

import torch
from torch import nn

from oobleck.core.codec import encode
from oobleck.core.instructions import Share
from oobleck.core.job.code import Json
from oobleck.core.job.description import Description, LayerSketch, TensorSketch, TreeSketch
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.worker.models.base import Layer, Linear
from oobleck.worker.models.tree import flatten, map_tensors, structure
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.step.mailbox import wire
from oobleck.worker.step.stage import StageRunner

CPU = torch.device("cpu")
ROWS, LENGTH, WIDTH, WORDS = 3, 4, 6, 11
MICROBATCHES = 2


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
        return found.mean(1) + (output["mean"] - value).square(), None


KINDS = [Prepare, Embed, Mix, Squash, Merge, Plain, Head]
LAST = len(KINDS) - 1


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
        loss = modules[-1].row_losses(x, self.targets)[0].mean()
        (loss / MICROBATCHES).backward()
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
            model=OwnModelSpec(
                python="support:chain", described=Json(encode(description).decode())
            ),
            data=DataSpec(python="support:samples"),
            training=TrainingSpec(
                steps=1,
                global_batch=MICROBATCHES * ROWS,
                microbatch=ROWS,
                precision=precision,
                **training,
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
        loss = sum(one[0].item() for one in made)
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


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-11, atol=1e-13, msg=name)
