"""Trust: tokens, and certificates issued and revoked.

Journaled state, and the rules about it. Times are Unix times, as in certificates. No secret is
kept: a token is known by the SHA-256 of its certificate. Pure.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from oobleck.host.security.credentials import Role
from oobleck.master.events.trust import (
    CredentialIssued,
    CredentialsRevoked,
    TokenCreated,
    TokenRevoked,
    TrustChanged,
)

if TYPE_CHECKING:
    from oobleck.host.security.pki import Identity

T = TypeVar("T")
Holder = tuple[Role, str]

#: Most tokens valid at one time.
MOST_TOKENS = 10_000
#: Most holders with certificates.
MOST_HOLDERS = 100_000
#: Least seconds between certificates of a holder, and the same as a part of short lives.
RENEWALS_APART_S = 60.0
RENEWALS_APART_PART = 1 / 50
#: Characters of a token's fingerprint that are its id, and the fewest that operators may give.
_ID_CHARACTERS = 12
_FEWEST_CHARACTERS = 6


def token_id(fingerprint: str) -> str:
    """Return the token's id for operators."""
    return fingerprint[:_ID_CHARACTERS]


class Denied(Exception):
    """Refusal; the text gives the reason and the fix."""


class TooSoon(Denied):
    """Refusal of a request that may be repeated later."""


class StillFresh(TooSoon):
    """Refusal of a renewal, since the caller's certificate is still fresh."""


@dataclass(slots=True, kw_only=True)
class Token:
    """Join token, known by its fingerprint."""

    #: Holder that asked for it.
    maker: Holder
    role: Role
    #: Only name that may join by it; empty: any free name.
    name: str
    expires_at: float
    #: SHA-256 of the key that has joined by it, and the name joined as; empty: not used yet.
    key: str = ""
    joined: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The last certificate of a holder."""

    at: float
    expires_at: float
    #: Maker of the token by which the holder joined; None: this master did not issue it.
    by: Holder | None = None


@dataclass(slots=True, kw_only=True)
class Trust:
    """Tokens, and certificates issued and revoked."""

    #: By fingerprint.
    tokens: dict[str, Token] = field(default_factory=dict)
    given: dict[Holder, Given] = field(default_factory=dict)
    #: Certificates issued up to this time are void.
    revoked: dict[Holder, float] = field(default_factory=dict)


#: Function of the trust and the Unix time. Returns the event to journal, if any, and the answer.
#: Raises Denied.
Decide = Callable[[Trust, float], tuple[TrustChanged | None, T]]


def apply(trust: Trust, event: TrustChanged, unix: float) -> None:
    """Change `trust` by `event`, which was journaled at `unix`."""
    match event:
        case TokenCreated():
            for old in [f for f, token in trust.tokens.items() if token.expires_at < unix]:
                del trust.tokens[old]
            trust.tokens[event.fingerprint] = Token(
                maker=event.maker, role=event.role, name=event.name, expires_at=event.expires_at
            )
        case TokenRevoked():
            trust.tokens.pop(event.fingerprint, None)
        case CredentialIssued():
            before = trust.given.get((event.role, event.name))
            by = before.by if before is not None else None
            if (token := trust.tokens.get(event.token)) is not None:
                token.key, token.joined, by = event.key, event.name, token.maker
            trust.given[event.role, event.name] = Given(at=unix, expires_at=event.expires_at, by=by)
        case CredentialsRevoked():
            holder = event.role, event.name
            # Never before the certificate: the clock may have been set back since.
            given, before_at = trust.given.get(holder), trust.revoked.get(holder, unix)
            trust.revoked[holder] = max(unix, given.at if given is not None else unix, before_at)
            for ended in [f for f, token in trust.tokens.items() if _ends_with(token, holder)]:
                del trust.tokens[ended]


def _ends_with(token: Token, holder: Holder) -> bool:
    """Return whether revoking the holder voids the token."""
    if token.key:
        return (token.role, token.joined) == holder
    return holder in (token.maker, (token.role, token.name))


def check_new_token(trust: Trust, unix: float) -> None:
    """Check that another token may be made. Raises Denied."""
    if sum(token.expires_at >= unix for token in trust.tokens.values()) >= MOST_TOKENS:
        raise Denied(f"there are {MOST_TOKENS} tokens already; revoke some, or wait")


def check_caller(trust: Trust, identity: "Identity", unix: float) -> None:
    """Check that the caller's certificate is neither revoked nor expired. Called at a call, and
    again in the iteration that decides on it. Raises Denied."""
    if was_revoked(trust, identity):
        raise Denied(
            f"the certificate of {identity.role} {identity.name} was revoked; join anew by a token"
        )
    if identity.expires_at <= unix:
        raise Denied("the certificate has expired; join anew by a token")


def was_revoked(trust: Trust, identity: "Identity") -> bool:
    """Return whether the caller's certificate was revoked; always False for tokens."""
    return not identity.token and identity.issued_at <= trust.revoked.get(
        (identity.role, identity.name), -1.0
    )


def check_renewal(trust: Trust, identity: "Identity", life_s: float, unix: float) -> None:
    """Raise Denied unless the caller may renew its certificate, of the life `life_s`."""
    given = trust.given.get((identity.role, identity.name))
    apart_s = min(RENEWALS_APART_S, RENEWALS_APART_PART * life_s)
    if given is None or not 0 <= (age_s := unix - given.at) < apart_s:
        return
    kind = StillFresh if unix - identity.issued_at < apart_s else TooSoon
    raise kind(
        f"{identity.role} {identity.name} was given a certificate {age_s:.1f} s ago; it can be "
        f"renewed in {apart_s - age_s:.1f} s"
    )


def check_join(
    trust: Trust,
    fingerprint: str,
    key: str,
    name: str,
    unix: float,
    issued: "Iterable[Identity]" = (),
) -> Role:
    """Return the role with which the token's holder may join as `name`. Raises Denied. `key`:
    digest of the joiner's key; the same key may repeat the request, since the answer may have been
    lost. `issued`: certificates that were issued without the master."""
    token = trust.tokens.get(fingerprint)
    if token is None or token.expires_at < unix:
        raise Denied("the join token has expired or was revoked; make one with 'oobleck pki token'")
    if token.key:
        if (token.key, token.joined) == (key, name):
            return token.role
        raise Denied("the join token was used before; make another with 'oobleck pki token'")
    if token.name and token.name != name:
        raise Denied(f"the join token is for {token.role} {token.name}, not for {name!r}")
    holder = (token.role, name)
    others = [one for one in issued if (one.role, one.name) == holder and one.expires_at > unix]
    held = is_held(trust, holder, unix) or not all(was_revoked(trust, one) for one in others)
    if not token.name and held:
        raise Denied(
            f"{token.role} {name} has a certificate already; choose another name, take that one "
            f"back with 'oobleck pki revoke {name}', or make a token for it with --name {name}"
        )
    if holder not in trust.given and len(trust.given) >= MOST_HOLDERS:
        raise Denied(f"there are {MOST_HOLDERS} holders of certificates already")
    return token.role


def joined_by(trust: Trust, fingerprint: str, unix: float) -> Given | None:
    """Return the certificate issued for the token, if it is still valid; None: there is none."""
    token = trust.tokens[fingerprint]
    given = trust.given.get((token.role, token.joined)) if token.key else None
    return given if given is not None and given.expires_at > unix else None


def is_held(trust: Trust, holder: Holder, unix: float) -> bool:
    """Return whether a certificate issued to `holder` may still be valid."""
    given = trust.given.get(holder)
    return given is not None and given.expires_at > unix and not is_revoked(trust, holder)


def is_revoked(trust: Trust, holder: Holder) -> bool:
    """Return whether all certificates of the holder are void."""
    given = trust.given.get(holder)
    return holder in trust.revoked and (given is None or given.at <= trust.revoked[holder])


def find_token(trust: Trust, beginning: str) -> str | None:
    """Return the only fingerprint with this beginning, if it is long enough; else None."""
    matching = [f for f in trust.tokens if f.startswith(beginning)]
    return matching[0] if len(matching) == 1 and len(beginning) >= _FEWEST_CHARACTERS else None
