"""OpenSSH's server on hosts that are network namespaces."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncssh
import pytest

from bench.support.network import Network, unusable

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


@contextmanager
def sshd(net: Network, host: str, folder: Path, libraries: Path) -> Iterator[None]:
    """A server on the host, where root has a home of its own. PYTHONPATH has what Oobleck needs."""
    assert SSHD is not None
    Path("/run/sshd").mkdir(exist_ok=True)
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(folder / host))
    (folder / host).chmod(0o600)
    home = folder / f"home-{host}"
    home.mkdir()
    config = folder / f"{host}.conf"
    config.write_text(
        f"ListenAddress {net.address(host)}\nHostKey {folder / host}\nPidFile none\n"
        f"AuthorizedKeysFile {folder / 'key.pub'}\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\nSubsystem sftp internal-sftp\n"
        f"SetEnv HOME={home} PYTHONPATH={libraries} OMP_NUM_THREADS=1 PATH={os.environ['PATH']}\n"
    )
    command = [*net.on(host), SSHD, "-D", "-e", "-f", str(config)]
    with (folder / f"{host}.log").open("wb") as log:
        server = subprocess.Popen(command, stderr=log)
    try:
        yield
    finally:
        server.terminate()
        server.wait()


def skip_without_ssh() -> None:
    if SSHD is None or shutil.which("ssh-keyscan") is None:
        pytest.skip("there is no sshd or ssh-keyscan; install openssh-server and openssh-client")
    if reason := unusable():
        pytest.skip(reason)
