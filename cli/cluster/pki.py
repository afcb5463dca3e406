"""`oobleck pki`: the cluster's authority, join tokens, and issued and revoked certificates."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import click

from oobleck.cli import options
from oobleck.cli.client import MasterClient, NothingToRenew, await_start
from oobleck.cli.jobs.follow import warn
from oobleck.cli.options import MASTERS, F, form_options, master_option, time_option
from oobleck.cli.output.table import table, terminal_width
from oobleck.cli.output.text import Form, document, is_data, moment, plain
from oobleck.core.ids import check_name
from oobleck.host.command import FAILED, NO_SUCH_THING, USAGE, CommandFailed, Group
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint, endpoint_at
from oobleck.host.security.credentials import (
    OPERATOR,
    ROLES,
    TOKEN_VARIABLE,
    Credentials,
    Role,
    check_writable,
    read_credentials,
    read_file,
    write_private,
)
from oobleck.host.system.files import below_home
from oobleck.proto import control_pb2 as pb

DEFAULT_DIR = Path("~/.oobleck/pki")
DEFAULT_CREDENTIALS = Path("~/.oobleck/credentials")
#: Roles that a token may have; workers only talk to their agent.
_JOINING = [role for role in ROLES if role != "worker"]


@click.group(cls=Group)
def pki() -> None:
    """Issue and revoke certificates and join tokens, which prove who may call a master."""


def _dir_option(help_text: str) -> Callable[[F], F]:
    return click.option(
        "--dir",
        "folder",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULT_DIR,
        show_default=True,
        metavar="DIR",
        help=help_text,
    )


@pki.command(short_help="Make a cluster's authority and its first credentials.")
@_dir_option("Where to make the authority; a master finds STATE-DIR/pki by itself.")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="DNS name or IP address to put into the master's certificate, for tools that check "
    "it; agents and 'oobleck' do not need it. May be repeated.",
)
def init(folder: Path, names: tuple[str, ...]) -> None:
    """Make a cluster's authority, the master's certificate and the first operator's credentials."""
    from oobleck.cli.cluster.authority import make_authority

    folder = _below_home(folder).absolute()
    make_authority(folder, names)
    click.echo(
        f"authority            {folder}\n"
        f"operator credentials {folder / OPERATOR}\n"
        f"start the master:    oobleck-master --pki {folder} --listen 0.0.0.0:4600 "
        "--state-dir DIR\n"
        f"then let nodes in:   oobleck pki token --out FILE --master HOST:4600 "
        f"--credentials {folder / OPERATOR}"
    )


@pki.command(short_help="Make credentials with the authority's own key.")
@click.argument("name", metavar="NAME")
@click.option("--role", type=click.Choice(ROLES), default="agent", show_default=True)
@_dir_option("The authority, which must be on this host.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder for the credentials.",
)
def issue(name: str, role: Role, folder: Path, out: Path) -> None:
    """Make credentials with the authority's own key, without a master or a token.

    An existing key in DIR is kept, and so are credentials of any other role, name or cluster.
    """
    from oobleck.cli.cluster import authority

    _check_name(name, role)
    authority.issue(_below_home(folder), _below_home(out), role, name)
    click.echo(out)


@pki.command(short_help="Make a join token.")
@click.option("--role", type=click.Choice(_JOINING), default="agent", show_default=True)
@click.option(
    "--name",
    default="",
    metavar="NAME",
    help="The only name that may join with it.  [default: any]",
)
@time_option("--ttl", "ttl_s", "10m", "How long it is valid: 30s, 10m, 2h.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it to this file, readable only by you; an existing token is replaced, but "
    "no other file.  [default: print it]",
)
@master_option
@click.pass_context
def token(
    ctx: click.Context, role: Role, name: str, ttl_s: float, out: Path | None, master: Endpoint
) -> None:
    """Make a join token: valid for one certificate of that role, for a short time. A master that
    was just started is waited for.

    Pass it in a file that nobody else can read, as --out makes one, or in OOBLECK_JOIN_TOKEN; never
    as an argument, which other users of a host can read.
    """
    if name:
        _check_name(name, role)
    if out is not None:
        _check_out(out)  # before there is a token

    await_start(master, warn)
    if master.credentials is None:  # those of this user's own master are known only now
        master = options.endpoint(ctx, ctx.command.params[0], str(master)) or master
    with MasterClient(master) as connection:
        made = make_token(connection, role=role, name=name, ttl_s=ttl_s)
    if out is None:
        click.echo(made)
        return
    try:
        write_private(out, f"{made}\n".encode())
    except OSError as error:
        raise CommandFailed(f"--out {out}: {error.strerror}; name another file", FAILED) from error
    click.echo(out)


@pki.command(short_help="Get credentials with a join token.")
@click.argument("name", metavar="NAME")
@click.option(
    "--master",
    envvar="OOBLECK_MASTER",
    required=True,
    show_envvar=True,
    metavar=MASTERS,
    help="The master that issued the token; of several addresses, the first that answers.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help=f"The token, in a regular file, not a pipe.  [default: the value of {TOKEN_VARIABLE}]",
)
@click.option(
    "--credentials",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_CREDENTIALS,
    show_default=True,
    envvar="OOBLECK_CREDENTIALS",
    show_envvar=True,
    metavar="DIR",
    help="Folder for the credentials.",
)
def join(name: str, master: str, token_file: Path | None, folder: Path) -> None:
    """Get credentials for NAME, an operator or viewer, with a join token.

    Agents do it themselves.
    """
    from oobleck.host.security import pki as certificates
    from oobleck.host.security.credential_folder import check_free, keep, own_key
    from oobleck.host.security.pki import shown_token

    folder = _below_home(folder)
    try:
        shown = shown_token(token_file, os.environ.get(TOKEN_VARIABLE, ""))
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from error
    if shown is None:
        text = f"give a join token with --token-file FILE, or in {TOKEN_VARIABLE}"
        raise CommandFailed(f"{text}; 'oobleck pki token' makes one", USAGE)
    role = certificates.identity_of(shown.certificate).role
    _check_name(name, role)
    try:
        check_free(folder, role, name, shown.authority)
        # Saved before the token is used: a repeated request must have the same key.
        request = certificates.new_request(own_key(folder))
        with MasterClient(endpoint_at(master, shown)) as connection:
            reply = connection.join(request, name)
        keep(folder, shown.authority, reply.certificate.encode())
    except ValueError as error:
        raise CommandFailed(f"--credentials {error}", USAGE) from error
    except OSError as error:
        reason = f"{error.strerror}; name another folder"
        raise CommandFailed(f"--credentials {folder}: {reason}", USAGE) from error
    click.echo(folder)


@pki.command()
@click.option(
    "--credentials",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    envvar="OOBLECK_CREDENTIALS",
    show_envvar=True,
    metavar="DIR",
    help="The credentials to renew.",
)
@click.option("--master", envvar="OOBLECK_MASTER", required=True, show_envvar=True, metavar=MASTERS)
def renew(folder: Path, master: str) -> None:
    """Replace your certificate by one that lasts longer. Agents do it themselves.

    A certificate that is less than a minute old is kept.
    """
    from oobleck.host.security import pki as certificates
    from oobleck.host.security.credential_folder import keep

    try:
        old = read_credentials(folder)
        request = certificates.new_request(certificates.read_key(old.key))
        with MasterClient(endpoint_at(master, old)) as connection:
            try:
                certificate = connection.renew(request).certificate.encode()
            except NothingToRenew as fresh:
                click.echo(f"nothing to do: {inline(fresh.message)}", err=True)
                certificate = old.certificate
        keep(folder, old.authority, certificate)
    except ValueError as error:
        raise CommandFailed(f"--credentials {error}", USAGE) from error
    except OSError as error:
        raise CommandFailed(f"--credentials {folder}: {error.strerror}", USAGE) from error
    click.echo(f"good until {moment(certificates.expiry(certificate))}")


@pki.command("list")
@master_option
@form_options("One JSON object: {tokens, credentials}.")
def list_(master: Endpoint, form: Form) -> None:
    """List usable tokens, and the holders of certificates.

    The last column names the maker of the token, or of the one that the holder joined with; it is
    empty for certificates of 'oobleck pki issue'.
    """
    with MasterClient(master) as connection:
        found = connection.credentials()
    if is_data(form):
        click.echo(document(plain(found), form))
        return
    click.echo(credentials_table(found, None if form == "wide" else terminal_width()))


@pki.command()
@click.argument("name", metavar="[NAME]", required=False)
@click.option(
    "--role",
    type=click.Choice(_JOINING),
    help="The role of NAME.  [default: as in 'oobleck pki list']",
)
@click.option("--token", "token_id", metavar="ID", help="A token, by its id in 'oobleck pki list'.")
@master_option
def revoke(name: str | None, role: Role | None, token_id: str | None, master: Endpoint) -> None:
    """Revoke all certificates that NAME was given so far, or a token. A node's session ends.

    Unused tokens that NAME made end too. Holders that joined with one stay, and are listed.
    """
    if (name is None) == (token_id is None):
        raise CommandFailed("give a NAME, or --token ID", USAGE)

    with MasterClient(master) as connection:
        if name is None:
            connection.revoke(pb.RevokeRequest(token_id=token_id))
            click.echo(f"revoked token {token_id}")
            return
        known = connection.credentials()  # an operator who revokes himself cannot ask afterwards
        role = role or _role_of(name, known)
        _check_name(name, role)
        connection.revoke(pb.RevokeRequest(holder=pb.Holder(role=role, name=name)))
        click.echo(f"revoked {role} {name}")
    if let_in := _let_in((role, name), known):
        who = ", ".join(f"{role} {name}" for role, name in let_in)
        click.echo(f"still admitted, by tokens of {name} or of their holders: {who}")


def make_token(master: MasterClient, *, role: str, name: str, ttl_s: float) -> str:
    """Make a join token. `name`: the only one that may use it; empty: any. Raise CommandFailed."""
    from oobleck.host.security import pki as certificates
    from oobleck.host.security.pki import format_token

    key = certificates.new_key()
    request = certificates.new_request(key)
    reply = master.create_token(request, role=role, name=name, ttl_s=ttl_s)
    return format_token(
        Credentials(
            authority=reply.authority.encode(),
            certificate=reply.certificate.encode(),
            key=certificates.key_pem(key),
        )
    )


def credentials_table(found: pb.ListCredentialsReply, width: int | None) -> str:
    """Return a table with a line for each token and each holder."""
    rows = [
        (one.name or "any", f"token {one.id}", one.role, moment(one.expires_at), _maker(one))
        for one in found.tokens
    ]
    for held in found.credentials:
        until = "revoked" if held.revoked else moment(held.expires_at)
        rows.append((held.name, "certificate", held.role, until, _maker(held)))
    return table(("NAME", "KIND", "ROLE", "GOOD UNTIL", "BY A TOKEN OF"), rows, width=width)


def _maker(entry: pb.TokenInfo | pb.CredentialInfo) -> str:
    return f"{entry.by.role} {entry.by.name}" if entry.HasField("by") else ""


def _let_in(holder: tuple[str, str], known: pb.ListCredentialsReply) -> list[tuple[str, str]]:
    """Return the unrevoked holders who joined with a token of `holder`, or of one of these."""
    revoked = {(held.role, held.name) for held in known.credentials if held.revoked}
    found, more = {holder}, {holder}
    while more:
        by_these = [held for held in known.credentials if (held.by.role, held.by.name) in more]
        more = {(held.role, held.name) for held in by_these} - found
        found |= more
    return sorted(found - revoked - {holder})


def _role_of(name: str, known: pb.ListCredentialsReply) -> Role:
    """Return the role in which `name` is held. Raise CommandFailed if there is none, or several."""
    roles = sorted({held.role for held in known.credentials if held.name == name})
    match roles:
        case [role]:
            return cast("Role", role)
        case []:
            raise CommandFailed(
                f"this master has given no certificate to {name!r}; one that was made with a copy "
                "of the authority is revoked with --role ROLE",
                NO_SUCH_THING,
            )
        case _:
            several = ", ".join(roles)
            raise CommandFailed(
                f"{name} has several roles ({several}): choose one with --role", USAGE
            )


def _check_out(out: Path) -> None:
    from oobleck.host.security.pki import read_token

    try:
        check_writable(out)
        if out.exists():
            read_token(read_file(out).decode(errors="replace"))
    except OSError as error:
        raise CommandFailed(f"--out {out}: {error.strerror}; name another file", FAILED) from error
    except ValueError as error:
        text = f"--out {out}: exists, and is not a join token; name another file"
        raise CommandFailed(text, USAGE) from error


def _check_name(name: str, role: str) -> None:
    try:
        check_name(name, role)
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from error


def _below_home(folder: Path) -> Path:
    """Return `folder` with ~ expanded. Raise CommandFailed if this user has no home."""
    try:
        return below_home(folder)
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from error
