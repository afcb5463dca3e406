"""What the training thread is at, so that another thread can tell that it hangs.

The training thread says what it begins (`beat`), and when it waits for another process (`WAITING`)
or for files (`FILES`); the thread that listens to the agent reads it (`read`). A process has one
training thread, so this is one for the process. Must not know what is a hang: that is the agent's
to say.
"""

from types import TracebackType

from oobleck.host.ipc.messages import Alive


class _Section:
    """For `with`, again inside too: what is done meanwhile is of one kind."""

    def __init__(self, beats: int) -> None:
        """`beats`: what its end counts."""
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
#: The same where nothing has come of it when it ends: time passes.
PAUSED = _Section(beats=0)
#: Files are read or written, or the state is copied for them.
FILES = _Section(beats=1)
_beats = 0
_doing: tuple[str, int | None] = ("start", None)


def beat(name: str, detail: int | None = None) -> None:
    """Something begins, which is called `name`, with `detail` behind. The text is made where it is
    read, every second: layers begin thousands of times in one."""
    global _beats, _doing
    _beats += 1
    _doing = (name, detail)


def called(name: str, detail: int | None) -> str:
    """`name` with `detail` behind if there is any, such as a layer's number."""
    return name if detail is None else f"{name} {detail}"


def read() -> Alive:
    """From any thread."""
    return Alive(
        beats=_beats,
        doing=called(*_doing),
        waiting=WAITING.depth + PAUSED.depth > 0,
        files=FILES.depth > 0,
    )
