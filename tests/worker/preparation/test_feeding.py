"""State that goes to a coming plan's workers while training goes on."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.routes import Shard
from oobleck.planner.programs.transfer import Transfer
from oobleck.worker.preparation.sink import Sink
from oobleck.worker.preparation.source import ACKNOWLEDGED, FRAME_BYTES, REFUSED, Source, frames_of
from oobleck.worker.state.layer_state import LayerState
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.progress import TrainingProgress
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.link import Incoming, Link
from oobleck.worker.transport.links.traffic import Traffic
from oobleck.worker.transport.links.wire import Label
from support.folders import TEXT

SECRET = b"k" * 32
HOST = torch.device("cpu")
A, B = (WorkerId(NodeName(name), 0) for name in "ab")


def job(
    optimizer: OptimizerSpec, *, tied: bool = True, precision: str = "fp32", hidden: int = 32
) -> JobSpec:
    return JobSpec(
        name="feeding",
        model=ModelSpec(layers=2, hidden=hidden, heads=2, sequence_length=16, tied=tied),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(
            steps=20,
            global_batch=4,
            microbatch=1,
            precision=precision,  # type: ignore[arg-type]
            optimizer=optimizer,
        ),
    )


class _Words(Incoming):
    def __init__(self, take: Callable[[int], None]) -> None:
        self._take = take
        self._content = bytearray()

    def room(self, size: int) -> memoryview:
        self._content = bytearray(size)
        return memoryview(self._content)

    def arrived(self) -> None:
        self._take(int.from_bytes(self._content, "big"))


class End:
    """One of the two ends; as the taker with a sink."""

    epoch = 7

    def __init__(self) -> None:
        #: That have come for the sink.
        self.frames = 0
        self.links = Links("127.0.0.1", silence_s=5.0)
        self.sink: Sink | None = None
        self.source: Source | None = None
        self.links.expect(SECRET, self)

    def feed(self, peer: bytes, label: Label) -> Incoming | None:
        if label == ACKNOWLEDGED:
            return _Words(self._acknowledged)
        if label == REFUSED:
            return _Words(self._refused)
        self.frames += 1
        return self.sink.frame(peer, label) if self.sink is not None else None

    def cut(self, peer: bytes) -> None:
        pass

    def _acknowledged(self, step: int) -> None:
        assert self.source is not None
        self.source.acknowledged = step

    def _refused(self, nothing: int) -> None:
        assert self.source is not None
        self.source.refused = True


@contextmanager
def two_ends() -> Iterator[tuple[End, End]]:
    giver, taker = End(), End()
    try:
        giver.links.connect([taker.links.card], End.epoch)
        until(lambda: giver.links.linked(taker.links.identity))
        until(lambda: taker.links.linked(giver.links.identity))
        yield giver, taker
    finally:
        for end in (giver, taker):
            end.links.close()


def feed(
    giver: End, own: ModelState, taker: bytes, transfers: Sequence[Transfer], newcomer: bool = True
) -> Source:
    return Source(giver.links, giver, own, taker, transfers, newcomer=newcomer)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def held(spec: JobSpec, shards: Sequence[Shard]) -> ModelState:
    state = ModelState(spec, HOST)
    for shard in shards:
        state.initialise(shard.layer, part=shard.part, parts=shard.parts)
    return state


def some_step(state: ModelState, number: int) -> None:
    """Gradients of a step, the same whatever is held."""
    for layer, one in state.layers.items():
        draw = torch.Generator().manual_seed(1000 * number + layer)
        whole = torch.randn(one.layout.size, generator=draw).to(one.gradient.dtype)
        one.reduced.clear()
        for numbers in one.numbers:
            one.gradient[one.columns(numbers)] = whole[numbers.start : numbers.stop]


def equal(one: LayerState, other: LayerState) -> bool:
    return one.version == other.version and torch.equal(one.storage, other.storage)


OPTIMIZERS = [
    pytest.param(OptimizerSpec(lr=1e-2), id="adamw"),
    pytest.param(OptimizerSpec(name="sgd", lr=1e-2, momentum=0.9), id="momentum"),
    pytest.param(OptimizerSpec(name="sgd", lr=1e-2), id="sgd"),
]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("parts", [1, 3])
def test_copies_follow_to_the_last_bit(
    optimizer: OptimizerSpec, precision: str, parts: int
) -> None:
    spec = job(optimizer, precision=precision)
    layers = range(spec.model.layer_count)
    own = held(spec, [Shard(layer) for layer in layers])
    wanted = [Shard(layer, parts - 1, parts) for layer in layers]
    with two_ends() as (giver, taker):
        state = ModelState(spec, HOST)
        taker.sink = Sink(taker.links, taker, state, spec.training, wanted)
        transfers = [
            Transfer(layer=s.layer, source=A, destination=B, start=s.start, stop=s.stop)
            for s in wanted
        ]
        source = giver.source = feed(giver, own, taker.links.identity, transfers)
        step = 0
        while step < 6 or not source.is_ready(step):
            step += 1
            some_step(own, step)
            source.reduced(step, own.layers)
            if step == 4:
                own.skip(step)
            else:
                own.apply(step, scale=0.5)
            source.committed(step, None if step == 4 else 0.5, step_s=0.0)
            until(lambda: source.acknowledged >= 0)
            if step > 6:
                until(lambda step=step: source.acknowledged >= step)  # type: ignore[misc]
        progress = TrainingProgress(committed=step, lineage=3)
        ballot = torch.arange(5, dtype=torch.float64)
        progress.learn(step, Generation(1), ballot)
        source.end(progress, generation=Generation(2))
        until(taker.sink.is_over)
        (word,) = taker.sink.last_words()
        assert (word.step, word.lineage, word.generation) == (step, 3, 2)
        assert (word.ballot, word.voted_generation) == (ballot.numpy().tobytes(), 1)
        found = taker.sink.whole_layers(step, anew=True)
        assert sorted(one.shard for one in found) == wanted
        for one in found:
            state.adopt(one)
        taker.sink.close()
    reference = ModelState(spec, HOST)
    for shard in wanted:
        whole = own.snapshot(shard.layer)
        reference.load(shard.layer, whole, version=step, part=shard.part, parts=parts)
    assert all(equal(state.layers[i], reference.layers[i]) for i in layers)


def test_what_is_held_makes_up_the_rest() -> None:
    spec = job(OptimizerSpec(lr=1e-2))
    own, state = held(spec, [Shard(1)]), held(spec, [Shard(1, 0, 2)])
    with two_ends() as (giver, taker):
        taker.sink = Sink(taker.links, taker, state, spec.training, [Shard(1)])
        half = Transfer(layer=1, source=A, destination=B, start=Fraction(1, 2), stop=Fraction(1))
        source = giver.source = feed(giver, own, taker.links.identity, [half])
        for step in range(1, 5):
            for one in (own, state):
                some_step(one, step)
            source.reduced(step, own.layers)
            for one in (own, state):
                one.apply(step, scale=1.0)
            source.committed(step, 1.0, step_s=0.0)
            until(lambda step=step: source.acknowledged >= step - 1)  # type: ignore[misc]
        until(lambda: source.acknowledged == 4)
        source.end(TrainingProgress(committed=4), generation=Generation(1))
        until(taker.sink.is_over)
        (found,) = taker.sink.whole_layers(4, anew=False)
        state.adopt(found)
        taker.sink.close()
    assert equal(state.layers[1], own.layers[1])


@pytest.mark.parametrize("harm", ["garbage", "no numbers", "too many", "another layer"])
def test_what_makes_no_sense_is_left(harm: str) -> None:
    spec = job(OptimizerSpec(lr=1e-2))
    own = held(spec, [Shard(1)])
    with two_ends() as (giver, taker):
        state = ModelState(spec, HOST)
        taker.sink = Sink(taker.links, taker, state, spec.training, [Shard(1)])
        layer = 2 if harm == "another layer" else 1
        if harm == "another layer":
            own = held(spec, [Shard(2)])
        transfer = Transfer(layer=layer, source=A, destination=B)
        source = giver.source = feed(giver, own, taker.links.identity, [transfer])
        with giver.links.lock:
            if harm == "garbage":
                giver.links.send_ahead(
                    giver, taker.links.identity, Label(10, 0, 0), memoryview(b'{"item": 3}')
                )
            elif harm != "another layer":
                size = 64 if harm == "too many" else 8
                giver.links.send_ahead(
                    giver, taker.links.identity, Label(10, 0, 1), memoryview(bytes(size))
                )
        for step in (1, 2):
            own.apply(step, scale=1.0)
            source.acknowledged = 0
            source.committed(step, 1.0, step_s=0.0)
        until(lambda: source._unsent_bytes() == 0)
        source.end(TrainingProgress(committed=2), generation=Generation(1))
        until(taker.sink.is_over)
        assert taker.sink.whole_layers(2, anew=True) == []
        until(lambda: source.refused)
        own.apply(3, scale=1.0)
        source.committed(3, 1.0, step_s=0.0)
        assert source.is_ready(3), "it waits for a taker that takes nothing"
        assert source.pieces == 0
        taker.sink.close()


def test_who_has_answered_an_offer_is_fed_at_the_next_step_boundary() -> None:
    spec = job(OptimizerSpec(lr=1e-2))
    own = held(spec, [Shard(1)])
    with two_ends() as (giver, taker):
        state = ModelState(spec, HOST)
        taker.sink = Sink(taker.links, taker, state, spec.training, [Shard(1)])
        transfer = Transfer(layer=1, source=A, destination=B)
        source = giver.source = feed(giver, own, taker.links.identity, [transfer])
        source.offer()
        until(lambda: source.acknowledged == 0)
        own.apply(1, scale=1.0)
        source.committed(1, 1.0, step_s=0.0)
        until(lambda: source.is_ready(1))
        assert source.pieces == 1
        taker.sink.close()


def test_a_taker_that_cannot_keep_up_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oobleck.worker.preparation.source._OUTRUN_S", 0.0)
    spec = job(OptimizerSpec(lr=1e-2))
    layers = range(spec.model.layer_count)
    own = held(spec, [Shard(layer) for layer in layers])
    with two_ends() as (giver, taker):
        transfers = [Transfer(layer=layer, source=A, destination=B) for layer in layers]
        # It takes what comes, and never says how far it is.
        source = feed(giver, own, taker.links.identity, transfers)
        source.acknowledged = 0
        for step in range(1, 60):
            own.apply(step, scale=1.0)
            source.reduced(step, own.layers)
            source.committed(step, 1.0, step_s=0.0)
            if source.is_ready(step):
                break
        assert source.is_ready(step)
        assert source.pieces == 0


def test_what_a_taker_has_not_applied_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oobleck.worker.preparation.source._MOST_BEHIND_BYTES", 1)
    spec = job(OptimizerSpec(lr=1e-2))
    own = held(spec, [Shard(1), Shard(2)])
    with two_ends() as (giver, taker):
        transfers = [Transfer(layer=layer, source=A, destination=B) for layer in (1, 2)]
        source = feed(giver, own, taker.links.identity, transfers)
        source.acknowledged = 0
        steps = 0
        while not source.is_ready(steps):
            steps += 1
            own.apply(steps, scale=1.0)
            source.reduced(steps, own.layers)
            source.committed(steps, 1.0, step_s=0.0)
            source.acknowledged = min(steps, 1)
            assert steps < 20, "it goes on whatever the taker does"
        assert source.pieces == 0


def test_the_last_word_waits_for_nothing_that_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oobleck.worker.preparation.source._OUTRUN_S", 0.0)
    spec = job(OptimizerSpec(lr=1e-2), hidden=128)
    own = held(spec, [Shard(1), Shard(2)])
    step_frames = sum(one.gradient.nbytes for one in own.layers.values()) // FRAME_BYTES
    with two_ends() as (giver, taker):
        taker.sink = Sink(taker.links, taker, ModelState(spec, HOST), spec.training, [Shard(1)])
        transfers = [Transfer(layer=layer, source=A, destination=B) for layer in (1, 2)]
        source = giver.source = feed(giver, own, taker.links.identity, transfers)
        source.acknowledged, step = 0, 0
        with taker.links.lock:  # it reads nothing
            while not (step > 40 and source.is_ready(step)):
                step += 1
                own.apply(step, scale=1.0)
                source.reduced(step, own.layers)
                source.committed(step, 1.0, step_s=0.0)
                assert step < 100
        source.end(TrainingProgress(committed=step), generation=Generation(1))
        until(taker.sink.is_over)
        assert source.pieces == 0
        assert taker.frames < 10 * step_frames, "what nobody wants was sent"
        assert taker.sink.whole_layers(step, anew=True) == []
        taker.sink.close()


def test_at_the_end_a_layer_is_not_waited_for_longer_than_to_fetch_it() -> None:
    spec = job(OptimizerSpec(name="sgd", lr=1e-2), hidden=128)
    own = held(spec, [Shard(1)])
    step_frames = own.layers[1].gradient.nbytes // FRAME_BYTES
    with two_ends() as (giver, taker):
        taker.sink = Sink(taker.links, taker, ModelState(spec, HOST), spec.training, [Shard(1)])
        transfer = Transfer(layer=1, source=A, destination=B)
        source = giver.source = feed(giver, own, taker.links.identity, [transfer])
        source.acknowledged = 0
        with taker.links.lock:
            for step in range(1, 61):
                own.apply(step, scale=1.0)
                source.reduced(step, own.layers)
                source.committed(step, 1.0, step_s=0.0)
            source.end(TrainingProgress(committed=60), generation=Generation(1))
        until(taker.sink.is_over)
        assert taker.frames < 30 * step_frames
        assert taker.sink.whole_layers(60, anew=True) == []
        taker.sink.close()


class Carrier:
    """A link that takes so many frames."""

    def __init__(self) -> None:
        self.room = 0

    def takes(self) -> bool:
        self.room -= 1
        return self.room >= 0


def test_what_a_link_can_carry_of_a_feed_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link takes one frame less in each step than the gradients of two layers have."""
    monkeypatch.setattr("oobleck.worker.preparation.source._OUTRUN_S", 0.0)
    carrier = Carrier()
    monkeypatch.setattr(Link, "has_little_in_flight", lambda link: carrier.takes())
    monkeypatch.setattr(Traffic, "_has_little_in_flight", lambda traffic: True)
    spec = job(OptimizerSpec(lr=1e-2), hidden=128)
    own = held(spec, [Shard(1), Shard(2)])
    with two_ends() as (giver, taker):
        state = ModelState(spec, HOST)
        taker.sink = Sink(taker.links, taker, state, spec.training, [Shard(1), Shard(2)])
        transfers = [Transfer(layer=layer, source=A, destination=B) for layer in (1, 2)]
        source = giver.source = feed(giver, own, taker.links.identity, transfers)
        source.acknowledged = 0
        step, most_fed = 0, 0
        while step < 4 or not source.is_ready(step):
            step += 1
            some_step(own, step)
            source.reduced(step, own.layers)
            own.apply(step, scale=0.5)
            source.committed(step, 0.5, step_s=0.0)
            most_fed = max(most_fed, source.pieces)
            with giver.links.lock:
                carrier.room = 2 * (len(frames_of(own.layers[1].gradient)) + 1)
            until(lambda: carrier.room < 0 or source._unsent_bytes() == 0)
            if source._unsent_bytes() == 0:
                until(lambda step=step: source.acknowledged == step)  # type: ignore[misc]
        assert (most_fed, source.pieces) == (2, 1)
        carrier.room = 1000
        source.end(TrainingProgress(committed=step), generation=Generation(1))
        until(taker.sink.is_over)
        (found,) = taker.sink.whole_layers(step, anew=True)
        taker.sink.close()
    assert equal(found, own.layers[1])


def test_a_taker_without_a_link_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oobleck.worker.preparation.source._PATIENCE_S", 0.05)
    spec = replace(job(OptimizerSpec(lr=1e-2)))
    own = held(spec, [Shard(1)])
    end = End()
    try:
        transfer = Transfer(layer=1, source=A, destination=B)
        source = feed(end, own, b"n" * 16, [transfer])
        own.apply(1, scale=1.0)
        source.committed(1, 1.0, step_s=0.0)
        assert not source.is_ready(1)
        time.sleep(0.1)
        for step in range(2, 5):
            own.apply(step, scale=1.0)
            source.committed(step, 1.0, step_s=0.0)
        assert source.is_ready(4)
    finally:
        end.links.close()
