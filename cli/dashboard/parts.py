"""Parts of a live page, and the changes since a browser got it.

A page is parts with names. Rows of a part are sent again only if they differ, so that one node of a
thousand costs one line. Pure but for the templates.
"""

import hashlib
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from oobleck.cli.dashboard import chart
from oobleck.cli.output import text
from oobleck.cli.output.incident import clock
from oobleck.core.units import count, format_bytes
from oobleck.host.display import inline

#: Renderings that may still be what a browser has, and their characters: one of 1,000 nodes has
#: half a million, and differs every second.
_MOST_KEPT = 200
MOST_CHARACTERS = 32 << 20
#: Where the rows of a part stand in it.
_ROWS = "<!--rows-->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    #: Of the element that has it, in the page.
    id: str
    html: str
    #: By the id of its element; they stand in `html` at a mark.
    rows: Mapping[str, str] = field(default_factory=dict)

    def whole(self) -> str:
        return self.html.replace(_ROWS, "".join(self.rows.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A page at one moment."""

    parts: tuple[Part, ...]
    #: Of all of it.
    digest: str
    characters: int

    def __getitem__(self, id: str) -> Part:
        return next(part for part in self.parts if part.id == id)


@dataclass(frozen=True, slots=True)
class Change:
    """Change that a browser makes to the element `id`: `fill` it, `replace` it, `remove` it, or
    `append` to it."""

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
    """`before`: what the browser has; None: nobody knows."""
    known = {part.id: part for part in before.parts} if before is not None else {}
    return [change for part in after.parts for change in _of_part(known.get(part.id), part)]


def _of_part(old: Part | None, new: Part) -> Iterator[Change]:
    """Yield the changes of one part. Its first rows may be gone and some have come at the end, as
    in a log."""
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
    """The id of the element that has the rows."""
    return f"{part}-rows"


class Renderings:
    """The newest ones, so that browsers share them, and one that opens a stream gets what has
    changed since its page was made."""

    def __init__(self) -> None:
        #: By page and role: what it was made of, and its digest.
        self._newest: dict[Hashable, tuple[Hashable, str]] = {}
        #: By digest, oldest first.
        self._kept: dict[str, Rendering] = {}
        #: Of all that are kept.
        self._characters = 0

    def newest(self, page: Hashable, version: Hashable) -> Rendering | None:
        """Return the page's newest rendering; None if it is not of `version`, or is no longer
        kept."""
        made_of, digest = self._newest.get(page, (None, ""))
        return self._kept.get(digest) if made_of == version else None

    def add(self, page: Hashable, version: Hashable, made: Rendering) -> None:
        """Keep the rendering, however large, and drop the oldest others to make room."""
        self._newest.pop(page, None)
        self._newest[page] = version, made.digest
        if len(self._newest) > _MOST_KEPT:
            del self._newest[next(iter(self._newest))]
        self._drop(made.digest)
        self._kept[made.digest] = made
        self._characters += made.characters
        while len(self._kept) > 1 and (
            len(self._kept) > _MOST_KEPT or self._characters > MOST_CHARACTERS
        ):
            self._drop(next(iter(self._kept)))

    def _drop(self, digest: str) -> None:
        if (found := self._kept.pop(digest, None)) is not None:
            self._characters -= found.characters

    def known(self, digest: str) -> Rendering | None:
        return self._kept.get(digest)


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
        }
        self._environment.globals |= {
            "chart": chart,
            "count": count,
            "now": time.time,
            "ROWS": _ROWS,
        }

    def page(self, name: str, **values: Any) -> str:
        return self._environment.get_template(name).render(**values)

    def part(self, id: str, name: str, **values: Any) -> Part:
        return Part(id=id, html=self._environment.get_template(name).render(**values))

    def rows(self, id: str, name: str, row: str, rows: Mapping[str, Any], **values: Any) -> Part:
        """`row`: the template of each, which knows it as `row` and its id as `id`."""
        one = self._environment.get_template(row)
        return Part(
            id=id,
            html=self._environment.get_template(name).render(**values),
            rows={name: one.render(id=name, row=of) for name, of in rows.items()},
        )
