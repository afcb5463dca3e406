"""The installed programs, the start of any program, and the TLS that it speaks.

  python -m oobleck.host.programs PARENT_PID MODULE [ARGUMENT...]

runs a module's `main`, or a package's `__main__`, in a process that ends with its parent. Loading a
program takes a second or more: the parent could die unnoticed meanwhile, and Ctrl-C must end it
quietly even then. So this module imports nothing slow, and loads the program by name.
"""

import gc
import importlib
import os
import sys

_CIPHERS = "GRPC_SSL_CIPHER_SUITES"
_GRPC = "grpc._cython.cygrpc"
_OF_RSA_KEYS = "ECDHE-RSA-AES256-GCM-SHA384"


def oobleck() -> None:
    run("oobleck.cli.main")


def agent() -> None:
    run("oobleck.agent.__main__")


def master() -> None:
    run("oobleck.master.__main__")


def run(module: str) -> None:
    """Load the module and call its `main`."""
    try:
        # Imported objects stay in use: searching them for garbage takes a tenth of the time.
        gc.disable()
        main = importlib.import_module(module).main
        gc.freeze()
        gc.enable()
        main()
    except KeyboardInterrupt:
        sys.exit(130)


# ---- TLS 1.3, and nothing older, on every connection of gRPC in this process
#
# gRPC has no such setting in Python, but its ciphers for TLS 1.2 can be set. The one set here needs
# RSA keys. All keys of a cluster are on elliptic curves, so no handshake of TLS 1.2 succeeds at
# either end. TLS 1.3 has its own ciphers, which this does not change.


def refuse_older_tls() -> None:
    """Refuse versions older than TLS 1.3. Raises RuntimeError if gRPC is loaded already, since it
    reads the environment at that time."""
    if _GRPC in sys.modules and os.environ.get(_CIPHERS) != _OF_RSA_KEYS:
        raise RuntimeError(
            "gRPC was loaded before oobleck and would speak TLS 1.2; import oobleck's packages "
            f"first, or start with {_CIPHERS}={_OF_RSA_KEYS}"
        )
    os.environ[_CIPHERS] = _OF_RSA_KEYS


def quiet_grpc() -> None:
    """Have gRPC print nothing: this process reports a failed connection itself, once, and gRPC at
    every attempt. Does nothing if gRPC is loaded already, or GRPC_VERBOSITY is set."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


if __name__ == "__main__":
    from importlib.util import find_spec

    from oobleck.host.system.process import die_with_parent

    die_with_parent(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    found = find_spec(module)
    is_package = found is not None and found.submodule_search_locations is not None
    run(f"{module}.__main__" if is_package else module)
