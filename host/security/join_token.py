"""Join tokens as text: a short-lived certificate with its key, and the cluster's authority.

The holder can ask the master once for a certificate of its own. On first contact the holder trusts
the authority inside, so a wrong master learns nothing. It comes from a file or the environment,
never from the command line, which other users of the host can read.
"""

import base64
import binascii
from pathlib import Path

import msgspec

from oobleck.host.security import pki
from oobleck.host.security.credentials import TOKEN_VARIABLE, Credentials, read_secret

_PREFIX = "oobleck1."
_MOST_CHARACTERS = 4096
_KEY_BYTES = 32


def format_token(credentials: Credentials) -> str:
    """Format a join token: one line of some 1,000 letters, digits, '-' and '_'."""
    number = pki.key_number(pki.read_key(credentials.key))
    parts = (
        pki.to_der(credentials.authority),
        pki.to_der(credentials.certificate),
        number.to_bytes(_KEY_BYTES, "big"),
    )
    return _PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(parts)).decode().rstrip("=")


def shown_token(path: Path | None, held: str) -> Credentials | None:
    """Read the token from the file, else from `held`, the text in the environment; None: there is
    neither. Raises ValueError with its source."""
    source = TOKEN_VARIABLE if path is None else f"--token-file {path}"
    try:
        if path is not None:
            held = read_secret(path).decode(errors="replace")
        return read_token(held) if held or path is not None else None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def read_token(text: str) -> Credentials:
    """Parse a token. Raises ValueError, which does not repeat the text."""
    text = text.strip()
    if not text.startswith(_PREFIX) or len(text) > _MOST_CHARACTERS:
        raise ValueError(
            f"is not a join token, which begins with {_PREFIX!r}; make one with 'oobleck pki token'"
        )
    body = text.removeprefix(_PREFIX)
    try:
        packed = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        authority, certificate, number = msgspec.msgpack.decode(
            packed, type=tuple[bytes, bytes, bytes]
        )
        key = pki.key_of_number(int.from_bytes(number, "big"))
        return Credentials(
            authority=pki.to_pem(authority),
            certificate=pki.to_pem(certificate),
            key=pki.key_pem(key),
        )
    except (ValueError, binascii.Error) as error:
        raise ValueError("is a damaged join token; copy the whole line, or make a new one") from (
            error
        )
