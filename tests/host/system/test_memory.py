"""What the agent knows of a host that is out of memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.host.system.memory import kernel_kills, total_memory

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 64 << 20
#: Counts, has a child take more than there is, and counts again.
GREEDY = """
import os, signal, sys
open(sys.argv[1], "w").write(str(os.getpid()))
from oobleck.host.system.memory import kernel_kills, total_memory
print(total_memory())
before = kernel_kills()
child = os.fork()
if not child:
    open("/proc/self/oom_score_adj", "w").write("1000")
    held = [os.urandom(1 << 20) for _ in range(256)]
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGKILL, status
print(kernel_kills() - before)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with little memory."""
    path = GROUPS / f"oobleck-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError:
        pytest.skip("no control group of memory can be made here")
    yield path
    path.rmdir()


def test_the_limit_of_the_group_counts_and_a_process_that_the_kernel_ends(group: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GREEDY, str(group / "cgroup.procs")], capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == (f"{LIMIT_BYTES}\n1\n", 0), done.stderr


@pytest.mark.parametrize(
    ("file", "groups"),
    [
        ("sys/fs/cgroup/jobs/one/memory.events", "0::/jobs/one\n"),
        ("sys/fs/cgroup/memory/one/memory.oom_control", "4:memory:/one\n0::/\n"),
        ("proc/vmstat", "0::/jobs/one\n"),
    ],
)
def test_the_counter_nearest_to_the_agent_is_read(tmp_path: Path, file: str, groups: str) -> None:
    assert kernel_kills(tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 1\n")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("low 0\noom 5\noom_kill 3\n")
    assert kernel_kills(tmp_path) == 3


@pytest.mark.parametrize(
    ("files", "groups", "least"),
    [
        ({"jobs/one/memory.max": "max", "jobs/memory.max": "7000"}, "0::/jobs/one\n", 7000),
        ({"jobs/one/memory.max": "3000", "jobs/memory.max": "7000"}, "0::/jobs/one\n", 3000),
        ({"memory/memory.limit_in_bytes": "5000"}, "4:memory:/not/shown\n0::/\n", 5000),
        ({"jobs/memory.max": "max"}, "0::/jobs\n", None),
    ],
)
def test_the_least_limit_of_a_group_and_those_above_counts(
    tmp_path: Path, files: dict[str, str], groups: str, least: int | None
) -> None:
    host = total_memory(tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert total_memory(tmp_path) == (least or host)
