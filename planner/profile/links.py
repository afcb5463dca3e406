"""Times of messages and sums of several workers on the links of a profile."""

from oobleck.planner.profile.profile import Links


def message_s(count: int, *, same_node: bool, links: Links) -> float:
    """Return the time of one message of `count` bytes from worker to worker."""
    rate = links.intra_node_bytes_per_s if same_node else links.inter_node_bytes_per_s
    return links.latency_s + count / rate


def all_reduce_s(count: int, *, workers: int, same_node: bool, links: Links) -> float:
    """Sum of `count` bytes over `workers` (a ring); nothing for one."""
    if workers == 1:
        return 0.0
    rate = links.intra_node_bytes_per_s if same_node else links.inter_node_bytes_per_s
    return 2 * (workers - 1) * (links.latency_s + count / workers / rate)


def exchange_s(count: int, *, gpus: int, links: Links) -> float:
    """Gathering `count` bytes of which each of `gpus` workers of a node holds a part, or summing
    as many into parts; nothing for one."""
    return all_reduce_s(count, workers=gpus, same_node=True, links=links) / 2
