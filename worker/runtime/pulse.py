"""Progress of the training thread, so that another thread can tell that it hangs.

The training thread says what it begins (`beat`), and when it waits for another process (`WAITING`)
or for files (`FILES`). The thread that listens to the agent reads it; the agent decides what is a
hang. A process has one training thread, so it has one pulse."""

from types import TracebackType

from oobleck.core.messages import Alive


class _Section:
    """A `with` block, which may be nested, of one kind of activity."""

    def __init__(self, beats: int) -> None:
        """`beats`: how many beats its end counts as."""
        self.depth = 0
        self._beats = beats

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _beats
        self.depth -= 1
        _beats += self._beats


#: Another process is waited for.
WAITING = _Section(beats=1)
#: The same, but its end is no progress: time passes.
PAUSED = _Section(beats=0)
#: Files are read or written, or the state is copied for them.
FILES = _Section(beats=1)
_beats = 0
_doing: tuple[str, int | None] = ("start", None)


def beat(name: str, detail: int | None = None) -> None:
    """Something begins, called `name` and `detail`. The reader makes the text, once a second, since
    layers begin thousands of times in a second."""
    global _beats, _doing
    _beats += 1
    _doing = (name, detail)


def called(name: str, detail: int | None) -> str:
    """Return `name` with `detail` behind if there is any, such as a layer's number."""
    return name if detail is None else f"{name} {detail}"


def read() -> Alive:
    """Return the present pulse. Callable from any thread."""
    return Alive(
        beats=_beats,
        doing=called(*_doing),
        waiting=WAITING.depth + PAUSED.depth > 0,
        files=FILES.depth > 0,
    )
