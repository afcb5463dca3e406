"""Who may speak to the master: tokens that were made, certificates given out and taken back.

Part of the journaled state, and the rules about it. Times are Unix times, since certificates say
theirs that way. Nothing secret is kept: of a token there is the SHA-256 of its certificate. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from oobleck.host.credentials import Role
from oobleck.master.trustevents import (
    CredentialIssued,
    CredentialsRevoked,
    TokenCreated,
    TokenRevoked,
    TrustChanged,
)

T = TypeVar("T")
Holder = tuple[Role, str]

#: Tokens that are good at one time; more are a mistake.
MOST_TOKENS = 10_000
#: Holders with certificates.
MOST_HOLDERS = 100_000
#: Of a fingerprint, to name its token.
_FEWEST_CHARACTERS = 6


class Denied(Exception):
    """The text says why, and the fix."""


@dataclass(slots=True, kw_only=True)
class Token:
    role: Role
    #: The only name that may join by it; empty: any that is free.
    name: str
    expires_at: float
    #: SHA-256 of the key that has joined by it, and the name; empty: nobody has.
    key: str = ""
    joined: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The last certificate of a holder."""

    at: float
    expires_at: float


@dataclass(slots=True, kw_only=True)
class Trust:
    #: By fingerprint.
    tokens: dict[str, Token] = field(default_factory=dict)
    given: dict[Holder, Given] = field(default_factory=dict)
    #: What was given out up to this time is void.
    revoked: dict[Holder, float] = field(default_factory=dict)


#: From what is trusted and the Unix time to what is to be journaled and the answer. Raises Denied.
Decide = Callable[[Trust, float], tuple[TrustChanged, T]]


def fold(trust: Trust, event: TrustChanged, unix: float) -> None:
    """Change `trust` by `event`, which was journaled at `unix`."""
    match event:
        case TokenCreated():
            for old in [f for f, token in trust.tokens.items() if token.expires_at < unix]:
                del trust.tokens[old]
            trust.tokens[event.fingerprint] = Token(
                role=event.role, name=event.name, expires_at=event.expires_at
            )
        case TokenRevoked():
            trust.tokens.pop(event.fingerprint, None)
        case CredentialIssued():
            trust.given[event.role, event.name] = Given(at=unix, expires_at=event.expires_at)
            if event.token in trust.tokens:
                trust.tokens[event.token].key = event.key
                trust.tokens[event.token].joined = event.name
        case CredentialsRevoked():
            trust.revoked[event.role, event.name] = unix


def check_new_token(trust: Trust, unix: float) -> None:
    """Raises Denied."""
    if sum(token.expires_at >= unix for token in trust.tokens.values()) >= MOST_TOKENS:
        raise Denied(f"there are {MOST_TOKENS} tokens already; revoke some, or wait")


def check_holder(trust: Trust, holder: Holder, issued_at: float) -> None:
    """Whether a certificate that was issued then is still good. Raises Denied."""
    if issued_at <= trust.revoked.get(holder, -1.0):
        raise Denied(
            f"the certificate of {holder[0]} {holder[1]} was revoked; join anew by a token"
        )


def check_join(trust: Trust, fingerprint: str, key: str, name: str, unix: float) -> Role:
    """The role with which the holder of the token may join as `name`. Raises Denied.

    `key`: digest of the joiner's key. One key may ask again, since its answer may have been lost.
    """
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
    if not token.name and is_held(trust, holder, unix):
        raise Denied(
            f"{token.role} {name} has a certificate already; choose another name, take that one "
            f"back with 'oobleck pki revoke {name}', or make a token for it with --name {name}"
        )
    if holder not in trust.given and len(trust.given) >= MOST_HOLDERS:
        raise Denied(f"there are {MOST_HOLDERS} holders of certificates already")
    return token.role


def is_held(trust: Trust, holder: Holder, unix: float) -> bool:
    """Whether a certificate of `holder` that was given out may be good."""
    given = trust.given.get(holder)
    return given is not None and given.expires_at > unix and not is_revoked(trust, holder)


def is_revoked(trust: Trust, holder: Holder) -> bool:
    """Whether all that the holder was given are void."""
    given = trust.given.get(holder)
    return given is not None and given.at <= trust.revoked.get(holder, -1.0)


def find_token(trust: Trust, beginning: str) -> str | None:
    """The fingerprint that begins so, if it is one alone and enough is given to be sure."""
    found = [f for f in trust.tokens if f.startswith(beginning)]
    return found[0] if len(found) == 1 and len(beginning) >= _FEWEST_CHARACTERS else None
