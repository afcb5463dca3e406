"""Credentials made with the authority's own key, where this user has it.

Loads the cryptography library. Must not know masters, nor permissions.
"""

import time
from pathlib import Path

from oobleck.host.security import pki
from oobleck.host.security.credential_folder import check_free, check_holder, keep, own_key
from oobleck.host.security.credentials import (
    AUTHORITY,
    AUTHORITY_KEY,
    CERTIFICATE,
    Role,
    read_file,
    read_secret,
)

#: Life of certificates that are made here and not by the master.
_LIFE_S = 365 * 86_400.0
#: Remaining life below which credentials are renewed before they are used.
_SOON_S = 7 * 86_400.0


def read_authority(folder: Path) -> pki.Authority:
    """Read the authority's certificate and key. Raises ValueError with the file and the fix."""
    return pki.Authority(
        read_file(folder / AUTHORITY), pki.read_key(read_secret(folder / AUTHORITY_KEY))
    )


def issue(authority: pki.Authority, target: Path, role: Role, name: str) -> None:
    """Put a new certificate of the holder into the folder `target`. Raises ValueError, OSError."""
    check_free(target, role, name, authority.certificate)
    key = own_key(target).public_key()
    certificate = authority.sign(key, pki.Identity(role=role, name=name), _LIFE_S)
    keep(target, authority.certificate, certificate)


def have_issued(folder: Path, target: Path, role: Role, name: str) -> None:
    """Ensure that `target` has credentials of the holder for some days, by the authority in
    `folder`. Raises ValueError, OSError."""
    check_holder(target, role, name)
    path = target / CERTIFICATE
    if not path.exists() or pki.expiry(read_file(path)) < time.time() + _SOON_S:
        issue(read_authority(folder), target, role, name)
