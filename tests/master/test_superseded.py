"""A head whose nodes follow another one says so, and how either of the two goes on."""

import logging
from pathlib import Path

import msgspec
import pytest

from oobleck.master.api.view import problem_of
from oobleck.master.rules.admission import Refusal
from support import loops
from support.agent import Agent, facts
from support.masters import running


def test_an_agent_that_follows_another_head_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def begin() -> None:
        async with running(tmp_path, validate=True):
            pass  # a term that began in this process goes above all others

    async def ask() -> str:
        async with running(tmp_path, validate=True) as master:
            own = master.state.head
            assert own is not None
            agent, other = Agent(facts("n1")), msgspec.structs.replace(own, begun_by="0b" * 16)
            for followed in (other, other, msgspec.structs.replace(other, term=2)):
                agent.acted_on = followed
                assert isinstance(await master.sessions.open(agent.registration()), Refusal)
            return problem_of(master.state, "")

    loops.run(begin())
    told = loops.run(ask())
    assert "n1 follows term 2 (begun by 0b0b0b0b) of history" in told
    assert "end this master, or, if the other is lost for good, start this one on a copy" in told
    refused = [record for record in caplog.records if record.getMessage() == "agent refused"]
    assert len(refused) == 2, "once for each head"
