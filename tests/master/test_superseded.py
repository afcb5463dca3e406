"""A head whose nodes follow another one says so, and how either of the two goes on."""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from oobleck.core.ids import NodeName
from oobleck.host.detection import DETECTIONS
from oobleck.master.api.view import problem_of
from oobleck.master.config import MasterConfig
from oobleck.master.loop import Master
from oobleck.master.rules.admission import Refusal
from oobleck.master.storage.journal import Journal
from oobleck.proto.protocol import OLDEST
from oobleck.proto.types import NodeStatus, Registration
from support import loops
from support.scenario import facts_of


def test_an_agent_that_follows_another_head_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    config = MasterConfig(
        listen="127.0.0.1:0", state_dir=tmp_path, timing=DETECTIONS["wan"], validate=True
    )

    def started() -> Master:
        return Master(config, Journal(tmp_path / "journal.log"))

    async def ask() -> str:
        master = started()
        running = asyncio.create_task(master.run())
        try:
            own = master.state.head
            assert own is not None
            other = msgspec.structs.replace(own, begun_by="0b" * 16)
            for followed in (other, other, msgspec.structs.replace(other, term=2)):
                registration = Registration(
                    protocol=OLDEST,
                    facts=facts_of(NodeName("n1"), 1, 1),
                    status=NodeStatus(),
                    acted_on=followed,
                )
                assert isinstance(await master.sessions.open(registration), Refusal)
            return problem_of(master.state, "")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            master.close()

    started().close()  # a term that began in this process goes above all others
    told = loops.run(ask())
    assert "n1 follows term 2 (begun by 0b0b0b0b) of history" in told
    assert "end this master, or, if the other is lost for good, start this one on a copy" in told
    refused = [record for record in caplog.records if record.getMessage() == "agent refused"]
    assert len(refused) == 2, "once for each head"
