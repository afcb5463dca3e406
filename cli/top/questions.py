"""Screens that stand before the page until a key is pressed: a question, or all about one thing."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static


class Question(ModalScreen[bool]):
    """Yes takes one key that nothing else takes; every way out of it is no."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question Vertical { width: 90%; max-width: 76; height: auto; padding: 0 1; }
    Question Vertical { border: heavy $warning; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)"),
        *(Binding(key, "dismiss(False)") for key in ("n", "escape", "enter", "q", "ctrl+c")),
    ]

    def __init__(self, question: str, consequence: str) -> None:
        super().__init__()
        self._question = question
        self._consequence = consequence

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._question, id="question", markup=False)
            yield Static(self._consequence, markup=False)
            yield Static("y yes   n no", id="answers", markup=False)


class Details(ModalScreen[None]):
    """A text that may be longer than the page."""

    DEFAULT_CSS = """
    Details { align: center middle; }
    Details VerticalScroll { width: 100%; height: 100%; border: heavy $primary; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, "dismiss") for key in ("escape", "enter", "q", "ctrl+c")
    ]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            scroll.border_title = self._title
            scroll.border_subtitle = "q back"
            yield Static(self._text, markup=False)
