"""Outlook of a job: how often nodes are lost, how many at a time, and what a return would cost.

`Losses` is a fold over the losses and returns of nodes, so a restarted master has the same. An
`Outlook` is what the chooser (`oobleck.planner.recovery.chooser`) needs of it at one moment. Must
not know plans or policies.
"""

import math
from collections import Counter
from collections.abc import Mapping
from statistics import median

import msgspec

from oobleck.core.ids import NodeName

#: Mean time between losses of one node that is expected where nothing is known, seconds.
MTBF_S = 30 * 86_400.0
#: Share of a broken step's work that the next plan need not do again.
SALVAGE = 0.55
#: Strength of the prior, in events: a cluster that loses a node an hour must be believed within a
#: few hours.
_PRIOR_EVENTS = 0.1
#: Live time of a node that is counted beside that seen where the prior is left out, seconds: a loss
#: in the first minute says little.
_PRIOR_NODE_S = 3600.0
#: Observations lose half of their weight in this time.
_HALF_LIFE_S = 2 * 86_400.0
#: Losses within this time of each other are one event. Nodes of one rack may be declared lost one
#: after the other.
TOGETHER_S, RACK_TOGETHER_S = 10.0, 60.0
#: Most nodes whose time of loss is remembered, and most times until a return.
_MOST_LOST = 4096
_MOST_BACK = 32
#: Seconds without a join that are counted beside those seen: one quick return says little.
_PRIOR_VACANT_S = 600.0
#: Least expected seconds of a transfer that says something, and bounds of the factor on these.
_LEAST_SEEN_S, _LEAST_FACTOR, _MOST_FACTOR = 0.2, 0.25, 1000.0
#: Most by which one transfer changes that factor. It may have been odd, and where transfers seem
#: slow, a job takes courses without any, so that nothing would correct the factor.
_MOST_AT_ONCE = 4.0
#: Seconds of a return to a checkpoint, beside the steps that it undoes.
BACK_S = 30.0
#: Seconds of a change of generation after a loss, beside moving state, and of one that was prepared
#: in training (`python -m bench.changes`: up to 0.13 s).
REJOIN_S, SWITCH_S = 0.5, 0.1
#: Least seconds that are learned of any of these.
_LEAST_LEARNED_S = 0.001
#: Weight of the newest pause at a step boundary, and of the newest broken step in the share of its
#: work that is kept.
_NEWEST = 0.125
#: Least and most seconds until the next event that are believed.
_LEAST_WAIT_S, _MOST_WAIT_S = 1.0, 10 * 365 * 86_400.0


class Losses(msgspec.Struct, kw_only=True):
    """Losses of a cluster's nodes so far. Older ones count less."""

    #: Time of the newest change, seconds; None: there was none.
    at_s: float | None = None
    #: Seconds that nodes were live, summed over nodes.
    node_s: float = 0.0
    #: Number of events by the number of nodes that were lost in each.
    events: dict[int, float] = {}
    #: Number of events that took all live nodes of a rack, two or more; `events` lacks these.
    whole_racks: float = 0.0
    #: Time of the newest event's last loss, its nodes, and their number by rack.
    last_s: float = -math.inf
    last: list[NodeName] = []
    last_racks: dict[str, int] = {}
    #: True if the newest event took a whole rack.
    last_whole: bool = False
    #: Time of loss of nodes that are still away.
    away: dict[NodeName, float] = {}
    #: Times in seconds after which the last lost nodes were back.
    back_s: list[float] = []
    #: Number of lost nodes in whose place none has come yet, whatever its name; the seconds in
    #: which there were some; and the number of times at which nodes came then, the newest at
    #: `came_s`.
    vacant: int = 0
    vacant_s: float = 0.0
    joins: float = 0.0
    came_s: float = -math.inf

    def pass_time(self, now_s: float, live: int) -> None:
        """Note that so many nodes were live since the last change."""
        if self.at_s is not None and now_s > self.at_s:
            weight = 0.5 ** ((now_s - self.at_s) / _HALF_LIFE_S)
            # The passed time loses weight as well, so that a quiet year says no more than a week.
            passed_s = (1 - weight) * _HALF_LIFE_S / math.log(2)
            self.node_s = self.node_s * weight + live * passed_s
            self.events = {size: number * weight for size, number in self.events.items()}
            self.whole_racks *= weight
            self.vacant_s = self.vacant_s * weight + (passed_s if self.vacant else 0.0)
            self.joins *= weight
        elif self.at_s is not None:  # the clock was set back
            self.last_s, self.came_s = min(self.last_s, now_s), min(self.came_s, now_s)
        self.at_s = now_s

    def lose(self, node: NodeName, now_s: float, rack: str = "", left: int = 0) -> None:
        """Note a loss; time has passed until then. `rack`: the label of its rack, if it has one,
        where so many nodes are `left`."""
        self.away[node] = now_s
        self.vacant += 1
        most_s = RACK_TOGETHER_S if rack in self.last_racks else TOGETHER_S
        if now_s - self.last_s > most_s:
            self.last, self.last_racks, self.last_whole = [], {}, False
        if node in self.last:  # one that comes and goes is no rack
            return
        size = len(self.last) + 1
        self.last_s, self.last = now_s, [*self.last, node]
        if rack:
            self.last_racks = self.last_racks | {rack: self.last_racks.get(rack, 0) + 1}
        if self.last_whole:
            return
        if size > 1:
            self.events[size - 1] = max(0.0, self.events.get(size - 1, 0.0) - 1)
        if not left and self.last_racks.get(rack, 0) > 1:
            self.whole_racks, self.last_whole = self.whole_racks + 1, True
        else:
            self.events[size] = self.events.get(size, 0.0) + 1
        while len(self.away) > _MOST_LOST:
            del self.away[next(iter(self.away))]

    def come(self, node: NodeName, now_s: float) -> None:
        """Note that a node is there."""
        lost_s = self.away.pop(node, None)
        if lost_s is not None:
            self.back_s = [*self.back_s, max(0.0, now_s - lost_s)][-_MOST_BACK:]
        if self.vacant:
            self.vacant -= 1
            self.joins += now_s - self.came_s > TOGETHER_S
            self.came_s = now_s

    @property
    def median_back_s(self) -> float | None:
        """Median time in seconds until a lost node is back; None: none has come back."""
        return median(self.back_s) if self.back_s else None

    @property
    def seen(self) -> float:
        """Number of events."""
        return sum(self.events.values()) + self.whole_racks

    def rack_share(self, racks: Mapping[NodeName, str]) -> float:
        """Return the expected share of events that take a whole rack of two or more nodes, by the
        label of each live node. One event is counted beside those seen: in that a rack fails as
        often as a node."""
        several = sum(size > 1 for size in Counter(filter(None, racks.values())).values())
        if not several:
            return 0.0
        return (self.whole_racks + several / (several + len(racks))) / (self.seen + 1)

    def per_node_s(self, mtbf_s: float = MTBF_S) -> float:
        """Return the expected events per node and second; `mtbf_s`: the prior."""
        return (self.seen + _PRIOR_EVENTS) / (self.node_s + _PRIOR_EVENTS * mtbf_s)

    @property
    def seen_per_node_s(self) -> float:
        """Events per node and second so far, without the prior, which hides a storm of them. One
        counts half: choices are made just after an event, which says more than a time without."""
        return max(0.0, self.seen - 0.5) / (self.node_s + _PRIOR_NODE_S)

    def joins_per_s(self, step_s: float) -> float:
        """Return the expected rate at which nodes come in place of lost ones and take part, from
        the boundary of a step of so many seconds on; 0: no place is vacant, or none has come."""
        if not self.vacant or not self.joins:
            return 0.0
        return 1 / ((self.vacant_s + _PRIOR_VACANT_S) / self.joins + step_s / 2)

    @property
    def sizes(self) -> tuple[tuple[int, float], ...]:
        """Share of events that take no whole rack, by the number of nodes that one takes. An event
        of one node is counted beside those seen."""
        counts: Mapping[int, float] = self.events | {1: self.events.get(1, 0.0) + 1}
        whole = sum(counts.values())
        return tuple((size, n / whole) for size, n in sorted(counts.items()) if n)


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """Expectations of the time after a change."""

    #: Expected events per node and second.
    per_node_s: float = 1 / MTBF_S
    #: Events per node and second so far, without what is expected of any cluster.
    seen_per_node_s: float = 0.0
    #: Expected joins per second, in place of lost nodes.
    joins_per_s: float = 0.0
    #: Share of events that take a whole rack, and of the others by the number of nodes.
    whole_rack: float = 0.0
    sizes: tuple[tuple[int, float], ...] = ((1, 1.0),)
    #: Steps that are left of the job; None: not known.
    left_steps: float | None = None
    #: Seconds that they take in the running plan, as it runs; None: not known.
    left_s: float | None = None
    #: Steps since the newest checkpoint, and between two; without checkpoints all steps so far,
    #: and infinity. By default a return undoes no step: nothing is known of checkpoints.
    behind_steps: float = 0.0
    every_steps: float = 0.0
    #: Seconds until the next checkpoint where a clock decides, which no loss and no return turns
    #: back; None: it comes `every_steps` after the newest one.
    next_s: float | None = None
    #: Standstill of a return to a checkpoint, seconds.
    back_s: float = BACK_S
    #: Standstill, beside moving state, of a change that something forces and of a switch at a step
    #: boundary, seconds.
    rejoin_s: float = REJOIN_S
    switch_s: float = SWITCH_S
    #: Share of the broken step that is not done again.
    kept: float = 0.0
    #: Factor on the expected times of transfers, by what they took so far.
    transfers: float = 1.0
    #: Seconds that a step of the running plan takes; None: as its profile says.
    step_s: float | None = None

    @property
    def in_storm(self) -> "Outlook | None":
        """The outlook if losses go on to come as often as they did; None: that is expected."""
        if self.seen_per_node_s <= self.per_node_s:
            return None
        return msgspec.structs.replace(self, per_node_s=self.seen_per_node_s)

    def in_units_of(self, seconds: float) -> "Outlook":
        """Return the outlook with times in units of so many seconds, such as those of a profile
        that takes steps to be shorter or longer than they are."""
        left_s, next_s = self.left_s, self.next_s
        return msgspec.structs.replace(
            self,
            per_node_s=self.per_node_s * seconds,
            seen_per_node_s=self.seen_per_node_s * seconds,
            joins_per_s=self.joins_per_s * seconds,
            left_s=None if left_s is None else left_s / seconds,
            next_s=None if next_s is None else next_s / seconds,
            back_s=self.back_s / seconds,
            rejoin_s=self.rejoin_s / seconds,
            switch_s=self.switch_s / seconds,
            transfers=self.transfers / seconds,
            step_s=None if self.step_s is None else self.step_s / seconds,
        )

    def wait_s(self, nodes: int) -> float:
        """Return the expected seconds until the next event among so many nodes."""
        per_s = self.per_node_s * max(nodes, 1)
        return min(max(1 / per_s, _LEAST_WAIT_S), _MOST_WAIT_S) if per_s else _MOST_WAIT_S

    def change_s(self, nodes: int) -> float:
        """Return the expected seconds until the next event or join among so many nodes."""
        return max(1 / (1 / self.wait_s(nodes) + self.joins_per_s), _LEAST_WAIT_S)

    def undone_steps(self, steps_per_s: float, wait_s: float) -> float:
        """Return the expected steps that a return undoes or stands still for, at the next change.

        It comes after an exponential time; each checkpoint on the way sets the count to 0.
        """
        ahead = steps_per_s * wait_s
        if self.left_steps is not None:
            ahead = min(ahead, self.left_steps)
        cost = self.back_s * steps_per_s
        if not self.every_steps or ahead <= 0:
            return self.behind_steps + cost
        if self.next_s is None and self.behind_steps > self.every_steps:  # saves fail
            return self.behind_steps + min(ahead, self.every_steps) + cost
        if math.isinf(self.every_steps):
            return self.behind_steps + ahead + cost
        first = self.every_steps - self.behind_steps
        if self.next_s is not None:
            first = self.next_s * steps_per_s
        first = max(first, 0.0)
        over = math.exp(-first / ahead)
        every = self.every_steps / ahead
        again = ahead - (self.every_steps / math.expm1(every) if every < 700 else 0.0)
        before = self.behind_steps * (1 - over) + ahead * (1 - over) - first * over
        return before + over * again + cost


def corrected(factor: float, *, expected_s: float, happened_s: float) -> float:
    """Return the factor on expected times of transfers after one more was seen. Halfway, on a scale
    of ratios, since one transfer may be beside other traffic.

    `expected_s`: with `factor`, for what was received (`received_s`).
    """
    if expected_s / min(factor, 1.0) < _LEAST_SEEN_S or happened_s <= 0:
        return factor
    more = min(max(math.sqrt(happened_s / expected_s), 1 / _MOST_AT_ONCE), _MOST_AT_ONCE)
    return min(max(factor * more, _LEAST_FACTOR), _MOST_FACTOR)


def learned_s(known_s: float, seen_s: float) -> float:
    """Return the seconds to expect after some more were seen: halfway on a scale of ratios, and at
    most fourfold, since one change may be odd."""
    known_s = max(known_s, _LEAST_LEARNED_S)
    ratio = math.sqrt(max(seen_s, _LEAST_LEARNED_S) / known_s)
    return known_s * min(max(ratio, 1 / _MOST_AT_ONCE), _MOST_AT_ONCE)


def learned_share(known: float, kept: float) -> float:
    """Return the expected share of a broken step's work that is kept, after one more kept `kept` of
    a whole step. Losses come at any time of a step, so half of it was done on average."""
    return min(1.0, known + _NEWEST * (2 * kept - known))


def learned_pause_s(known_s: float, seen_s: float) -> float:
    """Return the mean pause of a switch after one more was seen. Many pause for nothing, so their
    sum counts; an odd one counts no more than ten usual ones."""
    most_s = 10 * max(known_s, SWITCH_S)
    return known_s + _NEWEST * (min(max(seen_s, 0.0), most_s) - known_s)


def received_s(expected_s: float, *, expected_bytes: int, received_bytes: int) -> float:
    """Return the expected seconds of a transfer for what was received. A loss within another change
    finds some of the state in place, or less of it than its plan says."""
    return expected_s * received_bytes / expected_bytes if expected_bytes else expected_s


def best_interval_s(save_s: float, between_s: float) -> float:
    """Return the best seconds between two checkpoints, by the cost of one and the mean time between
    losses that need one (Young, Communications of the ACM 1974; Daly, FGCS 2006: a first order)."""
    return math.sqrt(2 * save_s * between_s)


def expecting(wait_s: float, nodes: int) -> Outlook:
    """Return the outlook under which so many nodes expect the next event in `wait_s` seconds."""
    return Outlook(per_node_s=1 / (wait_s * nodes))
