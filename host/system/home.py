"""Home directory of this process's user; in a container there may be none."""

from pathlib import Path


def below_home(place: str | Path) -> Path:
    """Return `place` with ~ expanded. Raises ValueError, with the fix, if there is no home."""
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{place}: this process's user has no home directory; set the variable HOME to a "
            "directory that it may write to, or name another place"
        ) from error
