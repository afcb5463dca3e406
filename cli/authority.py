"""The folder of a cluster's authority, made and used on the operator's side.

    DIR/ca.crt, ca.key           the authority; its key signs everything
    DIR/master.crt, master.key   the master's own
    DIR/operator/                the first operator's credentials

Loads the cryptography library. Must not know masters that run.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from oobleck.cli.options import FAILED, USAGE
from oobleck.host import pki
from oobleck.host.command import CommandFailed
from oobleck.host.credentials import (
    AUTHORITY,
    Credentials,
    Role,
    make_private,
    read_file,
    read_secret,
    write_credentials,
    write_private,
)

AUTHORITY_KEY = "ca.key"
OPERATOR = "operator"
#: Of certificates that are made here and not by the master, and of the master's own, which it
#: renews by itself.
_LIFE_S = 365 * 86_400.0
_MASTER_LIFE_S = 90 * 86_400.0
_SERVER_NAME = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.*-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]{2,39}")


def make_authority(folder: Path, names: Sequence[str]) -> None:
    """Make the whole folder. `names`: DNS names and addresses for the master's certificate.

    Raises CommandFailed, also where there is an authority already.
    """
    for name in names:
        if _SERVER_NAME.fullmatch(name) is None:
            raise CommandFailed(f"--name {name}: is no DNS name or IP address", USAGE)
    if (folder / AUTHORITY).exists():
        raise CommandFailed(
            f"--dir {folder}: has an authority already; use it, or move it away (all that it has "
            "signed ends with it)",
            USAGE,
        )
    try:
        make_private(folder)
        authority = pki.Authority.new(f"cluster {pki.new_cluster_id()}")
        key = pki.new_key()
        write_private(folder / AUTHORITY_KEY, pki.key_pem(authority.key))
        write_private(folder / "master.key", pki.key_pem(key))
        write_private(
            folder / "master.crt", authority.sign_master(key.public_key(), names, _MASTER_LIFE_S)
        )
        _write_signed(authority, folder / OPERATOR, "operator", "admin")
        # Last: with it the folder is whole.
        write_private(folder / AUTHORITY, authority.certificate)
    except OSError as error:
        raise CommandFailed(f"--dir {folder}: {error.strerror}; choose another", FAILED) from error


def issue(folder: Path, target: Path, role: Role, name: str) -> None:
    """Make credentials with the authority's own key. Raises CommandFailed."""
    try:
        authority = pki.Authority(
            read_file(folder / AUTHORITY), pki.read_key(read_secret(folder / AUTHORITY_KEY))
        )
    except ValueError as error:
        raise CommandFailed(f"--dir: {error}", USAGE) from error
    try:
        _write_signed(authority, target, role, name)
    except OSError as error:
        raise CommandFailed(f"{target}: {error.strerror}; choose another", FAILED) from error


def _write_signed(authority: pki.Authority, target: Path, role: Role, name: str) -> None:
    key = pki.new_key()
    certificate = authority.sign(key.public_key(), pki.Identity(role=role, name=name), _LIFE_S)
    write_credentials(
        target,
        Credentials(authority=authority.certificate, certificate=certificate, key=pki.key_pem(key)),
    )
