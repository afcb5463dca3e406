"""The files of an authority: a master that cannot use them says which, and the way out."""

from pathlib import Path

import pytest

from oobleck.cli.cluster.authority import make_authority
from oobleck.master.api.authority import AuthorityFolder


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
