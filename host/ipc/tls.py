"""TLS 1.3, and nothing older, on every connection of gRPC in this process.

gRPC has no such setting in Python, but its ciphers for TLS 1.2 can be set. The one set here needs
RSA keys. All keys of a cluster are on elliptic curves, so no handshake of TLS 1.2 succeeds at
either end. TLS 1.3 has its own ciphers, which this does not change.
"""

import os
import sys

_CIPHERS = "GRPC_SSL_CIPHER_SUITES"
_GRPC = "grpc._cython.cygrpc"
_OF_RSA_KEYS = "ECDHE-RSA-AES256-GCM-SHA384"


def refuse_older() -> None:
    """Refuse versions older than TLS 1.3. Raises RuntimeError if gRPC is loaded already, since it
    reads the environment at that time."""
    if _GRPC in sys.modules and os.environ.get(_CIPHERS) != _OF_RSA_KEYS:
        raise RuntimeError(
            "gRPC was loaded before oobleck and would speak TLS 1.2; import oobleck's packages "
            f"first, or start with {_CIPHERS}={_OF_RSA_KEYS}"
        )
    os.environ[_CIPHERS] = _OF_RSA_KEYS
