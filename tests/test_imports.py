"""Who may import whom, read from the sources: the layers hold, inside each package too, and heavy
libraries stay out."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: The packages of ours that each one may import, besides itself.
ALLOWED = {
    "core": set(),
    "planner": {"core"},
    "host": {"core"},
    "proto": {"core", "host"},
    "worker": {"core", "planner", "host", "model"},
    "agent": {"core", "planner", "host", "proto"},
    "master": {"core", "planner", "host", "proto"},
    "cli": {"core", "planner", "host", "proto"},
    "oobleck": {
        *("core", "planner", "host", "proto", "cli"),
        *("model", "client", "errors", "local_cluster", "records"),
    },
}
#: The sub-packages of each package, lowest first: each may import those before it. Modules beside
#: them have no place in the order, so none of them may close a circle.
LEVELS = {
    "core": ("job",),
    "planner": ("profile", "programs", "cost", "search", "recovery", "report", "simulate"),
    "host": ("system", "security", "ipc", "storage", "gpu", "doctor"),
    "worker": (
        "runtime",
        "models",
        "data",
        "state",
        "transport",
        "preparation",
        "step",
        "checkpoint",
        "recovery",
        "profiling",
    ),
    "agent": ("processes", "connection"),
    "master": ("events", "state", "planning", "storage", "rules", "clients", "api", "metrics"),
    "cli": (
        *("output", "jobs", "view", "reading", "tracking"),
        *("cluster", "planning", "top", "ssh", "chaos", "dashboard"),
    ),
    "proto": (),
}
#: Libraries that a package must not import anywhere, but for EXCEPTED.
FORBIDDEN = {
    "core": {"torch", "grpc", "asyncio", "socket", "subprocess", "time", "os", "random"},
    "planner": {"torch", "grpc", "asyncio", "socket", "subprocess", "time", "os", "random"},
    "host": {"torch", "grpc", "google"},
    "proto": {"torch", "asyncio"},
    "worker": {"grpc", "google", "asyncio"},
    "agent": {"torch", "numpy", "scipy"},
    "master": {"torch"},
    "cli": {"torch", "numpy", "scipy", "asyncssh"},
    "oobleck": {"scipy", "asyncssh"},
}
#: It is loaded by the commands that need it alone.
EXCEPTED = {ROOT / "cli/ssh/connection.py": "asyncssh"}


@cache
def statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """All imports of a file, at its top or inside functions."""
    nodes = ast.walk(ast.parse(path.read_text(), str(path)))
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        else:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "oobleck":
                yield from ((node.lineno, f"oobleck.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def files(package: str) -> list[Path]:
    """All but what `oobleck init` copies, which is the user's."""
    found = sorted((ROOT / package).rglob("*.py"))
    return [path for path in found if path.parent != ROOT / "cli" / "templates"]


def violations(package: str, path: Path) -> Iterator[str]:
    excepted = EXCEPTED.get(path)
    for line, name in imports(path):
        first, *rest = name.split(".")
        if first == "oobleck":
            if rest and rest[0] != package and rest[0] not in ALLOWED[package]:
                yield f"{path}:{line}: {package} must not import {name}"
        elif first in FORBIDDEN[package] and first != excepted:
            yield f"{path}:{line}: {package} must not import {first}"


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_layers(package: str) -> None:
    assert len(files(package)) > 1
    found = [text for path in files(package) for text in violations(package, path)]
    assert not found, "\n".join(found)


def place(package: str, name: str) -> str:
    """The sub-package that a module is in, or the module beside the sub-packages."""
    return name.removeprefix(f"oobleck.{package}.").split(".")[0]


def arrows(package: str) -> dict[str, dict[str, str]]:
    """What each sub-package, and each module beside them, imports of the others; and where."""
    found: dict[str, dict[str, str]] = {}
    for path in files(package):
        inside = path.relative_to(ROOT / package).with_suffix("").parts
        if inside[-1] == "__init__":
            inside = inside[:-1]
        here = found.setdefault(inside[0] if inside else "", {})
        for line, name in names_in(path, f"oobleck.{package}"):
            there = place(package, name)
            if inside and there != inside[0]:
                here[there] = f"{path.relative_to(ROOT)}:{line}"
    return found


def names_in(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """As `imports`, of one package; a name that is imported from it counts as its module."""
    for node in statements(path):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module == package:
            yield from ((node.lineno, f"{package}.{alias.name}") for alias in node.names)
        elif node.module.startswith(f"{package}."):
            yield node.lineno, node.module


@pytest.mark.parametrize("package", sorted(LEVELS))
def test_the_levels_of_a_package(package: str) -> None:
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    order = LEVELS[package]
    found = arrows(package)
    assert folders == set(order)
    backwards = [
        f"{where}: {lower} must not import {upper}"
        for number, lower in enumerate(order)
        for upper in order[number + 1 :]
        if (where := found[lower].get(upper))
    ]
    assert not backwards, "\n".join(backwards)


#: Modules of master/rules that a rule may import; only `reconcile` imports rules.
SHARED_BY_RULES = {"decision", "questions", "next_plan", "plan_made"}


def test_rules_do_not_import_each_other() -> None:
    package = "oobleck.master.rules"
    rules = [
        p for p in (ROOT / "master/rules").glob("*.py") if p.stem not in {"reconcile", "__init__"}
    ]
    found = {
        f"{path.stem} must not import {name}"
        for path in rules
        for _, full in names_in(path, package)
        if (name := full.removeprefix(f"{package}.").split(".")[0]) not in SHARED_BY_RULES
    }
    assert len(rules) > 10
    assert not found


#: They alone name the kind of accelerator; another one is a file beside each.
OF_CUDA = ("runtime/device.py", "transport/nccl/")


def test_workers_know_accelerators_by_one_module() -> None:
    named = {
        str(path.relative_to(ROOT / "worker"))
        for path in files("worker")
        if "torch.cuda" in path.read_text()
    }
    assert "runtime/device.py" in named
    assert {name for name in named if not name.startswith(OF_CUDA)} == set()


@pytest.mark.parametrize("package", sorted(LEVELS))
def test_no_circle(package: str) -> None:
    left = {name: set(others) for name, others in arrows(package).items()}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    assert not left


#: Modules of the longest chains of imports, whole and inside a package: a newcomer reads as many.
DEEPEST = {"": 22, "planner": 12, "master": 17, "worker": 17}


def modules() -> dict[str, set[str]]:
    """Return all modules, each with those of ours that it imports."""
    paths = {}
    for path in (path for package in ALLOWED for path in files(package)):
        parts = path.relative_to(ROOT).with_suffix("").parts
        dotted = ".".join(parts if parts[0] == "oobleck" else ("oobleck", *parts))
        paths[dotted.removesuffix(".__init__")] = path
    return {
        name: {
            found
            for node in statements(path)
            if isinstance(node, ast.ImportFrom) and node.module
            for found in (node.module, *(f"{node.module}.{each.name}" for each in node.names))
            if found in paths and found != name
        }
        for name, path in paths.items()
    }


def depth(imported: Mapping[str, set[str]]) -> int:
    """Count the modules of the longest chain."""
    levels: dict[str, int] = {}
    for name in TopologicalSorter(imported).static_order():
        levels[name] = 1 + max((levels[other] for other in imported[name]), default=0)
    return max(levels.values())


def test_chains_of_imports_are_short() -> None:
    imported = modules()
    for package, most in DEEPEST.items():
        own = {name for name in imported if name.startswith(f"oobleck.{package}")}
        assert depth({name: imported[name] & own for name in own}) <= most, package


def test_a_violation_is_found(tmp_path: Path) -> None:
    probe = tmp_path / "agent" / "probe.py"
    probe.parent.mkdir()
    probe.write_text(
        "from oobleck.proto import types\n"
        "def f() -> None:\n"
        "    import torch.nn\n"
        "    from oobleck.master import loop\n"
        "    from oobleck import worker\n"
    )
    assert [text.split(": ")[1] for text in violations("agent", probe)] == [
        "agent must not import torch",
        "agent must not import oobleck.master",
        "agent must not import oobleck.worker",
    ]
