"""Who is trusted when it is decided: revoked callers and their tokens, and how often one renews."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from oobleck.cli.cluster import authority
from oobleck.core.ids import JobId, NodeName
from oobleck.host.security import pki
from oobleck.host.security.credentials import Credentials, Role
from oobleck.master.clients.requests import Requests
from oobleck.master.events.trust import (
    CredentialIssued,
    CredentialsRevoked,
    TokenCreated,
    TrustChanged,
)
from oobleck.master.loop import Master
from oobleck.master.rules.admission import Refusal
from oobleck.master.state.trust import (
    Denied,
    StillFresh,
    TooSoon,
    Trust,
    apply,
    check_caller,
    check_join,
    check_renewal,
    is_revoked,
)
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.secure import open_aio_channel
from support import holders, loops, masters
from support.agent import Agent, facts
from support.commands import run
from support.jobs import job_spec
from support.masters import MasterProcess

LIMIT_S = 60.0
END = 1e9
EVE: tuple[Role, str] = ("operator", "eve")


def created(fingerprint: str, role: Role, name: str = "", by: str = "eve") -> TokenCreated:
    return TokenCreated(
        fingerprint=fingerprint, role=role, name=name, expires_at=END, maker=("operator", by)
    )


def joined(trust: Trust, fingerprint: str, name: str, unix: float) -> None:
    role = check_join(trust, fingerprint, "key", name, unix)
    issued = CredentialIssued(role=role, name=name, expires_at=END, token=fingerprint, key="key")
    apply(trust, issued, unix)


def test_what_a_revoked_holder_made_or_may_join_by_ends() -> None:
    trust = Trust()
    for token in (
        created("of-eve", "agent"),
        created("mal-by-eve", "operator"),
        created("of-mal", "viewer", by="mal"),
        created("for-eve", "operator", "eve", by="ann"),
        created("eve-by-ann", "operator", by="ann"),
        created("for-viewer-eve", "viewer", "eve", by="ann"),
    ):
        apply(trust, token, 1.0)
    joined(trust, "eve-by-ann", "eve", 2.0)
    joined(trust, "mal-by-eve", "mal", 3.0)
    apply(trust, CredentialsRevoked(role="operator", name="eve"), 4.0)
    # Who has joined stays, and may hear the answer again; whom he lets in, too.
    assert set(trust.tokens) == {"mal-by-eve", "of-mal", "for-viewer-eve"}
    assert is_revoked(trust, EVE)
    assert not is_revoked(trust, ("operator", "mal"))
    assert trust.given["operator", "mal"].by == EVE
    for ended in ("of-eve", "for-eve", "eve-by-ann"):
        with pytest.raises(Denied, match="expired or was revoked"):
            check_join(trust, ended, "key", "eve", 5.0)
    # A renewal does not change whose token it was.
    apply(trust, CredentialIssued(role="operator", name="mal", expires_at=END), 6.0)
    assert trust.given["operator", "mal"].by == EVE


def test_a_clock_that_was_put_back_leaves_nobody_in() -> None:
    trust = Trust()
    for made in ("of-n1", "of-n1-again"):
        apply(trust, created(made, "agent"), 999.0)
    joined(trust, "of-n1", "n1", 1000.0)
    n1 = pki.Identity(role="agent", name="n1", issued_at=1000.0, expires_at=END)
    for unix in (900.0, 800.0):
        apply(trust, CredentialsRevoked(role="agent", name="n1"), unix)
        assert is_revoked(trust, ("agent", "n1"))
        with pytest.raises(Denied, match="agent n1 was revoked"):
            check_caller(trust, n1, unix)
    joined(trust, "of-n1-again", "n1", 1001.0)
    assert not is_revoked(trust, ("agent", "n1"))


@pytest.mark.parametrize(("life_s", "apart_s"), [(90 * 86_400.0, 60.0), (20.0, 0.4)])
def test_a_holder_renews_once_in_a_while(life_s: float, apart_s: float) -> None:
    trust = Trust()
    before = pki.Identity(role="operator", name="eve", issued_at=10.0)
    now = replace(before, issued_at=100.0)
    check_renewal(trust, before, life_s, 100.0)
    apply(trust, CredentialIssued(role="operator", name="eve", expires_at=END), 100.0)
    for unix in (100.0, 100.0 + 0.9 * apart_s):
        again = f"{unix - 100:.1f} s ago; it can be renewed in {100 + apart_s - unix:.1f} s"
        for shown, kind in ((now, StillFresh), (before, TooSoon)):
            with pytest.raises(TooSoon) as refusal:
                check_renewal(trust, shown, life_s, unix)
            assert type(refusal.value) is kind
            assert str(refusal.value) == f"operator eve was given a certificate {again}"
    check_renewal(trust, now, life_s, 100.0 + apart_s)
    check_renewal(trust, now, life_s, 50.0)  # the calendar was put back
    check_renewal(trust, replace(now, role="viewer"), life_s, 100.0)


def test_what_a_caller_asks_who_is_revoked_in_that_turn_is_denied(tmp_path: Path) -> None:
    """All calls had come, and were allowed, before the revocation was decided on."""

    async def play() -> None:
        async with masters.running(tmp_path) as master:
            job_id = await master.requests.submit("r1", job_spec("demo"))
            before = master.state.sequence
            await _revoke_and_ask(master, job_id)
        assert master.state.sequence == before + 2  # the revocations
        assert not master.state.nodes
        assert list(master.state.jobs) == [job_id]

    loops.run(play())


async def _revoke_and_ask(running: Master, job_id: JobId) -> None:
    def revoke(role: Role, name: str) -> Coroutine[Any, Any, None]:
        event = CredentialsRevoked(role=role, name=name)
        return running.requests.change_trust(lambda trust, unix: (event, None))

    def renew(trust: Trust, unix: float) -> tuple[TrustChanged, None]:
        return CredentialIssued(role="operator", name="eve", expires_at=END), None

    agent = pki.Identity(role="agent", name="n1", issued_at=1.0, expires_at=END * 10)
    register = Agent(facts("n1")).registration()
    eve = pki.Identity(role="operator", name="eve", issued_at=1.0, expires_at=END * 10)
    hers: Requests = running.requests.of(eve)
    node = NodeName("n1")
    _, _, session, *answers = await asyncio.gather(
        revoke("operator", "eve"),
        revoke("agent", "n1"),
        running.sessions.open(register, agent),
        hers.submit("r2", job_spec("more")),
        hers.cancel("r3", job_id),
        hers.save("r4", job_id),
        hers.drain("r5", [node], "", force=True),
        hers.undrain("r6", node),
        hers.change_trust(renew),
        return_exceptions=True,
    )
    assert isinstance(session, Refusal)
    assert "agent n1 was revoked" in session.reason
    assert [type(answer) for answer in answers] == [Denied] * 6


# ---- a real master


def pki_of(channel: grpc.aio.Channel) -> Any:
    return rpc.PkiStub(channel)  # type: ignore[no-untyped-call]


def told(running: MasterProcess, holder: str) -> int:
    """How often the log says that the holder was given a certificate."""
    lines = running.errors.read_text().splitlines()
    return sum("credential issued" in line and f"holder={holder}" in line for line in lines)


def test_a_holder_who_asks_all_the_time_is_given_one_certificate(
    running: MasterProcess, folder: Path
) -> None:
    mine = holders.signed(folder, pki.Identity(role="operator", name="mallory"))
    request = pb.RenewRequest(request=pki.new_request(pki.read_key(mine.key)))

    async def renew_often() -> list[Any]:
        async with AsyncExitStack() as stack:
            stubs = []
            for _ in range(8):  # as one connection has few calls at a time
                opened = open_aio_channel(holders.at(running.address, mine), ())
                stubs.append(pki_of(await stack.enter_async_context(opened)))
            calls = (stub.Renew(request, timeout=LIMIT_S) for stub in 4 * stubs)
            return await asyncio.gather(*calls, return_exceptions=True)

    answers = loops.run(renew_often())
    refused = [one for one in answers if isinstance(one, grpc.aio.AioRpcError)]
    assert len(answers) == len(refused) + 1 == 32
    assert {one.code() for one in refused} == {grpc.StatusCode.ALREADY_EXISTS}
    assert told(running, "mallory") == 1


def test_renewing_twice_is_no_error(running: MasterProcess, folder: Path, tmp_path: Path) -> None:
    shown = tmp_path / "ned"
    authority.issue(folder, shown, "viewer", "ned")
    arguments = ("pki", "renew", "--master", running.address, "--credentials", str(shown))
    first, again = run(*arguments), run(*arguments)
    assert (first.returncode, first.stderr) == (0, "")
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert again.stderr.startswith("nothing to do: viewer ned was given a certificate ")
    assert told(running, "ned") == 1


def test_nobody_takes_a_name_that_was_given_without_the_master(
    running: MasterProcess, everyone: dict[str, Credentials], folder: Path, tmp_path: Path
) -> None:
    """By a token for any name; one for that name is its operator's wish."""
    authority.issue(folder, tmp_path / "held", "agent", "held")
    operator, key = everyone["operator"], pki.new_key()
    request = pki.new_request(key)

    async def join(named: str, name: str) -> str:
        async with open_aio_channel(holders.at(running.address, operator), ()) as channel:
            asked = pb.TokenRequest(request=request, role="agent", name=named, ttl_s=600.0)
            made = await pki_of(channel).CreateToken(asked, timeout=LIMIT_S)
        shown = made.certificate.encode()
        token = Credentials(authority=operator.authority, certificate=shown, key=pki.key_pem(key))
        async with open_aio_channel(holders.at(running.address, token), ()) as channel:
            joining = pki_of(channel).Join(pb.JoinRequest(request=request, name=name))
            if refused := await joining.details():
                return str(refused)
            return pki.identity_of((await joining).certificate.encode()).name

    async def revoke() -> None:
        async with open_aio_channel(holders.at(running.address, operator), ()) as channel:
            gone = pb.RevokeRequest(holder=pb.Holder(role="agent", name="held"))
            await pki_of(channel).Revoke(gone, timeout=LIMIT_S)

    assert "agent held has a certificate already" in loops.run(join("", "held"))
    assert loops.run(join("", "free")) == "free"
    loops.run(revoke())
    assert loops.run(join("", "held")) == "held"
    assert loops.run(join("held", "held")) == "held"


def test_a_token_lets_in_once_however_often_it_is_shown(
    running: MasterProcess, everyone: dict[str, Credentials]
) -> None:
    key = pki.new_key()
    request = pki.new_request(key)

    async def play() -> None:
        operator = everyone["operator"]
        async with open_aio_channel(holders.at(running.address, operator), ()) as channel:
            stub = pki_of(channel)
            asked = pb.TokenRequest(request=request, role="viewer", ttl_s=600.0)
            made = await stub.CreateToken(asked, timeout=LIMIT_S)
            token = Credentials(
                authority=operator.authority,
                certificate=made.certificate.encode(),
                key=pki.key_pem(key),
            )
            join = pb.JoinRequest(request=request, name="ann")
            async with open_aio_channel(holders.at(running.address, token), ()) as hers:
                replies = [await pki_of(hers).Join(join, timeout=LIMIT_S) for _ in range(3)]
                ends = {pki.expiry(reply.certificate.encode()) for reply in replies}
                assert len(ends) == 1
                revoke = pb.RevokeRequest(holder=pb.Holder(role="viewer", name="ann"))
                await stub.Revoke(revoke, timeout=LIMIT_S)
                with pytest.raises(grpc.aio.AioRpcError, match="expired or was revoked"):
                    await pki_of(hers).Join(join, timeout=LIMIT_S)
            listed = await stub.ListCredentials(pb.ListCredentialsRequest(), timeout=LIMIT_S)
            (ann,) = [held for held in listed.credentials if held.name == "ann"]
            assert ann.revoked
            assert (ann.by.role, ann.by.name) == ("operator", "some-operator")

    loops.run(play())
    assert told(running, "ann") == 1
