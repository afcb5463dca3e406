"""Journaled events of trust: tokens, certificates and revocations. Nothing secret is in them."""

import msgspec

from oobleck.host.security.credentials import Role


class TokenCreated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    #: SHA-256 of the token's certificate, in hexadecimal.
    fingerprint: str
    role: Role
    #: The only name that may join by it; empty: any that is free.
    name: str
    #: Unix time.
    expires_at: float
    #: The operator who asked for it, with whom it ends; None: a journal from before this was kept.
    maker: tuple[Role, str] | None = None


class TokenRevoked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    fingerprint: str


class CredentialIssued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A certificate was given out, by a token or in place of one that ends."""

    role: Role
    name: str
    #: Unix time.
    expires_at: float
    #: Fingerprint of the token that it was given for, which is used up by that, and SHA-256 of the
    #: key that may ask again; empty: it replaces one.
    token: str = ""
    key: str = ""


class CredentialsRevoked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No certificate that this holder was given before is good any more, nor a token that was made
    by the holder or that the holder could join by, but for those that others have joined by."""

    role: Role
    name: str


TrustChanged = TokenCreated | TokenRevoked | CredentialIssued | CredentialsRevoked
