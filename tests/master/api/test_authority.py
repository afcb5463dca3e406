"""The files of an authority: a master that cannot use them says which, and the way out."""

import stat
import time
from pathlib import Path

import pytest

from oobleck.cli.cluster.authority import make_authority
from oobleck.host.security import pki
from oobleck.host.security.credentials import read_credentials
from oobleck.master.api.pki_service import AuthorityFolder


def test_an_authority_that_is_damaged_is_named_by_its_file(tmp_path: Path) -> None:
    folder, other = tmp_path / "pki", tmp_path / "other"
    make_authority(folder, ())
    make_authority(other, ())
    AuthorityFolder(folder)
    for name in ("ca.crt", "ca.key", "master.crt", "master.key"):
        path = folder / name
        whole = path.read_bytes()
        blamed = path if name.endswith("crt") else path.with_suffix(".crt")
        for content, at_fault in (
            (b"rubbish", path),
            (whole[: len(whole) // 2], path),
            ((other / name).read_bytes(), blamed),
        ):
            path.write_bytes(content)
            with pytest.raises(ValueError, match="restore it from a copy") as refused:
                AuthorityFolder(folder)
            assert str(refused.value).startswith(f"{at_fault}: is no")
        path.write_bytes(whole)
    (folder / "ca.key").unlink()
    with pytest.raises(ValueError, match=r"ca\.key: no such file"):
        AuthorityFolder(folder)


def test_what_processes_of_the_masters_own_show_is_new_for_each_and_soon_ends(
    tmp_path: Path,
) -> None:
    make_authority(tmp_path / "pki", ())
    authority, folder = AuthorityFolder(tmp_path / "pki"), tmp_path / "viewer"
    shown = []
    for _ in range(2):
        authority.make_viewer(folder)
        shown.append(read_credentials(folder).certificate)
        assert pki.expiry(shown[-1]) <= time.time() + 3600.0
        modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert modes == {0o600}
    assert shown[0] != shown[1]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
