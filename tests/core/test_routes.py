"""Hops, holds and routes that contradict themselves cannot be built."""

import pytest

from oobleck.core.routes import Hop
from support.plans import hold, hop, route, worker


@pytest.mark.parametrize(
    ("hops", "reason"),
    [
        ([], "at least one hop"),
        ([hop(1, 2, worker(0))], "begins at layer 1, not at 0"),
        ([hop(0, 0, worker(0)), hop(2, 2, worker(1))], "from layer 0 on to 2"),
        ([hop(0, 1, worker(0)), hop(1, 2, worker(1))], "from layer 1 on to 1"),
        ([hop(0, 0, worker(0)), hop(1, 1, worker(0))], "are on the same worker"),
    ],
)
def test_a_route_passes_every_layer_once(hops: list[Hop], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        route(*hops)


def test_who_shares_a_layer_is_on_one_node() -> None:
    with pytest.raises(ValueError, match="must be of one node"):
        hop(0, 0, worker(0), worker(1))
    with pytest.raises(ValueError, match="must be different ones"):
        hold(0, 0, worker(0), worker(0))
    with pytest.raises(ValueError, match="needs at least one worker"):
        hold(0, 0)
    with pytest.raises(ValueError, match="last_layer: 0 is below 1"):
        hop(1, 0, worker(0))
    with pytest.raises(ValueError, match="first_layer: -1 is below 0"):
        hold(-1, 0, worker(0))
    with pytest.raises(ValueError, match="at least one micro-batch"):
        route(hop(0, 0, worker(0)), microbatches=0)
