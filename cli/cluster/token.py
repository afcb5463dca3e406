"""A join token from the master, as text. Must not know who gets it."""

from oobleck.cli.client import MasterClient
from oobleck.host.security import pki
from oobleck.host.security.credentials import Credentials
from oobleck.host.security.join_token import format_token


def make_token(master: MasterClient, *, role: str, name: str, ttl_s: float) -> str:
    """`name`: the only one that may join by it; empty: any that is free. Raises CommandFailed."""
    key = pki.new_key()
    reply = master.create_token(pki.new_request(key), role=role, name=name, ttl_s=ttl_s)
    return format_token(
        Credentials(
            authority=reply.authority.encode(),
            certificate=reply.certificate.encode(),
            key=pki.key_pem(key),
        )
    )
