"""oobleck-agent: reads the command line, then runs the supervisor and its session."""

import asyncio
import dataclasses
import functools
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from oobleck.agent.config import DRAIN_GRACE_S, AgentConfig
from oobleck.agent.connection.address import check_own_address
from oobleck.agent.connection.code import fetch
from oobleck.agent.connection.enrol import Denied, Holder, choose_way, join, read_join_token
from oobleck.agent.connection.outbox import Outbox
from oobleck.agent.connection.session import Session
from oobleck.agent.processes.environment import passed_on, read_patterns
from oobleck.agent.processes.memory import total_memory
from oobleck.agent.processes.pool import new_incarnation
from oobleck.agent.supervisor import Supervisor
from oobleck.host import command, log
from oobleck.host.address import own_hostname, split_address
from oobleck.host.device import Gpu, find_gpus, worker_environment
from oobleck.host.display import inline
from oobleck.host.ipc.messages import FaultRule
from oobleck.host.security.credentials import Credentials
from oobleck.host.system.environment import Environment
from oobleck.host.system.files import read_regular
from oobleck.host.system.process import die_with_parent, end_signals
from oobleck.host.versions import installed
from oobleck.planner.codec import decode
from oobleck.planner.ids import NodeName, nearest_name
from oobleck.planner.profile.memory import gpu_reserve_bytes
from oobleck.planner.units import parse_bytes

logger = logging.getLogger(__name__)

#: For the last reports, when everything has ended.
FAREWELL_S = 1.0
_MOST_FAULT_BYTES = 1 << 20

ROOT = (
    "the agent runs as root, and its workers too: jobs can read and write whatever root can; start "
    "it as a user of its own, as deploy/oobleck-agent.service does"
)
WITHHELD = (
    "variables of the agent's environment are not passed to workers; --pass-env NAME names those "
    "that they need"
)

EPILOG = """SIGTERM drains the node: its work moves to others, then the agent ends, within seconds
where no master is there to move it. SIGINT, SIGHUP, or a second SIGTERM, ends it at once. Exit
codes: 0 stopped by a signal, 2 wrong usage or refused by the master for good (the line says
why)."""


async def serve(config: AgentConfig, holder: Holder, token: Credentials | None = None) -> int:
    """Run until a signal or a refusal; the exit code. Without credentials the agent joins by the
    token first. Raises CommandFailed where it cannot."""
    if holder.folder is not None and holder.credentials is None and token is not None:
        holder.credentials = await _join(config, holder.folder, token)
    environment = Environment()
    incarnation = new_incarnation(environment)
    outbox = Outbox(incarnation)
    fetching = functools.partial(fetch, lambda: holder.endpoint)
    supervisor = Supervisor(
        config, outbox, environment, fetch=fetching if config.accept_code else None
    )
    session = Session(
        config,
        incarnation,
        outbox,
        environment,
        endpoint=lambda: holder.endpoint,
        node=supervisor,
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, supervisor.leave)
    for signum in end_signals():
        loop.add_signal_handler(signum, supervisor.shut_down)
    logger.info("agent starts", extra={"node": config.name, "master": config.master})
    if os.geteuid() == 0:
        logger.warning(ROOT)
    async with asyncio.TaskGroup() as tasks:
        supervising = tasks.create_task(supervisor.run())
        talking = tasks.create_task(session.run())
        renewing = tasks.create_task(holder.keep_fresh())
        await asyncio.wait({supervising, talking}, return_when=asyncio.FIRST_COMPLETED)
        refusal = talking.result() if talking.done() else None
        supervisor.shut_down()
        await supervising
        session.close()
        await asyncio.wait({talking}, timeout=FAREWELL_S)
        talking.cancel()
        renewing.cancel()
    if refusal is not None:
        click.echo(f"oobleck-agent: refused by the master: {inline(refusal)}", err=True)
        return 2
    return 0


async def _join(config: AgentConfig, folder: Path, token: Credentials) -> Credentials:
    try:
        return await join(config.master, folder, token, config.name)
    except Denied as denied:
        reason = f"the master denies: {inline(str(denied))}"
    except ValueError as error:
        reason = f"--credentials {error}"
    except OSError as error:
        reason = f"--credentials {folder}: {error.strerror}; name another folder"
    raise command.CommandFailed(reason, 2)


def default_name(hostname: str) -> str:
    """The host's name with whatever a node name may not contain replaced."""
    return nearest_name(hostname) or "node"


def check_master(address: str) -> None:
    try:
        _, port = split_address(address)
    except ValueError as error:
        raise ValueError(f"--master {address}: write it as HOST:PORT") from error
    if port == 0:
        raise ValueError(f"--master {address}: port 0 is nobody's; write it as HOST:PORT")


def _parse_memory(size: str) -> int:
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise ValueError(f"--memory-per-worker: {error}") from error


def read_faults(path: Path) -> tuple[FaultRule, ...]:
    try:
        return decode(tuple[FaultRule, ...], read_regular(path, _MOST_FAULT_BYTES))
    except OSError as error:
        text = f"--fault-plan {path}: give a JSON list of faults; the file {error.strerror}"
        raise ValueError(text) from error
    except ValueError as error:
        raise ValueError(f"--fault-plan {path}: give a JSON list of faults; {error}") from error


def default_memory(workers: int, gpus: Sequence[Gpu]) -> int:
    """Bytes for each of `workers` where they share the host's RAM, or what is left of the smallest
    GPU beside what CUDA and NCCL take."""
    if not gpus:
        return total_memory() // max(1, workers)
    share = min(gpu.memory_bytes for gpu in gpus) // max(1, -(-workers // len(gpus)))
    return max(share - gpu_reserve_bytes(workers), share // 2)


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="oobleck-cluster", prog_name="oobleck-agent")
@click.option("--master", required=True, metavar="HOST:PORT", help="Where oobleck-master listens.")
@click.option("--name", metavar="NAME", help="Name of this node.  [default: the host's name]")
@click.option(
    "--workers-per-node",
    "--workers",
    "workers",
    default=1,
    show_default=True,
    metavar="G",
    help="Workers on this node, one per GPU.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="What workers compute on; with cuda each gets the next of the host's GPUs.",
)
@click.option(
    "--address",
    metavar="ADDR",
    help="Address that other nodes reach the workers by.  [default: the one that reaches the "
    "master]",
)
@click.option(
    "--memory-per-worker",
    metavar="SIZE",
    help="What a plan may use of each worker, such as 8GiB.  [default: RAM or GPU memory, divided "
    "by the workers that share it]",
)
@click.option(
    "--drain-grace",
    type=float,
    default=DRAIN_GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="How long the work may take to move off this node after SIGTERM; 0: end at once.",
)
@click.option(
    "--credentials",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of this node's certificate, which is put there when it joins; "
    "OOBLECK_CREDENTIALS is for 'oobleck' and not read.  [default: ~/.oobleck/nodes/NAME, where "
    "the master is not on this host]",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A join token from 'oobleck pki token --out FILE', in a regular file, not a pipe, for the "
    "first start; it may also stand in OOBLECK_JOIN_TOKEN.",
)
@click.option(
    "--pass-env",
    multiple=True,
    metavar="NAME[,PREFIX_*]",
    help="What else of this environment the workers get, beside what they are known to need "
    "(docs/security.md).",
)
@click.option(
    "--allow-code",
    multiple=True,
    metavar="PREFIX",
    help="Jobs may load functions of this package, or of modules below this directory; * for any. "
    "May be given several times.  [default: any where the master is on this host and asks nobody "
    "for credentials, else none but installed plugins]",
)
@click.option(
    "--accept-code/--no-accept-code",
    default=None,
    help="Jobs may bring code of their own in a wheel, which is run as this agent's user.  "
    "[default: where the master is on this host and asks nobody for credentials]",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Talk to a master on this host in the clear, as is the default there.",
)
@click.option(
    "--exit-with-parent", is_flag=True, help="End, with all workers, when the parent process ends."
)
@click.option(
    "--fault-plan",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="For drills: a JSON list of faults to inject.",
)
def agent(
    master: str,
    name: str | None,
    workers: int,
    device: str,
    address: str | None,
    memory_per_worker: str | None,
    drain_grace: float,
    credentials: Path | None,
    token_file: Path | None,
    pass_env: tuple[str, ...],
    allow_code: tuple[str, ...],
    accept_code: bool | None,
    insecure: bool,
    exit_with_parent: bool,
    fault_plan: Path | None,
) -> int:
    """Join this host to the cluster of a master and run its share of the training."""
    if exit_with_parent:
        die_with_parent(os.getppid())
    hostname = own_hostname()
    try:
        check_master(master)
        if address is not None:
            check_own_address(address)
        token = read_join_token(token_file)
        more = read_patterns(pass_env)
        passed = passed_on(os.environ, more)
        withheld = len(os.environ) - len(passed)
        environment = {**worker_environment(device, address or ""), **passed}
        gpus = find_gpus(environment) if device == "cuda" else ()
        config = AgentConfig(
            master=master,
            name=NodeName(name if name is not None else default_name(hostname)),
            hostname=hostname,
            worker_slots=workers,
            gpus=gpus,
            address=address,
            memory_per_worker_bytes=(
                _parse_memory(memory_per_worker)
                if memory_per_worker
                else default_memory(workers, gpus)
            ),
            faults=read_faults(fault_plan) if fault_plan else (),
            warm_command=(
                sys.executable,
                *("-m", "oobleck.host.system.die_with_parent", str(os.getpid())),
                "oobleck.worker.warm",
            ),
            environment=environment,
            versions=installed(),
            drain_grace_s=drain_grace,
        )
        holder = choose_way(master, config.name, credentials, token, insecure=insecure)
        code = read_code(allow_code, accept_code, in_the_clear=holder.folder is None)
        config = dataclasses.replace(config, allow_code=code[0], accept_code=code[1])
    except ValueError as error:
        raise command.CommandFailed(str(error), 2) from error
    log.configure()
    if withheld:
        logger.info(WITHHELD, extra={"variables": withheld})
    return asyncio.run(serve(config, holder, token))


def read_code(
    allowed: Sequence[str], accepted: bool | None, *, in_the_clear: bool
) -> tuple[tuple[str, ...], bool]:
    """What --allow-code names, directories as absolute paths, and whether jobs may bring code of
    their own. Raises ValueError."""
    by_default = ("*",) if in_the_clear else ()
    prefixes = tuple(map(_read_prefix, allowed)) or by_default
    return prefixes, in_the_clear if accepted is None else accepted


def _read_prefix(prefix: str) -> str:
    if os.sep in prefix or prefix.startswith(("~", ".")):
        return os.path.abspath(os.path.expanduser(prefix))
    if prefix == "*" or all(part.isidentifier() for part in prefix.split(".")):
        return prefix
    raise ValueError(
        f"--allow-code {prefix!r}: is no package; name one, such as my.models, or a directory, "
        "such as /srv/models"
    )


def main() -> None:
    sys.exit(command.run(agent, "oobleck-agent"))


if __name__ == "__main__":
    main()
