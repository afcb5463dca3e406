"""The home directory of this process's user, which a user of a container may lack."""

from pathlib import Path


def below_home(place: str | Path) -> Path:
    """Return `place` with its ~ as the home. Raises ValueError with the fix where there is none."""
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{place}: this process's user has no home directory; set the variable HOME to a "
            "directory that it may write to, or name another place"
        ) from error
