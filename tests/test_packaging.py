"""What users install: the wheel, and protobuf code that is in step with its source."""

import configparser
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("agent", "cli", "core", "host", "master", "oobleck", "planner", "proto", "worker")
#: Of the files that are installed: modules, what is written or served, and what types say.
PATTERNS = ("*.py", "*.pyi", "*.proto", "*.yaml", "*.html", "*.css", "*.js", "*.svg", "py.typed")
PATTERNS += ("*.txt", "*.service")
GENERATED = ("control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the sources, so that building leaves nothing in the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", *PACKAGES):
        path = ROOT / name
        found = [path] if path.is_file() else path.rglob("*")
        for file in found:
            if file.is_file() and "__pycache__" not in file.parts:
                copy = source / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    (path,) = target.glob("oobleck_cluster-*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_has_the_three_commands(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    scripts = dict(points["console_scripts"])
    assert set(scripts) == {"oobleck", "oobleck-master", "oobleck-agent"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        source = wheel.read(module.replace(".", "/") + ".py").decode()
        assert f"def {function}(" in source


def test_the_wheel_has_every_module_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        f"oobleck/{file.relative_to(ROOT)}".replace("oobleck/oobleck/", "oobleck/")
        for package in PACKAGES
        for pattern in PATTERNS
        for file in (ROOT / package).rglob(pattern)
    }
    assert inside == expected


def test_the_wheel_says_its_licence(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith("METADATA"))
    metadata = wheel.read(name).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert any(n.endswith("licenses/LICENSE") for n in wheel.namelist())


def test_generated_protobuf_code_is_in_step(tmp_path: Path) -> None:
    package = tmp_path / "oobleck" / "proto"
    package.mkdir(parents=True)
    (package / "control.proto").write_bytes((ROOT / "proto" / "control.proto").read_bytes())
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    subprocess.run(
        [
            *protoc,
            "--python_out=.",
            "--pyi_out=.",
            "--grpc_python_out=.",
            "oobleck/proto/control.proto",
        ],
        cwd=tmp_path,
        check=True,
        timeout=240,
    )
    for name in GENERATED:
        made, kept = (package / name).read_text(), (ROOT / "proto" / name).read_text()
        assert made == kept, f"proto/{name} is not what control.proto gives; run 'make proto'"


@pytest.mark.parametrize(
    ("package", "file", "pattern"),
    [
        ("grpcio", "control_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
        ("protobuf", "control_pb2.py", r"# Protobuf Python Version: ([\d.]+)"),
    ],
)
def test_the_oldest_library_allowed_runs_the_generated_code(package, file, pattern):
    """Generated code refuses to be imported beside an older library than made it."""
    found = re.search(pattern, (ROOT / "proto" / file).read_text())
    assert found is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"{package}>={found[1]}" in project["dependencies"]
