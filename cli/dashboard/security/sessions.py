"""Sessions: who is logged in, until when, and what each may do.

Sessions are in memory alone: a dashboard that starts anew knows nobody. Time is an argument.

Browsers send a cookie to every port of a host, so to services of other users too. A session has two
parts therefore: its id, which is in the path of its pages, `/~ID/`, and a cookie for that path
alone. A server on another port does not know a path for which the browser would send the cookie,
and the id without the cookie opens nothing.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path

from oobleck.cli.dashboard.security.tokens import Role, check, spend

#: So many at a time; with one more the oldest is logged out.
_MOST = 1000


@dataclass(slots=True, kw_only=True)
class Session:
    #: In the path of its pages.
    id: str
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
    def __init__(self, key: bytes, folder: Path, *, lasts_s: float) -> None:
        """`folder`: where the tokens that were used are noted."""
        self._key = key
        self._folder = folder
        self._lasts_s = lasts_s
        #: By a hash of what the browser shows, oldest first: who reads memory or a log of it cannot
        #: show that.
        self._open: dict[str, Session] = {}

    def log_in(self, text: str, now: float) -> tuple[str, str]:
        """Return the session's id, and what its cookie shows from now on. Raises BadToken."""
        token = check(self._key, text, now)
        spend(self._folder, token, now)
        if len(self._open) >= _MOST:
            del self._open[next(iter(self._open))]
        id, shown = secrets.token_urlsafe(16), secrets.token_urlsafe(32)
        self._open[_hash(id, shown)] = Session(
            id=id,
            role=token.role,
            csrf=secrets.token_urlsafe(32),
            expires_at=now + self._lasts_s,
        )
        return id, shown

    def find(self, id: str, shown: str, now: float) -> Session | None:
        """Return the session; None if it is unknown or has expired."""
        name = _hash(id, shown)
        session = self._open.get(name)
        if session is not None and session.expires_at <= now:
            del self._open[name]
            return None
        return session

    def log_out(self, id: str, shown: str) -> None:
        self._open.pop(_hash(id, shown), None)


def _hash(id: str, shown: str) -> str:
    return hashlib.sha256(f"{id}/{shown}".encode()).hexdigest()
