"""What tests compute on, and their order: those of whole clusters first, so that all processes end
together. gRPC, which many tests load, is told first which TLS it speaks."""

import pytest

from oobleck.host.ipc import tls
from support import devices

tls.refuse_older()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="what engine tests compute on: cpu or cuda:0")


def pytest_configure(config: pytest.Config) -> None:
    try:
        devices.choose(config.getoption("--device"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("cluster") is None)
