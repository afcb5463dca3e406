"""The versions that this release is tested with, and the hashes of their files.

    cd tests && python -m support.pins

writes three files anew (`make lock`), by what is installed beside Oobleck:

    constraints.txt         every package, for pip's --constraint
    requirements.txt        what Oobleck itself needs, with hashes; `oobleck up` sends it to hosts
    requirements-dev.txt    the extras and the tools of development, with hashes

torch is in the first one alone, since its builds for CPUs and for CUDA are of one version and have
other hashes. `uv` asks the package index for hashes; it downloads no package.
"""

import re
import subprocess
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OWN = "oobleck-cluster"
#: No hashes of these: which build is right depends on the machine.
BUILDS = frozenset({"torch"})
PINS = "constraints.txt"
RUN = "requirements.txt"
DEVELOP = "requirements-dev.txt"
_UV = ROOT / "build" / "tools" / "bin" / "uv"
_LOCK = ["pip", "compile", "--no-config", "--no-deps", "--generate-hashes", "--no-annotate"]
_HOW = "# Written by 'make lock', by what is installed. "


def closure(*extras: str) -> dict[str, str]:
    """Return the versions of all packages that Oobleck with these extras needs here, by name."""
    asked: set[tuple[str, str]] = set()
    todo = [(OWN, extra) for extra in ("", *extras)]
    while todo:
        if (one := todo.pop()) in asked:
            continue
        asked.add(one)
        name, extra = one
        for line in distribution(name).requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                found = canonicalize_name(needed.name)
                todo += [(found, wanted) for wanted in ("", *needed.extras)]
    names = sorted({name for name, _ in asked} - {OWN})
    return {name: distribution(name).version.partition("+")[0] for name in names}


def pinned(text: str) -> dict[str, str]:
    """Return the versions in a file of pip's, by name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def hashes(text: str) -> dict[str, list[str]]:
    """Return the SHA-256 of each file of each package, in hex, by name."""
    parts = re.split(r"^(?=[a-z0-9][a-z0-9._-]*==)", text, flags=re.MULTILINE)[1:]
    return {
        canonicalize_name(part.partition("==")[0]): re.findall(
            r"--hash=sha256:([0-9a-f]{64})\b", part
        )
        for part in parts
    }


def _lines(pins: dict[str, str], names: Iterable[str]) -> str:
    return "".join(f"{name}=={pins[name]}\n" for name in sorted(names))


def _hashed(lines: str) -> str:
    # Of the same minor release as what is installed here: some packages want no earlier patch.
    python = ["--python-version", "3.11.9", "--only-binary", ":all:", "--no-header", "--quiet"]
    command = [str(_UV), *_LOCK, *python, "-"]
    return subprocess.run(
        command, input=lines, capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


def main() -> None:
    all_of_them = closure("dev")
    run = closure().keys()
    hashed = all_of_them.keys() - BUILDS
    (ROOT / PINS).write_text(
        f"{_HOW}For pip's --constraint:\n"
        "# pyproject.toml keeps the range open for users.\n" + _lines(all_of_them, all_of_them)
    )
    (ROOT / RUN).write_text(
        f"{_HOW}What Oobleck needs, but for\n# torch, whose version is in {PINS}.\n"
        + _hashed(_lines(all_of_them, run - BUILDS))
    )
    (ROOT / DEVELOP).write_text(
        f"{_HOW}The extras and what\n# development takes.\n-r {RUN}\n"
        + _hashed(_lines(all_of_them, hashed - run))
    )


if __name__ == "__main__":
    main()
