"""Hosts that are reached by ssh: asyncssh's own server on a port for each, with a home of its own.

What is run there are real processes of this machine. A host has Python, and by PYTHONPATH all that
Oobleck needs, as one where the libraries are installed already; Oobleck itself it has not.
"""

import asyncio
import os
import stat
import sys
import threading
from pathlib import Path

import asyncssh

from support.installed import link_libraries

#: The Python of a host; nobody's own is found by chance.
PYTHON = "host-python"
#: The one that the tests' virtual environment was made by.
_OUTSIDE = Path(sys.base_prefix, "bin", "python3")


def open_python() -> Path | None:
    """A Python for these libraries that every user of this machine can run; None: there is none."""
    system = Path(f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
    for path in (_OUTSIDE, system):
        if path.exists() and is_open(path):
            return path
    return None


def is_open(path: Path) -> bool:
    """Whether all users get there."""
    real = path.resolve()
    return all(one.stat().st_mode & stat.S_IXOTH for one in real.parents)


class SshHosts:
    """A context manager: the servers run in a thread of their own."""

    def __init__(self, folder: Path, names: list[str], warm: str = "") -> None:
        """`warm`: what agents' warm processes are forked from (`bench.support.preloaded`), as a
        folder for PYTHONPATH."""
        self.folder = folder
        self.names = names
        self._path = os.pathsep.join(filter(None, (warm, str(folder / "libraries"))))
        self.ports: dict[str, int] = {}
        self.known_hosts = folder / "known_hosts"
        self.identity = folder / "id_ed25519"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers: dict[str, asyncssh.SSHAcceptor] = {}
        self._keys: dict[str, asyncssh.SSHKey] = {}

    def __enter__(self) -> "SshHosts":
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(self.identity))
        key.write_public_key(str(self.folder / "authorized_keys"))
        link_libraries(self.folder / "libraries")
        self._thread.start()
        for name in self.names:
            self.serve(name, asyncssh.generate_private_key("ssh-ed25519"))
        self.known_hosts.write_text("".join(map(self._known, self.names)))
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._servers):
            self.refuse(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def home(self, name: str) -> Path:
        return self.folder / name

    def line(self, name: str) -> str:
        """Of HOSTS.txt."""
        return f"127.0.0.1:{self.ports[name]} name={name}\n"

    def _known(self, name: str) -> str:
        key = self._keys[name].export_public_key().decode().strip()
        return f"[127.0.0.1]:{self.ports[name]} {key}\n"

    def serve(self, name: str, key: asyncssh.SSHKey) -> None:
        """Also again, on the same port, perhaps with another key."""
        self._keys[name] = key
        tools = self.home(name) / "bin"
        if not tools.exists():
            tools.mkdir(parents=True)
            (tools / PYTHON).symlink_to(_OUTSIDE)
        serving = asyncio.run_coroutine_threadsafe(self._serve(name, key), self._loop)
        self._servers[name] = serving.result()
        self.ports[name] = self._servers[name].get_port()

    async def _serve(self, name: str, key: asyncssh.SSHKey) -> asyncssh.SSHAcceptor:
        async def run(process: asyncssh.SSHServerProcess[bytes]) -> None:
            await self._run(name, process)

        return await asyncssh.listen(
            "127.0.0.1",
            self.ports.get(name, 0),
            server_host_keys=[key],
            authorized_client_keys=str(self.folder / "authorized_keys"),
            process_factory=run,
            sftp_factory=True,
            encoding=None,
        )

    async def _run(self, name: str, process: asyncssh.SSHServerProcess[bytes]) -> None:
        assert process.command is not None
        home = self.home(name)
        environment = {
            "HOME": str(home),
            "PATH": f"{home / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": self._path,
            "OMP_NUM_THREADS": "1",
        }
        child = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            process.command,
            cwd=home,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await child.communicate(await process.stdin.read())
        process.stdout.write(output)
        process.stderr.write(errors)
        process.exit(child.returncode or 0)

    def forget(self, name: str) -> None:
        """Its key is in known_hosts no more."""
        lines = self.known_hosts.read_text().splitlines(keepends=True)
        self.known_hosts.write_text("".join(line for line in lines if line != self._known(name)))

    def age(self, name: str, version: str) -> None:
        """Its Python says that it is of this version."""
        program = self.home(name) / "bin" / PYTHON
        program.unlink()
        said = f"sys.version_info = ({version.replace('.', ', ')})"
        code = f"import sys; {said}; exec(sys.argv[2])"
        program.write_text(f"#!/bin/sh\nexec {_OUTSIDE} -c '{code}' \"$@\"\n")
        program.chmod(0o755)

    def refuse(self, name: str) -> None:
        """Nobody listens at its port any more."""
        closing = asyncio.run_coroutine_threadsafe(self._close(self._servers.pop(name)), self._loop)
        closing.result()

    @staticmethod
    async def _close(server: asyncssh.SSHAcceptor) -> None:
        server.close()
        await server.wait_closed()
