"""What the training thread is at, so that another thread can tell that it hangs.

The training thread says what it begins (`beat`) and when it waits for somebody else (`WAITING`);
the thread that listens to the agent reads it (`read`). A process has one training thread, so this
is one for the process. Must not know what is a hang: that is the agent's to say.
"""

from types import TracebackType

from oobleck.host.messages import Alive


class _Waiting:
    """While it is entered, what goes on is in the hands of other processes."""

    def __init__(self, beats: int) -> None:
        """`beats`: what the end of a wait counts."""
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


#: For `with`: another process is waited for; may be entered again inside.
WAITING = _Waiting(beats=1)
#: The same where nothing has come of it when it ends: time passes.
PAUSED = _Waiting(beats=0)
_beats = 0
_doing = "start"


def beat(doing: str) -> None:
    """Something begins, of what `doing` names."""
    global _beats, _doing
    _beats += 1
    _doing = doing


def read() -> Alive:
    """From any thread."""
    return Alive(beats=_beats, doing=_doing, waiting=WAITING.depth + PAUSED.depth > 0)
