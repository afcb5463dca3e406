"""The folder of a cluster's authority, made and used on the operator's side.

    DIR/ca.crt, ca.key           the authority; its key signs everything
    DIR/master.crt, master.key   the master's own
    DIR/operator/                the first operator's credentials

Loads the cryptography library. Must not know masters that run.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from oobleck.cli.options import FAILED, USAGE
from oobleck.host.command import CommandFailed
from oobleck.host.security import issue as signing
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

#: The first operator.
ADMIN = "admin"
#: What the folder is made of, and what is never written over.
_PARTS = (AUTHORITY, AUTHORITY_KEY, MASTER_CERTIFICATE, MASTER_KEY, OPERATOR)
_SERVER_NAME = re.compile(r"[A-Za-z0-9*]([A-Za-z0-9.*-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]{2,39}")


def make_authority(folder: Path, names: Sequence[str]) -> None:
    """Make the whole folder. `names`: DNS names and addresses for the master's certificate.

    Raises CommandFailed, also where there is an authority already.
    """
    for name in names:
        if _SERVER_NAME.fullmatch(name) is None:
            raise CommandFailed(f"--name {name}: is no DNS name or IP address", USAGE)
    try:
        if found := [name for name in _PARTS if (folder / name).exists()]:
            raise _taken(folder, found)
        make_private(folder)
        authority = pki.Authority.new(f"cluster {pki.new_cluster_id()}")
        key = pki.new_key()
        # Of several that are run at once, the one that puts its key there makes the folder.
        if not create_private(folder / AUTHORITY_KEY, pki.key_pem(authority.key)):
            raise _taken(folder, [AUTHORITY_KEY])
        write_private(folder / MASTER_KEY, pki.key_pem(key))
        write_private(
            folder / MASTER_CERTIFICATE,
            authority.sign_master(key.public_key(), names, MASTER_LIFE_S),
        )
        signing.issue(authority, folder / OPERATOR, "operator", ADMIN)
        # Last: with it the folder is whole.
        write_private(folder / AUTHORITY, authority.certificate)
    except ValueError as error:
        raise CommandFailed(f"--dir: {error}", USAGE) from error
    except OSError as error:
        raise CommandFailed(f"--dir {folder}: {error.strerror}; choose another", FAILED) from error


def _taken(folder: Path, found: Sequence[str]) -> CommandFailed:
    return CommandFailed(
        f"--dir {folder}: has an authority already, or a part of one ({', '.join(found)}); use "
        "it, or move it away (all that it has signed ends with it)",
        USAGE,
    )


def issue(folder: Path, target: Path, role: Role, name: str) -> None:
    """Make credentials with the authority's own key. Raises CommandFailed."""
    try:
        authority = signing.read_authority(folder)
    except ValueError as error:
        raise CommandFailed(f"--dir: {error}", USAGE) from error
    with _told(target):
        signing.issue(authority, target, role, name)


def have_issued(folder: Path, target: Path, role: Role, name: str) -> None:
    """The same unless `target` has credentials of that holder which last for some days."""
    with _told(target):
        signing.have_issued(folder, target, role, name)


@contextlib.contextmanager
def _told(target: Path) -> Iterator[None]:
    """Within, errors of writing to `target` become CommandFailed."""
    try:
        yield
    except ValueError as error:
        raise CommandFailed(f"--out: {error}", USAGE) from error
    except OSError as error:
        raise CommandFailed(f"{target}: {error.strerror}; choose another", FAILED) from error
