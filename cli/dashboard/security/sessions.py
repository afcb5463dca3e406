"""Sessions: who is logged in, until when, and with which rights.

They exist only in memory: a restarted dashboard has none. Time is an argument.

Browsers send a cookie to every port of a host, so also to services of other users. Therefore a
session has two parts: its id, in the path of its pages, `/~ID/`, and a cookie for that path only. A
server on another port does not know a path for which the browser would send the cookie, and the id
without the cookie opens nothing.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path

from oobleck.cli.dashboard.security.tokens import Role, check, spend

#: Most sessions; one more logs the oldest out.
_MOST = 1000


@dataclass(slots=True, kw_only=True)
class Session:
    #: Part of the path of its pages.
    id: str
    role: Role
    #: Secret in every form of this session, which no other site knows.
    csrf: str
    #: Unix time.
    expires_at: float
    #: Message for the next page about a form's effect; empty: none.
    told: str = ""

    def proves(self, csrf: str) -> bool:
        return hmac.compare_digest(self.csrf.encode(), csrf.encode())


class Sessions:
    def __init__(self, key: bytes, folder: Path, *, lasts_s: float) -> None:
        """Begin without sessions. `folder`: where used tokens are recorded."""
        self._key = key
        self._folder = folder
        self._lasts_s = lasts_s
        #: Sessions by a hash of the browser's cookie, oldest first: a copy of memory reveals no
        #: cookie.
        self._open: dict[str, Session] = {}

    def log_in(self, text: str, now: float) -> tuple[str, str]:
        """Return the session's id and its new cookie. Raise BadToken."""
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
