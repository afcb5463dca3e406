"""Layers that pass trees of tensors train as plain autograd does, wherever they are cut."""

from functools import partial

import pytest
import torch

from oobleck.core import instructions as ops
from oobleck.core.instructions import Share
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.compiler.own import OwnProgram
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.step.mailbox import Mailbox, joined, wire
from support.meeting import Party
from support.plans import plan_of_cuts
from support.tree_chain import CPU, LAST, ROWS, Chain, Worker, check, gradients, keys

CUTS = [(), *((cut,) for cut in range(LAST)), (1, 3), tuple(range(LAST))]
SHARES = {
    "alone": lambda stages: [1] * stages,
    "in pairs": lambda stages: [2] * stages,
    "1, 2, 1": lambda stages: [1 + number % 2 for number in range(stages)],
    "2, 1, 2": lambda stages: [2 - number % 2 for number in range(stages)],
    "some without rows": lambda stages: [(5, 2, 3)[number % 3] for number in range(stages)],
}


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


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    "cuts", [[(1, 1), (6, 2)], [(3, 2), (4, 3)], [(2, 3), (2, 1), (3, 2)]], ids=str
)
def test_they_travel_between_workers(cuts, schedule):
    """By their programs, through mailboxes and links: two micro-batches of the same rows."""
    chain = Chain("fp64")
    plan = plan_of_cuts((cuts, 2), schedule=schedule)
    programs = compile_programs(plan, tied=False)
    places = {
        member: (hold.layers, part, len(hold.workers))
        for hold in plan.holds
        for part, member in enumerate(hold.workers)
    }
    workers = {member: Worker(chain, *place) for member, place in places.items()}

    def train(transport):
        name = plan.workers[transport.rank]
        layers, part, parts = places[name]
        mailbox = Mailbox(
            OwnProgram.of(name, programs),
            transport,
            rank={member: rank for rank, member in enumerate(plan.workers)},
            layers=len(chain.modules),
            rows=lambda _: ROWS,
            wire=partial(wire, chain.job),
            shares=dict.fromkeys(layers, Share(part, part + 1, parts)),
            device=CPU,
        )
        return run_program(workers[name], programs[name], mailbox)

    with Party(len(plan.workers)) as party:
        party.meet()
        loss = sum(party.everywhere(train))
    assert loss == pytest.approx(2 * chain.loss, rel=1e-13)
    found = gradients([worker.modules for worker in workers.values()])
    check(found, {name: 2 * one for name, one in chain.gradients.items()})


def run_program(worker, program, mailbox):
    """The losses of its rows."""
    runner, rows, targets = worker.runner, keys(worker.rows), None
    inputs = worker.own(worker.chain.inputs)
    if runner.last:
        targets = worker.own(worker.chain.targets)
    split = any(isinstance(step, ops.BackwardWeight) for step in program)
    loss, made, came = 0.0, {}, {}
    mailbox.begin()
    for step in program:
        match step:
            case ops.ReceiveActivation() | ops.ReceiveGradient():
                pieces = came.setdefault((type(step), step.microbatch), {})
                pieces[step.share] = mailbox.receive(step)
            case ops.Forward(microbatch=m):
                x = inputs if runner.first else joined(came.pop((ops.ReceiveActivation, m)))
                made[ops.SendActivation, m] = runner.forward(m, x, rows, targets, split=split)
                if runner.last:
                    loss += made[ops.SendActivation, m][0].item()
            case ops.Backward(microbatch=m) | ops.BackwardInput(microbatch=m):
                backward = runner.backward_input if split else runner.backward
                gradient = joined(came.pop((ops.ReceiveGradient, m), {}))
                made[ops.SendGradient, m] = backward(m, gradient)
            case ops.BackwardWeight(microbatch=m):
                runner.backward_weight(m)
            case ops.SendActivation() | ops.SendGradient():
                mailbox.send(step, made[type(step), step.microbatch])
    mailbox.finish()
    return loss
