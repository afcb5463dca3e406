"""Wheels of jobs on the master's disk: whole or not there, bounded, gone with their jobs, and
given to nodes over a restart."""

import functools
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from oobleck.agent.wheels import NoCode, WheelCache
from oobleck.cli.client import MasterClient
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.credentials import Credentials
from oobleck.host.wheel import Wheel, stored_as
from oobleck.master.api import wheels
from oobleck.master.api.wheels import Wheels
from support import loops
from support.jobs import job_text
from support.masters import MasterProcess
from support.wheels import wheel_of

#: Of several messages.
CONTENT = wheel_of({"mine.py": "", "mine.bin": bytes(range(256)) * 12_000})
DIGEST = hashlib.sha256(b"one two").hexdigest()


def put(folder: Wheels, *parts: bytes) -> str:
    async def coming() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return loops.run(folder.put(coming()))


def fetched(endpoint: Endpoint, digest: str) -> bytes:
    return loops.run(WheelCache(lambda: endpoint).fetch(digest))


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


def test_a_wheel_is_there_when_it_is_whole(tmp_path: Path) -> None:
    folder = Wheels(tmp_path / "code")
    assert not folder.has(DIGEST)

    async def broken_off() -> AsyncIterator[bytes]:
        yield b"one "
        assert len(os.listdir(tmp_path / "code")) == 1
        assert not folder.has(DIGEST)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        loops.run(folder.put(broken_off()))
    assert os.listdir(tmp_path / "code") == [], "of one that breaks off nothing stays"
    assert put(folder, b"one ", b"two") == put(folder, b"one two") == DIGEST
    assert folder.has(DIGEST)
    assert (tmp_path / "code" / f"{DIGEST}.whl").read_bytes() == b"one two"
    assert os.listdir(tmp_path / "code") == [f"{DIGEST}.whl"]


def test_wheels_are_bounded_each_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Wheels(tmp_path / "code")
    monkeypatch.setattr(wheels, "MOST_WHEEL_BYTES", 6)
    with pytest.raises(ValueError, match="more than 6 bytes; leave data out of it"):
        put(folder, b"one ", b"two")
    assert os.listdir(tmp_path / "code") == []
    monkeypatch.setattr(wheels, "_MOST_BYTES", 5)
    put(folder, b"1234")
    put(folder, b"5678")
    with pytest.raises(ValueError, match=r"the wheels of jobs have .* or cancel some"):
        put(folder, b"9")


def test_a_wheel_goes_when_no_job_names_it_but_not_before_its_job_can_come(tmp_path: Path) -> None:
    folder = Wheels(tmp_path / "code")
    folder.remove_all_but((), 1e10)  # there is none yet
    named, other = put(folder, b"one two"), put(folder, b"other")
    came = (tmp_path / "code" / f"{other}.whl").stat().st_mtime
    folder.remove_all_but({named}, came + 599)
    assert folder.has(other)
    folder.remove_all_but({named}, came + 10_000)
    assert (folder.has(named), folder.has(other)) == (True, False)
    folder.remove_all_but((), came + 20_000)
    assert not folder.has(named)
