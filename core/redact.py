"""Text without the secrets of its URLs, for all that is shown, logged or stored.

Only workers may get a URL such as `s3://KEY:SECRET@store/path` or `https://host/path?token=SECRET`
unredacted. Must not know where texts come from.
"""

import re
from urllib.parse import unquote

HIDDEN = "***"

_WORD = re.compile(r"\S+")
#: End of the host's part of a URL.
_END = re.compile(r"[/?#]")
_PORT = re.compile(r"[^:]*:[0-9]{1,5}")
_VALUE = re.compile(r"([?&;#][^?=&;#]{0,100}=['\"]?)[^&;#'\"]+")
#: A password with a space, at which a URL would otherwise end. A port is no password.
_SPACED = re.compile(r"://[^\s/?#@:\[]{1,200}:(?!\d{1,5}\b)[^\s/?#@][^\n/?#@]{0,200}@")
#: Schemes whose part before `@` is a container or a user, not a secret.
_NAMED = re.compile(r"(?:^|[^a-z0-9+.-])(?:abfss?|wasbs?|hdfs)$")
_NAMED_CHARACTERS = 6
#: Matched anywhere in a query's name; not in `max_tokens`, `tokenizer` or `design`.
_SECRET = re.compile(
    r"token(?!s|iz)|secret|signature|(?<![a-z])sig(?![a-z])|passw|passphrase|credential|key"
    r"|access_?id",
    re.IGNORECASE,
)
#: Short words that are parts of many others, as in `author` and `encode`; these match whole words
#: only.
_SECRET_WORDS = frozenset(
    {"auth", "authorization", "bearer", "jwt", "otp", "pass", "pw", "pwd", "sas", "sid", "ticket"}
)
#: OAuth's names, and a session's; `country_code` and its like are not secret.
_SECRET_NAMES = frozenset(
    {"code", "authcode", "authorizationcode", "devicecode", "usercode", "sessionid", "phpsessid"}
)
_WORD_OF_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
#: Webhooks, whose path alone allows posting by HTTP. The secret is all after the host `hooks.*`, or
#: after a part of the path or host such as `webhooks`; and Telegram's `/bot123:TOKEN/`.
_HOOK = re.compile(
    r"(?P<shown>https?://(?:hooks\.[^\s/?#'\"]*/"
    r"|[^\s/?#'\"]{0,200}webhook[^\s/?#'\"]*/"
    r"|[^\s/?#'\"]*/(?:[^\s?#'\"]{0,200}/)?(?:(?:web)?hooks?|webhookb2)/"
    r"|[^\s/?#'\"]*/bot(?=[0-9]{1,20}:)))"
    r"[^\s?#'\"]+",
    re.IGNORECASE,
)
#: Secrets that are known by what they are or by what is before them, in any text: tokens of GitHub,
#: GitLab, Slack and Hugging Face, and of an Authorization header.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_])(?:gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|xox[a-z]-[A-Za-z0-9-]{20,}|hf_[A-Za-z0-9]{20,}|(?<=Bearer )[\w.~+/-]{8,}=*)"
)
#: Keys of Azure's storage and AWS, as an assignment, a line of an INI file, or JSON.
_ASSIGNED = re.compile(
    r"(?P<shown>(?:accountkey|secret_?access_?key|session_?token)['\"]?\s{0,3}[=:]\s{0,3}['\"]?)"
    r"[\w+/]{8,}=*",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Return `text` with the secrets of the URLs in it hidden, and tokens that are known by their
    form."""
    text = _ASSIGNED.sub(rf"\g<shown>{HIDDEN}", _TOKEN.sub(HIDDEN, text))
    if "://" not in text:
        return text
    whole = _SPACED.sub(f"://{HIDDEN}@", text)
    return _WORD.sub(lambda word: _redact_word(word[0]), whole)


def _redact_word(word: str) -> str:
    if "://" not in word:
        return word
    parts = word.split("://")
    shown = "://".join([parts[0], *map(_without_user, parts, parts[1:])])
    shown = _HOOK.sub(lambda hook: hook["shown"] + HIDDEN, shown)
    return _VALUE.sub(
        lambda value: f"{value[1]}{HIDDEN}" if _is_secret(value[1]) else value[0], shown
    )


def _is_secret(name: str) -> bool:
    """Return whether a query's parameter of this name is a secret. Escapes in the name are decoded
    first, as servers do."""
    plain = unquote(name)
    words = {word.lower() for word in _WORD_OF_NAME.findall(plain)}
    whole = re.sub(r"[^a-z0-9]", "", plain.lower())
    return bool(_SECRET.search(plain) or words & _SECRET_WORDS) or whole in _SECRET_NAMES


def _without_user(before: str, rest: str) -> str:
    """Return the text after `://` with the user and password hidden: the host's part up to its last
    `@`."""
    host = _END.split(rest, maxsplit=1)[0]
    at = host.rfind("@")
    if at < 0 and ":" in host and not _PORT.fullmatch(host):
        at = rest.find("@")  # a slash in the password ends the host's part
    elif _NAMED.search(before[-_NAMED_CHARACTERS:].lower()) and not set(":@") & set(host[:at]):
        return rest
    return rest if at < 0 else HIDDEN + rest[at:]
