"""`oobleck chaos`: a drill that strikes a running job with real faults and reports its reactions.

Owns the operator's options, and the choice of victims. `drill` runs the drill.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from oobleck.cli import options
from oobleck.cli.chaos.drill import (
    DEFAULT_KINDS,
    KINDS,
    OUT_OF_REACH,
    OVER_SSH,
    TO_THE_MASTER,
    Drill,
    Orders,
    schedule,
)
from oobleck.cli.chaos.striker import HostStriker, Striker, check_here, check_master_here
from oobleck.cli.client import MasterClient
from oobleck.cli.options import job_argument
from oobleck.cli.output import text
from oobleck.cli.ssh.hosts import Access, Host, login_options, read_hosts
from oobleck.host.command import NO_SUCH_THING, USAGE, CommandFailed
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb

_KINDS = {**KINDS, **OVER_SSH}
EPILOG = "\b\nKinds:\n" + "\n".join(f"  {kind:<12} {what}" for kind, what in _KINDS.items())


@click.command(epilog=EPILOG)
@job_argument()
@options.time_option("--mtbf", "mtbf_s", "30s", "Mean time between two faults of the cluster.")
@click.option(
    "--kinds",
    default=",".join(DEFAULT_KINDS),
    show_default=True,
    metavar="KIND,...",
    help="What to do; listed below.",
)
@click.option("--nodes", metavar="NAME,...", help="Strike only these.  [default: all live ones]")
@options.time_option("--for", "for_s", "10m", "How long the drill lasts.")
@options.time_option("--stop-for", "stop_for_s", "5s", "How long what is stopped stays so.")
@options.time_option(
    "--patience", "patience_s", "5m", "A job that does not go on for so long has failed the drill."
)
@click.option("--seed", type=int, help="The same seed gives the same faults.  [default: a new one]")
@click.option("--dry-run", is_flag=True, help="Only show when what would be done.")
@click.option("--beyond", is_flag=True, help="Strike also while the job cannot lose a node.")
@click.option(
    "--restart-command",
    metavar="COMMAND",
    help="Starts a killed agent again; {node} in it is the node's name.",
)
@click.option(
    "--restart-master", metavar="COMMAND", help="Starts a killed master again, with its flags."
)
@click.option(
    "--ssh",
    "hosts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="HOSTS.txt",
    help="Strike the nodes of these hosts, as 'oobleck up' has the file, over ssh as their agents' "
    "user or as root.",
)
@login_options
@options.master_option
def chaos(
    job_id: str,
    mtbf_s: float,
    kinds: str,
    nodes: str | None,
    for_s: float,
    stop_for_s: float,
    patience_s: float,
    seed: int | None,
    dry_run: bool,
    beyond: bool,
    restart_command: str | None,
    restart_master: str | None,
    hosts_file: Path | None,
    identity: Path | None,
    known_hosts: Path | None,
    python: str,
    master: Endpoint,
) -> int:
    """Strike the running job JOB with real faults, as a drill: signals to processes of its nodes,
    at random times, while no more is lost than it survives. Each fault is printed, with how long
    the job stood still; a summary comes at the end. For nodes of this machine, or with --ssh for
    those of others.

    Exit code 1: the job ended badly, or did not go on after a fault.
    """
    wanted = check_kinds(kinds, restart_command, restart_master, over_ssh=hosts_file is not None)
    hosts = {} if hosts_file is None else {host.name: host for host in read_hosts(hosts_file)}
    seed = seed if seed is not None else time.time_ns() % 1_000_000
    with MasterClient(master) as connection:
        connection.job(job_id)  # an unknown job is refused first
        live = chosen(connection.nodes(), nodes)
        if hosts_file is not None:
            live = of_hosts(live, hosts, named=nodes is not None)
        elif not set(wanted) <= set(TO_THE_MASTER):
            check_here(live)
        if on_master := sorted(kind for kind in wanted if kind.endswith("-master")):
            check_master_here(on_master[0], connection.address)
        orders = Orders(
            job_id=job_id,
            kinds=wanted,
            nodes=tuple(node.node for node in live),
            patience_s=patience_s,
            beyond=beyond,
        )
        strikes = schedule(seed=seed, mtbf_s=mtbf_s, for_s=for_s, kinds=wanted, nodes=orders.nodes)
        click.echo(f"seed {seed}")
        if dry_run:
            for strike in strikes:
                line = f"{text.seconds(strike.at_s):>12}  {strike.kind} {strike.node}"
                click.echo(line.rstrip())
            return 0
        others: dict[str, Any] = {
            "stop_for_s": stop_for_s,
            "restart_agent": restart_command,
            "restart_master": restart_master,
        }
        if hosts_file is None:
            striker = Striker(connection.address, **others)
        else:
            access = Access(identity=identity, known_hosts=known_hosts, python=python)
            striker = HostStriker(connection.address, hosts, access, **others)
            striker.check(live, wanted)
        return Drill(connection, orders, striker).run(list(strikes), for_s)


def of_hosts(
    live: Sequence[pb.NodeInfo], hosts: Mapping[str, Host], *, named: bool
) -> list[pb.NodeInfo]:
    """Return the live nodes that have a line in the file of hosts. Where the user `named` nodes,
    all of them must have one. Raises CommandFailed."""
    found = [node for node in live if node.node in hosts]
    if named and len(found) < len(live):
        missing = ", ".join(node.node for node in live if node.node not in hosts)
        raise CommandFailed(f"--nodes: {missing}: no line of the file of --ssh", USAGE)
    if not found:
        text = "--ssh: no line of the file is of a live node; name= gives a line the node's name"
        raise CommandFailed(text, NO_SUCH_THING)
    return found


def check_kinds(
    kinds: str, restart_command: str | None, restart_master: str | None, *, over_ssh: bool = False
) -> tuple[str, ...]:
    known = _KINDS if over_ssh else KINDS
    wanted = tuple(kind.strip() for kind in kinds.split(","))
    for kind in wanted:
        if kind in OVER_SSH and not over_ssh:
            raise click.UsageError(
                f"--kinds {kind}: a network is cut by root; name hosts by --ssh HOSTS.txt, as root@"
            )
        if kind in OUT_OF_REACH:
            raise click.UsageError(
                f"--kinds {kind}: a drill does only what the user of the processes may do, and "
                f"{OUT_OF_REACH[kind]}; there are {', '.join(KINDS)} ('make soak' does the others "
                "to a cluster of its own, as root)"
            )
        if kind not in known:
            raise click.UsageError(f"--kinds: no kind {kind!r}; there are {', '.join(known)}")
        if kind in ("kill-agent", "kill-node") and restart_command is None:
            raise click.UsageError(
                f"--kinds {kind}: nobody starts a killed agent again; say how with "
                "--restart-command 'systemctl restart oobleck-agent', or leave the kind out"
            )
    if "kill-master" in wanted and restart_master is None:
        raise click.UsageError(
            "--kinds kill-master: nobody starts a killed master again; say how with "
            "--restart-master 'systemctl restart oobleck-master', or leave the kind out"
        )
    return wanted


def chosen(known: Sequence[pb.NodeInfo], names: str | None) -> list[pb.NodeInfo]:
    live = {node.node: node for node in known if node.state == "live"}
    if names is None:
        if not live:
            raise CommandFailed("no node is live", NO_SUCH_THING)
        return [live[name] for name in sorted(live)]
    wanted = sorted({name.strip() for name in names.split(",")})
    if missing := [name for name in wanted if name not in live]:
        raise CommandFailed(
            f"--nodes: {', '.join(missing)} not live; live are {', '.join(sorted(live)) or 'none'}",
            NO_SUCH_THING,
        )
    return [live[name] for name in wanted]
