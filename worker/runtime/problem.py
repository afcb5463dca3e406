"""What is wrong with a model or a data set of the user's, as a record."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    #: model, a layer of it, loss, metrics or data.
    where: str
    #: What is wrong, and the fix.
    sentence: str
    #: The job may be run as it is.
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


def as_problem(error: Exception) -> Problem:
    """Of an error whose text begins with where it is."""
    where, _, sentence = str(error).partition(": ")
    return Problem(where=where, sentence=sentence)
