"""Workers that compute more slowly than the others: stragglers (Malleus, Li et al., 2024).

A worker's time is compared with the profile's time for its layers in the plan. If all workers of a
layer need more or less than its profile says, the profile is wrong, and no worker is slow. So each
layer's time is scaled by the usual worker's ratio, limited to the range of the workers that compute
the layer: the least correction that explains their times. Then each worker is compared with the
median of all.

A worker is slow if every sample in a window exceeds SLOW. A sample spans at least a second and a
step. If there are too few processors, workers are starved one after the other: each is 1.5 times as
slow for seconds. So the window must also be long enough to lose LOST_S. A worker twice as slow
loses that at once, a slightly slower one later. For the same reason a worker is well again if its
mean over a window is below WELL, though not every sample is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import median, median_low
from weakref import WeakKeyDictionary

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import LEAST_S, MOST_S, LayerProfile, Profile
from oobleck.master.events.jobs import RateChanged
from oobleck.master.planning.requests import Machines, profile_on
from oobleck.master.rules import questions
from oobleck.master.rules.decision import Context, Decision, decide
from oobleck.master.state.job import Job
from oobleck.master.state.pace import Alone, Round
from oobleck.planner.cost.estimate import computing_by_layer_s

#: Multiples of the median's time.
SLOW, WELL = 1.2, 1.1
#: Length of the window before a worker is called slow, or well again, in steps and in seconds.
SLOW_STEPS, WELL_STEPS = 5, 20
WHILE_S = 3.0
#: Time beyond what SLOW allows that a worker has lost before it is called slow, seconds.
LOST_S = 0.8
#: Relative change of a slow worker's rate that makes a new event.
_CHANGE = 0.2
#: Seconds after a plan in which a slow worker's rate is not raised above its planned one: CPU
#: quotas let it burst after idling, so with less to do it seems faster than it is with more.
TRIED_S = 600.0
#: Largest factor by which a measurement alone may differ from training, either way.
SURE = 1.5
#: Step that rates are rounded to, and the lowest rate.
_STEP = 0.05


@dataclass(frozen=True, slots=True)
class _Sample:
    """Sample of the workers' computation between two rounds."""

    seconds: float
    steps: Mapping[WorkerId, int]
    #: Seconds of computation per step.
    step_s: Mapping[WorkerId, float]
    #: Multiple of the time at the others' pace.
    slowness: Mapping[WorkerId, float]


@dataclass(frozen=True, slots=True)
class _Beside:
    """Measurement of a stand-by worker, compared with the others' pace."""

    slowness: float
    #: Seconds that another worker's share of a step would take this worker, and takes that one.
    step_s: float
    usual_s: float


#: Cache by measurement: plan and profile of the comparison, and its result. Every reconcile needs
#: it for each stand-by worker.
_beside: WeakKeyDictionary[Alone, tuple[Plan, Profile, _Beside | None]] = WeakKeyDictionary()


def watch(context: Context, job: Job) -> Decision:
    """Note the workers whose rate has changed, if any."""
    changes = [*_replaced(context, job), *_changed(context, job), *_alone(context, job)]
    waits = Decision(wake_at=questions.next_stand_by_end(context, job))
    return decide(changes, "; ".join(map(str, changes))) or waits


def _replaced(context: Context, job: Job) -> Iterator[RateChanged]:
    """Yield a rate of 1 for slow workers outside the plan whose process was replaced."""
    for worker, slow in job.slow.items():
        node = context.state.nodes[worker.node]
        status = node.seen.status.worker(worker.slot) if node.connected else None
        if status is None or worker in job.current.processes():
            continue
        if status.incarnation != slow.incarnation:
            yield RateChanged(job_id=job.id, worker=worker, incarnation=status.incarnation, rate=1)


def _changed(context: Context, job: Job) -> Iterator[RateChanged]:
    made, pace = job.current.made, job.seen.pace
    if made is None or job.state != "running" or len(pace.rounds) < 2:
        return
    if pace.generation != job.current.generation:
        return
    members = [context.state.nodes[name] for name in job.current.members]
    samples = _samples(made.plan, profile_on(job.spec, Machines.of(job, members)), pace.rounds)
    planned = {one.worker: one.rate for one in made.plan.rates}
    for worker, now in samples[0].slowness.items():
        last = job.slow.get(worker)
        # Check this window first: a worker that is slow now may have been well on average over a
        # longer one.
        slow = _run(samples, worker, lambda slowness: slowness >= SLOW, SLOW_STEPS, LOST_S)
        if last is None:
            run = slow
            rate = _rate(run, worker) if run else 1.0
        elif not slow and (run := _well(samples, worker)):
            rate = 1.0
        else:
            run = _run(samples, worker, _differs(last.rate, now), SLOW_STEPS)
            rate = _rate(run, worker) if run else last.rate
            tried = rate * SLOW >= 1 or context.now >= (job.seen.planned_at or 0.0) + TRIED_S
            if rate > last.rate and not tried:
                rate = max(last.rate, min(rate, planned.get(worker, 1.0)))
        if rate != (1.0 if last is None else last.rate):
            why = "" if rate == 1 else _hindrance(context, worker)
            yield _event(job, worker, rate, run, why)


def _hindrance(context: Context, worker: WorkerId) -> str:
    """Return the agent's explanation of the worker's slowness; empty: none."""
    status = context.state.nodes[worker.node].seen.status.worker(worker.slot)
    return status.hindrance if status is not None else ""


def _alone(context: Context, job: Job) -> Iterator[RateChanged]:
    """Yield new rates of slow workers that stand by, from their measurements alone."""
    made, pace = job.current.made, job.seen.pace
    if made is None or job.state != "running" or pace.generation != job.current.generation:
        return
    measured = [(worker, pace.alone[worker]) for worker in job.slow if worker in pace.alone]
    if not measured:
        return
    members = [context.state.nodes[name] for name in job.current.members]
    profile = profile_on(job.spec, Machines.of(job, members))
    for worker, alone in measured:
        last = job.slow[worker]
        if alone.process != last.incarnation or worker.node in made.plan.nodes:
            continue
        beside = _held_against(made.plan, profile, job.spec.model.order, alone)
        if beside is None:
            continue
        rate = last.rate
        if beside.slowness < SURE:
            rate = 1.0
        elif not 1 / SURE <= beside.slowness * last.rate <= SURE:
            rate = _rate_of(beside.slowness)
        if rate > last.rate and context.now < questions.stands_by_until(job, worker):
            continue
        if rate != last.rate:
            yield RateChanged(
                job_id=job.id,
                worker=worker,
                incarnation=last.incarnation,
                rate=rate,
                step_s=beside.step_s,
                usual_s=beside.usual_s,
                alone=True,
            )


def _held_against(
    plan: Plan, profile: Profile, order: Sequence[int], alone: Alone
) -> _Beside | None:
    """Compare a measurement with the others' pace, cached; None: they cannot be compared."""
    known = _beside.get(alone)
    if known is None or known[:2] != (plan, profile):
        known = _beside[alone] = plan, profile, _compare(plan, profile, order, alone)
    return known[2]


def _compare(plan: Plan, profile: Profile, order: Sequence[int], alone: Alone) -> _Beside | None:
    steps = _other_steps(plan, profile, order, alone)
    if not steps:
        return None
    slowness = median_low(step_s / usual_s for step_s, usual_s in steps)
    step_s, usual_s = min(steps, key=lambda each: abs(each[0] / each[1] - slowness))
    return _Beside(slowness, step_s, usual_s)


def _other_steps(
    plan: Plan, profile: Profile, order: Sequence[int], alone: Alone
) -> Sequence[tuple[float, float]]:
    """Return, for each other worker, the seconds per step that its share would take the worker that
    stands by, and that it takes itself. Neither uses the profile's times, which may be wrong.
    `order`: each layer's kind."""
    usual_s = _sample(plan, profile, alone.first, alone.last).step_s
    try:
        own = computing_by_layer_s(plan, _as_measured(profile, order, alone.seconds))
    except ValueError:  # the plan is another master's, or the times are not plausible
        return ()
    whole = {worker: sum(own.get(worker, {}).values()) for worker in usual_s}
    return [(whole[worker], seconds) for worker, seconds in usual_s.items() if whole[worker] > 0]


def _as_measured(profile: Profile, order: Sequence[int], seconds: Sequence[float]) -> Profile:
    """Return the profile with measured times per kind of layer. Workers that share a layer keep the
    parts that the profile gives them. Raises ValueError where a kind of layer has no time."""
    if len(seconds) != 1 + max(order):
        raise ValueError(f"{len(seconds)} times for {1 + max(order)} kinds of layers")
    times = [seconds[kind] for kind in order]
    return replace(profile, layers=tuple(map(_taking, profile.layers, times)))


def _taking(layer: LayerProfile, seconds: float) -> LayerProfile:
    profiled_s = {gpus: s + layer.backward_s[gpus] for gpus, s in layer.forward_s.items()}
    whole_s = profiled_s[min(profiled_s)]
    half = {gpus: seconds / 2 * (s / whole_s if whole_s else 1.0) for gpus, s in profiled_s.items()}
    return replace(layer, forward_s=half, backward_s=half, backward_input_s={})


def _well(samples: Sequence[_Sample], worker: WorkerId) -> Sequence[_Sample]:
    """Return the newest samples that fill a window, if the worker was well in it; else none."""
    run = _run(samples, worker, lambda slowness: True, WELL_STEPS)
    return run if run and _slowness(run, worker) < WELL else ()


def _slowness(run: Sequence[_Sample], worker: WorkerId) -> float:
    """Return the worker's slowness over all steps of the run."""
    spent_s, usual_s = _spent(run, worker)
    return spent_s / usual_s


def _differs(rate: float, slowness: float) -> Callable[[float], bool]:
    """Return a test of whether a sample differs from `rate` in the direction of `slowness`. A
    sample below WELL does not count as faster, since the worker may be about to recover."""
    if slowness * rate > 1:
        return lambda sample: sample * rate > 1 + _CHANGE
    return lambda sample: sample >= WELL and sample * rate < 1 - _CHANGE


def _run(
    samples: Sequence[_Sample],
    worker: WorkerId,
    holds: Callable[[float], bool],
    steps: int,
    lost_s: float = 0.0,
) -> Sequence[_Sample]:
    """Return the newest samples that fill a window, if `holds` is true of all of them; else
    none."""
    found_steps, found_s, found_lost_s = 0, 0.0, 0.0
    for count, sample in enumerate(samples, 1):
        slowness = sample.slowness.get(worker)
        if slowness is None or not holds(slowness):
            return ()
        found_steps += sample.steps[worker]
        found_s += sample.seconds
        spent_s = sample.steps[worker] * sample.step_s[worker]
        found_lost_s += spent_s * max(0.0, 1 - SLOW / slowness)
        enough = found_steps >= steps and found_s >= WHILE_S
        if enough and found_lost_s >= lost_s:
            return samples[:count]
    return ()


def _rate(run: Sequence[_Sample], worker: WorkerId) -> float:
    """Return the rate of a slow worker, from the median of its samples."""
    return _rate_of(median(sample.slowness[worker] for sample in run))


def _rate_of(slowness: float) -> float:
    steps = round(1 / slowness / _STEP)
    return round(min(max(1, steps), round(1 / _STEP) - 1) * _STEP, 2)


def _event(
    job: Job, worker: WorkerId, rate: float, run: Sequence[_Sample], hindrance: str
) -> RateChanged:
    steps = sum(sample.steps[worker] for sample in run)
    spent_s, usual_s = _spent(run, worker)
    return RateChanged(
        job_id=job.id,
        worker=worker,
        incarnation=job.current.processes()[worker],
        rate=rate,
        step_s=spent_s / steps,
        usual_s=usual_s / steps,
        steps=steps,
        seconds=sum(sample.seconds for sample in run),
        hindrance=hindrance,
    )


def _spent(run: Sequence[_Sample], worker: WorkerId) -> tuple[float, float]:
    """Return the seconds that the worker computed, and those that it needs at the others' pace."""
    seconds = [sample.steps[worker] * sample.step_s[worker] for sample in run]
    usual = (s / sample.slowness[worker] for s, sample in zip(seconds, run, strict=True))
    return sum(seconds), sum(usual)


def _samples(plan: Plan, profile: Profile, rounds: Sequence[Round]) -> list[_Sample]:
    """Return the samples between rounds, newest first. The first round is the end of the
    generation's first step."""
    samples = [_sample(plan, profile, before, after) for before, after in pairwise(rounds)]
    return samples[::-1]


@lru_cache(maxsize=64)
def _sample(plan: Plan, profile: Profile, before: Round, after: Round) -> _Sample:
    steps: dict[WorkerId, int] = {}
    step_s: dict[WorkerId, float] = {}
    for worker, last in after.readings.items():
        first = before.readings.get(worker)
        if first is None or first.process != last.process:
            continue
        taken, spent_s = last.steps - first.steps, last.seconds - first.seconds
        # Ignore times that only a broken or hostile agent reports.
        if taken > 0 and LEAST_S <= spent_s / taken <= MOST_S:
            steps[worker], step_s[worker] = taken, spent_s / taken
    return _Sample(
        seconds=after.at - before.at,
        steps=steps,
        step_s=step_s,
        slowness=slowness_of(step_s, _profiled_s(plan, profile)),
    )


@lru_cache(maxsize=4)
def _profiled_s(plan: Plan, profile: Profile) -> Mapping[WorkerId, Mapping[int, float]]:
    """Return each worker's profiled seconds by layer; empty where the profile does not fit the
    plan."""
    try:
        return computing_by_layer_s(plan, profile)
    except ValueError:  # the plan is another master's, made by another profile
        return {}


def slowness_of(
    step_s: Mapping[WorkerId, float], profiled_s: Mapping[WorkerId, Mapping[int, float]]
) -> Mapping[WorkerId, float]:
    """Return each worker's time per step as a multiple of the time at the others' pace, for the
    layers that it computes. Workers that compute nothing are left out."""
    ratios = {
        worker: seconds / whole
        for worker, seconds in step_s.items()
        if (whole := sum(profiled_s.get(worker, {}).values())) > 0
    }
    if not ratios:
        return {}
    of_layer: dict[int, list[float]] = {}
    for worker, ratio in ratios.items():
        for layer in profiled_s[worker]:
            of_layer.setdefault(layer, []).append(ratio)
    usual = median_low(ratios.values())
    mistake = {layer: min(max(usual, min(own)), max(own)) for layer, own in of_layer.items()}
    slowness = {
        worker: step_s[worker] / sum(s * mistake[layer] for layer, s in profiled_s[worker].items())
        for worker in ratios
    }
    middle = median_low(slowness.values())
    return {worker: each / middle for worker, each in slowness.items()}
