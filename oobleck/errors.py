"""Exceptions that users see: one type per exit code of the command `oobleck`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from oobleck.records import JobStatus


class Error(Exception):
    """Base of these exceptions, raised itself where no other type fits; the text is one line."""

    #: What the command would end with.
    exit_code: ClassVar[int] = 1


class JobFailed(Error):
    """The job that was waited for failed, or was cancelled."""

    def __init__(self, text: str, status: "JobStatus") -> None:
        super().__init__(text)
        self.status = status


class Refused(Error, ValueError):
    """Refusal of a request that cannot be met as it was made; the text says the fix."""

    exit_code = 2


class InvalidJob(Refused):
    """Refusal of a job that is submitted."""


class NotFound(Error):
    """Error of a request that names an unknown job or node."""

    exit_code = 3


class Unreachable(Error):
    """The master cannot be reached, or does not answer."""

    exit_code = 4


class Denied(Error):
    """The credentials do not allow it, or are none of this cluster."""

    exit_code = 5


def error_of(text: str, exit_code: int) -> Error:
    kinds = (Refused, NotFound, Unreachable, Denied)
    return next((kind for kind in kinds if kind.exit_code == exit_code), Error)(text)


@contextmanager
def from_command() -> Iterator[None]:
    """Convert errors raised by the command's code to an Error."""
    from oobleck.host.command import CommandFailed

    try:
        yield
    except CommandFailed as failed:
        raise error_of(failed.format_message(), failed.exit_code) from failed
