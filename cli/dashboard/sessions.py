"""Log-in tokens, and sessions: who is logged in, until when, and with which rights.

`oobleck dashboard token` makes tokens, and the dashboard checks them. Both read one secret in a
folder that only their user may read, so no token is stored. A token contains its holder's role and
its expiry, and is valid for one log-in: a used token leaves a file in that folder until it expires.

Sessions exist only in memory: a restarted dashboard has none. Browsers send a cookie to every port
of a host, so also to services of other users. Therefore a session has two parts: its id, in the
path of its pages, `/~ID/`, and a cookie for that path only. A server on another port does not know
a path for which the browser would send the cookie, and the id without the cookie opens nothing.
"""

import base64
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from oobleck.host.security.credentials import create_private, make_private, read_secret
from oobleck.host.system.files import below_home

# ---- tokens


#: A viewer reads; an operator also drains nodes, cancels jobs and records timelines.
Role = Literal["viewer", "operator"]

_FILE = "secret"
_SPENT = "spent"
_SECRET_BYTES = 32
_ID_BYTES = 12
_MOST_CHARACTERS = 500


class BadToken(ValueError):
    """Refusal of an invalid token; the text gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    id: str
    role: Role
    #: Unix time.
    expires_at: float


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the dashboard's folder in the user's XDG state directory. Raise ValueError if this
    user has no home."""
    base = environment.get("XDG_STATE_HOME") or below_home("~/.local/state")
    return Path(base) / "oobleck" / "dashboard"


def read_key(folder: Path) -> bytes:
    """Return the secret, made if missing. Raise ValueError with the file and the fix."""
    path = folder / _FILE
    try:
        make_private(folder)
        create_private(path, secrets.token_bytes(_SECRET_BYTES))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"{path}: {reason}; name another folder with --dir") from error
    key = read_secret(path)
    if len(key) != _SECRET_BYTES:
        raise ValueError(f"{path}: is damaged; remove it, and everybody must log in again")
    return key


def spend(folder: Path, token: Token, now: float) -> None:
    """Use the token up, for every dashboard of this folder. `now`: Unix time. Raise BadToken if it
    was used before, or if its use cannot be recorded."""
    spent = folder / _SPENT
    try:
        make_private(spent)
        for old in spent.glob("[0-9]*-*"):
            if int(old.name.partition("-")[0]) <= now:
                old.unlink(missing_ok=True)
        first = create_private(spent / f"{token.expires_at:.0f}-{token.id}", b"")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadToken(
            f"the dashboard cannot record the use of this token: {spent}: {reason}"
        ) from error
    if not first:
        raise BadToken("this token was used; 'oobleck dashboard token' prints a new one")


def make(key: bytes, role: Role, expires_at: float) -> str:
    payload = {"id": secrets.token_hex(_ID_BYTES), "role": role, "until": round(expires_at)}
    body = _encoded(json.dumps(payload, separators=(",", ":")).encode())
    return f"{body}.{_mac(key, body)}"


def check(key: bytes, text: str, now: float) -> Token:
    """Return the token in `text`. `now`: Unix time. Raise BadToken."""
    body, _, mac = "".join(text.split())[:_MOST_CHARACTERS].partition(".")
    if not hmac.compare_digest(mac.encode(), _mac(key, body).encode()):
        raise BadToken(
            "this is not a token of this dashboard; 'oobleck dashboard token' prints one"
        )
    payload = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    if payload["until"] <= now:
        raise BadToken("this token has expired; 'oobleck dashboard token' prints a new one")
    return Token(id=payload["id"], role=cast(Role, payload["role"]), expires_at=payload["until"])


def _mac(key: bytes, body: str) -> str:
    return _encoded(hmac.digest(key, body.encode(), hashlib.sha256))


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


# ---- sessions


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
    message: str = ""

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
