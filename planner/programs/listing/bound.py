"""Lower bound of a list schedule's time, at which a search can stop.

Must not know how schedules are made.
"""

from dataclasses import dataclass

from oobleck.planner.programs.listing.visits import Visits


def loads(visits: Visits) -> list[int]:
    """Return the ticks of each worker's whole work."""
    load = [0] * len(visits.workers)
    for visit, group in enumerate(visits.group):
        ticks = visits.forward[visit] + visits.backward[visit] + visits.weight[visit]
        for worker in visits.members[group]:
            load[worker] += ticks
    return load


@dataclass(slots=True)
class _Least:
    """Least times and bytes of one worker's work."""

    #: Earliest begin of a forward, and of a backward.
    forward: int
    backward: int
    #: Least time from its last work to the end of the step.
    tail: int
    #: Least bytes that a micro-batch keeps, and most ticks that a forward takes.
    kept: int
    most_ticks: int = 0


def least_makespan(visits: Visits) -> int:
    """Return a lower bound of the makespan.

    A worker does all its work. Before that it waits for its first forward. Until its first backward
    can begin it has only forwards, as many as fit. After its last work, backwards may remain on the
    hops before. A single micro-batch's time is a bound, too.
    """
    never = sum(visits.forward) + sum(visits.backward) + 2 * sum(visits.message)
    least = [_Least(forward=never, backward=never, tail=never, kept=room) for room in visits.room]
    longest = 0
    for microbatch, path in enumerate(visits.path):
        if visits.place[microbatch] > 0:
            continue  # like the first one of its route
        time = 0
        begins = []
        for visit in path:
            begins.append(time)
            time += visits.forward[visit] + (0 if visits.last[visit] else visits.message[visit])
        backwards = {}
        for visit in reversed(path):
            time += 0 if visits.last[visit] else visits.message[visit]
            backwards[visit] = time
            time += visits.backward[visit]
        longest = max(longest, time)
        for visit, begin in zip(path, begins, strict=True):
            left = time - backwards[visit] - visits.backward[visit]
            for worker in visits.members[visits.group[visit]]:
                own = least[worker]
                own.forward = min(own.forward, begin)
                own.backward = min(own.backward, backwards[visit])
                own.tail = min(own.tail, 0 if visits.splits[visit] else left)
                own.kept = min(own.kept, visits.kept[visit])
                own.most_ticks = max(own.most_ticks, visits.forward[visit])
    for room, own, load in zip(visits.room, least, loads(visits), strict=True):
        begin = own.forward
        if own.kept > 0:
            # Latest begin of work that continues without a pause from there.
            begin = max(begin, own.backward - room // own.kept * own.most_ticks)
        longest = max(longest, begin + load + own.tail)
    return longest
