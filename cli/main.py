"""`oobleck`: the list of commands, each loaded only when it is called.

Must import only click at the top, so that `oobleck --help` answers at once.
"""

import importlib
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from oobleck.host import command
from oobleck.host.programs import quiet_grpc

#: Module and attribute of each command, and its line in `oobleck --help`.
COMMANDS = {
    "local": ("oobleck.cli.cluster.local:local", "Run a whole cluster on this machine."),
    "init": ("oobleck.cli.jobs.files:init", "Write a job file to start from."),
    "check": ("oobleck.cli.jobs.files:check", "Check a job for problems."),
    "submit": ("oobleck.cli.jobs.submit:submit", "Queue a training job."),
    "status": ("oobleck.cli.reading.show:status", "Show the cluster, or one job in full."),
    "top": ("oobleck.cli.top.top:top", "Watch nodes, a job and its events on one page."),
    "node": ("oobleck.cli.cluster.node:node", "Take a node out for maintenance, and back."),
    "nodes": ("oobleck.cli.reading.show:nodes", "List the nodes."),
    "jobs": ("oobleck.cli.reading.show:jobs", "List the jobs."),
    "events": (
        "oobleck.cli.reading.show:events",
        "Show what happened to a job, or to the cluster.",
    ),
    "metrics": ("oobleck.cli.jobs.metrics:metrics", "Show the loss of each step, and plot it."),
    "goodput": (
        "oobleck.cli.planning.goodput:goodput",
        "Show what a job's time was spent on.",
    ),
    "track": (
        "oobleck.cli.tracking.track:track",
        "Copy a job's metrics to TensorBoard, W&B or MLflow.",
    ),
    "logs": ("oobleck.cli.reading.show:logs", "Show the output of a job's workers."),
    "dashboard": (
        "oobleck.cli.dashboard.command:dashboard",
        "Serve pages of the cluster for browsers.",
    ),
    "timeline": (
        "oobleck.cli.reading.timeline:timeline",
        "Show how a job's steps spend their time.",
    ),
    "checkpoint": (
        "oobleck.cli.jobs.checkpoint:checkpoint",
        "Take a checkpoint; list, verify or export them.",
    ),
    "chaos": (
        "oobleck.cli.chaos.chaos:chaos",
        "Inject real faults into a running job, as a drill.",
    ),
    "cancel": ("oobleck.cli.jobs.submit:cancel", "End a job."),
    "adopt": ("oobleck.cli.jobs.submit:adopt", "Take over a job that the master does not know."),
    "data": ("oobleck.cli.jobs.data:data", "Make and inspect token files for training."),
    "profile": (
        "oobleck.cli.planning.profile:profile",
        "Measure a job's model on the real devices.",
    ),
    "up": ("oobleck.cli.ssh.up:up", "Start agents on machines, by ssh."),
    "down": ("oobleck.cli.ssh.up:down", "Stop agents on machines, by ssh."),
    "doctor": (
        "oobleck.cli.cluster.doctor:doctor",
        "Check the cluster's hosts for problems.",
    ),
    "backup": (
        "oobleck.cli.cluster.backup:backup",
        "Copy the head's state, so that another can take over.",
    ),
    "pki": ("oobleck.cli.cluster.pki:pki", "Issue and revoke certificates and join tokens."),
    "plan": ("oobleck.cli.planning.plan:plan", "Show the plan that a job would get."),
    "simulate": (
        "oobleck.cli.planning.simulate:simulate",
        "Replay a trace of failures with recovery policies.",
    ),
    "config": ("oobleck.cli.jobs.files:config", "Show, check and describe job files."),
    "completion": ("oobleck.cli.options:completion", "Print a shell's completion script."),
}

#: Words of other tools, and the command for each.
SYNONYMS = {
    **dict.fromkeys(("delete", "kill", "stop"), "cancel"),
    **dict.fromkeys(("run", "start", "train"), "submit"),
    **dict.fromkeys(("describe", "get", "ps"), "status"),
}

#: Commands of `COMMANDS` that have commands of their own.
GROUPS = ("node", "dashboard", "checkpoint", "data", "pki", "config")

EPILOG = """\b
Every command that asks the master takes --master HOST:PORT, or OOBLECK_MASTER
from the environment; of several, separated by commas, the first that answers
is used. The default is 127.0.0.1:4600, where `oobleck local` listens.
Masters require a certificate: --credentials DIR, or OOBLECK_CREDENTIALS;
for your own master on this host, it is found automatically.
\b
Exit codes:
  0  done
  1  the job failed or was cancelled, or an internal error
  2  wrong usage, a refused job, or no plan fits
  3  no such job, node, checkpoint or other thing
  4  the master is unreachable, or does not answer within 5 s
  5  denied
  6  standard output cannot be written; the command may have succeeded
  130  Ctrl-C
"""


def _load(name: str) -> click.Command:
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, click.Command)
    return found


class LazyGroup(command.Group):
    """Group of the commands in `COMMANDS`."""

    synonyms = SYNONYMS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _load(cmd_name) if cmd_name in COMMANDS else None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete from `COMMANDS`, without loading any command."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(name, help=line)
            for name, (_, line) in COMMANDS.items()
            if name.startswith(incomplete)
        ]

    def shown(self) -> list[str]:
        return [*COMMANDS, "--help", "--version"]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        listed, *rest = args
        named = rest and not rest[0].startswith("-") and not ctx.resilient_parsing
        if listed in ("jobs", "nodes") and named:
            lines = [rest] if rest[0] in COMMANDS else self._of_groups(rest)
            if listed == "jobs" and not lines:
                lines = [["status", *rest]]
            hint = f"; {command.did_you_mean(ctx, lines)}" if lines else ""
            raise click.UsageError(f"{listed!r} lists all, and takes no name{hint}", ctx)
        return super().resolve_command(ctx, args)

    def meant(self, args: Sequence[str]) -> list[list[str]]:
        return self._of_groups(args) or super().meant(args)

    def _of_groups(self, args: Sequence[str]) -> list[list[str]]:
        """Return the line with each group that has the command."""
        groups = {name: _load(name) for name in GROUPS}
        return [
            [name, *args]
            for name, group in groups.items()
            if isinstance(group, click.Group) and args[0] in group.commands
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="oobleck-cluster", prog_name="oobleck")
def oobleck() -> None:
    """Train large models on machines that may fail: submit jobs and watch them."""


def main() -> None:
    quiet_grpc()
    sys.exit(command.run(oobleck, "oobleck"))


if __name__ == "__main__":
    main()
