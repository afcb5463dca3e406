"""NCCL communicators of a plan, and the order of their first use.

There is one for each set of owners whose gradients are summed, and one for each stage that several
workers share. There is also one for each link, which is a sender and a receiver of the step's
messages. Workers have exactly these while they train by the plan. At a change of plans they keep
those that both plans have, and end the others before they make new ones. `oobleck plan` shows their
number and memory (`oobleck.planner.profile.memory` has the bytes). Must not know NCCL.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import rows_in_common
from oobleck.core.plan import Plan
from oobleck.core.ties import Ties
from oobleck.planner.profile.memory import link_bytes, stage_bytes, sum_bytes
from oobleck.planner.programs.compiler.gradients import gradient_buckets
from oobleck.planner.programs.transfer import Transfer

#: Most communicators of a worker. Torch has 32 streams of a priority; beyond that two communicators
#: share one, and their operations may wait for each other in another order than at their peers. The
#: engine itself uses one stream.
MOST_COMMUNICATORS = 31


@dataclass(frozen=True, slots=True, order=True)
class Communicator:
    """Communicator: its purpose and its members.

    Members of a link, or of a communicator for moving state, are the sender and the receiver, in
    this order. Members of a stage are its workers by their part.
    """

    purpose: Literal["owners", "stage", "link", "state"]
    members: tuple[WorkerId, ...]

    def bytes_on(self, worker: WorkerId) -> int:
        """Return the bytes that it takes of the GPU of `worker`, a member."""
        if self.purpose == "owners":
            return sum_bytes()
        if self.purpose == "stage":
            return stage_bytes(len(self.members))
        sender, receiver = self.members
        return link_bytes(receives=worker == receiver, same_node=sender.node == receiver.node)


def most_links(stages: Sequence[int]) -> int:
    """Return the most links of a worker in a row of stages with so many workers each: two for each
    worker of a neighbouring stage that has some of the same rows."""
    return 2 * max(
        sum(_met(own, other) for other in (*stages[max(at - 1, 0) : at], *stages[at + 1 : at + 2]))
        for at, own in enumerate(stages)
    )


def _met(own: int, other: int) -> int:
    """Return the most workers of a stage of `other` workers that share rows with one worker of a
    stage of `own`."""
    ends = ((part * other // own, ((part + 1) * other - 1) // own) for part in range(own))
    return max(last - first + 1 for first, last in ends)


def too_many(plan: Plan, *, tied: Ties) -> bool:
    """Return whether a worker would be in more communicators than work.

    Only links can be so many. Plans whose stages allow only few are not examined: that takes a
    millisecond for ten workers.
    """
    links = Counter[WorkerId]()
    meeting = [plan.routes[position] for position in plan.meeting_routes]
    for before, after in {pair for route in meeting for pair in pairwise(route.hops)}:
        for own, other in ((before.workers, after.workers), (after.workers, before.workers)):
            links.update(dict.fromkeys(own, 2 * _met(len(own), len(other))))
    alone = {tuple(len(hop.workers) for hop in route.hops) for route in plan.routes}
    most = max(links.values(), default=0)
    if max(most, *map(most_links, alone)) <= MOST_COMMUNICATORS // 2:
        return False
    return _counts(communicators(plan, tied=tied)).most_common(1)[0][1] > MOST_COMMUNICATORS


def _counts(groups: Iterable[Communicator]) -> Counter[WorkerId]:
    """Count each worker's communicators."""
    return Counter(member for group in groups for member in group.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Needs of a plan's communicators on a GPU: the most of any worker."""

    communicators: int
    device_bytes: int
    #: Count of first uses that follow one another before the first step.
    rounds: int


def communicators(
    plan: Plan, *, tied: Ties, worker: WorkerId | None = None
) -> tuple[Communicator, ...]:
    """List the communicators of `worker`, by default of all workers, sorted. `tied`: groups of
    layers that share parameters."""
    needed = {Communicator("link", way) for way in _ways(plan, worker)}
    for hold in plan.holds:
        if len(hold.workers) > 1 and (worker is None or worker in hold.workers):
            needed.add(Communicator("stage", hold.workers))
    for bucket in gradient_buckets(plan, tied=tied):
        if len(bucket.owners) > 1 and (worker is None or worker in bucket.owners):
            needed.add(Communicator("owners", bucket.owners))
    return tuple(sorted(needed))


def _ways(plan: Plan, worker: WorkerId | None) -> Iterator[tuple[WorkerId, WorkerId]]:
    """Yield sender and receiver of all messages."""
    for route in plan.routes:
        for before, after in pairwise(route.hops):
            for member, one in enumerate(before.workers):
                if worker is None or worker == one or worker in after.workers:
                    for peer, _ in rows_in_common(before, after, member):
                        if worker is None or worker in (one, peer):
                            yield one, peer
                            yield peer, one


def for_state(
    transfers: Iterable[Transfer],
    layer_bytes: Sequence[int],
    has: Mapping[WorkerId, int],
    *,
    least_bytes: int,
) -> tuple[Communicator, ...]:
    """List the communicators that carry moving state before the first step of a plan; they are
    ended after that.

    A pair of workers gets one for `least_bytes` or more, the most bytes first, while neither has
    too many. `layer_bytes`: state of each layer; `has`: number of communicators that the plan gives
    each worker.
    """
    moved = Counter[tuple[WorkerId, WorkerId]]()
    for each in transfers:
        share = each.stop - each.start
        moved[each.source, each.destination] += int(share * layer_bytes[each.layer])
    count = Counter(has)
    made = []
    for way, size in sorted(moved.items(), key=lambda item: (-item[1], item[0])):
        if size >= least_bytes and all(count[worker] < MOST_COMMUNICATORS for worker in way):
            count.update(way)
            made.append(Communicator("state", way))
    return tuple(made)


def in_rounds(groups: Iterable[Communicator]) -> list[list[Communicator]]:
    """Group communicators into rounds, in the order of their first use.

    A worker is in at most one communicator per round, so the number of rounds bounds the chain of
    workers that wait for each other. `groups` must be all communicators of a plan, so that all
    workers compute the same rounds.
    """
    rounds: list[list[Communicator]] = []
    taken: dict[WorkerId, set[int]] = defaultdict(set)
    # The largest are the hardest to place.
    for each in sorted(groups, key=lambda each: (-len(each.members), each)):
        busy = set[int]().union(*(taken[member] for member in each.members))
        number = next(n for n in range(len(rounds) + 1) if n not in busy)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(each)
        for member in each.members:
            taken[member].add(number)
    return rounds


def needed(plan: Plan, *, tied: Ties) -> Needed:
    """Return the needs of the plan's workers, each with a GPU to itself."""
    groups = communicators(plan, tied=tied)
    size = Counter[WorkerId]()
    for group in groups:
        for member in group.members:
            size[member] += group.bytes_on(member)
    return Needed(
        communicators=max(_counts(groups).values(), default=0),
        device_bytes=max(size.values(), default=0),
        rounds=len(in_rounds(groups)),
    )


#: Purpose of a group ("owners": sums, "stage": exchanges, "link": messages), and the ranks of its
#: members; for a link the sender's and the receiver's.
Name = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Wiring:
    """Communicators of one worker, where there are GPUs."""

    #: Names by ranks; where requested, in the order of first use, which is the same on all workers.
    names: tuple[Name, ...] = ()
    #: Bytes of its GPU that they take.
    device_bytes: int = 0


#: Wiring of meetings where everything goes through the host.
NO_WIRING = Wiring()


def wiring_of(plan: Plan, worker: WorkerId, *, tied: Ties, ordered: bool) -> Wiring:
    """Return the worker's wiring in the plan. `ordered`: in the order of first use, which all of
    the plan's communicators determine."""
    rank = {each: index for index, each in enumerate(plan.workers)}
    if ordered:
        rounds = in_rounds(communicators(plan, tied=tied))
        own = [one for each in rounds for one in each if worker in one.members]
    else:
        own = list(communicators(plan, tied=tied, worker=worker))
    return Wiring(
        tuple((one.purpose, tuple(rank[member] for member in one.members)) for one in own),
        sum(one.bytes_on(worker) for one in own),
    )
