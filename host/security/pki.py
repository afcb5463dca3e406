"""Certificates of a cluster: its authority, the identity in a certificate, requests, join tokens.

One authority per cluster signs everything. A URI names the holder: oobleck://agent/n1 or
oobleck://operator/ann. A join token has oobleck://token/agent or, for one name only,
oobleck://token/agent/n1. The master's certificate has the name `MASTER_NAME` instead, which no
other has; clients insist on it at whatever address. Keys are on P-256.

Must not know the network or permissions. Loads the cryptography library, so commands import it only
where they need it.
"""

import base64
import binascii
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from oobleck.core.ids import check_name
from oobleck.host.security.credentials import (
    MASTER_NAME,
    ROLES,
    TOKEN_VARIABLE,
    Credentials,
    Role,
    read_secret,
)

_SCHEME = "oobleck://"
_AUTHORITY_LIFE = timedelta(days=3650)
#: Tolerated clock skew: certificates that other hosts check are backdated by it.
_SKEW = timedelta(hours=1)
#: The same on the host that signed: TLS looks at a clock that is some milliseconds behind.
_TICK = timedelta(seconds=1)
#: A serial number begins with the microsecond of its certificate's issue.
_RANDOM_BITS = 64
_MOST_REQUEST_CHARACTERS = 8192

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Holder of a certificate."""

    role: Role
    #: Empty: a token for any name.
    name: str
    #: True for a token, which only allows joining with that role.
    token: bool = False
    #: Unix times; to the microsecond, and to the second.
    issued_at: float = 0.0
    expires_at: float = 0.0
    #: SHA-256 of the certificate, in hexadecimal.
    fingerprint: str = ""

    @property
    def uri(self) -> str:
        parts = ["token", self.role] if self.token else [self.role]
        return _SCHEME + "/".join([*parts, *([self.name] if self.name else [])])


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def new_cluster_id() -> str:
    """Return a random name by which people tell two authorities apart."""
    return secrets.token_hex(4)


def key_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def read_key(pem: bytes) -> Key:
    """Read a private key. Raises ValueError."""
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("is not a key on an elliptic curve")
    return key


def fingerprint(pem: bytes) -> str:
    return x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()).hex()


def to_der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def to_pem(der: bytes) -> bytes:
    """Convert a certificate from DER to PEM. Raises ValueError."""
    return x509.load_der_x509_certificate(der).public_bytes(serialization.Encoding.PEM)


# ---- requests


def new_request(key: Key) -> str:
    """Return PEM text that requests a certificate for `key`, and proves possession of it."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def read_request(text: str) -> ec.EllipticCurvePublicKey:
    """Return the key whose possession the request proves. Raises ValueError."""
    if len(text) > _MOST_REQUEST_CHARACTERS:
        raise ValueError("is too long for a certificate request")
    unreadable = "is not a certificate request in PEM"
    try:
        request = x509.load_pem_x509_csr(text.encode())
        key = request.public_key()
    except (ValueError, UnsupportedAlgorithm, UnicodeError) as error:
        raise ValueError(unreadable) from error
    # Before the signature, which of other keys takes up to 6 ms to check.
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise ValueError("is not for a key on P-256")
    try:
        valid = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise ValueError(unreadable) from error
    if not valid:
        raise ValueError("is not signed by the key that it is for")
    return key


def key_digest(key: ec.EllipticCurvePublicKey) -> str:
    """Return the SHA-256 of the public key, in hexadecimal."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(
        key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return digest.finalize().hex()


# ---- reading certificates


def identity_of(pem: bytes) -> Identity:
    """Return the certificate's holder. Raises ValueError if this cluster knows no such holder."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound as error:
        raise ValueError("the certificate has no role") from error
    uris = names.value.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1 or not uris[0].startswith(_SCHEME):
        raise ValueError("the certificate has no role")
    role, name, token = _read_uri(uris[0].removeprefix(_SCHEME))
    return Identity(
        role=role,
        name=name,
        token=token,
        issued_at=(certificate.serial_number >> _RANDOM_BITS) / 1e6,
        expires_at=certificate.not_valid_after_utc.timestamp(),
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _read_uri(path: str) -> tuple[Role, str, bool]:
    parts = path.split("/")
    token = parts[0] == "token"
    if token:
        parts = parts[1:]
    for role in ROLES:
        if parts[:1] == [role] and len(parts) <= 2 and (token or len(parts) == 2):
            name = check_name(parts[1], role) if len(parts) == 2 else ""
            return role, name, token
    raise ValueError("the certificate has no role that is known here")


def expiry(pem: bytes) -> float:
    """Return the Unix time at which the certificate expires."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


def begin(pem: bytes) -> float:
    """Return the Unix time from which the certificate is valid."""
    return x509.load_pem_x509_certificate(pem).not_valid_before_utc.timestamp()


def server_names(pem: bytes) -> tuple[str, ...]:
    """Return the names and addresses of a master's certificate beside `MASTER_NAME`."""
    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    found = [*names.get_values_for_type(x509.DNSName)]
    found += [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return tuple(name for name in found if name != MASTER_NAME)


def matches(pem: bytes, key: Key) -> bool:
    """Return whether the certificate belongs to that key."""
    return x509.load_pem_x509_certificate(pem).public_key() == key.public_key()


# ---- the authority


class Authority:
    """Authority that signs for one cluster."""

    def __init__(self, certificate: bytes, key: Key) -> None:
        """Make the authority; raises ValueError if the key is another certificate's."""
        if not matches(certificate, key):
            raise ValueError("the key is not that of the certificate")
        self.certificate = certificate
        self.key = key
        self._name = x509.load_pem_x509_certificate(certificate).subject

    @classmethod
    def new(cls, cluster: str) -> "Authority":
        key = new_key()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Oobleck {cluster}")])
        builder = _builder(_AUTHORITY_LIFE, backdated=_SKEW).subject_name(name)
        builder = builder.issuer_name(name).public_key(key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(authority=True), True)
        certificate = builder.sign(key, hashes.SHA256())
        return cls(certificate.public_bytes(serialization.Encoding.PEM), key)

    def sign(self, key: ec.EllipticCurvePublicKey, identity: Identity, life_s: float) -> bytes:
        """Return a client's certificate, PEM. It is valid from now on by this host's clock, which
        is the master's, and only the master checks it."""
        alternative = [x509.UniformResourceIdentifier(identity.uri)]
        return self._sign(key, alternative, ExtendedKeyUsageOID.CLIENT_AUTH, life_s, _TICK)

    def sign_master(
        self, key: ec.EllipticCurvePublicKey, names: Sequence[str], life_s: float
    ) -> bytes:
        """Return a certificate, PEM, for the master, with further DNS names or IP addresses."""
        alternative: list[x509.GeneralName] = [x509.DNSName(MASTER_NAME)]
        alternative += [_server_name(name) for name in names]
        return self._sign(key, alternative, ExtendedKeyUsageOID.SERVER_AUTH, life_s, _SKEW)

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        alternative: Sequence[x509.GeneralName],
        purpose: x509.ObjectIdentifier,
        life_s: float,
        backdated: timedelta,
    ) -> bytes:
        builder = _builder(timedelta(seconds=life_s), backdated=backdated)
        builder = builder.subject_name(x509.Name([])).issuer_name(self._name).public_key(key)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(_usage(authority=False), True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), False)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternative), True)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _builder(life: timedelta, *, backdated: timedelta) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    serial = int(now.timestamp() * 1e6) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    builder = x509.CertificateBuilder().serial_number(serial)
    return builder.not_valid_before(now - backdated).not_valid_after(now + life)


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _server_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


# ---- join tokens as text: a short-lived certificate with its key, and the cluster's authority
#
# The holder can ask the master once for a certificate of its own. On first contact the holder
# trusts the authority inside, so a wrong master learns nothing. It comes from a file or the
# environment, never from the command line, which other users of the host can read.


_PREFIX = "oobleck1."
_MOST_CHARACTERS = 4096
_KEY_BYTES = 32


def format_token(credentials: Credentials) -> str:
    """Format a join token: one line of some 1,000 letters, digits, '-' and '_'."""
    number = read_key(credentials.key).private_numbers().private_value
    parts = (
        to_der(credentials.authority),
        to_der(credentials.certificate),
        number.to_bytes(_KEY_BYTES, "big"),
    )
    return _PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(parts)).decode().rstrip("=")


def shown_token(path: Path | None, held: str) -> Credentials | None:
    """Read the token from the file, else from `held`; None: there is neither. Raises ValueError."""
    source = TOKEN_VARIABLE if path is None else f"--token-file {path}"
    try:
        if path is not None:
            held = read_secret(path).decode(errors="replace")
        return read_token(held) if held or path is not None else None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def read_token(text: str) -> Credentials:
    """Parse a token. Raises ValueError, which does not repeat the text."""
    text = text.strip()
    if not text.startswith(_PREFIX) or len(text) > _MOST_CHARACTERS:
        raise ValueError(
            f"is not a join token, which begins with {_PREFIX!r}; make one with 'oobleck pki token'"
        )
    body = text.removeprefix(_PREFIX)
    try:
        packed = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        authority, certificate, number = msgspec.msgpack.decode(
            packed, type=tuple[bytes, bytes, bytes]
        )
        key = ec.derive_private_key(int.from_bytes(number, "big"), ec.SECP256R1())
        return Credentials(
            authority=to_pem(authority),
            certificate=to_pem(certificate),
            key=key_pem(key),
        )
    except (ValueError, binascii.Error) as error:
        raise ValueError("is a damaged join token; copy the whole line, or make a new one") from (
            error
        )
