"""TLS 1.3, and nothing older, on every connection that gRPC makes or takes in this process.

gRPC has no such setting in Python, but lets the ciphers of TLS 1.2 be named. Named is one for RSA
keys. All keys of a cluster are on elliptic curves, so no handshake of TLS 1.2 succeeds, at either
end. TLS 1.3 has ciphers of its own, which this leaves as they are.
"""

import os
import sys

_CIPHERS = "GRPC_SSL_CIPHER_SUITES"
_GRPC = "grpc._cython.cygrpc"
_OF_RSA_KEYS = "ECDHE-RSA-AES256-GCM-SHA384"


def refuse_older() -> None:
    """Refuse versions older than TLS 1.3. Raises RuntimeError if gRPC is loaded already, since it
    reads the environment then."""
    if _GRPC in sys.modules and os.environ.get(_CIPHERS) != _OF_RSA_KEYS:
        raise RuntimeError(
            "gRPC was loaded before oobleck and would speak TLS 1.2; import oobleck's packages "
            f"first, or start with {_CIPHERS}={_OF_RSA_KEYS}"
        )
    os.environ[_CIPHERS] = _OF_RSA_KEYS
