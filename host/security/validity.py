"""Validity of certificates as sentences: why one is not good, or that it ends soon, with the fix.

A certificate is judged by this host's clock and by the authority that its holder trusts. Loads the
cryptography library. Must not know the network.
"""

import time

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from oobleck.core.units import count
from oobleck.host.security import pki
from oobleck.host.security.credentials import Credentials

DAY_S = 86_400.0
#: Remaining life below which people are warned, and that part of a whole life, if it is less.
SOON_S = 14 * DAY_S
_SHORT_PART = 1 / 2
#: Word of gRPC's error where the master's certificate is of an authority that is not trusted here.
_NOT_TRUSTED = "CERTIFICATE_VERIFY_FAILED"
_CLOCK = "if that is wrong, set this host's clock (timedatectl set-ntp true, or chrony)"


def fault(credentials: Credentials, now: float) -> str:
    """Return why no master can accept the credentials, with the fix; empty: no reason is known."""
    authority, certificate = credentials.authority, credentials.certificate
    if problem := authority_fault(authority, now):
        return problem
    try:
        holder = pki.identity_of(certificate)
    except ValueError as error:
        return f"{error}; name the folder of credentials that 'oobleck pki' made"
    if period := _outside(certificate, now):
        fix = _new_one(holder) if now > pki.begin(certificate) else _CLOCK
        return f"{_name(holder)} {period}; {fix}"
    if not _is_signed(certificate, authority):
        cluster = _cluster(authority)
        return f"{_name(holder)} is not of {cluster}, as ca.crt beside it; {_new_one(holder)}"
    return ""


def refusal(credentials: Credentials, details: str, now: float) -> str:
    """Return why master and caller do not accept each other's certificates, with the fix; empty:
    that is not known. `details`: gRPC's."""
    if problem := fault(credentials, now):
        return problem
    if _NOT_TRUSTED not in details:
        return ""
    holder = pki.identity_of(credentials.certificate)
    cluster = _cluster(credentials.authority)
    return (
        f"{_name(holder)} is of {cluster}, and the master there is of another "
        f"cluster; name the folder of credentials of its cluster, or {_new_one(holder)}"
    )


def authority_fault(pem: bytes, now: float) -> str:
    """Return why the authority signs nothing valid now, with the fix; empty: it does."""
    if not (period := _outside(pem, now)):
        return ""
    fix = f"{_NEW_CLUSTER}; {_CLOCK}" if now > pki.begin(pem) else _CLOCK
    return f"the authority of {_cluster(pem)} {period}; {fix}"


def warning(credentials: Credentials, now: float) -> str:
    """Return that the certificate or its authority ends soon, with the fix; empty: neither does."""
    if period := authority_warning(credentials.authority, now):
        return period
    if fault(credentials, now) or not (period := _soon(credentials.certificate, now)):
        return ""
    holder = pki.identity_of(credentials.certificate)
    fix = "renew it with 'oobleck pki renew'"
    if holder.role == "agent":
        fix = "its agent renews it within an hour once a master answers"
    return f"{_name(holder)} {period}; {fix}"


def authority_warning(pem: bytes, now: float) -> str:
    """Return that the authority ends soon, with the fix; empty: it does not."""
    period = _soon(pem, now)
    return f"the authority of {_cluster(pem)} {period}; {_NEW_CLUSTER}" if period else ""


_NEW_CLUSTER = (
    "make a new one in another folder with 'oobleck pki init', after which all hosts need new "
    "credentials"
)


def _outside(pem: bytes, now: float) -> str:
    """Return that the certificate has ended or is not valid yet, with the time; empty: it is."""
    begin, end = pki.begin(pem), pki.expiry(pem)
    if now >= end:
        return f"ended on {_moment(end)}"
    return f"is not valid before {_moment(begin)}, by this host's clock" if now < begin else ""


def _soon(pem: bytes, now: float) -> str:
    """Return when the certificate ends, if that is soon; else empty."""
    begin, end = pki.begin(pem), pki.expiry(pem)
    if not 0 < (left_s := end - now) < min(SOON_S, _SHORT_PART * (end - begin)):
        return ""
    days = int(left_s // DAY_S)
    return f"ends on {_moment(end)}, in {count(days, 'day') if days else 'less than a day'}"


def _is_signed(certificate: bytes, authority: bytes) -> bool:
    try:
        issuer = x509.load_pem_x509_certificate(authority)
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(issuer)
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _name(holder: pki.Identity) -> str:
    if holder.token:
        of = f"{holder.role} {holder.name}" if holder.name else f"any {holder.role}"
        return f"the join token for {of}"
    return f"the certificate of {holder.role} {holder.name}"


def _cluster(authority: bytes) -> str:
    """Return the name of the authority's cluster: `cluster 1a2b3c4d`."""
    named = x509.load_pem_x509_certificate(authority).subject.rfc4514_string()
    return f"cluster {named.rpartition(' ')[2] or 'without a name'}"


def _new_one(holder: pki.Identity) -> str:
    if holder.token:
        return "make another with 'oobleck pki token'"
    if holder.role == "agent":
        token = f"'oobleck pki token --name {holder.name} --out FILE'"
        return f"start its agent with --token-file and a new token, made by {token}"
    join = f"'oobleck pki join {holder.name}' with a token from an operator"
    return f"get another by {join}, or by 'oobleck pki issue {holder.name} --role {holder.role}'"


def _moment(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
