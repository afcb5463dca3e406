"""A real master with an authority of its own, one for each module of tests that calls it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.host.security.credentials import Credentials
from support import holders
from support.masters import MasterProcess, master


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authority") / "pki"


@pytest.fixture(scope="module")
def everyone(folder: Path) -> dict[str, Credentials]:
    return holders.make(folder)


@pytest.fixture(scope="module")
def running(
    folder: Path, everyone: dict[str, Credentials], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MasterProcess]:
    options = ("--pki", str(folder), "--health-listen", "127.0.0.1:0")
    with master(tmp_path_factory.mktemp("secured") / "state", *options) as process:
        yield process
