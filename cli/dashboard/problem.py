"""What cannot be shown or done, as a browser is told."""


class Problem(Exception):
    """The text says why, in a line."""

    def __init__(self, status: int, told: str, heading: str = "") -> None:
        """`status`: of HTTP."""
        super().__init__(told)
        self.status = status
        self.heading = heading
