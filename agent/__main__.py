"""oobleck-agent: reads the command line, then runs the supervisor and its session."""

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import click

from oobleck.agent.config import DRAIN_GRACE_S, AgentConfig, passed_on, read_patterns
from oobleck.agent.connection.enrol import Denied, Holder, choose_way, join, read_join_token
from oobleck.agent.connection.heads import check_own_address
from oobleck.agent.connection.outbox import Outbox
from oobleck.agent.connection.session import Session
from oobleck.agent.examiner import Examiner
from oobleck.agent.gpus import default_memory, find, versions, watch
from oobleck.agent.metrics import read_slowly
from oobleck.agent.processes.pool import new_incarnation
from oobleck.agent.supervisor import Supervisor
from oobleck.agent.wheels import WheelCache
from oobleck.core.codec import decode
from oobleck.core.ids import NodeName, nearest_name
from oobleck.core.messages import FaultRule
from oobleck.core.units import parse_bytes
from oobleck.host import command, log
from oobleck.host.address import own_hostname, split_address, split_addresses
from oobleck.host.display import inline
from oobleck.host.gpu.devices import (
    GpuReport,
    interface_address,
    network_environment,
    worker_environment,
)
from oobleck.host.metrics import MetricsPage, bind
from oobleck.host.security.credentials import Credentials
from oobleck.host.system.environment import Environment
from oobleck.host.system.files import read_regular
from oobleck.host.system.process import die_with_parent, end_signals, with_parent
from oobleck.proto.health import ALIVE, READY, HealthPort

logger = logging.getLogger(__name__)

#: Time for the last reports, once all processes have ended.
FAREWELL_S = 1.0
_MOST_FAULT_BYTES = 1 << 20

ROOT = (
    "the agent runs as root, and its workers too: jobs can read and write whatever root can; start "
    "it as a user of its own, as deploy/oobleck-agent.service does"
)
IN_THE_CLEAR = (
    "the master is called in the clear: any user of this host who gets its port commands this "
    "agent, which runs as you; give the master an authority ('oobleck pki init'), or start both by "
    "'oobleck local'"
)
WITHHELD = (
    "variables of the agent's environment are not passed to workers; --pass-env NAME names those "
    "that they need"
)

EPILOG = """SIGTERM drains the node: its work moves to others, then the agent ends, within seconds
where no master is there to move it. SIGINT, SIGHUP, or a second SIGTERM, ends it at once. Exit
codes: 0 stopped by a signal, 2 wrong usage or refused by the master for good (the line says
why)."""


async def serve(
    config: AgentConfig,
    holder: Holder,
    token: Credentials | None = None,
    listening: socket.socket | None = None,
    health_listen: str | None = None,
) -> int:
    """Run until a signal or a refusal, and return the exit code. Raises CommandFailed. `listening`:
    serves metrics; `health_listen`: serves health; None: nowhere."""
    environment = Environment()
    incarnation = new_incarnation(environment)
    outbox = Outbox(incarnation)
    wheels = WheelCache((lambda: holder.endpoint) if config.accept_code else None)
    supervisor = Supervisor(config, outbox, environment, wheels=wheels)
    examiner = Examiner(config, environment, outbox.examined, holder.folder)
    session = Session(
        config,
        incarnation,
        outbox,
        environment,
        endpoint=lambda: holder.endpoint,
        heads=holder.heads,
        node=supervisor,
        examiner=examiner,
    )
    async with _answering_health(health_listen, supervisor):
        if holder.folder is not None and holder.credentials is None and token is not None:
            holder.credentials = await _join(config, holder, holder.folder, token)
        refusal = await _run(config, holder, supervisor, session, examiner, listening)
    if refusal is not None:
        click.echo(f"oobleck-agent: refused by the master: {inline(refusal)}", err=True)
        return 2
    return 0


async def _run(
    config: AgentConfig,
    holder: Holder,
    supervisor: Supervisor,
    session: Session,
    examiner: Examiner,
    listening: socket.socket | None,
) -> str | None:
    """Run the agent until a signal (None) or the master's refusal, which is returned."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, supervisor.leave)
    for signum in end_signals():
        loop.add_signal_handler(signum, supervisor.shut_down)
    logger.info("agent starts", extra={"node": config.name, "master": config.master})
    if os.geteuid() == 0:
        logger.warning(ROOT)
    if holder.folder is None:
        logger.warning(IN_THE_CLEAR)
    async with asyncio.TaskGroup() as tasks:
        supervising = tasks.create_task(supervisor.run())
        talking = tasks.create_task(session.run())
        others = [tasks.create_task(holder.keep_fresh()), tasks.create_task(examiner.run())]
        if config.gpus:
            watching = watch(config.environment, supervisor.gpus_read, config.watch_command)
            others.append(tasks.create_task(watching))
        if listening is not None:
            page = MetricsPage(listening, supervisor.metrics, read_slowly)
            others.append(tasks.create_task(page.run()))
        await asyncio.wait({supervising, talking}, return_when=asyncio.FIRST_COMPLETED)
        refusal = talking.result() if talking.done() else None
        supervisor.shut_down()
        await supervising
        session.close()
        await asyncio.wait({talking}, timeout=FAREWELL_S)
        talking.cancel()
        for task in others:
            task.cancel()
    return refusal


@asynccontextmanager
async def _answering_health(address: str | None, supervisor: Supervisor) -> AsyncIterator[None]:
    """Answer health probes at `address`, even before the agent has joined; None: answer none."""
    if address is None:
        yield
        return
    probes = {ALIVE: lambda: True, READY: lambda: supervisor.is_ready}
    try:
        port = HealthPort("--health-listen", address, probes)
    except ValueError as error:
        raise command.CommandFailed(str(error), 2) from error
    await port.start()
    try:
        yield
    finally:
        await port.stop()


async def _join(
    config: AgentConfig, holder: Holder, folder: Path, token: Credentials
) -> Credentials:
    try:
        return await join(holder.heads, folder, token, config.name)
    except Denied as denied:
        reason = f"the master denies: {inline(str(denied))}"
    except ValueError as error:
        reason = f"--credentials {error}"
    except OSError as error:
        reason = f"--credentials {folder}: {error.strerror}; name another folder"
    raise command.CommandFailed(reason, 2)


def default_name(hostname: str) -> str:
    """Return the host's name, with characters replaced that a node name may not contain."""
    return nearest_name(hostname) or "node"


def check_master(text: str) -> None:
    """Raise ValueError unless `text` is the addresses of heads, with commas between them."""
    try:
        heads = split_addresses(text)
    except ValueError as error:
        raise ValueError(f"--master {text}: write it as HOST:PORT[,HOST:PORT...]") from error
    if any(split_address(head)[1] == 0 for head in heads):
        raise ValueError(f"--master {text}: port 0 is nobody's; write it as HOST:PORT")


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


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="oobleck-cluster", prog_name="oobleck-agent")
@click.option(
    "--master",
    required=True,
    metavar="HOST:PORT[,HOST:PORT...]",
    help="Where oobleck-master listens. Several are tried in turn. Those that a head tells are "
    "kept beside the credentials.",
)
@click.option("--name", metavar="NAME", help="Name of this node.  [default: the host's name]")
@click.option(
    "--rack",
    envvar="OOBLECK_RACK",
    show_envvar=True,
    default="",
    metavar="NAME",
    help="Rack, switch or host that this node shares with others, which may fail together with it. "
    "Copies of a layer are spread over racks.  [default: unknown]",
)
@click.option(
    "--workers-per-node",
    "--workers",
    "workers",
    type=int,
    metavar="G",
    help="Workers on this node, one per GPU.  [default: 1, or one for each of --gpus]",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="What workers compute on; with cuda each gets the next of the host's GPUs.",
)
@click.option(
    "--gpus",
    metavar="GPU[,GPU...]",
    help="Which GPUs, by number as nvidia-smi counts them, or by name (GPU-... or MIG-..., as "
    "'nvidia-smi -L' shows).  [default: CUDA_VISIBLE_DEVICES, or all]",
)
@click.option(
    "--share-gpus",
    is_flag=True,
    help="Start also where other processes compute on the GPUs.",
)
@click.option(
    "--address",
    metavar="ADDR",
    help="Address that other nodes reach the workers by.  [default: that of --interface, or the "
    "one that reaches the master]",
)
@click.option(
    "--interface",
    metavar="NAME",
    help="Network interface that workers talk by, as eth0: its address is theirs unless --address "
    "says another one, and NCCL uses it.  [default: the one that has the address]",
)
@click.option(
    "--hca",
    metavar="NAME[:PORT][,NAME...]",
    help="InfiniBand or RoCE adapters that NCCL uses, as mlx5_0,mlx5_1; none: it uses sockets.  "
    "[default: as NCCL chooses]",
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
    "OOBLECK_CREDENTIALS is for 'oobleck' and not read.  [default: a folder beside the master's "
    "authority where the master is your own and on this host, else ~/.oobleck/nodes/NAME]",
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
    "May be given several times.  [default: any where the master is your own and for this host "
    "alone, else none but installed plugins]",
)
@click.option(
    "--accept-code/--no-accept-code",
    default=None,
    help="Jobs may bring code of their own in a wheel, which is run as this agent's user.  "
    "[default: where the master is your own and for this host alone]",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Talk to a master on this host in the clear, as is the default where it is not your own "
    "or has no authority: whatever listens there is obeyed.",
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
    rack: str,
    workers: int | None,
    device: str,
    gpus: str | None,
    share_gpus: bool,
    address: str | None,
    interface: str | None,
    hca: str | None,
    memory_per_worker: str | None,
    drain_grace: float,
    credentials: Path | None,
    token_file: Path | None,
    pass_env: tuple[str, ...],
    allow_code: tuple[str, ...],
    accept_code: bool | None,
    insecure: bool,
    metrics_listen: str | None,
    health_listen: str | None,
    exit_with_parent: bool,
    fault_plan: Path | None,
) -> int:
    """Join this host to the cluster of a master and run its share of the training."""
    if exit_with_parent:
        die_with_parent(os.getppid())
    hostname = own_hostname()
    try:
        check_master(master)
        if interface is not None:
            address = address or interface_address(interface)
        if address is not None:
            check_own_address(address)
        if gpus is not None and device != "cuda":
            raise ValueError(f"--gpus {gpus}: is for workers on GPUs; give --device cuda too")
        network = network_environment(interface, hca)
        token = read_join_token(token_file)
        more = read_patterns(pass_env)
        passed = passed_on(os.environ, more)
        withheld = len(os.environ) - len(passed)
        environment = {**worker_environment(device, address or ""), **passed, **network}
        found = GpuReport()
        if device == "cuda":
            found = find(environment, gpus, workers, shared=share_gpus)
        if workers is None:
            workers = 1 if gpus is None else len(found.gpus)
        config = AgentConfig(
            master=master,
            name=NodeName(name if name is not None else default_name(hostname)),
            hostname=hostname,
            worker_slots=workers,
            gpus=found.gpus,
            address=address,
            memory_per_worker_bytes=(
                _parse_memory(memory_per_worker)
                if memory_per_worker
                else default_memory(workers, found.gpus, found.context_bytes)
            ),
            gpu_context_bytes=found.context_bytes,
            faults=read_faults(fault_plan) if fault_plan else (),
            warm_command=tuple(with_parent("oobleck.worker.warm")),
            environment=environment,
            versions=versions(found),
            drain_grace_s=drain_grace,
            rack=rack,
        )
        log.configure()
        holder = choose_way(master, config.name, credentials, token, insecure=insecure)
        code = read_code(allow_code, accept_code, any_by_default=holder.own_user_alone)
        config = dataclasses.replace(config, allow_code=code[0], accept_code=code[1])
        listening = bind("--metrics-listen", metrics_listen) if metrics_listen is not None else None
    except ValueError as error:
        raise command.CommandFailed(str(error), 2) from error
    if withheld:
        logger.info(WITHHELD, extra={"variables": withheld})
    return asyncio.run(serve(config, holder, token, listening, health_listen))


def read_code(
    allowed: Sequence[str], accepted: bool | None, *, any_by_default: bool
) -> tuple[tuple[str, ...], bool]:
    """Return the prefixes that --allow-code names, directories as absolute paths, and whether jobs
    may bring code of their own. Raises ValueError."""
    by_default = ("*",) if any_by_default else ()
    prefixes = tuple(map(_read_prefix, allowed)) or by_default
    return prefixes, any_by_default if accepted is None else accepted


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
