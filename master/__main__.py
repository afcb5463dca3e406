"""`oobleck-master`: reads the flags, locks the state directory, and serves until a signal ends
it."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from oobleck.core.units import parse_seconds
from oobleck.host import command, log
from oobleck.host.address import leaves_host, split_address, split_addresses
from oobleck.host.detection import MODES, Detection, Mode, choose
from oobleck.host.ipc.endpoint import check_insecure
from oobleck.host.storage.backup import AUTHORITY, JOURNAL, Summary
from oobleck.host.system.process import allow_open_files, die_with_parent
from oobleck.master import process
from oobleck.master.api.pki_service import AuthorityFolder
from oobleck.master.config import MasterConfig, Retention, Unusable
from oobleck.master.process import locked, share_heap, short_collections
from oobleck.master.server import serve
from oobleck.master.state.validate import InvariantViolation
from oobleck.master.storage.backup import (
    brings_authority,
    check_backup,
    check_cluster,
    check_started,
    check_target,
    restore,
)
from oobleck.master.storage.disk import StorageFailed
from oobleck.master.storage.journal import Journal, JournalUnusable

logger = logging.getLogger(__name__)
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
#: Open files; with fewer the master cannot serve a cluster of a thousand nodes.
_FEW_FILES = 4096


def choose_pki(
    listen: str,
    state_dir: Path,
    pki: str | None,
    *,
    insecure: bool,
    restored: Summary | None = None,
) -> Path | None:
    """Return the authority's folder; None: serve in the clear. `restored`: a backup, which may
    bring an authority. Raises ValueError with the flag and the fix."""
    if insecure:
        if pki is not None:
            raise ValueError("--insecure and --pki exclude each other; leave one out")
        check_insecure("--insecure", listen)
        return None
    own = state_dir / "pki"
    if pki is not None:
        return Path(pki).absolute()
    if own.exists() or (restored is not None and restored.has_authority):
        return own
    if leaves_host(listen):
        raise ValueError(
            f"--listen {listen}: others than this host could reach the master, so it needs an "
            f"authority; run 'oobleck pki init --dir {own}', or listen on 127.0.0.1"
        )
    return None


def choose_heads(listen: str, heads: str) -> tuple[str, ...]:
    """Return the addresses that agents are given. Raises ValueError with the flag and the fix."""
    if heads:
        return tuple(_read("--heads", split_addresses, heads))
    host, port = split_address(listen)
    reachable = port != 0 and host not in ("0.0.0.0", "::") and leaves_host(listen)
    return (listen,) if reachable else ()


def choose_retention(forget_nodes_after: str, keep_jobs: int) -> Retention:
    """Return the retention that the flags ask for. Raises ValueError with the flag and the fix."""
    node_s = _read("--forget-nodes-after", parse_seconds, forget_nodes_after)
    return Retention(node_s=node_s, ended_jobs=keep_jobs)


def _read_backup(backups: Sequence[Path], state_dir: Path) -> Summary | None:
    """Check the backup to restore, if any, and return its summary. Raises Unusable."""
    if len(backups) > 1:
        raise Unusable("--restore: is there more than once; name one backup")
    if not backups:
        check_started(state_dir)
        return None
    check_target(state_dir, backups[0])
    return check_backup(backups[0])


def _brings_authority(config: MasterConfig) -> bool:
    """Return whether the backup to restore brings the authority."""
    return (
        config.restored is not None
        and config.pki == config.state_dir / AUTHORITY
        and brings_authority(config.restored, config.state_dir)
    )


def _cluster_of(pki: Path | None) -> str:
    """Return the identity of the authority's cluster; empty: there is none. Raises ValueError."""
    return "" if pki is None else AuthorityFolder(pki).cluster


def _fill(config: MasterConfig, backups: Sequence[Path]) -> None:
    """Restore the backup, if there is one. Raises Unusable, StorageFailed."""
    if config.restored is None:
        check_started(config.state_dir)
        return
    # Again: another master may have used the directory before this one had the lock.
    check_target(config.state_dir, backups[0])
    own = _brings_authority(config)
    restore(backups[0], config.restored, config.state_dir, authority=own)


def _read(flag: str, read: Callable[[str], T], value: str) -> T:
    """Return the flag's value as `read` parses it. Raises ValueError with the flag and the fix."""
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def _time_out_flags(function: F) -> F:
    """Add hidden flags that set single time-outs, for tests and drills."""
    for field in reversed(fields(Detection)):
        flag = "--" + field.name.replace("_", "-")
        function = click.option(flag, field.name, type=float, hidden=True)(function)
    return function


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="oobleck-cluster", prog_name="oobleck-master")
@click.option(
    "--listen",
    default="127.0.0.1:4600",
    show_default=True,
    metavar="HOST:PORT",
    help="Where agents and operators reach this master; port 0 takes a free one.",
)
@click.option(
    "--heads",
    default="",
    metavar="HOST:PORT[,HOST:PORT...]",
    help="Where this head, or one in its place, may be reached. Agents keep these addresses beside "
    "their credentials.  [default: that of --listen, if others than this host reach it]",
)
@click.option(
    "--state-dir",
    required=True,
    type=click.Path(),
    metavar="DIR",
    help="Journal, metrics, events and logs; a master started on it again goes on from there.",
)
@click.option(
    "--pki",
    type=click.Path(),
    metavar="DIR",
    help="Folder of the cluster's authority, made by 'oobleck pki init'.  [default: pki in "
    "--state-dir, if it is there]",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Let everybody on this host do everything, in the clear; on loopback addresses only, "
    "where it is the default without an authority.",
)
@click.option(
    "--metrics-listen",
    metavar="HOST:PORT",
    help="Serve metrics for Prometheus at /metrics there, to anybody who reaches it.  [default: "
    "nowhere]",
)
@click.option(
    "--health-listen",
    metavar="HOST:PORT",
    help="Answer gRPC's health checks there, and nothing else, in the clear: for kubelets, which "
    "show no certificate.  [default: nowhere]",
)
@click.option("--exit-with-parent", is_flag=True, help="End when the parent process ends.")
@click.option(
    "--salvage-journal",
    is_flag=True,
    help="Go on with what a damaged journal has before the damage; the rest is kept beside it.",
)
@click.option(
    "--restore",
    "backups",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="DIR",
    help="Go on from this backup of 'oobleck backup'; --state-dir must be empty. For the first "
    "start on it alone.",
)
@click.option(
    "--crash-at", metavar="POINT[:COUNT]", help="Die there, as by kill -9 (for tests).", hidden=True
)
@click.option(
    "--detection",
    type=click.Choice(MODES),
    default="balanced",
    show_default=True,
    help="How fast faults are found, against how much delay is no fault: sets all time-outs of "
    "the cluster (docs/faults.md).",
)
@click.option(
    "--keep-jobs",
    type=int,
    default=Retention().ended_jobs,
    show_default=True,
    metavar="N",
    help="Jobs that have ended and are known to 'oobleck jobs'; the files of all stay.",
)
@click.option(
    "--forget-nodes-after",
    default="24h",
    show_default=True,
    metavar="TIME",
    help="A node that is lost for so long is no longer known to 'oobleck nodes'.",
)
@click.option(
    "--waiting-gives-way-after",
    default="10m",
    show_default=True,
    metavar="TIME",
    help="A job with a checkpoint that has waited for nodes for so long lets the next one that can "
    "start train first.",
)
@click.option(
    "--validate",
    is_flag=True,
    help="After every event check what always holds of the master's state, and end with exit code "
    "3 and the last events where it does not; slow with many nodes.",
)
@click.option("--certificate-life-s", default=90 * 86_400.0, hidden=True)
@click.option("--compact-bytes", default=0, hidden=True)
@click.option("--records-wait-s", default=60.0, hidden=True)
@_time_out_flags
def master(
    listen: str,
    heads: str,
    state_dir: str,
    pki: str | None,
    insecure: bool,
    certificate_life_s: float,
    compact_bytes: int,
    records_wait_s: float,
    metrics_listen: str | None,
    health_listen: str | None,
    exit_with_parent: bool,
    salvage_journal: bool,
    backups: tuple[Path, ...],
    crash_at: str | None,
    detection: Mode,
    keep_jobs: int,
    forget_nodes_after: str,
    waiting_gives_way_after: str,
    validate: bool,
    **time_outs: float | None,
) -> int:
    """Head of an Oobleck cluster: takes jobs, plans them onto nodes, and plans anew on losses.

    Prints `listening on HOST:PORT` when it is ready. Exit codes: 0 ended by a signal, 1 the state
    directory can no longer be written, 2 a flag, or what it names, cannot be used, 3 an invariant
    of the state is broken (--validate), 6 standard output cannot be written.
    """
    if exit_with_parent:
        die_with_parent(os.getppid())
    log.configure()
    if (files := allow_open_files()) < _FEW_FILES:
        logger.warning(
            "few files may be open: each agent takes one, so raise the hard limit (ulimit -Hn)",
            extra={"limit": files},
        )
    os.umask(0o077)
    try:
        if not state_dir:
            raise ValueError("--state-dir: is empty; name a directory, as in oobleck-state")
        timing = choose(detection, time_outs)
        _read("--listen", split_address, listen)
        state = Path(state_dir).absolute()
        restored = _read_backup(backups, state)
        config = MasterConfig(
            listen=listen,
            heads=choose_heads(listen, heads),
            metrics_listen=metrics_listen,
            health_listen=health_listen,
            state_dir=state,
            timing=timing,
            pki=choose_pki(listen, state, pki, insecure=insecure, restored=restored),
            certificate_life_s=certificate_life_s,
            retention=choose_retention(forget_nodes_after, keep_jobs),
            gives_way_s=_read("--waiting-gives-way-after", parse_seconds, waiting_gives_way_after),
            records_wait_s=records_wait_s,
            validate=validate,
            restored=restored,
        )
        if restored is not None:
            check_cluster(
                restored,
                _cluster_of(backups[0] / AUTHORITY if _brings_authority(config) else config.pki),
            )
        if crash_at is not None:
            point, _, times = crash_at.partition(":")
            process.arm(point, int(times or 1))
    except (Unusable, ValueError) as error:
        raise command.CommandFailed(str(error), 2) from error
    except OSError as error:  # no permission for a folder above it, or the path is too long
        text = f"--state-dir {state_dir}: {error.strerror}; choose another one"
        raise command.CommandFailed(text, 2) from error
    try:
        with locked(config.state_dir):
            _fill(config, backups)
            path = config.state_dir / JOURNAL
            journal = Journal(path, salvage=salvage_journal, compact_bytes=compact_bytes)
            share_heap()
            with contextlib.closing(journal), short_collections():
                asyncio.run(serve(config, journal))
    except (Unusable, JournalUnusable) as error:
        raise command.CommandFailed(str(error), 2) from error
    except StorageFailed as failed:
        raise command.CommandFailed(str(failed), 1) from failed
    except command.OutputFailed as failed:  # such as a pipe whose reader has ended
        raise command.CommandFailed(str(failed), command.NO_OUTPUT) from failed
    except InvariantViolation as violation:
        lines = [f"oobleck-master: {violation}; the last events:", *violation.last_events]
        click.echo("\n".join(lines), err=True)
        return 3
    return 0


def main() -> None:
    sys.exit(command.run(master, "oobleck-master"))


if __name__ == "__main__":
    main()
