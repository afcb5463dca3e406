"""The cluster's authority in the master: its folder, the master's own certificate, and TLS.

The folder has `ca.crt` and `ca.key`, and the master's own `master.crt` and `master.key`. The
master makes itself a new certificate before the old one ends; every handshake gets the newest.
Must not know who may have certificates.
"""

import logging
import threading
import time
from pathlib import Path

import grpc

from oobleck.host.security import pki
from oobleck.host.security.credentials import (
    AUTHORITY,
    AUTHORITY_KEY,
    CERTIFICATE,
    KEY,
    MASTER_CERTIFICATE,
    MASTER_KEY,
    MASTER_LIFE_S,
    make_private,
    read_file,
    read_secret,
    write_private,
)

log = logging.getLogger(__name__)


#: Of the master's own certificate, which it renews itself when this part of its life is left.
_RENEW_PART = 1 / 3

#: By this name its own processes ask the master.
_VIEWER = "master"
#: Of what such a process shows. Each is given a new certificate; one that has to connect again
#: later than this ends, and the next one goes on.
_VIEWER_LIFE_S = 3600.0

_FIX = (
    "restore it from a copy, or make a new authority in another folder with 'oobleck pki init', "
    "after which all hosts need new credentials"
)


def _key(path: Path) -> pki.Key:
    """Raises ValueError with the file and the fix."""
    content = read_secret(path)
    try:
        return pki.read_key(content)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: is no key that can be read; {_FIX}") from error


def _check_pair(folder: Path, name: str, certificate: bytes, key: pki.Key) -> None:
    """Raises ValueError with the file and the fix."""
    try:
        fits = pki.matches(certificate, key)
    except ValueError as error:
        raise ValueError(f"{folder / name}: is no certificate that can be read; {_FIX}") from error
    if not fits:
        raise ValueError(f"{folder / name}: is not of the key beside it; {_FIX}")


class AuthorityFolder:
    def __init__(self, folder: Path) -> None:
        """Raises ValueError with the file and the fix."""
        self._folder = folder
        certificate = read_file(folder / AUTHORITY)
        self._certificate = read_file(folder / MASTER_CERTIFICATE)
        key = _key(folder / AUTHORITY_KEY)
        self._key = _key(folder / MASTER_KEY)
        _check_pair(folder, AUTHORITY, certificate, key)
        _check_pair(folder, MASTER_CERTIFICATE, self._certificate, self._key)
        self.authority = pki.Authority(certificate, key)
        self._names = pki.server_names(self._certificate)
        self._viewer_key = pki.new_key()
        self._lock = threading.Lock()

    @property
    def cluster(self) -> str:
        """Identity of the cluster: the SHA-256 of the authority's public key, in hexadecimal."""
        return pki.key_digest(self.authority.key.public_key())

    def server_credentials(self) -> grpc.ServerCredentials:
        """Clients must show a certificate of this cluster."""
        self._renew_if_due()
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._newer_configuration,  # type: ignore[arg-type]  # None is allowed
            require_client_authentication=True,
        )

    def make_viewer(self, folder: Path) -> None:
        """Put credentials into `folder`, for processes of the master's own that only read. It is
        nobody's but this process's, whose key for them is a new one. Raises OSError."""
        make_private(folder)
        identity = pki.Identity(role="viewer", name=_VIEWER)
        certificate = self.authority.sign(self._viewer_key.public_key(), identity, _VIEWER_LIFE_S)
        write_private(folder / AUTHORITY, self.authority.certificate)
        write_private(folder / KEY, pki.key_pem(self._viewer_key))
        write_private(folder / CERTIFICATE, certificate)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (pki.key_pem(self._key), self._certificate)
        return grpc.ssl_server_certificate_configuration([pair], self.authority.certificate)

    def _newer_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads at every handshake; None: the one before is good."""
        with self._lock:
            return self._configuration() if self._renew_if_due() else None

    def _renew_if_due(self) -> bool:
        left_s = pki.expiry(self._certificate) - time.time()
        if left_s > MASTER_LIFE_S * _RENEW_PART:
            return False
        self._certificate = self.authority.sign_master(
            self._key.public_key(), self._names, MASTER_LIFE_S
        )
        try:
            write_private(self._folder / MASTER_CERTIFICATE, self._certificate)
        except OSError as error:  # the next start makes another
            log.warning("own certificate not stored", extra={"reason": error.strerror})
        log.info("own certificate renewed", extra={"seconds_left": round(left_s)})
        return True
