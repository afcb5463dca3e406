"""Error of a page or an action, as shown to a browser."""


class Problem(Exception):
    """Error with a text of one line that gives the reason."""

    def __init__(self, status: int, told: str, heading: str = "") -> None:
        """Make the error. `status`: HTTP status."""
        super().__init__(told)
        self.status = status
        self.heading = heading
