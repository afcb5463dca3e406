"""URLs without their secrets, for whatever is shown, logged or stored for others to read.

A place such as `s3://KEY:SECRET@store/path` or `https://host/path?token=SECRET` must reach the
workers whole, and nobody else. Must not know where texts come from.
"""

import re

HIDDEN = "***"

_WORD = re.compile(r"\S+")
#: Where the host's part of a URL ends.
_END = re.compile(r"[/?#]")
_PORT = re.compile(r"[^:]*:[0-9]{1,5}")
_VALUE = re.compile(r"([?&;][^?=&;]{0,100}=)[^&;'\"]+")
_SECRET = re.compile(r"token|secret|sig|passw|credential|key", re.IGNORECASE)


def redact(text: str) -> str:
    """`text` with the secrets of the URLs in it hidden."""
    if "://" not in text:
        return text
    return _WORD.sub(lambda word: _redact_word(word[0]), text)


def _redact_word(word: str) -> str:
    if "://" not in word:
        return word
    first, *others = word.split("://")
    shown = "://".join([first, *map(_without_user, others)])
    return _VALUE.sub(
        lambda value: f"{value[1]}{HIDDEN}" if _SECRET.search(value[1]) else value[0], shown
    )


def _without_user(rest: str) -> str:
    """What stands behind `://`, without who opens it: the host's part up to its last `@`."""
    host = _END.split(rest, maxsplit=1)[0]
    at = host.rfind("@")
    if at < 0 and ":" in host and not _PORT.fullmatch(host):
        at = rest.find("@")  # a slash in the password cuts the host's part short
    return rest if at < 0 else HIDDEN + rest[at:]
