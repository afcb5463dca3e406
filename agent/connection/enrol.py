"""Certificate of the node: issued for a join token, kept in a folder, renewed before it ends.

The key is made before the token is used, and never leaves the folder. A join that was cut off is
repeated with the same key, which the master recognises. Must not know sessions.
"""

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from oobleck.agent.connection.heads import Heads
from oobleck.host.address import pinned, split_addresses, stays_on_host
from oobleck.host.ipc.endpoint import Endpoint, check_insecure, find_own_master
from oobleck.host.security import pki
from oobleck.host.security.credential_folder import (
    check_free,
    check_holder,
    have_issued,
    keep,
    own_key,
)
from oobleck.host.security.credentials import (
    CERTIFICATE,
    TOKEN_VARIABLE,
    Credentials,
    read_credentials,
)
from oobleck.host.security.pki import shown_token
from oobleck.host.security.validity import DAY_S, fault, refusal, warning
from oobleck.host.system.files import below_home
from oobleck.proto import control_pb2 as pb
from oobleck.proto.control_pb2_grpc import PkiStub
from oobleck.proto.secure import open_aio_channel

logger = logging.getLogger(__name__)

#: Parts of a certificate's life: how much is left when it is renewed, and the wait between retries.
_RENEW_PART = 2 / 3
_RETRY_PART = 1 / 20
_LONGEST_LOOK_S = 3600.0
_SHORTEST_LOOK_S = 0.2
_CALL_TIMEOUT_S = 10.0
_JOIN_RETRY_S = 2.0
#: Answers that another try does not change.
_FINAL = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
)


#: Where operators' credentials are, for `oobleck`.
OPERATOR_VARIABLE = "OOBLECK_CREDENTIALS"


class Denied(Exception):
    """Refusal by the master to give a certificate; the text is its reason."""


def read_join_token(path: Path | None) -> Credentials | None:
    """Read the token from the file, else from the environment, from which it is removed so that no
    worker inherits it. None: there is neither. Raises ValueError."""
    return shown_token(path, os.environ.pop(TOKEN_VARIABLE, ""))


def choose_way(
    master: str, name: str, folder: Path | None, token: Credentials | None, *, insecure: bool
) -> "Holder":
    """Choose the agent's credentials: those in the folder, or new ones signed by an authority of
    the agent's own user, or none yet, to be got by `token`. `master`: addresses with commas. Raises
    ValueError with the flag and the fix."""
    heads = split_addresses(master)
    if insecure:
        if folder is not None or token is not None:
            raise ValueError("--insecure excludes --credentials and a join token; leave one out")
        for head in heads:
            check_insecure("--insecure", head)
        master = ",".join(map(pinned, heads))
        return Holder(master=master, folder=None, credentials=None)
    own_user_alone = False
    if folder is None and token is None:
        stays = all(map(stays_on_host, heads))
        if stays:
            heads = [pinned(head) for head in heads]
            master = ",".join(heads)
        own = next(filter(None, map(find_own_master, heads)), None)
        if own is not None and os.path.exists(own.pki):
            folder, own_user_alone = own.node(name), own.private and len(heads) == 1
            _sign_for(folder, own.pki, name)
        elif stays:
            return Holder(master=master, folder=None, credentials=None)
    folder = folder or below_home(f"~/.oobleck/nodes/{name}")
    credentials = _stored(folder, name)
    if token is not None and (credentials is None or _is_newer(token, credentials)):
        _check_token(folder, token, name)
        credentials = None  # the operator made the token because these are no longer valid
    elif credentials is None:
        raise ValueError(
            f"--master {master}: the agent needs credentials, and {folder} has none; make a token "
            "with 'oobleck pki token --out FILE' and give it by --token-file FILE or "
            f"{TOKEN_VARIABLE}{_hint()}"
        )
    elif pki.expiry(credentials.certificate) <= time.time():
        raise ValueError(f"--credentials {folder}: {fault(credentials, time.time())}")
    return Holder(
        master=master, folder=folder, credentials=credentials, own_user_alone=own_user_alone
    )


def _sign_for(folder: Path, authority: Path, name: str) -> None:
    """Sign a certificate for the agent with the authority's key. Raises ValueError with the fix."""
    fix = "give another one a token of 'oobleck pki token' by --token-file"
    try:
        if unrecorded := have_issued(authority, folder, "agent", name):
            logger.warning("certificate not recorded", extra={"reason": unrecorded})
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}; {fix}") from error


def _hint() -> str:
    if OPERATOR_VARIABLE not in os.environ:
        return ""
    return f"; {OPERATOR_VARIABLE} is not read by agents: give --credentials DIR"


def _is_newer(token: Credentials, credentials: Credentials) -> bool:
    made = pki.identity_of(token.certificate).issued_at
    return made > pki.identity_of(credentials.certificate).issued_at


def _stored(folder: Path, name: str) -> Credentials | None:
    """Read the node's credentials from the folder; None if it has none. Raises ValueError with the
    fix, also if they are another holder's."""
    if not (folder / CERTIFICATE).exists():
        return None
    try:
        check_holder(folder, "agent", name)
    except ValueError as error:
        raise ValueError(f"--credentials {error}") from error
    return read_credentials(folder)


def _check_token(folder: Path, token: Credentials, name: str) -> None:
    """Raise ValueError if the folder cannot take the certificate that the token would give."""
    if (role := pki.identity_of(token.certificate).role) != "agent":
        raise ValueError(
            f"the join token is for the role {role}; make an agent's with 'oobleck pki token'"
        )
    try:
        check_free(folder, role, name, token.authority)
    except ValueError as error:
        raise ValueError(f"--credentials {error}") from error


async def join(heads: Heads, folder: Path, token: Credentials, name: str) -> Credentials:
    """Get a certificate for the token, retrying until a master answers. Raises Denied, ValueError,
    OSError."""
    request = pb.JoinRequest(request=pki.new_request(own_key(folder)), name=name)
    reply = await _until_answered(heads, token, request)
    found = keep(folder, token.authority, reply.certificate.encode())
    logger.info("joined the cluster", extra={"master": heads.current, "node": name})
    return found


async def _until_answered(
    heads: Heads, token: Credentials, request: pb.JoinRequest
) -> pb.CertificateReply:
    """Send the request to heads in turn until one answers. Raises Denied."""
    logged = ""
    failed = False
    while True:
        await heads.seek(pass_over=failed)
        failed = True
        endpoint = Endpoint(address=heads.current, credentials=token)
        try:
            reply: pb.CertificateReply = await _call(endpoint, lambda stub: stub.Join, request)
        except grpc.aio.AioRpcError as error:
            if error.code() in _FINAL:
                raise Denied(error.details() or error.code().name) from error
            # The master refuses an expired token in the handshake, where it can give no reason.
            if pki.expiry(token.certificate) < time.time():
                raise Denied(fault(token, time.time())) from error
            reason = refusal(token, error.details() or "", time.time()) or error.code().name
            if reason != logged:
                logged = reason
                fields = {"master": endpoint.address, "reason": reason}
                logger.warning("cannot join, trying on", extra=fields)
        else:
            return reply
        await asyncio.sleep(random.uniform(0.0, _JOIN_RETRY_S))


async def _call(
    endpoint: Endpoint, method: Callable[[Any], Callable[..., Awaitable[Any]]], request: Any
) -> Any:
    async with open_aio_channel(endpoint, ()) as channel:
        stub = PkiStub(channel)  # type: ignore[no-untyped-call]  # generated
        return await method(stub)(request, timeout=_CALL_TIMEOUT_S)


@dataclass(slots=True)
class Holder:
    """Credentials that the agent shows to the master now."""

    #: HOST:PORT of the heads, with commas between them.
    master: str
    #: None: the master is called in the clear.
    folder: Path | None
    credentials: Credentials | None
    #: The master is this user's, and serves no other user without this user's consent.
    own_user_alone: bool = False
    heads: Heads = field(init=False)
    #: Unix time of the last warning that the certificate ends.
    _warned_at: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self.heads = Heads(split_addresses(self.master), self.folder)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(address=self.heads.current, credentials=self.credentials)

    async def keep_fresh(self) -> None:
        """Renew the certificate before it ends, until cancelled."""
        while self.folder is not None and self.credentials is not None:
            self._warn(self.credentials, time.time())
            await asyncio.sleep(_wait_s(self.credentials.certificate, time.time()))
            if _left_s(self.credentials.certificate, time.time()) <= 0:
                await self._renew(self.folder, self.credentials)

    def _warn(self, credentials: Credentials, now: float) -> None:
        """Warn once a day that the certificate ends soon, or has ended."""
        problem = fault(credentials, now) or warning(credentials, now)
        if problem and abs(now - self._warned_at) >= DAY_S:
            self._warned_at = now
            logger.warning("a certificate needs attention", extra={"reason": problem})

    async def _renew(self, folder: Path, old: Credentials) -> None:
        request = pb.RenewRequest(request=pki.new_request(pki.read_key(old.key)))
        try:
            reply = await _call(self.endpoint, lambda stub: stub.Renew, request)
            self.credentials = keep(folder, old.authority, reply.certificate.encode())
        except (grpc.aio.AioRpcError, OSError, ValueError) as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            logger.warning("certificate not renewed, trying on", extra={"reason": details})
            return
        logger.info("certificate renewed")


def _left_s(certificate: bytes, now: float) -> float:
    """Return the seconds until the certificate's renewal is due."""
    end = pki.expiry(certificate)
    return end - _RENEW_PART * (end - pki.begin(certificate)) - now


def _wait_s(certificate: bytes, now: float) -> float:
    """Return the seconds until the next look at the certificate, bounded since clocks may jump."""
    left_s = _left_s(certificate, now)
    if left_s <= 0:  # the last try failed
        left_s = _RETRY_PART * (pki.expiry(certificate) - pki.begin(certificate))
        left_s *= random.uniform(0.5, 1.0)
    return min(max(left_s, _SHORTEST_LOOK_S), _LONGEST_LOOK_S)
