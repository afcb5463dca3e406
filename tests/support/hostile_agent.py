"""Messages of an agent that has a certificate and lies: each kind of message, each field at its
edges, about its own processes and about others'."""

import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import (
    CheckpointSaved,
    Evaluated,
    EvaluationRecord,
    Failed,
    LinkMeasured,
    Measured,
    PeerLost,
    PhaseReached,
    Restored,
    SaveFailed,
    StepRecord,
)
from oobleck.master.inbox import Incoming, Output, Records
from oobleck.proto.types import Hung, NodeStatus, WorkerExited, WorkerReport, WorkerStatus

_NUMBERS = st.sampled_from((0, 1, 2, 3, 5, 6, 7, 2**31, 2**40, 2**62, 2**63 - 1))
_SECONDS = st.sampled_from((0.0, 1e-9, 1.0, 1e9, 1e300))
_LOSSES = st.sampled_from((None, -1e300, 0.0, 0.5, 1e300))
_TEXTS = st.sampled_from(("", "/nowhere", "x" * 4096))
_GENERATIONS = _NUMBERS.map(Generation)
_WORKERS = st.builds(
    WorkerId, st.sampled_from(("n1", "n2", "n4", "n9")).map(NodeName), st.sampled_from((0, 1))
)
_STEP_RECORDS = st.builds(
    StepRecord,
    step=_NUMBERS,
    loss=_LOSSES,
    grad_norm=_LOSSES,
    tokens=_NUMBERS,
    samples_digest=st.text(string.hexdigits, min_size=64, max_size=64),
    generation=_GENERATIONS,
    step_seconds=_SECONDS,
    time=_SECONDS,
    skipped=st.booleans(),
)
_EVALUATIONS = st.builds(
    EvaluationRecord,
    step=_NUMBERS.filter(bool),
    loss=_LOSSES,
    samples=_NUMBERS,
    generation=_GENERATIONS,
    seconds=_SECONDS,
    time=_SECONDS,
    metrics=st.dictionaries(st.sampled_from(("accuracy", "")), _LOSSES, max_size=1),
)
_OF_ITS_OWN_END = st.one_of(
    st.builds(WorkerExited, pid=_NUMBERS, exit_code=st.just(1), signal=st.none(), log_tail=_TEXTS),
    st.builds(Hung, reason=_TEXTS, seconds=_SECONDS),
    st.builds(Failed, kind=st.sampled_from(("user", "node", "internal")), message=_TEXTS),
)
_HAPPENINGS = st.one_of(
    st.builds(
        PhaseReached,
        generation=_GENERATIONS,
        phase=st.sampled_from(("aborted", "received", "joined", "transferred")),
        layers=st.lists(_NUMBERS, max_size=3).map(tuple),
        committed_step=_NUMBERS,
        rolled_forward=st.booleans(),
        redo=st.booleans(),
        received_bytes=_NUMBERS,
        seconds_ago=_SECONDS,
    ),
    st.builds(
        PeerLost,
        generation=_GENERATIONS,
        step=_NUMBERS,
        detail=_TEXTS,
        unreached=st.lists(_WORKERS, max_size=3).map(tuple),
        host_unreached=st.booleans(),
        left=st.booleans(),
    ),
    st.builds(
        CheckpointSaved,
        step=_NUMBERS,
        path=_TEXTS,
        bytes=_NUMBERS,
        seconds=_SECONDS,
        request=_NUMBERS,
    ),
    st.builds(
        SaveFailed,
        what=st.sampled_from(("checkpoint", "output")),
        step=_NUMBERS,
        reason=_TEXTS,
        request=_NUMBERS,
    ),
    st.builds(Restored, generation=_GENERATIONS, step=_NUMBERS, path=_TEXTS),
    st.builds(Evaluated, record=_EVALUATIONS),
    st.builds(
        Measured,
        attempt=_NUMBERS,
        measurement=st.none(),
        alone_s=st.one_of(st.none(), st.just((1e-9,)), st.just((1e9,))),
    ),
    st.builds(
        LinkMeasured,
        attempt=_NUMBERS,
        scope=st.sampled_from(("intra_node", "inter_node")),
        link=st.none(),
    ),
)


def words(
    job_id: JobId, processes: tuple[Incarnation, ...], ends: bool = True
) -> st.SearchStrategy[Incoming]:
    """Draw messages about the job. `processes`: incarnations that the agent knows, its own and,
    though no agent hears of them, others'. `ends`: also that its own processes end or fail."""
    known = st.sampled_from((*processes, Incarnation("0" * 16)))
    slots = st.sampled_from((0, 1))
    workers = st.builds(
        WorkerStatus,
        slot=st.just(0),
        incarnation=known,
        pid=_NUMBERS,
        card=st.sampled_from(("", "n1:4000", "n9:4000")),
        generation=_GENERATIONS,
        committed_step=_NUMBERS,
        stepped=_GENERATIONS,
        also_entered=st.lists(_GENERATIONS, max_size=3).map(tuple),
        finished=st.booleans(),
        compute_steps=_NUMBERS,
        compute_s=_SECONDS,
        beats=_NUMBERS,
        doing=_TEXTS,
        waiting=st.booleans(),
    )
    happenings = st.one_of(_HAPPENINGS, _OF_ITS_OWN_END) if ends else _HAPPENINGS
    return st.one_of(
        st.builds(
            WorkerReport, job_id=st.just(job_id), slot=slots, incarnation=known, what=happenings
        ),
        st.builds(
            Records, job_id=st.just(job_id), records=st.lists(_STEP_RECORDS, max_size=4).map(tuple)
        ),
        st.builds(
            Output,
            job_id=st.just(job_id),
            slot=slots,
            lines=st.lists(_TEXTS, max_size=2).map(tuple),
        ),
        st.builds(
            NodeStatus,
            job_id=st.sampled_from((None, job_id)),
            generation=_GENERATIONS,
            workers=st.lists(workers, max_size=1).map(tuple),
            trouble=_TEXTS,
        ),
    )


#: Values that a field is set to, one after the other, by the type of what stands there.
_EDGES: Mapping[type, Sequence[object]] = {
    bool: (True, False),
    int: (0, 1, 2, 3, 5, 6, 7, 2**31, 2**40, 2**62, 2**63 - 1),
    float: (0.0, 1e-9, 1.0, 1e9, 1e300),
    str: ("", "/nowhere", "x" * 4096),
    type(None): (),
}


def ends(generation: Generation) -> list[Any]:
    """Return the ways in which its own processes may end, or say that they cannot go on."""
    return [
        WorkerExited(pid=2, exit_code=None, signal=9),
        Hung(reason="nothing comes of it", seconds=60.0),
        *(Failed(kind=kind, message="no") for kind in ("user", "node", "internal")),
        PeerLost(generation=generation, step=1, detail="closed"),
    ]


def at_edges(
    job_id: JobId, process: Incarnation, generation: Generation, step: int
) -> Iterator[Incoming]:
    """Yield each message that a process could truthfully send in that step, with another loss, and
    then with each of its fields in turn at each edge."""
    true = StepRecord(
        step=step,
        loss=9.0,
        grad_norm=9.0,
        tokens=1,
        samples_digest="0" * 64,
        generation=generation,
        step_seconds=1e-9,
        time=0.0,
    )
    for record in _varied(true):
        yield Records(job_id=job_id, records=(record,))
    status = WorkerStatus(
        slot=0,
        incarnation=process,
        pid=2,
        card="n9:4000",
        generation=generation,
        committed_step=step,
        stepped=generation,
    )
    for worker in _varied(status, but=("slot", "incarnation", "card")):
        yield NodeStatus(job_id=job_id, generation=generation, workers=(worker,))
    evaluation = EvaluationRecord(
        step=step, loss=9.0, samples=1, generation=generation, seconds=1.0, time=0.0
    )
    happenings: list[Any] = [
        *(
            PhaseReached(generation=generation, phase=phase, committed_step=step)
            for phase in ("aborted", "received", "joined", "transferred")
        ),
        CheckpointSaved(step=step, path="/nowhere", bytes=1, seconds=1.0),
        SaveFailed(what="checkpoint", step=step, reason="no"),
        SaveFailed(what="output", step=step, reason="no"),
        Restored(generation=generation, step=step, path="/nowhere"),
        Restored(generation=generation, step=0, path=""),
        Measured(attempt=1, measurement=None),
        LinkMeasured(attempt=1, scope="inter_node", link=None),
    ]
    varied = [one for happening in happenings for one in _varied(happening, but=("phase", "what"))]
    varied += [Evaluated(record=one) for one in _varied(evaluation)]
    for what in varied:
        yield WorkerReport(job_id=job_id, slot=0, incarnation=process, what=what)
    yield Output(job_id=job_id, slot=0, lines=("x" * 4096,) * 100)


def _varied(value: Any, but: Sequence[str] = ()) -> Iterator[Any]:
    yield value
    for name in value.__struct_fields__:
        for edge in _EDGES.get(type(getattr(value, name)), ()):
            if name not in but and not (name == "step" and not edge):
                yield msgspec.structs.replace(value, **{name: edge})
