"""The release before this one, from this checkout's history, to be run beside it."""

import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from support.folders import ROOT

#: The newest commit of `main` that all neighbours of this release are at, or behind. Whoever begins
#: what comes after a release sets it to that release (docs/contributing.md).
COMMIT = "2fa48b21986cfb9b5d41d94ddc5c8d5a0b41191b"
PACKAGES = ("agent", "cli", "host", "master", "planner", "proto", "worker")


def unusable() -> str:
    """Why there is no such release here; empty: there is."""
    known = subprocess.run(
        ["git", "-C", str(ROOT), "cat-file", "-e", f"{COMMIT}^{{commit}}"],
        capture_output=True,
        check=False,
    )
    if known.returncode == 0:
        return ""
    return f"the history of this checkout lacks {COMMIT[:8]}, the release before: fetch all of it"


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
