"""Exceptions that users see: one type per exit code of the command `oobleck`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from oobleck.records import JobStatus


class Error(Exception):
    """Base of these exceptions, raised itself where no other type fits; the text is one line."""

    #: Exit code of the command for this error.
    exit_code: ClassVar[int] = 1


class JobFailed(Error):
    """End of a job without success: it failed or was cancelled."""

    def __init__(self, text: str, status: "JobStatus") -> None:
        super().__init__(text)
        self.status = status


class Refused(Error, ValueError):
    """Refusal of a request that cannot be met as it was made; the text has the fix."""

    exit_code = 2


class InvalidJob(Refused):
    """Refusal of a job that is submitted."""


class NotFound(Error):
    """Error of a request that names an unknown job or node."""

    exit_code = 3


class Unreachable(Error):
    """Failure to reach the master, or to get an answer from it."""

    exit_code = 4


class Denied(Error):
    """Refusal of the credentials: they do not allow the request, or are not of this cluster."""

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
