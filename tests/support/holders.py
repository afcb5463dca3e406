"""An authority for tests, and credentials for everyone who may or may not call a master."""

from pathlib import Path

from oobleck.cli.cluster.authority import issue, make_authority
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security import pki
from oobleck.host.security.credentials import (
    ROLES,
    Credentials,
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


def token(folder: Path) -> Credentials:
    """One that the master has never made."""
    return signed(folder, pki.Identity(role="agent", name="", token=True))


def at(address: str, credentials: Credentials | None) -> Endpoint:
    return Endpoint(address=address, credentials=credentials)
