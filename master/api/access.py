"""Access control: a table of who may call which RPC, and the check before each call.

The certificate of the connection identifies the caller. A method that is not in the table is denied
to all. A service without certificates listens on this host alone, and there everybody may call
everything in the table. Must not know what the calls do.
"""

import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import grpc

from oobleck.host.security.credentials import Role
from oobleck.master.state.trust import Denied, Trust, check_caller
from oobleck.proto.health import CHECK

if TYPE_CHECKING:
    from oobleck.host.security.pki import Identity

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_AGENT: frozenset[Role] = frozenset({"agent"})
_READING: frozenset[Role] = frozenset({"operator", "viewer"})
_OPERATOR: frozenset[Role] = frozenset({"operator"})
_TOKEN: frozenset[Role] = frozenset()  # holders of join tokens, which have no role yet

#: Workers talk to their agent alone, so they have nothing here.
ALLOWED: Mapping[str, frozenset[Role]] = {
    "/oobleck.Control/Session": _AGENT,
    "/oobleck.Control/GetCode": _AGENT,
    "/oobleck.Control/GiveCode": _AGENT,
    "/oobleck.Operator/Submit": _OPERATOR,
    "/oobleck.Operator/PutCode": _OPERATOR,
    "/oobleck.Operator/ListJobs": _READING,
    "/oobleck.Operator/GetJob": _READING,
    "/oobleck.Operator/WatchJob": _READING,
    "/oobleck.Operator/CancelJob": _OPERATOR,
    "/oobleck.Operator/CancelUnknownJob": _OPERATOR,
    "/oobleck.Operator/AdoptJob": _OPERATOR,
    "/oobleck.Operator/SaveCheckpoint": _OPERATOR,
    "/oobleck.Operator/GetProfile": _READING,
    "/oobleck.Operator/GetPlanning": _READING,
    "/oobleck.Operator/ListNodes": _READING,
    "/oobleck.Operator/DrainNode": _OPERATOR,
    "/oobleck.Operator/UndrainNode": _OPERATOR,
    "/oobleck.Operator/Events": _READING,
    "/oobleck.Operator/Metrics": _READING,
    "/oobleck.Operator/GetTimeline": _OPERATOR,  # has the workers record
    "/oobleck.Operator/Logs": _READING,
    "/oobleck.Operator/Examine": _OPERATOR,  # has every node's disks and links used
    "/oobleck.Operator/Backup": _OPERATOR,
    "/oobleck.Pki/Join": _TOKEN,
    "/oobleck.Pki/Renew": frozenset({"agent", "worker", "operator", "viewer"}),
    "/oobleck.Pki/CreateToken": _OPERATOR,
    "/oobleck.Pki/ListCredentials": _OPERATOR,
    "/oobleck.Pki/Revoke": _OPERATOR,
    CHECK: _READING,
}
JOIN = "/oobleck.Pki/Join"

#: Different refusals that get a line in the log; the rest is only counted.
_MOST_TOLD = 1000


@functools.lru_cache(maxsize=4096)
def _identity_of(pem: bytes) -> "Identity":
    from oobleck.host.security.pki import identity_of

    return identity_of(pem)


def caller(context: Context) -> "Identity | None":
    """Return the caller's identity; None: a caller on this host, without TLS. Raises Denied."""
    certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
    if certificate is None:
        return None
    try:
        return _identity_of(certificate)
    except ValueError as error:
        raise Denied(str(error)) from error


async def _at_once(peer: str) -> None:
    pass


class Access:
    def __init__(
        self,
        trust: Trust,
        refused: Counter[str],
        *,
        secured: bool,
        allowed: Callable[[str, "Identity | None"], None] = lambda peer, who: None,
        denied: Callable[[str], Awaitable[None]] = _at_once,
    ) -> None:
        """`secured`: whether callers have to show certificates; `refused`: counts denials;
        `allowed` is told of calls that are, by the peer's name in gRPC and who it is; `denied` is
        told of the others, and returns when one may be answered."""
        self._trust = trust
        self._refused = refused
        self._secured = secured
        self._allowed = allowed
        self._denied = denied
        self._told: set[tuple[str, str]] = set()

    async def check(self, method: str, context: Context) -> None:
        """Ends the call where the caller may not make it."""
        code = grpc.StatusCode.UNAUTHENTICATED
        who = "nobody"
        try:
            identity = caller(context)
            if identity is None and self._secured:
                raise Denied("show a certificate of this cluster ('oobleck pki join' gets one)")
            if identity is not None:
                who = identity.uri
                check_caller(self._trust, identity, time.time())
            code = grpc.StatusCode.PERMISSION_DENIED
            _check_table(method, identity)
            self._allowed(context.peer(), identity)
            return
        except Denied as denied:
            reason = str(denied)
        self._refused["denied call"] += 1
        if (who, method) not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add((who, method))
            log.warning("call denied", extra={"who": who, "method": method, "reason": reason})
        await self._denied(context.peer())
        await context.abort(code, reason)


def _check_table(method: str, identity: "Identity | None") -> None:
    roles = ALLOWED.get(method)
    name = method.rpartition("/")[2]
    if roles is None:
        raise Denied(f"nobody may call {name}")
    if identity is None:
        return
    if identity.token:
        if method != JOIN:
            raise Denied(f"a join token is good for joining alone, not for {name}")
    elif identity.role not in roles:
        allowed = " or ".join(sorted(roles)) or "the holder of a join token"
        raise Denied(f"{identity.role} {identity.name} may not call {name}; {allowed} may")
