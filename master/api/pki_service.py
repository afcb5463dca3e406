"""Certificates of the cluster: the authority, and the service of joins, renewals and tokens.

The loop journals every answer before it leaves. `oobleck.master.api.access` has decided before who
may call; this module decides on the answer.

The authority's folder has `ca.crt` and `ca.key`, and the master's own `master.crt` and
`master.key`. The master makes itself a new certificate before the old one ends; every handshake
gets the newest.
"""

import logging
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from oobleck.core.ids import check_name
from oobleck.host.security import credential_folder, pki, validity
from oobleck.host.security.credentials import (
    AUTHORITY,
    AUTHORITY_KEY,
    CERTIFICATE,
    KEY,
    MASTER_CERTIFICATE,
    MASTER_KEY,
    MASTER_LIFE_S,
    Role,
    make_private,
    read_file,
    read_secret,
    write_private,
)
from oobleck.master.api.access import caller
from oobleck.master.clients.requests import Requests
from oobleck.master.events.trust import (
    CredentialIssued,
    CredentialsRevoked,
    TokenCreated,
    TokenRevoked,
    TrustChanged,
)
from oobleck.master.loop import Master
from oobleck.master.state.trust import (
    Holder,
    Trust,
    check_join,
    check_new_token,
    check_renewal,
    find_token,
    is_revoked,
    joined_by,
    token_id,
    was_revoked,
)
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

log = logging.getLogger(__name__)


#: Share of its life that the master's own certificate has left when it is renewed.
_RENEW_PART = 1 / 3
#: Name in the certificates of the master's own processes.
_VIEWER = "master"
#: Validity of such a certificate, in seconds. Each process gets a new one. A process that
#: reconnects later fails, and its successor continues.
_VIEWER_LIFE_S = 3600.0
_FIX = (
    "restore it from a copy, or make a new authority in another folder with 'oobleck pki init', "
    "after which all hosts need new credentials"
)
SHORTEST_TTL_S = 1.0
LONGEST_TTL_S = 7 * 86_400.0


def _key(path: Path) -> pki.Key:
    """Read a private key. Raises ValueError with the file and the fix."""
    content = read_secret(path)
    try:
        return pki.read_key(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: is no key that can be read; {_FIX}") from error


def _check_pair(folder: Path, name: str, certificate: bytes, key: pki.Key) -> None:
    """Check that a certificate is of the key beside it. Raises ValueError with the file and the
    fix."""
    try:
        fits = pki.matches(certificate, key)
    except ValueError as error:
        raise ValueError(f"{folder / name}: is no certificate that can be read; {_FIX}") from error
    if not fits:
        raise ValueError(f"{folder / name}: is not of the key beside it; {_FIX}")


class AuthorityFolder:
    def __init__(self, folder: Path) -> None:
        """Read the authority and the master's certificate from `folder`. Raises ValueError with the
        file and the fix."""
        self._folder = folder
        certificate = read_file(folder / AUTHORITY)
        self._certificate = read_file(folder / MASTER_CERTIFICATE)
        key = _key(folder / AUTHORITY_KEY)
        self._key = _key(folder / MASTER_KEY)
        _check_pair(folder, AUTHORITY, certificate, key)
        _check_pair(folder, MASTER_CERTIFICATE, self._certificate, self._key)
        self.authority = pki.Authority(certificate, key)
        self._names = pki.server_names(self._certificate)
        self._viewer_key = pki.new_key()
        self._lock = threading.Lock()
        #: Unix time of the last warning about the authority's end.
        self._warned_at = -math.inf

    @property
    def cluster(self) -> str:
        """Identity of the cluster: the SHA-256 of the authority's public key, in hexadecimal."""
        return pki.key_digest(self.authority.key.public_key())

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a server whose clients must show a certificate of this
        cluster."""
        self._renew_if_due()
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._newer_configuration,  # type: ignore[arg-type]  # None is allowed
            require_client_authentication=True,
        )

    def make_viewer(self, folder: Path) -> None:
        """Put credentials into `folder`, for processes of the master's own that only read. The
        folder is private, and each master process makes a new key for it. Raises OSError."""
        make_private(folder)
        identity = pki.Identity(role="viewer", name=_VIEWER)
        certificate = self.authority.sign(self._viewer_key.public_key(), identity, _VIEWER_LIFE_S)
        write_private(folder / AUTHORITY, self.authority.certificate)
        write_private(folder / KEY, pki.key_pem(self._viewer_key))
        write_private(folder / CERTIFICATE, certificate)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (pki.key_pem(self._key), self._certificate)
        return grpc.ssl_server_certificate_configuration([pair], self.authority.certificate)

    def _newer_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration with a renewed certificate; None: the one before is good. gRPC's
        threads call this at every handshake."""
        with self._lock:
            return self._configuration() if self._renew_if_due() else None

    def _warn(self, now: float) -> None:
        """Warn once a day that the authority has expired, or expires soon."""
        fault = validity.authority_fault(self.authority.certificate, now)
        problem = fault or validity.authority_warning(self.authority.certificate, now)
        if problem and abs(now - self._warned_at) >= validity.DAY_S:
            self._warned_at = now
            level = logging.ERROR if fault else logging.WARNING
            log.log(level, "a certificate needs attention", extra={"reason": problem})

    def _renew_if_due(self) -> bool:
        now = time.time()
        self._warn(now)
        left_s = pki.expiry(self._certificate) - now
        if left_s > MASTER_LIFE_S * _RENEW_PART:
            return False
        self._certificate = self.authority.sign_master(
            self._key.public_key(), self._names, MASTER_LIFE_S
        )
        try:
            write_private(self._folder / MASTER_CERTIFICATE, self._certificate)
        except OSError as error:  # the next start renews it
            log.warning("own certificate not stored", extra={"reason": error.strerror})
        log.info("own certificate renewed", extra={"seconds_left": round(left_s)})
        return True


Context = grpc.aio.ServicerContext[Any, Any]


class PkiService(rpc.PkiServicer):
    def __init__(self, master: Master, authority: pki.Authority | None, life_s: float) -> None:
        """Serve certificates of `authority` that are valid for `life_s`. `authority`: None where
        the service is in the clear."""
        self._master = master
        self._authority = authority
        self._life_s = life_s

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.CertificateReply:
        authority, token = await self._ready(context)
        key = await _read_key(request.request, context)
        try:
            name = check_name(request.name, token.role)
        except ValueError as error:
            await _refuse(context, f"name: {error}")
        digest = pki.key_digest(key)
        issued = [] if token.name else await self._issued(context)

        def decide(trust: Trust, unix: float) -> tuple[TrustChanged | None, bytes]:
            role = check_join(trust, token.fingerprint, digest, name, unix, issued)
            identity = pki.Identity(role=role, name=name)
            if (before := joined_by(trust, token.fingerprint, unix)) is not None:
                # The first answer was lost. The repeated certificate ends when the first one does.
                return None, authority.sign(key, identity, before.expires_at - unix)
            certificate = authority.sign(key, identity, self._life_s)
            joined = CredentialIssued(
                role=role,
                name=name,
                expires_at=pki.expiry(certificate),
                token=token.fingerprint,
                key=digest,
            )
            return joined, certificate

        return _reply(await self._requests(context).change_trust(decide), authority)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.CertificateReply:
        authority, holder = await self._ready(context)
        key = await _read_key(request.request, context)

        def decide(trust: Trust, unix: float) -> tuple[TrustChanged, bytes]:
            check_renewal(trust, holder, self._life_s, unix)
            identity = pki.Identity(role=holder.role, name=holder.name)
            certificate = authority.sign(key, identity, self._life_s)
            issued = CredentialIssued(
                role=holder.role, name=holder.name, expires_at=pki.expiry(certificate)
            )
            return issued, certificate

        return _reply(await self._requests(context).change_trust(decide), authority)

    async def CreateToken(self, request: pb.TokenRequest, context: Context) -> pb.CertificateReply:
        authority, maker = await self._ready(context)
        key = await _read_key(request.request, context)
        try:
            role = _read_role(request.role)
            name = check_name(request.name, role) if request.name else ""
            if not SHORTEST_TTL_S <= request.ttl_s <= LONGEST_TTL_S:  # NaN fails too
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
                maker=(maker.role, maker.name),
            )
            return created, certificate

        return _reply(await self._requests(context).change_trust(decide), authority)

    async def ListCredentials(
        self, request: pb.ListCredentialsRequest, context: Context
    ) -> pb.ListCredentialsReply:
        await self._ready(context)
        trust, unix = self._master.state.trust, time.time()
        issued = {(one.role, one.name): one for one in await self._issued(context)}
        return pb.ListCredentialsReply(
            tokens=[
                pb.TokenInfo(
                    id=token_id(fingerprint),
                    role=token.role,
                    name=token.name,
                    expires_at=token.expires_at,
                    by=_holder(token.maker),
                )
                for fingerprint, token in trust.tokens.items()
                if token.expires_at > unix and not token.key
            ],
            credentials=[
                _credential(trust, holder, issued.get(holder))
                for holder in sorted({*trust.given, *trust.revoked, *issued})
            ],
        )

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeReply:
        await self._ready(context)
        event: TrustChanged
        match request.WhichOneof("what"):
            case "token_id":
                fingerprint = find_token(self._master.state.trust, request.token_id)
                if fingerprint is None:
                    await _not_found(context, f"no token {request.token_id[:80]!r}")
                event = TokenRevoked(fingerprint=fingerprint)
            case "holder":
                try:
                    role = _read_role(request.holder.role)
                    name = check_name(request.holder.name, role)
                except ValueError as error:
                    await _refuse(context, str(error))
                event = CredentialsRevoked(role=role, name=name)
            case _:
                await _refuse(context, "what: is missing; name a holder or a token")
        await self._requests(context).change_trust(lambda trust, unix: (event, None))
        return pb.RevokeReply()

    async def _ready(self, context: Context) -> tuple[pki.Authority, pki.Identity]:
        """Return the authority and the caller. End the call where there is no authority; with one,
        every caller is known."""
        identity = caller(context)
        if self._authority is None or identity is None:
            text = (
                "this master has no authority: stop it, run 'oobleck pki init --dir "
                f"{self._master.config.state_dir}/pki', and start it again"
            )
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        return self._authority, identity

    async def _issued(self, context: Context) -> list[pki.Identity]:
        """Return the certificates that were issued without this master."""
        folder = self._master.config.pki
        try:
            return credential_folder.issued(folder) if folder else []
        except ValueError as error:
            await _refuse(context, f"on the master's host, {error}")

    def _requests(self, context: Context) -> Requests:
        return self._master.requests.of(caller(context))


async def _refuse(context: Context, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
    raise AssertionError("an abort does not return")


async def _not_found(context: Context, text: str) -> NoReturn:
    await context.abort(grpc.StatusCode.NOT_FOUND, text)
    raise AssertionError("an abort does not return")


async def _read_key(request: str, context: Context) -> "EllipticCurvePublicKey":
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


def _credential(trust: Trust, holder: Holder, issued: pki.Identity | None) -> pb.CredentialInfo:
    """Describe the holder's last certificate. `issued`: a certificate in the folder that this
    master did not issue."""
    given = trust.given.get(holder)
    ends = [one.expires_at for one in (given, issued) if one is not None]
    return pb.CredentialInfo(
        role=holder[0],
        name=holder[1],
        expires_at=max(ends, default=0.0),
        revoked=is_revoked(trust, holder) and (issued is None or was_revoked(trust, issued)),
        by=_holder(given.by if given is not None else None),
    )


def _holder(holder: Holder | None) -> pb.Holder | None:
    return pb.Holder(role=holder[0], name=holder[1]) if holder is not None else None


def _reply(certificate: bytes, authority: pki.Authority) -> pb.CertificateReply:
    return pb.CertificateReply(
        certificate=certificate.decode(), authority=authority.certificate.decode()
    )
