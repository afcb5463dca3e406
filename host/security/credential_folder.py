"""Writer of credentials' folders, the only one. A folder belongs to one holder for good.

  DIR/client.key   made here, once; never replaced
  DIR/ca.crt       the cluster's authority; never replaced
  DIR/client.crt   replaced only by a certificate of the same role and name

So a process that is given the wrong folder destroys nothing there. If two processes are given an
empty folder at the same time, one succeeds: files are put in place by a link or an exclusive
creation. Loads the cryptography library. Must not know masters or tokens.
"""

import contextlib
import os
import time
from functools import partial
from pathlib import Path

import msgspec

from oobleck.host.security import pki
from oobleck.host.security.credentials import (
    AUTHORITY,
    AUTHORITY_KEY,
    CERTIFICATE,
    KEY,
    Credentials,
    Role,
    create_private,
    make_private,
    read_credentials,
    read_file,
    read_secret,
    write_private,
)
from oobleck.host.system.files import read_regular

_FIX = "name another folder, or move this one away"


def check_holder(folder: Path, role: Role, name: str) -> None:
    """Raise ValueError with the fix if the folder has the certificate of another holder."""
    path = folder / CERTIFICATE
    if not path.exists():
        return
    content = read_file(path)
    try:
        found = pki.identity_of(content)
    except ValueError as error:
        raise ValueError(f"{path}: is not a readable certificate; {_FIX}") from error
    if (found.role, found.name) != (role, name):
        raise ValueError(
            f"{folder} has the certificate of {found.role} {found.name}, which stays; "
            f"{role} {name} needs a folder of its own: {_FIX}"
        )


def check_free(folder: Path, role: Role, name: str, authority: bytes) -> None:
    """Raise ValueError with the fix if the folder has the certificate of another holder, or
    credentials in another cluster."""
    check_holder(folder, role, name)
    path = folder / AUTHORITY
    if not path.exists():
        return
    content = read_file(path)
    try:
        same = pki.fingerprint(content) == pki.fingerprint(authority)
    except ValueError as error:
        raise ValueError(f"{path}: is not a readable certificate; {_FIX}") from error
    if not same:
        raise ValueError(f"{folder} has credentials in another cluster, which stay; {_FIX}")


def own_key(folder: Path) -> pki.Key:
    """Return the folder's key, made now if there is none. Raises ValueError, OSError."""
    make_private(folder)
    path = folder / KEY
    if not path.exists():
        create_private(path, pki.key_pem(pki.new_key()))
    content = read_secret(path)
    try:
        return pki.read_key(content)
    except (TypeError, ValueError) as error:  # TypeError: it needs a password
        raise ValueError(f"{path}: is not a readable key; {_FIX}") from error


def keep(folder: Path, authority: bytes, certificate: bytes) -> Credentials:
    """Put a certificate for the folder's own key there. Raises ValueError, OSError."""
    identity = pki.identity_of(certificate)
    check = partial(check_free, folder, identity.role, identity.name, authority)
    check()
    if not pki.matches(certificate, own_key(folder)):
        raise ValueError(f"{folder / KEY} is not the key that the certificate is for; {_FIX}")
    # Another process may have been first, with either file.
    if not create_private(folder / AUTHORITY, authority):
        check()
    if not create_private(folder / CERTIFICATE, certificate):
        check()
        write_private(folder / CERTIFICATE, certificate)
    return read_credentials(folder)


# ---- credentials made with the authority's own key, where this user has it


#: Record of these certificates in the authority's folder: an `Identity` per line.
ISSUED = "issued.jsonl"
_RECORDED = ("role", "name", "issued_at", "expires_at", "fingerprint")
_MOST_RECORD_BYTES = 16 << 20
#: Life of certificates that are made here and not by the master.
_LIFE_S = 365 * 86_400.0
#: Remaining life below which credentials are renewed before they are used.
_SOON_S = 7 * 86_400.0


def read_authority(folder: Path) -> pki.Authority:
    """Read the authority's certificate and key. Raises ValueError with the file and the fix."""
    return pki.Authority(
        read_file(folder / AUTHORITY), pki.read_key(read_secret(folder / AUTHORITY_KEY))
    )


def issue(authority: pki.Authority, folder: Path, target: Path, role: Role, name: str) -> str:
    """Put a new certificate of the holder into the folder `target`, and record it in the
    authority's `folder`. Return a warning with the fix if it is not recorded, as where the folder
    is only read; empty: it is. Raises ValueError, OSError."""
    check_free(target, role, name, authority.certificate)
    key = own_key(target).public_key()
    certificate = authority.sign(key, pki.Identity(role=role, name=name), _LIFE_S)
    keep(target, authority.certificate, certificate)
    try:
        _record(folder, pki.identity_of(certificate))
    except OSError as error:
        return f"'oobleck pki list' will not show {role} {name}: {_fault(folder, error)}"
    return ""


def _record(folder: Path, holder: pki.Identity) -> None:
    """Append a line about the holder's certificate. Raises OSError."""
    line = msgspec.json.encode({name: getattr(holder, name) for name in _RECORDED}) + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    descriptor = os.open(folder / ISSUED, flags, 0o600)
    try:
        owner, made = (folder / AUTHORITY_KEY).stat(), os.fstat(descriptor)
        if made.st_size == 0 and made.st_uid != owner.st_uid:  # by root, for the master's user
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def _fault(folder: Path, error: OSError) -> str:
    """Describe an error of the folder's record, with the fix."""
    path, fix = folder / ISSUED, "put that right, or move it away"
    if isinstance(error, PermissionError):
        fix = f"run: sudo chown --reference={folder / AUTHORITY_KEY} {path}"
    return f"{path}: {(error.strerror or str(error)).lower()}; {fix}"


def issued(folder: Path) -> list[pki.Identity]:
    """Return the newest certificate of each holder that was issued with the authority's own key, by
    its folder's record. Lines that cannot be read are passed over. Raises ValueError with the
    fix."""
    try:
        lines = read_regular(folder / ISSUED, _MOST_RECORD_BYTES).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(_fault(folder, error)) from error
    found: dict[tuple[Role, str], pki.Identity] = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            holder = msgspec.json.decode(line, type=pki.Identity)
            found[holder.role, holder.name] = holder
    return list(found.values())


def have_issued(folder: Path, target: Path, role: Role, name: str) -> str:
    """Ensure that `target` has credentials of the holder for some days, by the authority in
    `folder`. Return a warning as `issue` does. Raises ValueError, OSError."""
    check_holder(target, role, name)
    path = target / CERTIFICATE
    if not path.exists() or pki.expiry(read_file(path)) < time.time() + _SOON_S:
        return issue(read_authority(folder), folder, target, role, name)
    return ""
