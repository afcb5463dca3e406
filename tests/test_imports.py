"""Who may import whom, read from the sources: the layers hold, and heavy libraries stay out."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: The packages of ours that each one may import, besides itself.
ALLOWED = {
    "planner": set(),
    "host": {"planner"},
    "proto": {"planner", "host"},
    "worker": {"planner", "host"},
    "agent": {"planner", "host", "proto"},
    "master": {"planner", "host", "proto"},
    "cli": {"planner", "host", "proto"},
}
#: Libraries that a package must not import anywhere.
FORBIDDEN = {
    "planner": {"torch", "grpc", "asyncio", "socket", "subprocess", "time", "os", "random"},
    "host": {"torch", "grpc", "google"},
    "proto": {"torch", "asyncio"},
    "worker": {"grpc", "google", "asyncio", "cryptography"},
    "agent": {"torch", "numpy", "scipy"},
    "master": {"torch"},
    "cli": {"torch", "numpy", "scipy", "asyncssh"},
}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "oobleck":
                yield from ((node.lineno, f"oobleck.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def violations(package: str, path: Path) -> Iterator[str]:
    for line, name in imports(path):
        first, *rest = name.split(".")
        if first == "oobleck":
            if rest and rest[0] != package and rest[0] not in ALLOWED[package]:
                yield f"{path}:{line}: {package} must not import {name}"
        elif first in FORBIDDEN[package]:
            yield f"{path}:{line}: {package} must not import {first}"


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_layers(package: str) -> None:
    assert len(files(package)) > 1
    found = [text for path in files(package) for text in violations(package, path)]
    assert not found, "\n".join(found)


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
