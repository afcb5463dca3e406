"""What tests compute on, and the order of their files, which is random, so that those that wait for
a cluster run beside those that compute; the longest begin before the rest is over. gRPC, which many
tests load, is told first which TLS it speaks."""

import gc
import random
import signal
import zlib
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from bench.support.preloaded import Preloaded
from oobleck.host.programs import refuse_older_tls
from support import devices
from support.testing import python_of

refuse_older_tls()
# A script has what it starts in the background ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


#: Where real workers train, whatever goes between them.
_OF_WORKERS = tuple(
    f"tests/worker/{each}/" for each in ("checkpoint", "preparation", "recovery", "step")
)

#: Of a run, in which all files with real workers begin.
_FIRST_PART = 0.75

#: Clusters of tests/cluster that go on as long as files of that folder follow each other.
_STANDING = {"standing_cluster", "standing_wide_cluster"}

#: Starts the warm processes in all processes of a run.
_SHARED = pytest.StashKey[Preloaded]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="what engine tests compute on: cpu or cuda:0")
    parser.addoption(
        "--transport",
        choices=("links", "staged", "nccl"),
        help="what goes between workers on CPUs where a test does not say; nccl: a fake of it. By "
        "default links, and the fake in every fourth test of how workers train and recover",
    )

    parser.addoption(
        "--shuffle",
        metavar="SEED",
        default="3",
        help="run the files in the random order of this seed; 'new' draws one, and says it",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--shuffle") == "new":
        drawn = str(random.SystemRandom().randrange(10**6))
        config.option.shuffle = getattr(config, "workerinput", {}).get("shuffle", drawn)
    try:
        devices.choose(config.getoption("--device"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Start the warm process of all. Processes of xdist's are forked from it, unless they compute
    on a GPU, for which it is not set up."""
    shared = config.stash[_SHARED] = Preloaded().__enter__()
    config.add_cleanup(shared.__exit__)
    if config.getoption("--device") == "cpu":
        for spec in specs:
            if spec.popen and not spec.python:
                spec.python = python_of(shared)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each process of xdist's the seed that was drawn, since all must have one order, and
    where the warm process of all is."""
    node.workerinput["shuffle"] = node.config.getoption("--shuffle")
    node.workerinput["preloaded"] = node.config.stash[_SHARED].python_path


def pytest_report_header(config: pytest.Config) -> str:
    return f"files in random order: --shuffle {config.getoption('--shuffle')}"


def _has_workers(item: pytest.Item) -> bool:
    return item.nodeid.startswith(_OF_WORKERS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    chosen: devices.Transport | None = item.config.getoption("--transport")
    # By its name: the same in every run, however the tests are spread over processes.
    fakes = _has_workers(item) and zlib.crc32(item.nodeid.encode()) % 4 == 0
    devices.choose_transport(chosen or ("nccl" if fakes else "links"))


@pytest.fixture(scope="session")
def preloaded(request: pytest.FixtureRequest) -> Iterator[Preloaded]:
    """Starts the warm processes of clusters that many tests share or kill nodes of."""
    told: dict[str, str] = getattr(request.config, "workerinput", {})
    with Preloaded(told.get("preloaded", "")) as process:
        yield process


@pytest.fixture(scope="module")
def quick_start(preloaded: Preloaded) -> Iterator[None]:
    """What the module's commands start has the libraries of workers at hand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", preloaded.python_path)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is loaded for all tests stays to the end: the collector does not look at it again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    places = {
        path: random.Random(f"{seed} {path.relative_to(config.rootpath)}").random()
        for path in {i.path for i in items}
    }
    # Files with real workers take longest, and one that begins last is waited for. Those that share
    # a cluster follow each other, so that each process starts it once.
    for path in {i.path for i in items if i.get_closest_marker("cluster") or _has_workers(i)}:
        places[path] *= _FIRST_PART
    for path in {i.path for i in items if _STANDING & set(getattr(i, "fixturenames", ()))}:
        places[path] /= len(items)
    items.sort(key=lambda item: places[item.path])
