"""TLS 1.3, and nothing older, on every connection that gRPC makes or takes in this process.

gRPC has no such setting in Python, but lets the ciphers of TLS 1.2 be named. Named is one for RSA
keys. All keys of a cluster are on elliptic curves, so no handshake of TLS 1.2 succeeds, at either
end. TLS 1.3 has ciphers of its own, which this leaves as they are.
"""

import os

_CIPHERS = "GRPC_SSL_CIPHER_SUITES"
_OF_RSA_KEYS = "ECDHE-RSA-AES256-GCM-SHA384"


def refuse_older() -> None:
    """Has an effect only before gRPC is loaded, which is when it reads the environment."""
    os.environ[_CIPHERS] = _OF_RSA_KEYS
