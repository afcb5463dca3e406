"""Every user error is one line with its fix and the documented exit code, never a traceback."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import click
import grpc
import pytest

from oobleck.cli.client import MasterClient, Unreachable, cannot_reach
from oobleck.cli.jobs.job_file import read_job
from oobleck.cli.main import COMMANDS, GROUPS, oobleck
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import DEFAULT_MASTER
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import MOST_RECEIVED_BYTES
from support.commands import refused, run

VERBS = [
    ("status",),
    ("status", "demo-1"),
    ("nodes",),
    ("jobs",),
    ("events", "demo-1"),
    ("logs", "demo-1"),
    ("cancel", "demo-1"),
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_nobody_listens(verb: tuple[str, ...]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        line = refused(run(*verb, "--master", address), 4)
    assert address in line
    assert line.endswith(
        "; check that oobleck-master runs there, or name another with --master or OOBLECK_MASTER"
    )


def test_where_a_local_cluster_would_listen_its_start_is_the_hint() -> None:
    assert "start one with 'oobleck local --nodes 4'" in str(cannot_reach(DEFAULT_MASTER, "silent"))


@pytest.mark.parametrize(
    "verb",
    [("jobs",), pytest.param(("events", "demo-1"), marks=pytest.mark.soak)],
    ids=" ".join,
)
def test_a_master_that_hangs_is_given_up_long_before_grpc_would(verb: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        line = refused(run(*verb, "--master", address, timeout_s=40), 4)
    assert address in line
    assert "does not answer like an Oobleck master" in line


def test_a_proxy_for_downloads_is_not_on_the_way_to_a_master(master: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        proxy = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        names = ("http_proxy", "https_proxy", "grpc_proxy")
        result = run("jobs", "--master", master, environment=dict.fromkeys(names, proxy))
    assert result.returncode == 0, result


FULL = "exec env PYTHONUNBUFFERED=%s {} >/dev/full"
CLOSED = "exec {} >&-"
NO_FOLDER = 'cd "$(mktemp -d)" && rmdir "$PWD" && exec {}'


def told_through(shell: str, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of the command as `shell` starts it."""
    command = shlex.join([sys.executable, "-m", "oobleck.cli.main", *arguments])
    line = ["sh", "-c", shell.format(command)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
    return result.returncode, result.stderr


def test_standard_output_that_takes_nothing(master: str, job_file: Callable[..., Path]) -> None:
    why = "standard output cannot be written: No space left on device\n"
    assert told_through(FULL % "1", "nodes", "--master", master) == (6, f"oobleck: {why}")
    queued = told_through(FULL % "", "submit", str(job_file()), "--master", master, "--follow")
    assert queued == (6, f"oobleck: submitted demo-1, but {why}")
    assert run("cancel", "demo-1", "--master", master).returncode == 0


@pytest.mark.parametrize(
    ("shell", "arguments", "line"),
    [
        (CLOSED, ("nodes",), "standard output is closed; to have none, send it to /dev/null"),
        (NO_FOLDER, ("local", "--nodes", "1", "--state-dir", "x"), "the current folder is gone; "),
        (NO_FOLDER, ("pki", "init", "--dir", "x"), "the current folder is gone; change into one"),
        ("exec {} <&-", ("submit", "-"), "-: standard input is closed; give a YAML job file"),
    ],
    ids=["closed", "local", "init", "input"],
)
def test_what_the_shell_has_taken_away(shell: str, arguments: tuple[str, ...], line: str) -> None:
    code, told = told_through(shell, *arguments)
    assert code == 2, told
    assert told.startswith(f"oobleck: {line}")
    assert told.count("\n") == 1


def test_a_port_that_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    with connection:
                        connection.sendall(b"220 welcome\r\n" * 10)

        greeter = threading.Thread(target=greet)
        greeter.start()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        try:
            line = refused(run("jobs", "--master", address), 4)
        finally:
            other.shutdown(socket.SHUT_RDWR)  # closing alone does not end an accept
            greeter.join(timeout=240)
    assert not greeter.is_alive()
    assert "does not answer like an Oobleck master" in line


def test_a_master_of_an_earlier_release_that_lacks_a_call() -> None:
    jobs = grpc.unary_unary_rpc_method_handler(
        lambda request, context: pb.ListJobsReply(),
        request_deserializer=pb.ListJobsRequest.FromString,
        response_serializer=pb.ListJobsReply.SerializeToString,
    )
    calls = grpc.method_handlers_generic_handler("oobleck.Operator", {"ListJobs": jobs})
    server = grpc.server(ThreadPoolExecutor(1), handlers=(calls,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with MasterClient(f"127.0.0.1:{port}") as client:
            assert client.jobs() == []
            with pytest.raises(CommandFailed, match=r"runs an earlier release.*: upgrade Oobleck"):
                client.nodes()
    finally:
        server.stop(None).wait()


def test_a_request_that_never_left_is_not_repeated() -> None:
    """It is where its reply was lost, which takes seconds."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        connection = MasterClient(f"127.0.0.1:{nobody.getsockname()[1]}")
        with connection, pytest.raises(Unreachable) as caught:
            connection.cancel("x-1")
    assert not caught.value.reached


def test_a_host_that_has_no_address() -> None:
    line = refused(run("jobs", "--master", "no.such.host.invalid:4600"), 4)
    assert "]" not in line


@pytest.mark.parametrize(
    "verb", [("status", "x-1"), ("events", "x-1"), ("logs", "x-1"), ("cancel", "x-1")], ids=" ".join
)
def test_no_such_job(master: str, verb: tuple[str, ...]) -> None:
    assert "no job 'x-1'" in refused(run(*verb, "--master", master), 3)


@pytest.mark.parametrize("verb", ["drain", "undrain"])
def test_no_such_node(master: str, verb: str) -> None:
    line = refused(run("node", verb, "n9", "--master", master), 3)
    assert "no node 'n9'; known nodes: none yet" in line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("train",), "no command 'train'"),
        (("stauts",), "no command 'stauts'; did you mean 'status'?"),
        (("version",), "no command 'version'; did you mean '--version'?"),
        (("help",), "did you mean '--help'?"),
        (("drain", "n1"), "no command 'drain'; did you mean 'oobleck node drain n1'?"),
        (("revoke", "my node"), "did you mean 'oobleck pki revoke 'my node''?"),
        (("show",), "did you mean 'oobleck config show'?"),
        (("stop", "demo-1"), "no command 'stop'; did you mean 'cancel'?"),
        (("demo-1", "status"), "no command 'demo-1'; did you mean 'oobleck status demo-1'?"),
        (("job", "cancel", "demo-1"), "no command 'job'; did you mean 'oobleck cancel demo-1'?"),
        (("jobs", "demo-1"), "takes no name; did you mean 'oobleck status demo-1'?"),
        (("jobs", "cancel", "demo-1"), "takes no name; did you mean 'oobleck cancel demo-1'?"),
        (("nodes", "drain", "n1"), "takes no name; did you mean 'oobleck node drain n1'?"),
        (("nodes", "n1"), "'nodes' lists all, and takes no name (see 'oobleck --help')"),
        (("node", "drian", "n1"), "no command 'drian'; did you mean 'drain'?"),
        (("node", "n1", "drain"), "no command 'n1'; did you mean 'oobleck node drain n1'?"),
        (("node", "list"), "no command 'list'; there are drain, undrain, forget (see"),
        (("checkpoint", "lst", "demo-1"), "no command 'lst'; did you mean 'list'?"),
        (("checkpoint", "take", "demo-1"), "'take'; did you mean 'oobleck checkpoint demo-1'?"),
        (("checkpoint", "demo-1", "list"), "did you mean 'oobleck checkpoint list demo-1'?"),
        (("config", "a.yaml", "show"), "did you mean 'oobleck config show a.yaml'?"),
        (("pki", "tokne"), "no command 'tokne'; did you mean 'token'?"),
        (("dashboard", "tokne"), "no command 'tokne'; did you mean 'token'?"),
        (("nodes", "--jsn"), "No such option '--jsn'. Did you mean '--json'?"),
        (("jobs", "--what"), "No such option"),
        (("jobs", "--master", "here"), "HOST:PORT"),
        (("jobs", "--master", "http://127.0.0.1:80"), "HOST:PORT"),
        (("jobs", "--master", "127.0.0.1:0"), "no master has port 0"),
        (("jobs", "--master", "::1:4600"), "HOST:PORT"),
        (("events", "\udcff"), r"the argument '\udcff' is not UTF-8 text"),
        (("status", "\udcff"), r"the argument '\udcff' is not UTF-8 text"),
        (("metrics",), "Missing argument 'JOB'"),
        (("submit", "absent.yaml"), "absent.yaml: No such file"),
        (("plan", "--nodes", "4"), "--profile"),
        (("plan", "--profile", "absent.json", "--nodes", "4"), "absent.json: No such file"),
        (("local", "--nodes", "0"), "'--nodes': 0 is not in the range x>=1"),
        (("local", "--nodes", "1", "--workers-per-node", "0"), "0 is not in the range x>=1"),
        (("local", "--nodes", "1", "--workers", "0"), "0 is not in the range x>=1"),
        (("local", "--nodes", "100000"), "--oversubscribe"),
        (("local", "--nodes", "2", "--listen", "nowhere"), "HOST:PORT"),
        (("local", "--nodes", "1", "--state-dir", ""), "--state-dir: is empty"),
        (("local",), "Missing option '--nodes'"),
    ],
    ids=lambda value: ascii(" ".join(value)) if isinstance(value, tuple) else "",
)
def test_wrong_usage(arguments: tuple[str, ...], part: str) -> None:
    assert part in refused(run(*arguments), 2)


@pytest.mark.parametrize("program", ["oobleck.cli.main", "oobleck.agent", "oobleck.master"])
def test_every_program_tells_its_version(program: str) -> None:
    command = [sys.executable, "-m", program, "--version"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert told.returncode == 0
    assert told.stdout.strip().endswith(f"version {metadata.version('oobleck-cluster')}")


def test_a_home_that_takes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    monkeypatch.setenv("HOME", str(home))
    assert "--state-dir" in refused(run("local", "--nodes", "1"), 2)


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused(run("local", "--nodes", "1", "--listen", address), 2)
    assert "already in use" in line


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ("fault_tolerence: 1\n", "job.yaml:5: unknown key 'fault_tolerence'"),
        ("fault_tolerance: many\n", "job.yaml:5"),
        ("fault_tolerance: 9\n", "global_batch"),
        ("{", "job.yaml:"),
    ],
)
def test_a_bad_job_file_names_the_line(
    master: str, job_file: Callable[..., Path], extra: str, part: str
) -> None:
    assert part in refused(run("submit", str(job_file(extra=extra)), "--master", master), 2)


def test_what_is_no_job_file_is_refused_at_once(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (1 << 20) + b"\n")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    absent = refused(run("submit", str(tmp_path / "absent.yaml")), 2)
    assert absent.endswith("absent.yaml: No such file or directory; give a YAML job file")
    assert "larger than 1 MiB" in refused(run("submit", str(large)), 2)
    assert "is not a regular file" in refused(run("submit", "/dev/zero"), 2)
    assert "nothing came through this pipe for 5 s" in refused(run("submit", str(pipe)), 2)


def test_a_submission_that_is_larger_than_a_message_is_refused_unsent() -> None:
    told = pytest.raises(CommandFailed, match="at most 524288 can be sent; give")
    with MasterClient("127.0.0.1:1") as client, told as failed:
        client.submit("{}", "1", profile=" " * MOST_RECEIVED_BYTES)
    assert failed.value.exit_code == 2


@pytest.mark.parametrize(
    ("override", "part"),
    [
        (r'profile="\0"', "profile: has characters that cannot be printed; name another place"),
        (r'model.config="\0"', "a file name cannot contain NUL; give the config.json of a"),
    ],
    ids=["profile", "config"],
)
def test_no_file_has_a_name_with_a_nul(
    job_file: Callable[..., Path], override: str, part: str
) -> None:
    with pytest.raises(CommandFailed, match=re.escape(part)):
        read_job(job_file(), ["model.kind=gpt2", override])


def test_a_job_in_a_folder_that_it_cannot_name(
    tmp_path: Path, job_file: Callable[..., Path]
) -> None:
    folder = tmp_path / os.fsdecode(b"gr\xfcn")
    folder.mkdir()
    path = job_file().rename(folder / "job.yaml")
    with pytest.raises(CommandFailed, match=r"its folder is '.*gr\\udcfcn': move the job file"):
        read_job(path, ())


@pytest.mark.parametrize("through", ["-", "/dev/stdin"])
def test_a_job_comes_through_a_pipe(
    master: str, job_file: Callable[..., Path], through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_file(name="piped")
    monkeypatch.chdir(path.parent)
    command = [sys.executable, "-m", "oobleck.cli.main", "plan", through, "--nodes", "2"]
    result = subprocess.run(
        command, input=path.read_text(), capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result
    assert "pipeline 1" in result.stdout


@pytest.mark.parametrize(
    ("flags", "start"),
    [
        (("--microbatch", "3"), "--microbatch 3: training.microbatch: 3 does not divide"),
        (("--fault-tolerance", "10"), "--fault-tolerance 10: training.global_batch: "),
        (("--set", "model.hiden=3"), "--set model.hiden=3: unknown key 'hiden' in model"),
        (("--memory-per-worker", "lots"), "--memory-per-worker: 'lots' is not a size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_plan_blames_the_option(
    job_file: Callable[..., Path], flags: tuple[str, ...], start: str
) -> None:
    line = refused(run("plan", str(job_file()), "--nodes", "4", *flags), 2)
    assert line.startswith(f"oobleck: {start}")


def test_a_bad_override(master: str, job_file: Callable[..., Path]) -> None:
    submit = ("submit", str(job_file()), "--master", master, "--set")
    before = run("jobs", "--master", master).stdout
    assert "microbatch" in refused(run(*submit, "training.microbatch=3"), 2)
    blamed = "oobleck: --set fault_tolerance=9: training.global_batch: "
    assert refused(run(*submit, "fault_tolerance=9"), 2).startswith(blamed)
    assert run("jobs", "--master", master).stdout == before


def test_missing_data_of_workers_on_this_machine(job_file: Callable[..., Path]) -> None:
    measure = ("profile", str(job_file()), "--local", "--set")
    assert "no file matches" in refused(run(*measure, "data.text=[nothing/*.txt]"), 2)
    device = refused(run(*measure, "data.text=[/dev/null]"), 2)
    assert "/dev/null is not a regular file" in device
    few = refused(run(*measure, "model.sequence_length=5000"), 2)
    assert "holds 1000 tokens, too few for one row of 5001" in few


def test_the_reader_of_a_pipe_may_leave(master: str) -> None:
    command = [sys.executable, "-m", "oobleck.cli.main", "--help"]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == ""


def test_all_groups_are_looked_through_for_a_command() -> None:
    context = click.Context(oobleck)
    found = {
        name for name in COMMANDS if isinstance(oobleck.get_command(context, name), click.Group)
    }
    assert found == set(GROUPS)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, oobleck.cli.main as m; m.command.run(m.oobleck, 'oobleck', ['--help']); "
        "print([n for n in ('grpc', 'torch', 'scipy', 'yaml', 'asyncio', 'google') "
        "if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip().split("\n")[-1] == "[]"
