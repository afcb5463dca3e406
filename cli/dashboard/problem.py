"""Error of a page or an action, as a browser is told of it."""


class Problem(Exception):
    """The text says why, in a line."""

    def __init__(self, status: int, told: str, heading: str = "") -> None:
        """`status`: of HTTP."""
        super().__init__(told)
        self.status = status
        self.heading = heading
