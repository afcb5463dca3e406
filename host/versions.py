"""Versions of the software that computes on a host, and the differences between hosts.

Read from the installed packages without importing them, so that a broken library does not end the
process. Must not know the reaction to a difference.
"""

import platform
from collections.abc import Iterable, Mapping
from importlib import metadata

import msgspec

#: Hosts by package and version.
Differences = Mapping[str, Mapping[str, tuple[str, ...]]]
#: Version of everything that workers compute and send to each other: the instructions made from a
#: plan, the order of samples and sums, draws, links and meetings.
#:
#: Only workers of one engine train a job together. Any change to the things above increases it.
ENGINE = "1"
_MOST_CHARACTERS = 64


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of one host's software. Empty: not installed, or unknown."""

    oobleck: str = ""
    python: str = ""
    torch: str = ""
    transformers: str = ""
    #: Versions that torch was built with, and the driver of the GPUs that workers use.
    cuda: str = ""
    nccl: str = ""
    driver: str = ""
    engine: str = ""


def installed() -> Versions:
    """Return the versions in this process's environment."""
    return Versions(
        oobleck=_version("oobleck-cluster"),
        python=platform.python_version(),
        torch=_version("torch"),
        transformers=_version("transformers"),
        engine=ENGINE,
    )


def _version(distribution: str) -> str:
    try:
        # Without a version in its metadata it is None, or a KeyError from Python 3.14 on.
        return (metadata.version(distribution) or "")[:_MOST_CHARACTERS]
    except (metadata.PackageNotFoundError, KeyError, ValueError, OSError):
        return ""


def series(version: str) -> str:
    """Return `2.13` of `2.13.1+cpu`: versions of one series treat a model alike."""
    return ".".join(version.split(".")[:2])


def differences(hosts: Iterable[tuple[str, Versions]]) -> Differences:
    """Return the packages that differ between the hosts: host names by version, by package."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, versions in sorted(hosts):
        for package in Versions.__struct_fields__:
            version = getattr(versions, package) or "none"
            found.setdefault(package, {}).setdefault(version, []).append(name)
    return {
        package: {version: tuple(names) for version, names in sorted(versions.items())}
        for package, versions in found.items()
        if len(versions) > 1
    }


def described(found: Differences) -> str:
    """Describe versions, as `torch 2.12.0 on n4, 2.13.0 on n1, n2`."""
    return "; ".join(
        f"{package} " + ", ".join(f"{version} on {', '.join(on)}" for version, on in hosts.items())
        for package, hosts in found.items()
    )
