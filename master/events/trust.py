"""Journaled events of trust: tokens and certificates that are issued and revoked. They hold no
secrets."""

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
    #: Operator who requested it; revoking the operator voids it.
    maker: tuple[Role, str]


class TokenRevoked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    fingerprint: str


class CredentialIssued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a certificate was issued, for a token or as a renewal."""

    role: Role
    name: str
    #: Unix time.
    expires_at: float
    #: Fingerprint of the token that it was issued for, now used up, and SHA-256 of the joining key,
    #: which may repeat the request. Empty: a renewal.
    token: str = ""
    key: str = ""


class CredentialsRevoked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: all certificates issued to this holder are void, and so are unused tokens that it made
    or may join by."""

    role: Role
    name: str


TrustChanged = TokenCreated | TokenRevoked | CredentialIssued | CredentialsRevoked
