"""Requests for certificates, which any holder of a certificate may send to the master."""

import base64

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from oobleck.host.security import pki

#: Object identifiers as they are encoded: a kind of key, and a curve, with their last bytes.
KIND, CURVE = bytes.fromhex("06072a8648ce3d0201"), bytes.fromhex("06082a8648ce3d030107")


@pytest.mark.parametrize("known", [KIND, CURVE])
def test_a_request_for_an_unknown_kind_of_key_is_refused_like_any_other(known: bytes) -> None:
    request = x509.load_pem_x509_csr(pki.new_request(pki.new_key()).encode())
    der = request.public_bytes(Encoding.DER)
    assert known in der
    changed = base64.encodebytes(der.replace(known, known[:-1] + b"\x7f")).decode()
    kind = "CERTIFICATE REQUEST"
    with pytest.raises(ValueError, match="is not a certificate request"):
        pki.read_request(f"-----BEGIN {kind}-----\n{changed}-----END {kind}-----\n")


def test_of_another_kind_of_key_no_signature_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check may take fifty times as long as one on P-256, and the master does nothing else."""

    class Request:
        def public_key(self) -> ec.EllipticCurvePublicKey:
            return ec.generate_private_key(ec.SECP521R1()).public_key()

        @property
        def is_signature_valid(self) -> bool:
            raise AssertionError("it was checked")

    monkeypatch.setattr(x509, "load_pem_x509_csr", lambda pem: Request())
    with pytest.raises(ValueError, match="P-256"):
        pki.read_request("a request")
