"""Progress of the training thread, by which another thread detects that it hangs.

The training thread names each activity that it begins (`beat`). It marks waits for another process
(`WAITING`) and for files (`FILES`). The thread that listens to the agent reads the pulse; the agent
decides whether it is a hang. A process has one training thread, so it has one pulse.
"""

from oobleck.core.messages import Alive


class _Section:
    """Section of one kind of activity, as a `with` block that may be nested."""

    def __init__(self, beats: int) -> None:
        """Make a section. `beats`: number of beats that its end counts as."""
        self.depth = 0
        self._beats = beats

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        global _beats
        self.depth -= 1
        _beats += self._beats


#: Wait for another process.
WAITING = _Section(beats=1)
#: Wait whose end is no progress, as after a pause of fixed length.
PAUSED = _Section(beats=0)
#: Reading or writing of files, or copying the state for them.
FILES = _Section(beats=1)
_beats = 0
_doing: tuple[str, int | None] = ("start", None)


def beat(name: str, detail: int | None = None) -> None:
    """Count the begin of an activity called `name` and `detail`. The reader makes the text, once a
    second, since layers begin thousands of times a second."""
    global _beats, _doing
    _beats += 1
    _doing = (name, detail)


def called(name: str, detail: int | None) -> str:
    """Return `name`, followed by `detail` if there is any, such as a layer's number."""
    return name if detail is None else f"{name} {detail}"


def read() -> Alive:
    """Return the present pulse. Callable from any thread."""
    return Alive(
        beats=_beats,
        doing=called(*_doing),
        waiting=WAITING.depth + PAUSED.depth > 0,
        files=FILES.depth > 0,
    )
