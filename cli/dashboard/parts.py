"""Parts of a live page, and the stream of its changes while it is open (server-sent events).

A page is a set of named parts. Rows of a part are sent again only if they differ, so a change of
one node in a thousand costs one line. Nothing is queued: when a browser has received everything, it
gets the differences from what it has. A slow browser gets fewer changes and costs no more.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from oobleck.cli.dashboard import chart, gantt
from oobleck.cli.output import text
from oobleck.cli.output.events import clock
from oobleck.core.units import count, format_bytes
from oobleck.host.display import inline


class Problem(Exception):
    """Error with a text of one line that gives the reason."""

    def __init__(self, status: int, text: str, heading: str = "") -> None:
        """Make the error. `status`: HTTP status."""
        super().__init__(text)
        self.status = status
        self.heading = heading


#: Most renderings kept to compare with, and their most characters. A page of 1,000 nodes has half a
#: million, and changes every second.
_MOST_KEPT = 200
MOST_CHARACTERS = 32 << 20
#: Position of the rows in a part.
_ROWS = "<!--rows-->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    #: Id of its element in the page.
    id: str
    html: str
    #: Rows by the id of their element; a mark in `html` shows their place.
    rows: Mapping[str, str] = field(default_factory=dict)

    def whole(self) -> str:
        return self.html.replace(_ROWS, "".join(self.rows.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Page at one moment."""

    parts: tuple[Part, ...]
    #: Digest of the whole page.
    digest: str
    characters: int

    def __getitem__(self, id: str) -> Part:
        return next(part for part in self.parts if part.id == id)


@dataclass(frozen=True, slots=True)
class Change:
    """Change to the element `id`: `fill` it, `replace` it, `remove` it, or `append` to it."""

    do: Literal["fill", "replace", "remove", "append"]
    id: str
    html: str = ""

    def data(self) -> list[str]:
        return [self.do, self.id, self.html]


def rendering(parts: Sequence[Part]) -> Rendering:
    digest, characters = hashlib.blake2b(digest_size=12), 0
    for part in parts:
        whole = part.whole()
        digest.update(whole.encode())
        characters += len(whole)
    return Rendering(parts=tuple(parts), digest=digest.hexdigest(), characters=characters)


def changes(before: Rendering | None, after: Rendering) -> list[Change]:
    """Return the changes. `before`: rendering that the browser has; None: unknown."""
    known = {part.id: part for part in before.parts} if before is not None else {}
    return [change for part in after.parts for change in _of_part(known.get(part.id), part)]


def _of_part(old: Part | None, new: Part) -> Iterator[Change]:
    """Yield the changes of one part; as in a log, its first rows may go and new ones follow."""
    if old is None or old.html != new.html:
        yield Change("fill", new.id, new.whole())
        return
    first = next(iter(new.rows), None)
    gone = list(old.rows) if first not in old.rows else list(takewhile(first.__ne__, old.rows))
    stay = list(old.rows)[len(gone) :]
    if list(new.rows)[: len(stay)] != stay or (old.rows and not stay):
        yield Change("fill", new.id, new.whole())
        return
    yield from (Change("remove", id) for id in gone)
    for id in stay:
        if old.rows[id] != new.rows[id]:
            yield Change("replace", id, new.rows[id])
    if come := list(new.rows.values())[len(stay) :]:
        yield Change("append", rows_of(new.id), "".join(come))


def rows_of(part: str) -> str:
    """Return the id of the element that has the rows."""
    return f"{part}-rows"


class Renderings:
    """Newest rendering of each page, for all browsers.

    A browser that opens a stream gets the changes since its page was made, or else all of it.
    """

    def __init__(self) -> None:
        #: Version and rendering by page and role, the newest last.
        self._newest: dict[Hashable, tuple[Hashable, Rendering]] = {}

    def newest(self, page: Hashable, version: Hashable) -> Rendering | None:
        """Return the page's newest rendering; None if its version differs, or if it was dropped."""
        made_of, found = self._newest.get(page, (None, None))
        return found if made_of == version else None

    def add(self, page: Hashable, version: Hashable, made: Rendering) -> None:
        """Keep the rendering, however large, and drop the oldest others to make room."""
        self._newest.pop(page, None)
        self._newest[page] = version, made
        while len(self._newest) > 1 and (
            len(self._newest) > _MOST_KEPT or self._characters() > MOST_CHARACTERS
        ):
            del self._newest[next(iter(self._newest))]

    def _characters(self) -> int:
        return sum(made.characters for _, made in self._newest.values())

    def known(self, digest: str) -> Rendering | None:
        return next((one for _, one in self._newest.values() if one.digest == digest), None)


class Templates:
    def __init__(self) -> None:
        self._environment = Environment(
            loader=PackageLoader("oobleck.cli.dashboard", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "bytes": format_bytes,
            "clock": clock,
            "inline": inline,
            "moment": text.moment,
            "seconds": text.seconds,
            "short_moment": text.short_moment,
            "whole": "{:,.0f}".format,
        }
        self._environment.globals |= {
            "chart": chart,
            "count": count,
            "gantt": gantt,
            "now": time.time,
            "ROWS": _ROWS,
        }

    def page(self, name: str, **values: Any) -> str:
        return self._environment.get_template(name).render(**values)

    def part(self, id: str, name: str, **values: Any) -> Part:
        return Part(id=id, html=self._environment.get_template(name).render(**values))

    def rows(self, id: str, name: str, row: str, rows: Mapping[str, Any], **values: Any) -> Part:
        """Return a part with rows. `row`: their template, which gets `row` and its `id`."""
        one = self._environment.get_template(row)
        return Part(
            id=id,
            html=self._environment.get_template(name).render(**values),
            rows={name: one.render(id=name, row=of) for name, of in rows.items()},
        )


# ---- streams


#: Interval of checks for changes, and longest silence of a stream.
TICK_S = 0.5
QUIET_S = 5.0
#: Most concurrent streams.
MOST_STREAMS = 200


class Streams:
    """Streams of live pages: counted, and ended with the dashboard."""

    def __init__(self) -> None:
        self.open = 0
        self.closing = asyncio.Event()

    async def follow(
        self,
        seen: Rendering | None,
        look: Callable[[], Rendering],
    ) -> AsyncIterator[str]:
        """Yield changes.

        `seen`: rendering that the browser has. `look`: makes the current one, and raises Problem
        when the stream must end, as at the end of the session.
        """
        self.open += 1
        quiet_since = time.monotonic()
        try:
            yield "retry: 2000\n\n"
            while not self.closing.is_set():
                try:
                    found = look()
                except Problem as problem:
                    yield _event("end", str(problem) or "you are logged out")
                    return
                if some := changes(seen, found):
                    yield _event("change", [change.data() for change in some])
                    quiet_since = time.monotonic()
                elif time.monotonic() - quiet_since > QUIET_S:
                    yield _event("alive", None)
                    quiet_since = time.monotonic()
                seen = found
                await self._pause()
        finally:
            self.open -= 1

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(TICK_S):
                await self.closing.wait()
        except TimeoutError:
            return


def _event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
