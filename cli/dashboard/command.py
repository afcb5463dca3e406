"""`oobleck dashboard`: pages for browsers, and the tokens to log in with."""

import ssl
import time
from pathlib import Path

import click

from oobleck.cli import options
from oobleck.cli.client import MasterClient
from oobleck.cli.dashboard.sessions import Role, default_folder, make, read_key
from oobleck.host.address import is_loopback, joined, split_address
from oobleck.host.command import USAGE, CommandFailed, Group
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.metrics import bind

_LISTEN = "127.0.0.1:4680"

_EPILOG = """\b
Examples:
  oobleck dashboard                             on this host only
  oobleck dashboard token                       to log in as a viewer
  oobleck dashboard token --role operator
  oobleck dashboard --listen 0.0.0.0:443 --certificate c.pem --key k.pem --host board.example"""


def dir_option(function: options.F) -> options.F:
    return click.option(
        "--dir",
        "folder",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="OOBLECK_DASHBOARD_DIR",
        show_envvar=True,
        metavar="DIR",
        help="Folder of the secret that the dashboard and its tokens share.  "
        "[default: ~/.local/state/oobleck/dashboard]",
    )(function)


class _Dashboard(Group):
    """Group whose default command is `serve`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["serve", *args] if not args or args[0][:1] == "-" else args)


@click.group(cls=_Dashboard)
def dashboard() -> None:
    """Show the cluster and its jobs to browsers."""


@dashboard.command(epilog=_EPILOG, short_help="Serve pages that show and control the cluster.")
@click.option(
    "--listen",
    default=_LISTEN,
    show_default=True,
    metavar="HOST:PORT",
    help="Address to serve at; port 0: any free port.",
)
@click.option(
    "--host",
    "names",
    multiple=True,
    metavar="NAME",
    help="A name that browsers use for it, besides localhost and this host's own. May be repeated.",
)
@click.option(
    "--certificate",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Serve https with this certificate (PEM, with its chain).",
)
@click.option(
    "--key",
    "key_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The key of the certificate.",
)
@click.option(
    "--plain-http",
    is_flag=True,
    help="Serve other hosts without a certificate, behind a proxy that has one.",
)
@options.time_option("--session", "session_s", "12h", "How long a log-in lasts.")
@dir_option
@options.master_option
@click.pass_context
def serve(
    ctx: click.Context,
    listen: str,
    names: tuple[str, ...],
    certificate: Path | None,
    key_file: Path | None,
    plain_http: bool,
    session_s: float,
    folder: Path | None,
    master: Endpoint,
) -> None:
    """Serve pages that show the cluster and its jobs, and plan, drain and cancel.

    It calls the master with your certificate, a viewer's or an operator's. Browsers log in with a
    token from 'oobleck dashboard token', and may do only what both allow.
    """
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        problem = f"{error.name} is missing; run: pip install '.[dashboard]'"
        raise CommandFailed(problem, USAGE) from error
    tls = _tls(listen, certificate, key_file, plain=plain_http)
    from oobleck.cli.dashboard.app import run

    try:
        folder = folder or default_folder()
        key = read_key(folder)
        listening = bind("--listen", listen)
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from error
    endpoint_now = options.endpoint_again(ctx, master)

    def connect() -> MasterClient:
        return MasterClient(endpoint_now())

    address = joined(*listening.getsockname()[:2])
    click.echo(f"dashboard of {master} at {'https' if tls else 'http'}://{address}")
    click.echo("log in with a token: 'oobleck dashboard token' prints one")
    run(
        listening,
        connect=connect,
        master=str(master),
        key=key,
        folder=folder,
        session_s=session_s,
        names=names,
        tls=tls,
    )


@dashboard.command()
@click.option(
    "--role",
    type=click.Choice(["viewer", "operator"]),
    default="viewer",
    show_default=True,
    help="Rights of the holder, limited by the dashboard's own certificate.",
)
@options.time_option("--ttl", "ttl_s", "15m", "How long the token is valid for a log-in.")
@dir_option
def token(role: Role, ttl_s: float, folder: Path | None) -> None:
    """Print a token for one log-in. Run it on the dashboard's host, as its user."""
    try:
        key = read_key(folder or default_folder())
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from error
    click.echo(make(key, role, time.time() + ttl_s))


def _tls(
    listen: str, certificate: Path | None, key_file: Path | None, *, plain: bool
) -> tuple[Path, Path] | None:
    """Return the certificate's and the key's file; None: no TLS. Raise CommandFailed."""
    if (certificate is None) != (key_file is None):
        raise CommandFailed("--certificate and --key: give both, or neither", USAGE)
    if certificate is not None and key_file is not None:
        _check_pair(certificate, key_file)
        return certificate, key_file
    try:
        host, _ = split_address(listen)
    except ValueError as error:
        raise CommandFailed(f"--listen: {error}", USAGE) from error
    if not plain and not is_loopback(host):
        problem = (
            f"--listen {listen}: without TLS, anybody on the network could read tokens and pages; "
            "give --certificate and --key, or --plain-http behind a proxy that has them"
        )
        raise CommandFailed(problem, USAGE)
    return None


def _check_pair(certificate: Path, key_file: Path) -> None:
    """Raise CommandFailed unless the key belongs to the certificate."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key_file, password="")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else None
        problem = reason or "damaged, or the key is another certificate's"
        raise CommandFailed(
            f"--certificate {certificate}, --key {key_file}: {problem}", 2
        ) from error
