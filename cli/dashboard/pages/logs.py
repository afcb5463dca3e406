"""Page *Logs*: live output of a job's workers, filtered by node and text."""

from collections.abc import Hashable, Sequence

from oobleck.cli.dashboard.feeds import Line, LogFeed
from oobleck.cli.dashboard.hub import TooMany
from oobleck.cli.dashboard.pages.job import JobBased
from oobleck.cli.dashboard.parts import Part
from oobleck.cli.dashboard.problem import Problem
from oobleck.cli.dashboard.security.sessions import Session
from oobleck.cli.dashboard.site import Site

MOST_SHOWN = 400
_MOST_CHARACTERS = 200


class LogsPage(JobBased):
    template = "logs.html"
    active = "logs"

    def __init__(self, site: Site, session: Session, job_id: str, node: str, having: str) -> None:
        """Make the page. `having`: text that a shown line contains, ignoring case."""
        super().__init__(site, session, job_id)
        self.title = f"Logs of {job_id}"
        self.node = node[:_MOST_CHARACTERS]
        self.having = having[:_MOST_CHARACTERS]
        self.key = (type(self).__name__, self.role, job_id, self.node, self.having)

    @property
    def logs(self) -> LogFeed:
        """Feed of the job's output. Raises Problem."""
        try:
            return self.site.hub.logs(self.status())
        except TooMany as error:
            raise Problem(503, str(error), "Too many pages") from error

    @property
    def nodes(self) -> list[str]:
        """Nodes with a log line here, and the chosen one."""
        found = {line.node for line in self.logs.lines()} | ({self.node} - {""})
        return sorted(found)

    def touch(self) -> None:
        self.site.hub.cluster.touch()
        _ = self.logs

    def version(self) -> Hashable:
        return self.site.hub.cluster.trouble, self.logs.version, self.logs.following.trouble

    def is_ready(self) -> bool:
        return self.logs.version > 0 or self.logs.is_complete

    def parts(self) -> Sequence[Part]:
        lines = [line for line in self.logs.lines() if self._is_wanted(line)][-MOST_SHOWN:]
        return [
            self.site.templates.rows(
                "lines",
                "parts/lines.html",
                "parts/line.html",
                {f"line-{line.number}": line for line in lines},
                some=bool(lines),
                trouble=self.logs.following.trouble,
            )
        ]

    def _is_wanted(self, line: Line) -> bool:
        if self.node and line.node != self.node:
            return False
        return self.having.lower() in line.text.lower()
