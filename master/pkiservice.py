"""The service by which certificates are given out and taken back: joins, renewals, tokens.

Every answer is journaled by the loop before it leaves. Who may call what is decided before, by
`oobleck.master.access`; here it is what the caller may get.
"""

import time
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc

from oobleck.host.credentials import Role
from oobleck.master.access import caller
from oobleck.master.loop import Master
from oobleck.master.trust import (
    Decide,
    Denied,
    Trust,
    check_join,
    check_new_token,
    find_token,
    is_revoked,
)
from oobleck.master.trustevents import (
    CredentialIssued,
    CredentialsRevoked,
    TokenCreated,
    TokenRevoked,
    TrustChanged,
)
from oobleck.planner.ids import check_name
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from oobleck.host.pki import Authority, Identity

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

SHORTEST_TTL_S = 1.0
LONGEST_TTL_S = 7 * 86_400.0
#: Characters of a token's fingerprint that stand for it.
ID_CHARACTERS = 12


class PkiService(rpc.PkiServicer):
    def __init__(self, master: Master, authority: "Authority | None", life_s: float) -> None:
        """`authority`: None where the service is in the clear; `life_s`: of the certificates that
        holders are given."""
        self._master = master
        self._authority = authority
        self._life_s = life_s

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.CertificateReply:
        from oobleck.host import pki

        authority, token = await self._ready(context)
        key = await _read_key(request.request, context)
        try:
            name = check_name(request.name, token.role)
        except ValueError as error:
            await _refuse(context, f"name: {error}")
        digest = pki.key_digest(key)

        def decide(trust: Trust, unix: float) -> tuple[TrustChanged, bytes]:
            role = check_join(trust, token.fingerprint, digest, name, unix)
            certificate = authority.sign(key, pki.Identity(role=role, name=name), self._life_s)
            issued = CredentialIssued(
                role=role,
                name=name,
                expires_at=pki.expiry(certificate),
                token=token.fingerprint,
                key=digest,
            )
            return issued, certificate

        return _reply(await self._change(decide, context), authority)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.CertificateReply:
        from oobleck.host import pki

        authority, holder = await self._ready(context)
        key = await _read_key(request.request, context)

        def decide(trust: Trust, unix: float) -> tuple[TrustChanged, bytes]:
            identity = pki.Identity(role=holder.role, name=holder.name)
            certificate = authority.sign(key, identity, self._life_s)
            issued = CredentialIssued(
                role=holder.role, name=holder.name, expires_at=pki.expiry(certificate)
            )
            return issued, certificate

        return _reply(await self._change(decide, context), authority)

    async def CreateToken(self, request: pb.TokenRequest, context: Context) -> pb.CertificateReply:
        from oobleck.host import pki

        authority, _ = await self._ready(context)
        key = await _read_key(request.request, context)
        try:
            role = _read_role(request.role)
            name = check_name(request.name, role) if request.name else ""
            if not SHORTEST_TTL_S <= request.ttl_s <= LONGEST_TTL_S:  # not a number: neither
                raise ValueError(f"--ttl: {request.ttl_s:g} s is not from 1 s to 7 days")
        except ValueError as error:
            await _refuse(context, str(error))

        def decide(trust: Trust, unix: float) -> tuple[TrustChanged, bytes]:
            check_new_token(trust, unix)
            identity = pki.Identity(role=role, name=name, token=True)
            certificate = authority.sign(key, identity, request.ttl_s)
            created = TokenCreated(
                fingerprint=pki.fingerprint(certificate),
                role=role,
                name=name,
                expires_at=pki.expiry(certificate),
            )
            return created, certificate

        return _reply(await self._change(decide, context), authority)

    async def ListCredentials(
        self, request: pb.ListCredentialsRequest, context: Context
    ) -> pb.ListCredentialsReply:
        await self._ready(context)
        trust, unix = self._master.state.trust, time.time()
        return pb.ListCredentialsReply(
            tokens=[
                pb.TokenInfo(
                    id=fingerprint[:ID_CHARACTERS],
                    role=token.role,
                    name=token.name,
                    expires_at=token.expires_at,
                )
                for fingerprint, token in trust.tokens.items()
                if token.expires_at > unix and not token.key
            ],
            credentials=[
                pb.CredentialInfo(
                    role=role,
                    name=name,
                    expires_at=given.expires_at,
                    revoked=is_revoked(trust, (role, name)),
                )
                for (role, name), given in sorted(trust.given.items())
            ],
        )

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeReply:
        await self._ready(context)
        event: TrustChanged
        match request.WhichOneof("what"):
            case "token_id":
                found = find_token(self._master.state.trust, request.token_id)
                if found is None:
                    await _not_found(context, f"no token {request.token_id[:80]!r}")
                event = TokenRevoked(fingerprint=found)
            case "holder":
                try:
                    role = _read_role(request.holder.role)
                    name = check_name(request.holder.name, role)
                except ValueError as error:
                    await _refuse(context, str(error))
                event = CredentialsRevoked(role=role, name=name)
            case _:
                await _refuse(context, "what: is missing; name a holder or a token")
        await self._change(lambda trust, unix: (event, None), context)
        return pb.RevokeReply()

    async def _ready(self, context: Context) -> "tuple[Authority, Identity]":
        """The authority and who calls, which a service with an authority always knows."""
        identity = caller(context)
        if self._authority is None or identity is None:
            text = (
                "this master has no authority: stop it, run 'oobleck pki init --dir "
                f"{self._master.config.state_dir}/pki', and start it again"
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        return self._authority, identity

    async def _change(self, decide: Decide[T], context: Context) -> T:
        try:
            return await self._master.requests.change_trust(decide)
        except Denied as denied:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(denied))


async def _refuse(context: Context, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
    raise AssertionError("an abort does not return")


async def _not_found(context: Context, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.NOT_FOUND, text)
    raise AssertionError("an abort does not return")


async def _read_key(request: str, context: Context) -> "EllipticCurvePublicKey":
    from oobleck.host import pki

    try:
        return pki.read_request(request)
    except ValueError as error:
        await _refuse(context, f"request: {error}")


def _read_role(text: str) -> Role:
    match text:
        case "agent" | "operator" | "viewer":
            return text
        case _:
            raise ValueError(f"role: {text[:80]!r} is not agent, operator or viewer")


def _reply(certificate: bytes, authority: "Authority") -> pb.CertificateReply:
    return pb.CertificateReply(
        certificate=certificate.decode(), authority=authority.certificate.decode()
    )
