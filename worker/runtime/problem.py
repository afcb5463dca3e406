"""Records of faults of a user's model or data set."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    #: One of model, a layer of it, loss, metrics or data.
    where: str
    #: Fault and fix.
    sentence: str
    #: True if the job may run as it is.
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


def as_problem(error: Exception) -> Problem:
    """Return the record of an error whose text begins with its place."""
    where, _, sentence = str(error).partition(": ")
    return Problem(where=where, sentence=sentence)
