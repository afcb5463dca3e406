"""Replay of a trace under one policy: which plan runs when, and what each moment is spent on.

Decides nothing itself: `oobleck.planner.recovery.course` says which plan to request, and the
policies answer. Owns the order of what happens between events: phases of transitions, step
boundaries, joins, and waiting. Must not know how plans are made.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.planner.recovery import course
from oobleck.planner.recovery.chooser import READY_STEPS
from oobleck.planner.recovery.course import PlanWanted
from oobleck.planner.recovery.outlook import MTBF_S, Losses, Outlook
from oobleck.planner.recovery.rules import Next
from oobleck.planner.report.account import Account, Cause, Result, seconds, ticks
from oobleck.planner.simulate.costs import Costs
from oobleck.planner.simulate.shapes import Outcome, Racks, Rates, Shape, Shapes, swapped
from oobleck.planner.simulate.trace import Instant, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Coming:
    """Plan on its way in."""

    outcome: Outcome
    #: The fresh nodes that it was asked for with.
    fresh: tuple[str, ...]
    #: True if workers train on and switch at a step boundary.
    voluntary: bool
    #: Time at which workers are ready to switch to it; voluntary plans only.
    ready_at: int = 0

    @property
    def newcomers(self) -> frozenset[str]:
        return frozenset(self.fresh[-1 - seat] for seat in self.outcome.seats if seat < 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Inputs that all replays of one trace share."""

    trace: Trace
    shapes: Shapes
    costs: Costs
    #: Time in seconds of the end.
    until_s: float
    #: Seconds of a step of the first plan on all nodes.
    full_step_s: float
    #: Samples of a step.
    batch: int
    #: Nodes of the full cluster.
    nodes: int
    #: Most nodes of the job; further live ones are its spares. None: all of them.
    most_nodes: int | None = None
    #: Mean time between losses of one node that is expected before any is seen, seconds.
    mtbf_s: float = MTBF_S
    #: Label of each node's rack, as far as it has one.
    racks: Mapping[str, str] = field(default_factory=dict)
    #: Steps of the job; None: it does not end.
    steps: int | None = None


class Replay:
    """State of a replay, from the trace's beginning to its end."""

    def __init__(self, setting: Setting, policy: RecoveryPolicy) -> None:
        self._setting, self._policy = setting, policy
        self._shapes, self._costs = setting.shapes, setting.costs
        self._fault_tolerance = setting.shapes.terms.fault_tolerance
        self.account = Account(batch=setting.batch)
        self._now = 0
        #: Live nodes in the order of arrival, with the time from which they can take part.
        self._live: dict[str, int] = {}
        self._losses = Losses()
        self._rates: dict[str, float] = {}
        self._draining: set[str] = set()
        # The plan that workers hold: the node in each seat, and the seats whose nodes are lost.
        self._shape: Shape | None = None
        self._names: list[str] = []
        self._seats: dict[str, int] = {}
        self._gone: set[int] = set()
        #: The newest answer, which the step time is from.
        self._step_s = 0.0
        self._step = 1
        #: Ticks that the step in progress still takes, and useful ones spent in it.
        self._left = 1
        self._spent = 0
        self._then: Next | None = None
        #: Whether the plan has committed a step: nothing voluntary comes before.
        self._trained = False
        self._phases: deque[tuple[Cause, int]] = deque()
        #: Ticks of the phases passed on the way to the next plan.
        self._stood = 0
        self._coming: _Coming | None = None
        #: Time since which no plan is possible, and why.
        self._waits_since: int | None = 0
        self._reason = "no node is live"
        self._failed = False
        #: Whether workers have to load the newest checkpoint, whose later steps are undone.
        self._rolled_back = False
        #: Share of a broken step's work that is kept.
        self._kept = 0.0
        self._save_due = ticks(self._costs.checkpoint_every_s)
        self._even_at: int | None = None
        #: Seats whose processes died and whose state is not back yet.
        self._repaired = frozenset[int]()
        self._rest_until = 0
        self._look_at: int | None = None
        self._looked: object = None

    def run(self, report: Callable[[float], None] = lambda time_s: None) -> Result:
        """Replay the trace to its end; `report` gets the progress in seconds of the trace."""
        end = ticks(self._setting.until_s)
        curve = [(0.0, 0.0)]
        for instant in self._setting.trace.instants:
            at = ticks(instant.time_s)
            if at >= end:
                break
            self._advance(at)
            curve.append((instant.time_s, self._samples()))
            self._apply(instant)
            report(instant.time_s)
        self._advance(end)
        curve.append((self._setting.until_s, self._samples()))
        waits = self._waits_since if self._due() is None else None
        return Result(
            account=self.account,
            share=self._share(),
            failed_at=None if waits is None else seconds(waits),
            reason="" if waits is None else self._reason,
            full=self._setting.batch / self._setting.full_step_s,
            nodes=self._setting.nodes,
            curve=tuple(curve),
        )

    def _samples(self) -> float:
        return (self.account.steps + self._share()) * self._setting.batch

    # ---- Time

    def _advance(self, until: int) -> None:
        while self._now < until:
            if self._phases:
                self._pass_phase(until)
            elif self._coming is not None and not self._coming.voluntary:
                self._enter()
            elif self._waits_since is not None:
                self._wait(until)
            else:
                self._train(until)
        if not self._phases and self._coming is not None and not self._coming.voluntary:
            self._enter()

    def _pass_phase(self, until: int) -> None:
        cause, left = self._phases[0]
        spent = min(left, until - self._now)
        self._spend(spent, cause)
        if cause not in ("save", "first_step"):
            self._stood += spent
        if spent == left:
            self._phases.popleft()
            if cause == "save":
                self.account.saved()
        else:
            self._phases[0] = (cause, left - spent)

    def _wait(self, until: int) -> None:
        due = self._due()
        if due is not None and due <= self._now:
            self._resume()
            return
        self._spend((until if due is None else min(due, until)) - self._now, "waiting")

    def _spend(self, spent: int, cause: Cause | None) -> None:
        """Let time pass; `cause` None: with useful work."""
        account = self.account
        if cause is None:
            account.useful += spent
            account.worked += spent
            account.worked_nodes += spent * len(self._seats)
        else:
            account.badput[cause] += spent
        self._now += spent
        members = 0 if self._waits_since is not None else len(self._seats)
        account.idle_nodes += spent * (len(self._live) - members)
        begun = self._waits_since is None and self._shape is not None
        if begun and self._can_lose() < self._fault_tolerance:
            account.unguarded += spent

    def _can_lose(self) -> int:
        assert self._shape is not None, "only asked while there is a plan"
        if not self._gone:
            return self._shape.can_lose
        return min(len(own - self._gone) for own in self._shape.holders) - 1

    # ---- Training

    def _share(self) -> float:
        """Return the done share of the step in progress, or the kept one of a broken step."""
        way = self._coming is not None and not self._coming.voluntary
        if self._waits_since is not None or way:
            return self._kept
        return 1 - self._left / self._step

    def _train(self, until: int) -> None:
        """Train until something is due, at most until then."""
        if self._trained and self._coming is None:
            self._look()
        first = self._now + self._left
        bounds = []
        if not self._trained:
            bounds.append(first)
        if self._coming is not None:
            bounds.append(self._boundary(self._coming.ready_at))
        if self._costs.checkpoint_every_s:
            bounds.append(self._boundary(self._save_due))
        if self._look_at is not None and self._look_at > self._now:
            until = min(until, self._look_at)
        stop = min([until, *bounds])
        self._work(stop)
        if self._left == self._step and stop in bounds:
            self._at_boundary()

    def _boundary(self, at: int) -> int:
        """Return the first step boundary from then on."""
        first = self._now + self._left
        return first if at <= first else first - (first - at) // self._step * self._step

    def _work(self, stop: int) -> None:
        span, steps = stop - self._now, 0
        if span >= self._left:
            steps, further = divmod(span - self._left, self._step)
            steps += 1
            self.account.commit(steps, span - further + self._spent)
            self._spent, self._left = further, self._step - further
            self._trained = True
        else:
            self._spent += span
            self._left -= span
        self._spend(span, None)

    def _at_boundary(self) -> None:
        if self._costs.checkpoint_every_s and self._now >= self._save_due:
            self._save_due = self._now + ticks(self._costs.checkpoint_every_s)
            if self._costs.save_s:
                self._phases.append(("save", ticks(self._costs.save_s)))
            else:
                self.account.saved()
        coming = self._coming
        if coming is not None and self._now >= coming.ready_at:
            wait_s = self._costs.switch_s + self._moved_s(coming.outcome.late_s)
            self._phases.append(("switch", ticks(wait_s)))
            self._kept, self._spent = 0.0, 0
            self._coming = _Coming(outcome=coming.outcome, fresh=coming.fresh, voluntary=False)

    def _moved_s(self, planned_s: float) -> float:
        """Return the time of what takes so long on the profile's links."""
        planned = self._shapes.terms.profile.links.inter_node_bytes_per_s
        return planned_s * planned / (self._costs.bytes_per_s or planned)

    def _stall_s(self, outcome: Outcome, more_bytes: int = 0) -> float:
        """Return the time of the moving state."""
        planned = self._shapes.terms.profile.links.inter_node_bytes_per_s
        return self._moved_s(max(outcome.stall_s, more_bytes / planned))

    # ---- Voluntary changes

    def _look(self) -> None:
        """Ask for the plan of a voluntary change that is due, in the master's order."""
        leaving, coming = self._leaving(), self._joiners()
        ready = [name for name in coming if self._live[name] <= self._now]
        state = (
            id(self._shape),
            leaving,
            tuple(ready),
            self._then,
            tuple(sorted(self._rates.items())),
            self._even_at,
        )
        if state == self._looked and (self._look_at is None or self._now < self._look_at):
            return
        # Look again when nodes that are still starting are ready.
        later = [self._live[name] for name in coming if name not in ready]
        self._looked, self._look_at = state, min(later, default=None)
        if leaving and self._propose(course.WITHOUT_DRAINED, leaving, self._fresh()):
            return
        settle = ticks(self._costs.settle_s)
        due = course.settled_at([self._live[name] for name in ready], settle)
        if due is not None and self._now < due:
            self._look_at = min([round(due), *later])
            return
        joins = ready and course.takes_joins(self._policy)
        if joins and self._propose(course.JOINED, (), self._fresh(), joining=True):
            return
        if self._then is not None:
            if self._propose(course.behind_answer(self._then), (), self._fresh()):
                return
            if not course.is_tried_again(self._then):
                self._then = None
        if self._even_at is not None and course.evens_out(self._policy):
            at = max(self._even_at, self._rest_until)
            if self._now < at:
                self._look_at = min([at, *later])
                return
            self._even_at = None
            if self._propose(course.AROUND_SLOW, (), self._fresh(slow=True)):
                self._rest_until = self._now + ticks(course.REST_S)

    def _outside(self, *, slow: bool = False) -> Iterator[str]:
        """Yield the nodes outside the plan that stay; `slow`: slow ones as well."""
        if len(self._live) == len(self._seats):
            return  # each live node has a seat
        for name in self._live:
            usable = slow or self._rates.get(name, 1.0) == 1
            if usable and name not in self._seats and name not in self._draining:
                yield name

    def _joiners(self) -> list[str]:
        """Return the nodes outside the plan that may join, once they are ready."""
        return list(islice(self._outside(), self._room()))

    def _fresh(self, *, slow: bool = False) -> list[str]:
        """Return the nodes outside the plan that can take part now; `slow`: slow ones as well."""
        ready = (n for n in self._outside(slow=slow) if self._live[n] <= self._now)
        return list(islice(ready, self._room()))

    def _room(self) -> int | None:
        """Return how many nodes the job may take in; None: any number."""
        most = self._setting.most_nodes
        if most is None:
            return None
        return max(0, most - sum(name not in self._draining for name in self._seats))

    def _propose(
        self,
        wanted: PlanWanted,
        leaving: Collection[int],
        fresh: list[str],
        *,
        joining: bool = False,
    ) -> bool:
        """Ask for a plan for a step boundary; return whether there is one."""
        try:
            outcome = self._ask(wanted, leaving, fresh)
        except PlanInfeasible:
            return False
        stay = sum(seat >= 0 for seat in outcome.seats)
        if joining and not (stay == len(self._names) and stay < len(outcome.seats)):
            return False
        prepared = round((READY_STEPS + outcome.copied_layers) * self._step)
        ready = ticks(self._costs.plan_s) + max(prepared, ticks(self._stall_s(outcome)))
        self._coming = _Coming(
            outcome=outcome, fresh=tuple(fresh), voluntary=True, ready_at=self._now + ready
        )
        return True

    def _ask(self, wanted: PlanWanted, without: Collection[int], fresh: Sequence[str]) -> Outcome:
        """Ask for the plan without these seats and the lost ones. Raises PlanInfeasible."""
        shape = self._shape
        assert shape is not None, "there is a plan to change"
        gone = frozenset(self._gone.union(without))
        rates = self._slow(fresh)
        order = None if rates else swapped(shape, gone)
        if order is not None:
            self._swap(order)
            back = {other: to for to, other in enumerate(order)}
            gone = frozenset(back[seat] for seat in gone)
        names = [*fresh, *(name for name, seat in self._seats.items() if seat not in gone)]
        return self._shapes.ask(
            shape,
            gone,
            len(fresh),
            wanted,
            rates,
            self._outlook(),
            self._racks_of(names, fresh),
            course.most_more(self._policy),
        )

    def _racks_of(self, names: Iterable[str], fresh: Sequence[str]) -> Racks:
        """Return the number of the rack of each seat, and of fresh nodes from -1 down, in the order
        of seats: alike where alike nodes share racks."""
        if not self._setting.racks:
            return ()
        seats = {name: -1 - number for number, name in enumerate(fresh)} | self._seats
        numbers: dict[str, int] = {}
        return tuple(
            (seats[name], numbers.setdefault(rack, len(numbers)))
            for name in sorted(names, key=lambda name: seats[name])
            if (rack := self._setting.racks.get(name))
        )

    def _outlook(self) -> Outlook:
        costs, losses = self._costs, msgspec.structs.replace(self._losses)
        losses.pass_time(seconds(self._now), len(self._live))
        every = costs.checkpoint_every_s / max(self._step_s, seconds(1))
        steps = self._setting.steps
        left = None if steps is None else max(1, steps - self.account.steps)
        # In the profile's seconds, as plans are: each takes `step_ratio` of the trace's.
        return Outlook(
            per_node_s=losses.per_node_s(self._setting.mtbf_s),
            seen_per_node_s=losses.seen_per_node_s,
            joins_per_s=losses.joins_per_s(self._step_s),
            whole_rack=losses.rack_share(self._live_racks()),
            sizes=losses.sizes,
            left_steps=left,
            left_s=None if left is None else left * seconds(self._step),
            behind_steps=self.account.fresh_steps,
            every_steps=every or math.inf,
            next_s=seconds(self._save_due - self._now) if every else None,
            back_s=costs.load_s,
            rejoin_s=costs.abort_s + costs.meeting_s + costs.first_step_s,
            switch_s=costs.switch_s + costs.first_step_s,
            kept=self._kept,
            transfers=self._moved_s(1.0),
        ).in_units_of(costs.step_ratio)

    def _live_racks(self) -> Mapping[NodeName, str]:
        return {NodeName(name): self._setting.racks.get(name, "") for name in self._live}

    def _slow(self, fresh: Sequence[str]) -> Rates:
        if not self._rates:
            return ()
        seats = {name: -1 - number for number, name in enumerate(fresh)} | self._seats
        return tuple(
            sorted(
                (seats[name], rate)
                for name, rate in self._rates.items()
                if name in seats and rate != 1
            )
        )

    def _swap(self, order: Sequence[int]) -> None:
        """Let alike pipelines change places."""
        back = {other: to for to, other in enumerate(order)}
        self._names = [self._names[other] for other in order]
        self._seats = {name: back[seat] for name, seat in self._seats.items()}
        self._gone = {back[seat] for seat in self._gone}

    # ---- Events

    def _apply(self, instant: Instant) -> None:
        self.account.events += instant.time_s > 0
        self._count_losses(instant)
        hit = set[int]()
        lost = set[str]()
        for name in instant.removed:
            del self._live[name]
            self._rates.pop(name, None)
            self._draining.discard(name)
            lost.add(name)
            if name in self._seats:
                hit.add(self._seats.pop(name))
        for name in instant.added:
            # Nodes of the start are ready at once.
            begun = 0 if instant.time_s == 0 else ticks(self._costs.join_s)
            self._live[name] = self._now + begun
        for name, rate in instant.rates.items():
            self._rates[name] = rate
        self._draining.update(instant.noticed)
        repaired = {self._seats[name] for name in instant.repaired if name in self._seats}
        self._gone |= hit
        if self._waits_since is not None:
            self._empty(repaired)
            if instant.time_s == 0 and self._shape is None:
                self._start(free=True)
            elif self._lacks_layers(self._gone):
                self._roll_back()
            return
        coming = self._coming
        misses = coming is not None and not lost.isdisjoint(coming.newcomers)
        if self._shape is None:
            if misses:
                self._begin_to_wait()
            return
        if hit or repaired or (misses and coming is not None and not coming.voluntary):
            self._break(repaired)
        elif misses:
            self._coming = None
        if instant.rates:
            self._change_pace()
        self._looked = None

    def _count_losses(self, instant: Instant) -> None:
        """Count losses and returns, as the master does. A node that leaves as announced has not
        failed."""
        self._losses.pass_time(instant.time_s, len(self._live))
        racks, gone = self._setting.racks, set[str]()
        for name in instant.removed:
            if name not in self._draining:
                gone.add(name)
                rack = self._setting.racks.get(name, "")
                left = sum(racks.get(one) == rack for one in self._live if one not in gone)
                self._losses.lose(NodeName(name), instant.time_s, rack, left)
        for name in instant.added:
            self._losses.come(NodeName(name), instant.time_s)

    def _change_pace(self) -> None:
        """Continue at the workers' new rates; the answer follows when they are noticed."""
        assert self._shape is not None, "there is a plan"
        self._even_at = self._now + ticks(self._costs.slow_s)
        if self._coming is not None and not self._coming.voluntary:
            return
        share = self._left / self._step
        self._set_step(share)

    def _set_step(self, left: float) -> None:
        """Set the length of a step, with the share `left` of it still to do."""
        assert self._shape is not None, "there is a plan"
        rates = tuple(one for one in self._slow(()) if one[0] >= 0)
        slow = rates or self._shape.plan.rates
        step_s = self._step_s
        if slow:
            step_s = self._shapes.staying_s(self._shape, rates) * self._costs.step_ratio
        self._step = max(1, ticks(step_s))
        self._left = min(self._step, max(1, round(left * self._step)))

    def _break(self, repaired: Collection[int]) -> None:
        """Request a plan after losses of the plan's nodes or processes."""
        # Processes that are started anew hold nothing before the next plan is entered.
        repaired = self._repaired = self._repaired.union(repaired) - self._gone
        coming, self._coming = self._coming, None
        #: True if state was moving, so that the layers that workers hold are not certain.
        moving = coming is not None and not coming.voluntary and coming.outcome.moved_bytes > 0
        if coming is None or coming.voluntary:
            self._break_step()
        self._phases.clear()
        gone = self._gone.union(repaired)
        assert self._shape is not None, "there is a plan"
        if self._lacks_layers(gone) and not self._roll_back():
            return
        wanted = self._wanted(certain=not (moving or repaired))
        more = sum(map(self._held_bytes, repaired))
        outcome, fresh = self._found_without_draining(wanted)
        if outcome is None:
            self._empty(repaired)
            self._begin_to_wait()
            return
        costs = self._costs
        self._phases.append(("detect", ticks(costs.detect_s)))
        self._phases.append(("plan", ticks(costs.plan_s)))
        self._phases.append(("abort", ticks(costs.abort_s)))
        if repaired:
            self._phases.append(("process", ticks(costs.process_s)))
        self._set_out(outcome, fresh, more_bytes=more)

    def _wanted(self, *, certain: bool) -> PlanWanted:
        """Return the wanted plan where the running one cannot go on. `certain`: workers hold what
        it says."""
        wanted = course.for_losses(self._policy, certain=certain)
        returns = self._rolled_back
        if self._policy == course.MORPH:
            wanted, returns = course.MOVING, returns or self.account.has_saved
        # All state is loaded anyway, so the shape is free.
        return course.MORPH if returns and wanted != course.WAITING else wanted

    def _empty(self, seats: Collection[int]) -> None:
        """Note that nodes of the plan have lost their state, and may take part as fresh ones."""
        self._gone.update(seats)
        self._seats = {name: seat for name, seat in self._seats.items() if seat not in seats}

    def _break_step(self) -> None:
        """Count the work of the step in progress that is lost."""
        share, keep = self._share(), self._costs.salvage
        kept = round(keep * self._spent)
        lost = self._spent - kept
        self.account.waste(lost, (1 - keep) * share * self.account.batch, "redone_step")
        self._spent, self._kept = kept, keep * share

    def _lacks_layers(self, gone: Set[int]) -> bool:
        """Return whether all holders of some layer are among the seats that are `gone`."""
        return self._shape is not None and any(own <= gone for own in self._shape.holders)

    def _roll_back(self) -> bool:
        """Return to the newest checkpoint, or to the beginning before the first one. Return False
        if there are none, so that the job has failed."""
        if self._rolled_back:
            return True
        self._rolled_back = True
        account = self.account
        account.waste(self._spent, self._kept * account.batch, "redone_checkpoint")
        self._spent, self._kept = 0, 0.0
        account.rolled_back()
        if self._costs.checkpoint_every_s:
            account.returns += 1
            return True
        self._failed = True
        self._reason = "the last holder of a layer is lost, and there are no checkpoints"
        if self._waits_since is None:
            self._begin_to_wait()
        return False

    def _found_without_draining(self, wanted: PlanWanted) -> tuple[Outcome | None, list[str]]:
        """Return the answer without nodes that are about to go, or with them if there is no other;
        None: there is none."""
        fresh, leaving = self._fresh(), self._leaving()
        for without in (leaving, frozenset[int]()) if leaving else (leaving,):
            try:
                return self._ask(wanted, without, fresh), fresh
            except PlanInfeasible as infeasible:
                self._reason = str(infeasible)
        return None, fresh

    def _leaving(self) -> frozenset[int]:
        """Return the seats of nodes that are about to go."""
        return frozenset(self._seats[name] for name in self._draining if name in self._seats)

    def _held_bytes(self, seat: int) -> int:
        assert self._shape is not None, "there is a plan"
        name, layers = self._shape.nodes[seat], self._shapes.terms.profile.layers
        return sum(
            -(-layers[shard.layer].travelling_bytes // shard.parts)
            for worker, shards in self._shape.plan.shards.items()
            if worker.node == name
            for shard in shards
        )

    def _set_out(self, outcome: Outcome, fresh: list[str], *, more_bytes: int = 0) -> None:
        """Begin the transition into a plan that all wait for."""
        costs = self._costs
        self._phases.append(("meeting", ticks(costs.meeting_s)))
        if outcome.policy == course.MORPH:
            self._roll_back()
        if self._rolled_back:
            self._phases.append(("load", ticks(costs.load_s)))
        else:
            self._phases.append(("transfer", ticks(self._stall_s(outcome, more_bytes))))
            self.account.moved_bytes += more_bytes
        self._coming = _Coming(outcome=outcome, fresh=tuple(fresh), voluntary=False)

    def _enter(self) -> None:
        """Begin to train in the plan on its way."""
        coming = self._coming
        assert coming is not None, "a plan is on its way"
        outcome, before = coming.outcome, self._names
        self._names = [
            before[seat] if seat >= 0 else coming.fresh[-1 - seat] for seat in outcome.seats
        ]
        self._seats = {name: seat for seat, name in enumerate(self._names)}
        self._shape, self._gone, self._coming = outcome.shape, set(), None
        self._repaired = frozenset()
        self._step_s, self._then = outcome.step_s * self._costs.step_ratio, outcome.then
        self._set_step(1 - self._kept)
        self._kept = 0.0
        self._trained, self._looked, self._look_at = False, None, None
        self.account.counts[outcome.policy, outcome.rule] += 1
        self.account.stalls[outcome.policy, outcome.rule].append(self._stood)
        self._stood = 0
        if not self._rolled_back:
            self.account.moved_bytes += outcome.moved_bytes
        self._rolled_back = False
        # A plan around slow workers may be due again: a rate may have changed since its request.
        if outcome.policy != course.AROUND_SLOW:
            slow = any(rate != 1 for rate in self._rates.values())
            self._even_at = self._now if slow else None
        if self._costs.first_step_s:
            self._phases.append(("first_step", ticks(self._costs.first_step_s)))

    # ---- Waiting

    def _begin_to_wait(self) -> None:
        self._phases.clear()
        self._coming, self._waits_since, self._look_at = None, self._now, None

    def _due(self) -> int | None:
        """Return when the job can go on, or a node gets ready; None: not with these nodes."""
        if self._failed or self._waits_since is None:
            return None
        ready = [at for at in self._live.values() if at <= self._now]
        later = [at for at in self._live.values() if at > self._now]
        try:
            self._resumed()
        except PlanInfeasible as infeasible:
            self._reason = str(infeasible)
            return min(later, default=None)
        settled = max(self._now, max(ready) + ticks(self._costs.settle_s))
        return min([settled, *later])

    def _resumed(self) -> tuple[Outcome, list[str]]:
        """Return the plan with which the job goes on. Raises PlanInfeasible."""
        fresh = self._fresh()
        if self._shape is None:
            racks = self._racks_of(fresh, fresh)
            return self._shapes.first(len(fresh), racks=racks), fresh
        return self._ask(self._wanted(certain=False), (), fresh), fresh

    def _resume(self) -> None:
        if self._shape is None:
            self._start(free=False)
            return
        outcome, fresh = self._resumed()
        self._waits_since = None
        self._phases.append(("plan", ticks(self._costs.plan_s)))
        self._set_out(outcome, fresh)

    def _start(self, *, free: bool) -> None:
        """Begin the job, if there are enough nodes."""
        try:
            outcome, fresh = self._resumed()
        except PlanInfeasible as infeasible:
            self._reason = str(infeasible)
            return
        self._waits_since = None
        self._coming = _Coming(outcome=outcome, fresh=tuple(fresh), voluntary=False)
        self._save_due = self._now + ticks(self._costs.checkpoint_every_s)
        if free:
            self._enter()
            return
        self._phases.append(("plan", ticks(self._costs.plan_s)))
        self._phases.append(("meeting", ticks(self._costs.meeting_s)))


def replay(
    setting: Setting,
    policy: RecoveryPolicy,
    report: Callable[[float], None] = lambda time_s: None,
) -> Result:
    """Replay the setting's trace under `policy`."""
    return Replay(setting, policy).run(report)
