"""The wheel that a job file names as its `code`: read, unpacked for checks, and sent."""

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from oobleck.cli import options
from oobleck.host.command import CommandFailed

if TYPE_CHECKING:
    from oobleck.cli.client import MasterClient
    from oobleck.core.job.spec import JobSpec
    from oobleck.host.wheel import Wheel


def read_wheel(path: str) -> "Wheel":
    """Read and check a wheel. Raise CommandFailed with the fix."""
    from oobleck.host.system.files import read_regular
    from oobleck.host.wheel import MOST_WHEEL_BYTES, Wheel

    try:
        return Wheel(read_regular(path, MOST_WHEEL_BYTES))
    except OSError as error:
        text = f"code: {path}: {error.strerror}; name a wheel of pure Python (dist/NAME.whl)"
        raise CommandFailed(text, options.USAGE) from error
    except ValueError as error:
        raise CommandFailed(f"code: {path}: {error}", options.USAGE) from error


@contextmanager
def unpacked(job: "JobSpec") -> Iterator["JobSpec"]:
    """Yield the job for this machine, with its wheel unpacked during the block."""
    from oobleck.host.wheel import unpacked_in

    if job.code is None:
        yield job
        return
    wheel = read_wheel(job.code)
    with tempfile.TemporaryDirectory(prefix="oobleck-") as folder:
        place = Path(folder) / "code"
        try:
            wheel.unpack(place)
        except OSError as error:
            text = f"code: {place}: {error.strerror}; make room, or set TMPDIR to another place"
            raise CommandFailed(text, options.FAILED) from error
        except ValueError as error:
            raise CommandFailed(f"code: {job.code}: {error}", options.USAGE) from error
        yield unpacked_in(job, str(place), wheel.modules)


def sent_text(connection: "MasterClient", job: "JobSpec") -> str:
    """Return the job's text for the master, after sending its wheel. Raise CommandFailed."""
    from oobleck.core.job.file import format_job
    from oobleck.host.wheel import stored_as

    if job.code is not None:
        wheel = read_wheel(job.code)
        connection.put_code(wheel.content)
        job = dataclasses.replace(job, code=stored_as(wheel.digest))
    return format_job(job, defaults=False)  # a master of an earlier release may not know all keys
