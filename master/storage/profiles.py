"""`<state-dir>/profiles/<key>.json`: measurements that later jobs may use. Owns the files."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from oobleck.core.profile import Profile
from oobleck.core.profile_file import format_profile, parse_profile
from oobleck.host.system.files import read_regular
from oobleck.master.events.reports import ProfilesFound

log = logging.getLogger(__name__)

#: One of the largest model takes a megabyte.
MOST_BYTES = 16 << 20


def read_profiles(folder: Path) -> ProfilesFound:
    """Read all stored profiles. Those that cannot be read are logged as well as returned."""
    found: dict[str, Profile] = {}
    unusable: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            found[path.stem] = parse_profile(read_regular(path, MOST_BYTES))
        except OSError as error:
            unusable[path.stem] = error.strerror or str(error)
        except ValueError as error:
            unusable[path.stem] = str(error)
        if path.stem in unusable:
            why = {"path": path, "reason": unusable[path.stem]}
            log.warning("stored profile passed over", extra=why)
    return ProfilesFound(profiles=found, unusable=unusable)


def write_profile(folder: Path, key: str, profile: Profile, notes: Mapping[str, object]) -> None:
    """Whole or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(format_profile(profile, {**notes, "key": key}))
    os.replace(partial, path)
