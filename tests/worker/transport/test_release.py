"""Whoever waits for a peer that is gone is released by the push of the next generation.

Real workers wait in every kind of wait for one that is killed, stopped or cut off from the network
without a word, and are released without a time-out having struck, in the same processes, which keep
nothing of it. The training stays the same.
"""

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule, PeerLost
from oobleck.core.plan import Plan
from support.director import Cut, Director, LiveWorker, WarmWorkers, make_plan
from support.folders import TEXT
from support.leftovers import opened
from support.network import Host
from support.reference import train_reference

SURVIVORS = ("a", "b", "c")
#: Where the victim is caught, and so what the others wait for or in.
WAITS = {
    "arrival of all": "before:rendezvous",
    "victim's word": "before:rendezvous",
    "links": "before:connect",
    "agree": "before:agree",
    "transfer": "sending",
    "receive and sums": "before:Backward",
    "vote": "reduced",
    "handover's links": "before:connect",
    "handover": "before:transfer",
}
#: Where the victim must have come to hold something in a generation before.
SETTLED = {"transfer", "handover's links", "handover"}
#: The words of a wait that nothing but its limit of time has ended.
TIMED_OUT = ("no answer", "Timed out", "wait timeout", "timed out")


def make_job(microbatch: int) -> JobSpec:
    return JobSpec(
        name="release",
        model=ModelSpec(layers=3, hidden=64, heads=2, sequence_length=16),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(
            steps=100_000,
            global_batch=4 * microbatch,
            microbatch=microbatch,
            precision="fp64",
            optimizer=OptimizerSpec(lr=1e-3),
        ),
    )


@pytest.fixture(scope="module")
def far_host() -> Iterator[tuple[Host, WarmWorkers]]:
    with Host() as host, WarmWorkers(host.within) as warm:
        yield host, warm


def strikes(victims: dict[str, str], action: str) -> Iterator[FaultRule]:
    """At each victim, where the others are to wait for it, in the generation that `Drill` means."""
    generation = 1
    for victim, wait in victims.items():
        generation += 2 if wait in SETTLED else 1
        yield FaultRule(
            worker=WorkerId(NodeName(victim), 0),
            point=WAITS[wait],
            generation=Generation(generation),
            action=action,  # type: ignore[arg-type]
        )
        generation += 1  # without it


class Drill:
    """A cluster that loses one worker after the other."""

    def __init__(self, cluster: Director, lose: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._lose = lose
        self._generation = 0
        cluster.assign(self._plan([("c", 5)]))
        self._step_of(self._generation)

    def _plan(self, second: list[Cut]) -> Plan:
        self._generation += 1
        return make_plan(self._generation, [[("a", 2), ("b", 3)], second], [2, 2])

    def _step_of(self, generation: int) -> None:
        self._cluster.wait(
            lambda: any(r[0].generation == generation for r in self._cluster.records.values()),
            f"a step of generation {generation}",
        )

    def lose_one(self, wait: str, victim: str) -> None:
        cluster = self._cluster
        host_of = victim if wait == "victim's word" else None
        cluster.assign(self._plan([("c", 2), (victim, 3)]), host_of=host_of)
        if wait in SETTLED:
            self._step_of(self._generation)
            if wait == "transfer":
                cluster.assign(self._plan([("c", 4), (victim, 1)]))
            else:
                left = self._plan([("c", 5)])
                cluster.assign(left, boundary=True, leaving=[victim], handover=True)
        cluster.wait(lambda: cluster.has_faulted(f"{victim}/0"), f"{victim} is caught")
        self._lose(victim)
        held_up = Generation(self._generation)
        cluster.assign(self._plan([("c", 5)]))
        self._step_of(self._generation)
        for node in SURVIVORS:
            for message in cluster.said(WorkerId(NodeName(node), 0), PeerLost, held_up):
                assert isinstance(message, PeerLost)
                assert not any(words in message.detail for words in TIMED_OUT), message


#: Descriptors and threads of each survivor.
Footprints = list[tuple[int, int]]


def footprints(survivors: list[LiveWorker]) -> Footprints:
    return [opened(live.pid) for live in survivors]


def as_large(before: Footprints, after: Footprints) -> bool:
    return all(
        descriptors <= then + 4 and threads <= threads_then + 2
        for (then, threads_then), (descriptors, threads) in zip(before, after, strict=True)
    )


def await_as_large(cluster: Director, before: Footprints, survivors: list[LiveWorker]) -> None:
    now = footprints(survivors)
    cluster.wait(
        lambda: as_large(before, footprints(survivors)), f"what {now} have more than {before}"
    )


@pytest.mark.parametrize(
    ("fault", "microbatch", "waits"),
    [
        # The others' waits for one that is killed are in test_recovery.py.
        pytest.param("killed", 1, ["victim's word"], id="killed"),
        pytest.param("stopped", 1, 2 * list(WAITS), id="stopped, again and again"),
        pytest.param("cut off", 1, list(WAITS), id="cut off"),
        # Messages that are larger than what the kernel keeps on its way.
        pytest.param("cut off", 96, ["receive and sums", "vote"], id="cut off, large messages"),
    ],
)
def test_whoever_waits_for_a_lost_peer_is_released(
    request: pytest.FixtureRequest,
    warm: WarmWorkers,
    fault: str,
    microbatch: int,
    waits: list[str],
) -> None:
    job = make_job(microbatch)
    far: tuple[Host, WarmWorkers] | None = None
    if fault == "cut off":
        far = request.getfixturevalue("far_host")
    victims = {f"{number}{wait[0]}": wait for number, wait in enumerate(waits)}

    def lose(victim: str) -> None:
        if far is not None:
            far[0].cut()

    action = {"killed": "kill_worker", "stopped": "stop", "cut off": "hold"}[fault]
    with Director(warm, job, address=far[0].near if far else "127.0.0.1") as cluster:
        cluster.faults = tuple(strikes(victims, action))
        cluster.start(*SURVIVORS)
        cluster.start(*victims, at=(far[1], far[0].far) if far else None)
        drill = Drill(cluster, lose)
        survivors = [cluster.workers[WorkerId(NodeName(node), 0)] for node in SURVIVORS]
        before: Footprints = []
        for number, (victim, wait) in enumerate(victims.items(), 1):
            drill.lose_one(wait, victim)
            if fault != "killed":
                cluster.kill(victim)
            if far is not None:
                far[0].join()
            if len(waits) > len(WAITS) and number % len(WAITS) == 0:
                if not before:
                    before = footprints(survivors)
                await_as_large(cluster, before, survivors)
        assert not any(live.gone for live in survivors)
        cluster.stop()
        losses = cluster.losses()
    training = dataclasses.replace(job.training, steps=len(losses))
    reference = train_reference(dataclasses.replace(job, training=training))
    expected = [step.loss for step in reference.steps]
    assert list(losses.values()) == pytest.approx(expected, rel=1e-9)
