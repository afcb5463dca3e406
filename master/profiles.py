"""`<state-dir>/profiles/<key>.json`: measurements that later jobs may use. Owns the files."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from oobleck.planner.profile import Profile
from oobleck.planner.profilefile import format_profile, parse_profile

log = logging.getLogger(__name__)


def read_profiles(folder: Path) -> dict[str, Profile]:
    """All that are readable, by key; of the others the log tells."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = parse_profile(path.read_bytes())
        except (OSError, ValueError) as error:
            log.warning("stored profile passed over", extra={"path": path, "reason": error})
    return found


def write_profile(folder: Path, key: str, profile: Profile, notes: Mapping[str, object]) -> None:
    """Whole or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(format_profile(profile, {**notes, "key": key}))
    os.replace(partial, path)
