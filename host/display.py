"""Text that others wrote, made fit for a terminal or a line of a log.

A manifest, a worker's output or a file's name may hold escapes that move the cursor, set the
window's title, hide or reorder what stands there. Whatever prints such text takes it through
here. Must not know what the text is.
"""

from oobleck.planner.redact import redact


def inline(text: str) -> str:
    """`text` as a part of one line: what would end it, move a cursor or hide is shown instead, and
    the secrets of URLs are not."""
    text = redact(text)
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else " " if one.isspace() else ascii(one)[1:-1] for one in text
    )


def printable(text: str) -> str:
    """`text` with its line ends, and each of its lines `inline`."""
    return "\n".join(map(inline, text.split("\n")))


def one_line(text: str) -> str:
    """`text` of any number of lines as one."""
    return inline(" ".join(text.split()))
