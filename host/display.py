"""Text by others, made fit for a terminal or a line of a log.

A manifest, a worker's output or a file's name may hold escapes that move the cursor, set the
window's title, hide or reorder other text. All code that prints such text passes it through here.
Must not know the meaning of the text.
"""

from oobleck.core.redact import redact


def inline(text: str) -> str:
    """Return `text` fit for a line: hidden characters shown as text, secrets of URLs hidden."""
    text = redact(text)
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else " " if one.isspace() else ascii(one)[1:-1] for one in text
    )


def printable(text: str) -> str:
    """Return `text` with its line ends, and each of its lines `inline`."""
    return "\n".join(map(inline, text.split("\n")))


def one_line(text: str) -> str:
    """Join `text` of any number of lines to one line."""
    return inline(" ".join(text.split()))
