"""Code that goes with jobs through a real master: from who submits to the nodes, over a restart."""

import functools
import json
from pathlib import Path

import pytest

from oobleck.agent.connection import code
from oobleck.agent.processes.code import NoCode
from oobleck.cli.client import MasterClient
from oobleck.core.job.wheel import stored_as
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.credentials import Credentials
from oobleck.host.wheel import Wheel
from support import loops
from support.crowd import job_text
from support.fake_agent import MasterProcess
from support.wheels import wheel_of

#: Of several messages.
CONTENT = wheel_of({"mine.py": "", "mine.bin": bytes(range(256)) * 12_000})


def fetched(endpoint: Endpoint, digest: str) -> bytes:
    return loops.run(code.fetch(lambda: endpoint, digest))


def test_a_wheel_is_kept_for_its_job_and_given_to_nodes(tmp_path: Path) -> None:
    state, digest = tmp_path / "state", Wheel(CONTENT).digest
    job = json.dumps(json.loads(job_text(10)) | {"code": stored_as(digest)})
    master = MasterProcess(state)
    endpoint = Endpoint(address=master.address)
    with MasterClient(master.address) as client:
        with pytest.raises(CommandFailed, match="code: the wheel did not come; submit the job"):
            client.submit(job, "first")
        with pytest.raises(NoCode, match="has no such wheel"):
            fetched(endpoint, digest)
        with pytest.raises(NoCode, match="has no such wheel"):
            fetched(endpoint, "../journal.log")
        client.put_code(CONTENT)
        assert client.submit(job, "second").job_id == "demo-1"
        with pytest.raises(CommandFailed, match="more than 67108864 bytes; leave data out"):
            client.put_code(bytes((64 << 20) + 1))
    master.kill()
    master = MasterProcess(state, listen=master.address)
    try:
        assert fetched(endpoint, digest) == CONTENT
    finally:
        master.close()


def test_nodes_alone_get_code_and_operators_alone_bring_it(
    running: MasterProcess, everyone: dict[str, Credentials]
) -> None:
    at = functools.partial(Endpoint, address=running.address)
    for role in ("viewer", "agent", "worker"):
        denied = pytest.raises(CommandFailed, match=f"denied: {role} .* may not call PutCode")
        with MasterClient(at(credentials=everyone[role])) as client, denied:
            client.put_code(CONTENT)
    with MasterClient(at(credentials=everyone["operator"])) as client:
        client.put_code(CONTENT)
    digest = Wheel(CONTENT).digest
    assert fetched(at(credentials=everyone["agent"]), digest) == CONTENT
    with pytest.raises(NoCode, match="operator some-operator may not call GetCode; agent may"):
        fetched(at(credentials=everyone["operator"]), digest)
