"""Scrolling lists of rows, some with a selected row: the panes of the page."""

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from oobleck.cli.top.rows import Row


class Rows(ScrollView, can_focus=True):
    """List that draws only the visible rows, however many there are."""

    DEFAULT_CSS = """
    Rows { scrollbar-size-vertical: 1; overflow-x: hidden; border-top: solid $primary; }
    Rows:focus { border-top: heavy $primary; border-title-style: bold; }
    """

    def __init__(self, *, id: str, title: str, follows: bool = False) -> None:
        """Make an empty list.

        `follows`: show the newest rows, which are the last ones, unless the user has scrolled away.
        """
        super().__init__(id=id)
        self._rows: Sequence[Row] = ()
        self._follows = follows
        self.border_title = title

    def show(self, rows: Sequence[Row]) -> None:
        if rows == self._rows:
            return
        at_end = self.scroll_offset.y >= self.max_scroll_y
        self._rows = rows
        self.virtual_size = Size(self.size.width, len(rows))
        if self._follows and at_end:
            self.scroll_end(animate=False)
        self.refresh()

    @property
    def text(self) -> list[str]:
        """Text of all rows, without styles."""
        return ["".join(text for text, _ in row) for row in self._rows]

    def render_line(self, y: int) -> Strip:
        base, width, number = self.rich_style, self.size.width, self.scroll_offset.y + y
        if number >= len(self._rows):
            return Strip.blank(width, base)
        base += self._mark(number)
        parts = [Segment(text, base + Style.parse(style)) for text, style in self._rows[number]]
        return Strip(parts).crop_extend(0, width, base)

    def _mark(self, number: int) -> Style:
        """Return the style that highlights the row."""
        return Style.null()


class Choices(Rows):
    """Rows with names; the selected one stays selected when its row moves."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Opened(Message):
        """Message that Enter was pressed on the row of that name."""

        def __init__(self, choices: "Choices", name: str) -> None:
            super().__init__()
            self.choices = choices
            self.name = name

        @property
        def control(self) -> "Choices":
            return self.choices

    def __init__(self, *, id: str, title: str) -> None:
        super().__init__(id=id, title=title)
        self._names: Sequence[str] = ()
        self._at = 0
        #: Whether the user has selected a row; otherwise the first row is selected.
        self._moved = False

    @property
    def chosen(self) -> str | None:
        return self._names[self._at] if self._names else None

    def show_named(self, rows: Sequence[tuple[str, Row]]) -> None:
        chosen = self.chosen
        self._names = [name for name, _ in rows]
        if self._moved and chosen in self._names:
            self._at = self._names.index(chosen)
        else:
            self._at = min(self._at, max(0, len(rows) - 1)) if self._moved else 0
        self.show([row for _, row in rows])

    def _mark(self, number: int) -> Style:
        chosen = number == self._at and self.has_focus
        return Style(reverse=True) if chosen else Style.null()

    def action_move(self, by: int) -> None:
        if not self._names:
            return
        self._at = max(0, min(self._at + by, len(self._names) - 1))
        self._moved = True
        self.scroll_to_region(Region(0, self._at, 1, 1), animate=False, force=True)
        self.refresh()

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - 1))

    def action_open(self) -> None:
        if self.chosen is not None:
            self.post_message(self.Opened(self, self.chosen))

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()
