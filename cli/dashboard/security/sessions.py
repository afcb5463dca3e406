"""Who is logged in, until when, and what each may do.

Sessions are in memory alone: a dashboard that starts anew knows nobody. Pure: time is an argument.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from oobleck.cli.dashboard.security.tokens import BadToken, Role, Token, check

#: So many at a time; with one more the oldest is logged out.
_MOST = 1000
#: Tokens that were used, until they expire; the oldest is forgotten first.
_MOST_USED = 10_000


@dataclass(slots=True, kw_only=True)
class Session:
    role: Role
    #: What a form of this session shows, and no other site knows.
    csrf: str
    #: Unix time.
    expires_at: float
    #: What the next page says of what was done by a form before it; empty: nothing.
    told: str = ""

    def proves(self, csrf: str) -> bool:
        return hmac.compare_digest(self.csrf.encode(), csrf.encode())


class Sessions:
    def __init__(self, key: bytes, *, lasts_s: float) -> None:
        self._key = key
        self._lasts_s = lasts_s
        #: By a hash of what the browser shows, oldest first: who reads memory or a log of it cannot
        #: show that.
        self._open: dict[str, Session] = {}
        #: When each token that was used ends.
        self._used: dict[str, float] = {}

    def log_in(self, text: str, now: float) -> str:
        """What the browser is to show from now on. Raises BadToken."""
        token = check(self._key, text, now)
        self._use(token, now)
        if len(self._open) >= _MOST:
            del self._open[next(iter(self._open))]
        shown = secrets.token_urlsafe(32)
        self._open[_hash(shown)] = Session(
            role=token.role, csrf=secrets.token_urlsafe(32), expires_at=now + self._lasts_s
        )
        return shown

    def find(self, shown: str, now: float) -> Session | None:
        """None: it is unknown, or has expired."""
        name = _hash(shown)
        session = self._open.get(name)
        if session is not None and session.expires_at <= now:
            del self._open[name]
            return None
        return session

    def log_out(self, shown: str) -> None:
        self._open.pop(_hash(shown), None)

    def _use(self, token: Token, now: float) -> None:
        """Raises BadToken."""
        self._used = {id: until for id, until in self._used.items() if until > now}
        if token.id in self._used:
            raise BadToken("this token was used; 'oobleck dashboard token' prints a new one")
        if len(self._used) >= _MOST_USED:
            del self._used[next(iter(self._used))]
        self._used[token.id] = token.expires_at


def _hash(shown: str) -> str:
    return hashlib.sha256(shown.encode()).hexdigest()
