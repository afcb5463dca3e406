"""Oobleck as pip would install it from this checkout, without a build; and what it needs."""

import sysconfig
from importlib.metadata import PathDistribution, distributions
from pathlib import Path

from support.folders import ROOT

PACKAGES = ("agent", "cli", "core", "host", "master", "oobleck", "planner", "proto", "worker")


def install(folder: Path) -> PathDistribution:
    """Into `folder`, as a site-packages; with links to the sources."""
    # A build leaves metadata of another form beside the sources.
    found = distributions(name="oobleck-cluster")
    here = next(one for one in found if one.read_text("METADATA"))
    metadata = folder / f"oobleck_cluster-{here.version}.dist-info"
    metadata.mkdir(parents=True)
    names = ("METADATA", "entry_points.txt", "WHEEL")
    for name in names:
        text = here.read_text(name)
        assert text, name
        (metadata / name).write_text(text)
    for package in PACKAGES:
        place = folder / "oobleck" if package == "oobleck" else folder / "oobleck" / package
        for source in (ROOT / package).rglob("*"):
            if source.suffix != ".pyc" and source.is_file():
                target = place / source.relative_to(ROOT / package)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    lines = [*map(str, files), f"{metadata.name}/RECORD", "../../../bin/oobleck"]
    (metadata / "RECORD").write_text("".join(f"{line},,\n" for line in lines))
    return PathDistribution(metadata)


def link_libraries(folder: Path) -> Path:
    """All that is installed here, but for Oobleck: for PYTHONPATH. Returns the folder."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "oobleck" not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder
