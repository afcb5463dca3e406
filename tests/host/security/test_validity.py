"""Sentences about certificates at moments that no test can wait for."""

from pathlib import Path

import pytest

from oobleck.host.doctor.certificates import conclude
from oobleck.host.security import pki, validity
from oobleck.host.security.credentials import Credentials
from support import holders

DAY_S = validity.DAY_S


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    holders.make(tmp_path / "pki")
    return tmp_path / "pki"


def test_an_authority_that_ends_is_told_before_its_holders(folder: Path) -> None:
    found = holders.signed(folder, pki.Identity(role="operator", name="ann"), 5000 * DAY_S)
    end = pki.expiry(found.authority)
    assert validity.fault(found, end - 15 * DAY_S) == ""
    assert validity.warning(found, end - 15 * DAY_S) == ""
    assert "the authority of cluster " in validity.warning(found, end - 13 * DAY_S)
    assert "in another folder with 'oobleck pki init'" in validity.warning(found, end - 13 * DAY_S)
    assert " ended on " in validity.fault(found, end)
    assert "clock" in validity.fault(found, pki.begin(found.authority) - 1)
    alone = Credentials(authority=found.authority, certificate=b"", key=b"")
    levels = [conclude(alone, end - days * DAY_S).level for days in (15, 13, 0)]
    assert levels == ["pass", "warn", "fail"]


def test_short_lives_are_warned_of_in_their_second_half(folder: Path) -> None:
    found = holders.signed(folder, pki.Identity(role="agent", name="n1"), 100.0)
    end = pki.expiry(found.certificate)
    assert validity.warning(found, end - 60) == ""
    told = validity.warning(found, end - 40)
    assert told.startswith("the certificate of agent n1 ends on ")
    assert "in less than a day; its agent renews it" in told


def test_a_folder_of_two_clusters_is_told_as_one(folder: Path, tmp_path: Path) -> None:
    holders.make(tmp_path / "other")
    found = holders.signed(folder, pki.Identity(role="operator", name="ann"))
    other = (tmp_path / "other" / "ca.crt").read_bytes()
    mixed = Credentials(authority=other, certificate=found.certificate, key=found.key)
    told = validity.fault(mixed, pki.begin(found.certificate) + 1)
    assert told.startswith("the certificate of operator ann is not of cluster ")
    assert "'oobleck pki join ann'" in told


def test_a_certificate_can_be_shown_at_once(folder: Path) -> None:
    """TLS looks at time(), which begins a second up to some milliseconds after the signer does."""
    shown = holders.signed(folder, pki.Identity(role="agent", name="n1")).certificate
    assert pki.begin(shown) <= int(pki.identity_of(shown).issued_at) - 1
