"""An authority for tests, and credentials for everyone who may or may not call a master."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from oobleck.cli.cluster.authority import issue, make_authority
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security import pki
from oobleck.host.security.credential_folder import keep, own_key
from oobleck.host.security.credentials import (
    ROLES,
    Credentials,
    Role,
    read_credentials,
    read_file,
    read_secret,
)


def make(folder: Path) -> dict[str, Credentials]:
    """An authority in `folder`, and by role who it has signed for; `token` may join as an agent."""
    make_authority(folder, ())
    found = {}
    for role in ROLES:
        issue(folder, folder / role / "x", role, f"some-{role}")
        found[role] = read_credentials(folder / role / "x")
    found["token"] = token(folder)
    return found


def authority(folder: Path) -> pki.Authority:
    return pki.Authority(read_file(folder / "ca.crt"), pki.read_key(read_secret(folder / "ca.key")))


def signed(folder: Path, identity: pki.Identity, life_s: float = 3600.0) -> Credentials:
    """Credentials that say whatever a test wants."""
    signer, key = authority(folder), pki.new_key()
    return Credentials(
        authority=signer.certificate,
        certificate=signer.sign(key.public_key(), identity, life_s),
        key=pki.key_pem(key),
    )


def dated(folder: Path, target: Path, role: Role, name: str, begin_s: float, end_s: float) -> Path:
    """A folder of credentials that are good from `begin_s` to `end_s`, from now."""
    signer, key = authority(folder), own_key(target)
    plain = x509.load_pem_x509_certificate(
        signer.sign(key.public_key(), pki.Identity(role=role, name=name), 60.0)
    )
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=plain.issuer,
        subject_name=plain.subject,
        public_key=plain.public_key(),
        serial_number=plain.serial_number,
        not_valid_before=now + timedelta(seconds=begin_s),
        not_valid_after=now + timedelta(seconds=end_s),
        extensions=list(plain.extensions),
    )
    made = builder.sign(signer.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    keep(target, signer.certificate, made)
    return target


def token(folder: Path) -> Credentials:
    """One that the master has never made."""
    return signed(folder, pki.Identity(role="agent", name="", token=True))


def at(address: str, credentials: Credentials | None) -> Endpoint:
    return Endpoint(address=address, credentials=credentials)
