"""What a worker tells its agent."""

import socket

import msgspec

from oobleck.core.ids import Generation
from oobleck.core.messages import FromWorker, PeerLost, ToWorker
from oobleck.host.ipc.channel import Channel
from oobleck.worker.runtime.control import Control


def test_a_loss_that_several_threads_see_is_told_once() -> None:
    own, agents = socket.socketpair()
    with own, agents:
        agents.settimeout(120)
        control = Control(Channel(own, ToWorker))
        heard: Channel[FromWorker] = Channel(agents, FromWorker)
        lost = PeerLost(generation=Generation(3), step=7, detail="connection closed by peer")
        assert control.report_lost(lost)
        assert not control.report_lost(msgspec.structs.replace(lost))
        later = msgspec.structs.replace(lost, generation=Generation(4))
        assert control.report_lost(later)
        assert [heard.receive(), heard.receive()] == [lost, later]
