"""The making of signatures: keys with passwords, certificates, and signatures that are replaced or not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from qsample.addons.trust.signing import sign
from qsample.errors import PackageError
from qsample.package.package import read_package
from qsample.package.signature import SIGNATURE_NAME, signer_of
from tests.helpers.small_packages import throw, write

pytest.importorskip("model_signing")
from tests.helpers.signing_keys import authority, key_pair, signing_certificate


def test_a_signature_is_replaced_only_on_demand_and_with_a_private_key(tmp_path: Path) -> None:
    folder = write(tmp_path / "package").path
    private, public = key_pair(tmp_path / "keys")
    sign(folder, private_key=private)
    before = (folder / SIGNATURE_NAME).read_bytes()
    with pytest.raises(PackageError, match="is signed already; give overwrite"):
        sign(folder, private_key=private)
    with pytest.raises(PackageError, match=r"cannot sign .* with .*public\.pem"):
        sign(folder, private_key=public, overwrite=True)
    assert (folder / SIGNATURE_NAME).read_bytes() == before
    # A new package takes the place of the old one, and of its signature.
    write(folder, overwrite=True)
    assert signer_of(folder) is None


def test_a_certificate_of_another_key_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "package").path
    root = authority(tmp_path / "roots", "root")
    certificate = signing_certificate(key_pair(tmp_path / "keys")[0], root)
    with pytest.raises(PackageError, match="cannot sign"):
        sign(
            folder,
            private_key=key_pair(tmp_path / "other keys")[0],
            certificate=certificate,
            certificate_chain=[root[2]],
        )
    assert signer_of(folder) is None


def test_a_password_and_other_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = write(tmp_path / "package").path
    private, public = key_pair(tmp_path / "keys", ec.SECP521R1(), b"secret")
    with pytest.raises(PackageError, match=r"TypeError: Password.*QSAMPLE_KEY_PASSWORD"):
        sign(folder, private_key=private)
    assert signer_of(folder) is None
    monkeypatch.setenv("QSAMPLE_KEY_PASSWORD", "secret")
    sign(folder, private_key=private)
    assert read_package(folder, trusted_keys=public).signer is not None
    with pytest.raises(PackageError, match="curve"):
        sign(folder, private_key=key_pair(tmp_path / "k1", ec.SECP256K1())[0], overwrite=True)


def test_a_full_disk_is_not_a_fault_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import model_signing

    folder = write(tmp_path / "package").path
    private, _ = key_pair(tmp_path / "keys")
    monkeypatch.setattr(
        model_signing.signing.Config,
        "sign",
        lambda *_: throw(OSError(errno.ENOSPC, "No space left on device")),
    )
    with pytest.raises(PackageError, match=rf"^the disk of {tmp_path}.* is full; nothing") as full:
        sign(folder, private_key=private)
    assert "key" not in str(full.value).replace(str(tmp_path), "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "package"]
    with pytest.raises(PackageError, match=r"cannot sign .*missing\.key .*FileNotFoundError"):
        sign(folder, private_key=tmp_path / "missing.key")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_package_whose_parent_is_read_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "package").path
    private, public = key_pair(tmp_path / "keys")
    tmp_path.chmod(0o500)
    try:
        sign(folder, private_key=private)
        assert read_package(folder, trusted_keys=public).signer is not None
    finally:
        tmp_path.chmod(0o700)
