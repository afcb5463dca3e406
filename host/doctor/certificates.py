"""Validity of the certificate of this host's agent, or of the authority at the head."""

from collections.abc import Iterator
from pathlib import Path

from oobleck.core.orders import Finding
from oobleck.core.units import count
from oobleck.host.security import pki, validity
from oobleck.host.security.credentials import AUTHORITY, CERTIFICATE, Credentials, read_file


def look(folder: Path, now: float) -> Iterator[Finding]:
    """Report on the certificate in `folder`, or on the authority where that is its folder."""
    try:
        yield conclude(_read(folder), now)
    except ValueError as error:
        fix = "have it made anew by 'oobleck pki'"
        yield Finding(check="certificate", level="fail", what=str(error), fix=fix)


def conclude(found: Credentials, now: float) -> Finding:
    """Return the finding on credentials; those without a certificate are an authority alone."""
    if found.certificate:
        fault, soon = validity.fault(found, now), validity.warning(found, now)
    else:
        fault = validity.authority_fault(found.authority, now)
        soon = validity.authority_warning(found.authority, now)
    what, _, fix = (fault or soon).partition("; ")
    if what:
        return Finding(check="certificate", level="fail" if fault else "warn", what=what, fix=fix)
    left_s = pki.expiry(found.certificate or found.authority) - now
    days = count(int(left_s // validity.DAY_S), "day")
    figures = {"left_s": left_s}
    return Finding(
        check="certificate", level="pass", what=f"good for another {days}", figures=figures
    )


def _read(folder: Path) -> Credentials:
    """Read authority and certificate, without the key. Raises ValueError."""
    path = folder / CERTIFICATE
    certificate = read_file(path) if path.exists() else b""
    return Credentials(authority=read_file(folder / AUTHORITY), certificate=certificate, key=b"")
