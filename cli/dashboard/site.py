"""Site: the state that all pages share, and the protocol of a live page."""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from oobleck.cli.dashboard.hub import Hub, Problem
from oobleck.cli.dashboard.parts import Part, Rendering, Renderings, Streams, Templates, rendering
from oobleck.cli.dashboard.sessions import Session, Sessions
from oobleck.cli.view.feeds import Connect, Snapshot


class Page(Protocol):
    """Page that stays up to date while it is open."""

    #: Identifies everything that the page depends on and that is fixed while it is open.
    key: Hashable
    title: str
    template: str
    #: Name of its entry in the navigation.
    active: str

    def version(self) -> Hashable:
        """Return a value that differs whenever the page may differ."""

    def parts(self) -> Sequence[Part]:
        """Return its current parts."""

    def touch(self) -> None:
        """Note that a browser still shows the page."""

    def is_ready(self) -> bool:
        """Return whether the first content is complete."""


@dataclass(frozen=True, kw_only=True)
class Site:
    #: The master's address, for display.
    master: str
    connect: Connect
    hub: Hub
    sessions: Sessions
    #: Whether it serves https.
    is_tls: bool
    streams: Streams
    templates: Templates = field(default_factory=Templates)
    renderings: Renderings = field(default_factory=Renderings)

    def snapshot(self) -> Snapshot:
        """Return the master's last answer. Raise Problem if it has never answered."""
        found, trouble = self.hub.cluster.snapshot, self.hub.cluster.trouble
        if found is None:
            told = trouble.line if trouble is not None else "the master has not answered yet"
            raise Problem(503, told, "No answer from the master")
        return found

    def render(self, page: Page) -> Rendering:
        page.touch()
        version = page.version()
        found = self.renderings.newest(page.key, version)
        if found is None:
            found = rendering([self._of_master(), *page.parts()])
            self.renderings.add(page.key, version, found)
        return found

    def _of_master(self) -> Part:
        """Return the part of every page that reports trouble with the master."""
        feed = self.hub.cluster
        return self.templates.part(
            "master",
            "parts/master.html",
            trouble=feed.trouble,
            problem=feed.snapshot.problem if feed.snapshot is not None else "",
        )


class ClusterBased:
    """Page that depends at least on the cluster's state."""

    template = ""
    title = ""
    active = ""

    def __init__(self, site: Site, session: Session) -> None:
        self.site = site
        self.role = session.role
        self.key: Hashable = (type(self).__name__, self.role)

    def touch(self) -> None:
        self.site.hub.cluster.touch()

    def version(self) -> Hashable:
        return self.site.hub.cluster.version

    def is_ready(self) -> bool:
        return True

    def part(self, id: str, **values: object) -> Part:
        return self.site.templates.part(id, f"parts/{id}.html", **values)


def now() -> float:
    return time.time()
