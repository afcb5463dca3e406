"""How soon agents look for a master that is started again."""

import pytest

from oobleck.agent.connection.session import FIRST_RETRY_S, channel_options, next_retry_s
from oobleck.host.detection import Mode, choose

#: Within this time all agents are back, however long the master was away.
BACK_S = 10.0


@pytest.mark.parametrize("mode", ["fast", "balanced", "wan"])
def test_waits_grow_to_a_bound_that_has_all_agents_back_in_time(mode: Mode) -> None:
    detection = choose(mode, {})
    waits = [FIRST_RETRY_S]
    for _ in range(1000):
        waits.append(next_retry_s(waits[-1], detection))
    assert waits == sorted(waits)
    assert waits[1] > waits[0]
    assert waits[-1] == detection.longest_retry_s
    # The channel waits as well before it opens a connection again.
    channel_s = dict(channel_options(detection))["grpc.max_reconnect_backoff_ms"] / 1000
    assert waits[-1] + channel_s < BACK_S
