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
_VALUE = re.compile(r"([?&;#][^?=&;#]{0,100}=)[^&;#'\"]+")
#: A password with a space in it, which is no end of a URL then; a port is no password.
_SPACED = re.compile(r"://[^\s/?#@:\[]{1,200}:(?!\d{1,5}\b)[^\s/?#@][^\n/?#@]{0,200}@")
#: Of these the part before `@` names a container or a user, and is no secret.
_NAMED = re.compile(r"(?:^|[^a-z0-9+.-])(?:abfss?|wasbs?|hdfs)$")
_NAMED_CHARACTERS = 6
_SECRET = re.compile(r"token|secret|sig|passw|credential|key", re.IGNORECASE)


def redact(text: str) -> str:
    """`text` with the secrets of the URLs in it hidden."""
    if "://" not in text:
        return text
    whole = _SPACED.sub(f"://{HIDDEN}@", text)
    return _WORD.sub(lambda word: _redact_word(word[0]), whole)


def _redact_word(word: str) -> str:
    if "://" not in word:
        return word
    parts = word.split("://")
    shown = "://".join([parts[0], *map(_without_user, parts, parts[1:])])
    return _VALUE.sub(
        lambda value: f"{value[1]}{HIDDEN}" if _SECRET.search(value[1]) else value[0], shown
    )


def _without_user(before: str, rest: str) -> str:
    """What stands behind `://`, without who opens it: the host's part up to its last `@`."""
    host = _END.split(rest, maxsplit=1)[0]
    at = host.rfind("@")
    if at < 0 and ":" in host and not _PORT.fullmatch(host):
        at = rest.find("@")  # a slash in the password cuts the host's part short
    elif _NAMED.search(before[-_NAMED_CHARACTERS:].lower()) and not set(":@") & set(host[:at]):
        return rest
    return rest if at < 0 else HIDDEN + rest[at:]
