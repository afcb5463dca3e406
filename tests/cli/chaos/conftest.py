"""Processes for drills to strike."""

from collections.abc import Iterator

import pytest

from oobleck.proto import control_pb2 as pb
from support.struck import agent_with_worker


@pytest.fixture
def node() -> Iterator[pb.NodeInfo]:
    with agent_with_worker() as node:
        yield node
