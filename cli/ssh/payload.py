"""Files for every host: Oobleck's wheel, and wheels of its dependencies if the operator has them.

Knows no ssh.
"""

import base64
import hashlib
import json
import zipfile
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

from oobleck.host.command import USAGE, CommandFailed

_NAME = "oobleck-cluster"
_PREFIX = "oobleck_cluster-"
#: Files beside this module: the unit of deploy/, and the release's pins.
UNIT = "oobleck-agent.service"
_REQUIREMENTS = "requirements.txt"
_CONSTRAINTS = "constraints.txt"
#: Files of a wheel's metadata folder that exist only after installation.
_OF_INSTALLING = {"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"}
_MOST_CONSTRAINT_BYTES = 1 << 20
#: A zip file's earliest time, so that equal files make equal wheels.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    path: Path
    digest: str
    bytes: int
    unpacked_bytes: int

    @property
    def place(self) -> str:
        """Path below the folder of wheels on a host."""
        return f"{self.digest[:_DIGITS]}/{self.path.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    #: The first one is Oobleck's own.
    wheels: tuple[Wheel, ...]
    #: Requirements file for pip with hashes, installed first; may be empty.
    requirements: str
    #: Constraints file for pip for all other packages; may be empty.
    constraint: str
    #: Whether only these wheels may be installed.
    alone: bool
    python: str

    @property
    def key(self) -> str:
        """Digest that differs for every different installation."""
        parts = [*(wheel.place for wheel in self.wheels), self.constraint, self.python]
        parts.append(self.requirements)
        return hashlib.sha256(json.dumps([*parts, self.alone]).encode()).hexdigest()[:_DIGITS]


def make_payload(
    own: Path | None, others: Path | None, constraint: Path | None, python: str, scratch: Path
) -> Payload:
    """Return the files to install.

    `own`: Oobleck's wheel; None: packed from the installation, in the folder `scratch`. `others`: a
    folder of wheels. Without these and without a constraint, the release's own pins decide the
    packages' versions. Raise CommandFailed.
    """
    try:
        paths = [own if own is not None else installed_wheel(distribution(_NAME), scratch)]
        if others is not None:
            found = sorted(path for path in others.glob("*.whl"))
            paths += [path for path in found if not path.name.startswith(_PREFIX)]
            if len(paths) == 1:
                raise CommandFailed(
                    f"--with-dependencies {others}: has no wheel; fill it with 'pip download "
                    f"--only-binary :all: -d {others} {paths[0].name}'",
                    USAGE,
                )
        text = constraint.read_bytes()[:_MOST_CONSTRAINT_BYTES].decode() if constraint else ""
        pinned = constraint is None and others is None
        wheels = tuple(map(_read, paths))
    except OSError as error:
        raise CommandFailed(f"{error.filename}: {error.strerror}", USAGE) from error
    except UnicodeDecodeError as error:
        raise CommandFailed(f"--constraint {constraint}: is not UTF-8 text", USAGE) from error
    except PackageNotFoundError as error:
        raise CommandFailed(f"{_NAME} is not installed here; name --wheel", USAGE) from error
    if not wheels[0].path.name.startswith(_PREFIX):
        raise CommandFailed(f"--wheel {own}: is not Oobleck's; name {_PREFIX}*.whl", USAGE)
    return Payload(
        wheels=wheels,
        requirements=shipped(_REQUIREMENTS) if pinned else "",
        constraint=shipped(_CONSTRAINTS) if pinned else text,
        alone=others is not None,
        python=python,
    )


def shipped(name: str) -> str:
    """Return the text of a file that came with this release."""
    return files("oobleck.cli.ssh").joinpath(name).read_text()


def _read(path: Path) -> Wheel:
    """Return the wheel at `path`. Raise CommandFailed or OSError."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked_bytes = sum(info.file_size for info in archive.infolist())
    except zipfile.BadZipFile as error:
        raise CommandFailed(f"{path}: is not a wheel; build or copy it again", USAGE) from error
    return Wheel(path=path, digest=digest, bytes=path.stat().st_size, unpacked_bytes=unpacked_bytes)


def installed_wheel(installed: Distribution, folder: Path) -> Path:
    """Pack the installed package into a wheel again. Raise CommandFailed or OSError."""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    # Metadata that a build leaves beside the sources does not mean an installation.
    if origin.get("dir_info", {}).get("editable") or not installed.read_text("METADATA"):
        source = str(origin.get("url", ".")).removeprefix("file://")
        raise CommandFailed(
            "this Oobleck runs from its sources, which have no wheel; make one with 'pip "
            f"wheel --no-deps --wheel-dir dist {source}' and name it with --wheel",
            USAGE,
        )
    target = folder / f"{_PREFIX}{installed.version}-py3-none-any.whl"
    lines = []
    metadata = ""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, content: bytes) -> None:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)

        for file in sorted(installed.files or ()):
            of_installing = ".dist-info" in file.parts[0] and file.name in _OF_INSTALLING
            # Programs are outside the packages, and pip makes them again.
            if ".." in file.parts or "__pycache__" in file.parts or of_installing:
                continue
            if ".dist-info" in file.parts[0]:
                metadata = file.parts[0]
            content = Path(str(file.locate())).read_bytes()
            hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
            lines.append(f"{file},sha256={hashed.decode()},{len(content)}\n")
            add(str(file), content)
        record = f"{metadata}/RECORD"
        add(record, "".join([*lines, f"{record},,\n"]).encode())
    return target
