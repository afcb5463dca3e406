"""Folder of a cluster's authority, made and used on the operator's side.

    DIR/ca.crt, ca.key           the authority; its key signs everything
    DIR/master.crt, master.key   the master's own
    DIR/operator/                the first operator's credentials

Loads the cryptography library. Must not know running masters.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from oobleck.host.command import FAILED, USAGE, CommandFailed
from oobleck.host.display import inline
from oobleck.host.security import credential_folder as signing
from oobleck.host.security import pki
from oobleck.host.security.credentials import (
    AUTHORITY,
    AUTHORITY_KEY,
    MASTER_CERTIFICATE,
    MASTER_KEY,
    MASTER_LIFE_S,
    OPERATOR,
    Role,
    create_private,
    make_private,
    write_private,
)

#: Name of the first operator.
ADMIN = "admin"
#: Parts of the folder, which are never overwritten.
_PARTS = (AUTHORITY, AUTHORITY_KEY, MASTER_CERTIFICATE, MASTER_KEY, OPERATOR)
_SERVER_NAME = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.*-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]{2,39}")


def make_authority(folder: Path, names: Sequence[str]) -> None:
    """Make the whole folder.

    `names`: DNS names and addresses for the master's certificate. Raise CommandFailed, also if
    there is an authority already.
    """
    for name in names:
        if _SERVER_NAME.fullmatch(name) is None:
            raise CommandFailed(f"--name {name}: is not a DNS name or an IP address", USAGE)
    try:
        if found := [name for name in _PARTS if (folder / name).exists()]:
            raise _taken(folder, found)
        make_private(folder)
        authority = pki.Authority.new(f"cluster {pki.new_cluster_id()}")
        key = pki.new_key()
        # If several run at once, the one that creates the key makes the folder.
        if not create_private(folder / AUTHORITY_KEY, pki.key_pem(authority.key)):
            raise _taken(folder, [AUTHORITY_KEY])
        write_private(folder / MASTER_KEY, pki.key_pem(key))
        write_private(
            folder / MASTER_CERTIFICATE,
            authority.sign_master(key.public_key(), names, MASTER_LIFE_S),
        )
        _warn(signing.issue(authority, folder, folder / OPERATOR, "operator", ADMIN))
        # Written last: it completes the folder.
        write_private(folder / AUTHORITY, authority.certificate)
    except ValueError as error:
        raise CommandFailed(f"--dir: {error}", USAGE) from error
    except OSError as error:
        raise CommandFailed(f"--dir {folder}: {error.strerror}; choose another", FAILED) from error


def _taken(folder: Path, found: Sequence[str]) -> CommandFailed:
    return CommandFailed(
        f"--dir {folder}: already has an authority, or part of one ({', '.join(found)}); use "
        "it, or move it away (its certificates become useless)",
        USAGE,
    )


def issue(folder: Path, target: Path, role: Role, name: str) -> None:
    """Make credentials with the authority's own key. Raise CommandFailed."""
    try:
        authority = signing.read_authority(folder)
    except ValueError as error:
        raise CommandFailed(f"--dir: {error}", USAGE) from error
    with _errors_as_failures(target):
        _warn(signing.issue(authority, folder, target, role, name))


def have_issued(folder: Path, target: Path, role: Role, name: str) -> None:
    """Make credentials unless `target` has some of that holder with enough life left."""
    with _errors_as_failures(target):
        _warn(signing.have_issued(folder, target, role, name))


def _warn(warning: str) -> None:
    if warning:
        click.echo(inline(f"oobleck: warning: {warning}"), err=True)


@contextlib.contextmanager
def _errors_as_failures(target: Path) -> Iterator[None]:
    """Convert errors of writing to `target` in the block to CommandFailed."""
    try:
        yield
    except ValueError as error:
        raise CommandFailed(f"--out: {error}", USAGE) from error
    except OSError as error:
        raise CommandFailed(f"{target}: {error.strerror}; choose another", FAILED) from error
