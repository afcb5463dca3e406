"""Journaled events of trust: tokens and certificates that are given out and revoked.

They have nothing secret in them.
"""

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
    #: The operator who asked for it, with whom it ends.
    maker: tuple[Role, str]


class TokenRevoked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    fingerprint: str


class CredentialIssued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Certificate that was given out, for a token or in place of one that ends."""

    role: Role
    name: str
    #: Unix time.
    expires_at: float
    #: Fingerprint of the token that it was given for, which is used up by that, and SHA-256 of the
    #: key that may ask again. Empty: it replaces another certificate.
    token: str = ""
    key: str = ""


class CredentialsRevoked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: no certificate given to this holder before is good any more. Nor is a token that it
    made, or could join by; those that others have joined by stay."""

    role: Role
    name: str


TrustChanged = TokenCreated | TokenRevoked | CredentialIssued | CredentialsRevoked
