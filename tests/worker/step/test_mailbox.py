"""What a message says of those that went the other way, and how much is under way at most."""

import random
from itertools import pairwise

import pytest

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Message, Program, SendActivation, SendGradient
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.compiler.own import OwnProgram
from oobleck.worker.step.mailbox import Receive, Send, acknowledged
from support.plans import plan_of_cuts


def messages(program: Program) -> list[Message]:
    return [step for step in program if isinstance(step, Message)]


def test_sends_are_let_go_once_by_what_the_peer_sends_after_it_has_them() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        layers = draw.randint(2, 7)
        ends = sorted(draw.sample(range(1, layers), draw.randint(1, min(4, layers - 1))))
        cuts = [b - a for a, b in pairwise([0, *ends, layers])]
        schedule = draw.choice(["1f1b", "gpipe", "zb-h1"])
        microbatches = draw.randint(1, 8)
        plan = plan_of_cuts((cuts, microbatches), schedule=schedule)
        programs = compile_programs(plan, tied=False)
        for worker, program in programs.items():
            check_worker(worker, programs)
            if schedule != "gpipe":
                assert most_under_way(worker, programs) <= 2 * len(cuts), (seed, program)


def freed(worker: WorkerId, programs: dict[WorkerId, Program]) -> dict[Receive, list[Send]]:
    own = messages(programs[worker])
    ends = {(step.peer, step.content): step for step in own}
    return {
        ends[peer, content]: [ends[peer, sent] for sent in arrived]
        for peer in {step.peer for step in own}
        for content, arrived in acknowledged(OwnProgram.of(worker, programs).peers[peer])
    }


def check_worker(worker: WorkerId, programs: dict[WorkerId, Program]) -> None:
    by = freed(worker, programs)
    own = messages(programs[worker])
    receives = [step for step in own if isinstance(step, Receive)]
    assert set(by) == set(receives), "every message that comes is one that is received"
    everything = [send for sends in by.values() for send in sends]
    assert len(set(everything)) == len(everything)
    for receive, sends in by.items():
        for send in sends:
            assert send.peer == receive.peer
            assert own.index(send) < own.index(receive), "it was sent before"
            theirs = messages(programs[receive.peer])
            came = next(i for i, s in enumerate(theirs) if is_other_end(s, send, worker))
            went = next(i for i, s in enumerate(theirs) if is_other_end(s, receive, worker))
            assert came < went, "the peer had it before"


def is_other_end(theirs: Message, mine: Message, worker: WorkerId) -> bool:
    backward = "Gradient"
    return (
        theirs.peer == worker
        and theirs.microbatch == mine.microbatch
        and (backward in type(theirs).__name__) == (backward in type(mine).__name__)
    )


def most_under_way(worker: WorkerId, programs: dict[WorkerId, Program]) -> int:
    by, under_way, most = freed(worker, programs), set(), 0
    for step in messages(programs[worker]):
        if isinstance(step, SendActivation | SendGradient):
            under_way.add(step)
        else:
            under_way.difference_update(by[step])
        most = max(most, len(under_way))
    return most


@pytest.mark.parametrize(("stages", "kept"), [(2, 1), (4, 3)])
def test_under_1f1b_the_last_activation_sent_is_known_to_have_come_with_a_gradient(
    stages: int, kept: int
) -> None:
    """The first stage has as many activations under way as it computes ahead, at most."""
    programs = compile_programs(plan_of_cuts(([1] * stages, 12)), tied=False)
    first = min(programs)
    assert most_under_way(first, programs) <= kept + 1
