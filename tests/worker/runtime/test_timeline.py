"""A recorded step shows what the program says, on one track per worker, and the recovery before."""

import json
from collections.abc import Callable, Sequence

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.instructions import Action, Forward, Program, SyncGradient
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Record, Recorded, Recording, Span
from oobleck.core.plan import Plan
from oobleck.host.timeline import Clock, Track, chrome_trace
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.device import DeviceClock
from oobleck.worker.runtime.timeline import Timeline
from support.director import Director, WarmWorkers, make_plan, worker_named

MakeJob = Callable[..., JobSpec]
PLAN = make_plan(1, [[("a", 2), ("b", 3)], [("c", 5)]], [2, 1])
WITHOUT_B = make_plan(2, [[("a", 2), ("c", 3)]], [3])


def test_the_pulse_tells_the_whole_name_of_what_is_done_though_nothing_is_recorded() -> None:
    timeline = Timeline()
    told = []
    for name, detail in (("layers 0 to", 4), ("layer", 3), ("forward", 0), ("ballot", None)):
        with timeline.span(name, detail):
            told.append(pulse.read().doing)
    with timeline.phase("rendezvous"):
        told.append(pulse.read().doing)
    assert told == ["layers 0 to 4", "layer 3", "forward 0", "ballot", "rendezvous"]


def record(cluster: Director, plan: Plan, wish: Record) -> dict[WorkerId, Recording]:
    """Ask all workers of `plan` and return what they have recorded."""
    for worker in plan.workers:
        cluster.workers[worker].channel.send(wish)

    def answers(worker: WorkerId) -> list[Recording]:
        said = cluster.said(worker, Recorded)
        return [m.recording for m in said if m.recording.number == wish.number]  # type: ignore[union-attr]

    cluster.wait(lambda: all(answers(worker) for worker in plan.workers), "the recordings")
    return {worker: answers(worker)[0] for worker in plan.workers}


def record_ahead(cluster: Director, plan: Plan, number: int) -> dict[WorkerId, Recording]:
    """Of one step, asked for early enough before it for all workers to hear of it in time."""
    ahead = 30
    while True:
        step = max(cluster.records) + ahead
        found = record(cluster, plan, Record(number=number, first_step=step, last_step=step))
        steps = {recording.steps for recording in found.values()}
        if steps == {(step,)}:
            return found
        ahead, number = 2 * ahead, number + 1


def outermost(spans: Sequence[Span]) -> list[Span]:
    """Those inside no other, in order; fails where two cross."""
    open_spans: list[Span] = []
    found = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.duration_ns)):
        while open_spans and open_spans[-1].end_ns <= span.start_ns:
            open_spans.pop()
        if open_spans:
            assert span.end_ns <= open_spans[-1].end_ns, (span, open_spans[-1])
        else:
            found.append(span)
        open_spans.append(span)
    return found


def inside(spans: Sequence[Span], outer: Span) -> list[Span]:
    """The spans right inside of `outer`, in order."""
    return outermost(
        [
            span
            for span in spans
            if span is not outer and outer.start_ns <= span.start_ns and span.end_ns <= outer.end_ns
        ]
    )


def names(program: Program) -> list[str]:
    """What the program's instructions are called in a recording."""
    words = {
        "LoadTokens": "load",
        "ReceiveActivation": "receive activation",
        "Forward": "forward",
        "SendActivation": "send activation",
        "ReceiveGradient": "receive gradient",
        "Backward": "backward",
        "SendGradient": "send gradient",
        "SyncGradient": "sync gradient",
        "Vote": "vote",
        "OptimizerStep": "optimizer",
    }
    return [
        words[type(step).__name__] + (f" {step.microbatch}" if isinstance(step, Action) else "")
        for step in program
    ]


def check_step(recording: Recording, program: Program, layers: range) -> None:
    """The step's spans are those of the program, in its order."""
    spans = [span for span in recording.spans if span.category == "step"]
    (step,) = outermost(spans)
    assert step.name == f"step {recording.steps[0]}"
    instructions = inside(spans, step)
    assert [span.name for span in instructions] == names(program)
    for span, instruction in zip(instructions, program, strict=True):
        if isinstance(instruction, Forward):
            assert [s.name for s in inside(spans, span)] == [f"layer {n}" for n in layers]
    outermost([span for span in recording.spans if span.category != "sum"])
    sums = [span for span in recording.spans if span.category == "sum"]
    shared = [s for s in program if isinstance(s, SyncGradient) and len(s.owners) > 1]
    assert [span.name for span in sums] == [f"sum {sync.bucket}" for sync in shared]
    assert all(step.start_ns <= s.start_ns and s.end_ns <= step.end_ns for s in sums)


def job(make_job: MakeJob) -> JobSpec:
    return make_job(steps=100_000)


def test_recording_matches_the_program_and_the_recovery_is_in_it(
    warm: WarmWorkers, make_job: MakeJob
) -> None:
    spec = job(make_job)
    with Director(warm, spec) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(PLAN)
        cluster.wait(lambda: 2 in cluster.records, "two steps")
        found = record_ahead(cluster, PLAN, 1)
        programs = compile_programs(PLAN, tied=spec.model.tied)
        for worker, recording in found.items():
            check_step(recording, programs[worker], PLAN.held[worker])
        # A wish that comes too late is answered, with nothing.
        late = record(cluster, PLAN, Record(number=100, first_step=1, last_step=1))
        assert [(r.steps, r.spans) for r in late.values()] == [((), ())] * 3
        cluster.kill("b")
        cluster.wait(lambda: cluster.workers[worker_named("b")].gone, "the kill")
        cluster.assign(WITHOUT_B)
        cluster.wait(
            lambda: any(records[0].generation == 2 for records in cluster.records.values()),
            "a step after the loss",
        )
        again = record_ahead(cluster, WITHOUT_B, 200)
        cluster.stop()
    for worker, recording in again.items():
        assert recording.generation == 2
        check_step(
            recording,
            compile_programs(WITHOUT_B, tied=spec.model.tied)[worker],
            WITHOUT_B.held[worker],
        )
        phases = [span.name for span in recording.spans if span.category == "recovery"]
        assert phases[0] == "leave"
        always = ("rendezvous", "agree", "transfer", "first step")
        assert tuple(phase for phase in phases if phase in always) == always


def test_steps_that_are_not_wanted_leave_nothing() -> None:
    timeline = Timeline()
    wish = Record(number=7, first_step=2, last_step=3)
    answers = []
    for step in range(1, 5):
        timeline.begin_step(step, wish)
        with timeline.span("forward", step):
            pass
        answers.append(timeline.end_step(step, wish))
    assert [answer is not None for answer in answers] == [False, False, True, True]
    assert answers[2] is not None
    recording = answers[2].recording
    assert (recording.number, recording.steps) == (7, (2, 3))
    assert [span.name for span in recording.spans] == ["forward 2", "forward 3"]


class Lagging:
    """A device that begins with what is queued 50 ns after the host has, and does each mark 7 ns
    after the one before."""

    def __init__(self) -> None:
        self.host_ns = 1_000
        self._done_ns = 0
        self.waits = 0

    def mark(self) -> int:
        self._done_ns = max(self._done_ns + 7, self.host_ns + 50)
        return self._done_ns

    def between(self, one: int, other: int) -> float:
        self.waits += 1
        self.host_ns = max(self.host_ns, other)
        return (other - one) / 1e9

    def clock(self) -> DeviceClock[int]:
        return DeviceClock(self.mark, self.between, lambda: self.host_ns)


def test_what_a_device_computes_lies_where_it_does() -> None:
    device = Lagging()
    timeline = Timeline(device.clock())
    wish = Record(number=1, first_step=2, last_step=2)
    timeline.begin_step(1, wish)
    with timeline.computing("forward", 0):
        pass
    assert timeline.end_step(1, wish) is None
    assert not device.waits, "nothing is recorded"
    timeline.begin_step(2, wish)
    device.host_ns += 1_000
    with timeline.span("step", 2), timeline.computing("forward", 0):
        with timeline.computing("layer", 3):
            device.host_ns += 1
        with timeline.span("gather", 4):
            pass
    before = device.waits
    answer = timeline.end_step(2, wish)
    assert before == 1, "only as it began"
    assert answer is not None
    names = [span.name for span in answer.recording.spans]
    assert names == ["layer 3", "gather 4", "forward 0", "step 2"]
    # It has waited for the first mark, at 1,050, and the host has then spent 1,000.
    layer, forward = answer.recording.device
    assert (layer.name, layer.start_ns, layer.duration_ns) == ("layer 3", 2_107, 7)
    assert (forward.name, forward.start_ns, forward.duration_ns) == ("forward 0", 2_100, 21)


def test_an_interrupted_step_is_not_part_of_a_recording() -> None:
    timeline = Timeline()
    wish = Record(number=1, first_step=1, last_step=1)
    timeline.begin_step(1, wish)
    with timeline.span("forward"):
        pass
    timeline.leave()
    timeline.enter(Generation(2))
    timeline.begin_step(1, wish)
    with timeline.span("backward"):
        pass
    answer = timeline.end_step(1, wish)
    assert answer is not None
    assert [span.name for span in answer.recording.spans] == ["backward"]


def test_chrome_trace_has_a_thread_per_worker_on_one_clock() -> None:
    def track(node: str, slot: int, start_ns: int, offset_ns: int) -> Track:
        spans = (
            Span("step 1", "step", start_ns, 5_000),
            Span("sum 0", "sum", start_ns + 1_000, 3_000),
        )
        recording = Recording(number=1, generation=Generation(1), steps=(1,), spans=spans)
        return Track(
            worker=WorkerId(NodeName(node), slot),
            title="pipeline 0, stage 0",
            recording=recording,
            clock=Clock(offset_ns=offset_ns, error_ns=250_000),
        )

    tracks = [track("n1", 0, 1_000_000, 0), track("n1", 1, 1_002_000, 0), track("n2", 0, 0, 10**6)]
    trace = json.loads(json.dumps(chrome_trace(tracks)))
    events = trace["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(named) == {(0, 0), (0, 1), (1, 0)}
    assert named[1, 0] == "n2/0 (rank 2): pipeline 0, stage 0"
    steps = {(e["pid"], e["tid"]): (e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert steps == {(0, 0): (0.0, 5.0), (0, 1): (2.0, 5.0), (1, 0): (0.0, 5.0)}
    sums = [(e["ph"], e["ts"]) for e in events if e.get("cat") == "sum" and e["pid"] == 1]
    assert sums == [("b", 1.0), ("e", 4.0)]
    assert trace["otherData"]["clocks"]["n2"] == {"offset_us": 1000.0, "within_us": 250.0}
