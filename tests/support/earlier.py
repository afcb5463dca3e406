"""The release before this one, from this checkout's history, to be run beside it."""

import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from support.folders import ROOT

#: The release before: a tag, or a commit. There is none before 0.1.0, which is not out yet, so that
#: what is committed here stands for it. Whoever begins what comes after a release sets it to that
#: release's tag (docs/contributing.md).
COMMIT = "HEAD"
PACKAGES = ("agent", "cli", "core", "host", "master", "planner", "proto", "worker")


def unusable() -> str:
    """Why there is no such release here; empty: there is."""
    known = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "-e", f"{COMMIT}^{{commit}}"],
        capture_output=True,
        check=False,
    )
    if known.returncode == 0:
        return ""
    return f"the history of this checkout lacks {COMMIT}, the release before: fetch all of it"


def environment(folder: Path) -> Mapping[str, str]:
    """For processes that are to run that release; its sources are put into `folder`."""
    archive = folder / "earlier.tar"
    command = ["git", "-C", str(ROOT), "archive", f"--output={archive}", COMMIT]
    subprocess.run([*command, "oobleck", *PACKAGES], check=True)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    for package in PACKAGES:  # as pip puts them
        os.rename(folder / package, folder / "oobleck" / package)
    # Before what is installed, and before the folder that a process starts in.
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
