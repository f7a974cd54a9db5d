"""Signed packages: moved, verified; refused after a flipped bit in any file, with another key, with another file."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from qsample.addons.trust.signing import sign
from qsample.errors import PackageError, QsampleError
from qsample.ort.model_package import bundle
from qsample.package import package as package_module
from qsample.package.package import read_package, use_package
from qsample.package.signature import SIGNATURE_NAME, signer_of
from tests.helpers.small_packages import write

model_signing = pytest.importorskip("model_signing")
from tests.helpers.signing_keys import authority, key_pair, signing_certificate  # noqa: E402


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """A signed package, and the public key."""
    private, public = key_pair(tmp_path / "keys")
    folder = write(tmp_path / "package").path
    sign(folder, private_key=private)
    return folder, public


def test_a_package_is_signed_moved_and_verified(signed: tuple[Path, Path], tmp_path: Path) -> None:
    folder, public = signed
    unchecked = read_package(folder)
    assert (unchecked.signer, signer_of(folder)) == (
        None,
        read_package(folder, trusted_keys=public).signer,
    )
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(folder, tmp_path / "elsewhere" / "renamed")
    (moved / ".gitattributes").write_text("as the hub adds it")
    another = key_pair(tmp_path / "another")[1]
    shutil.copy(public, tmp_path / "another" / "trusted.pem")
    for keys in (public, str(public), [another, public], tmp_path / "another"):
        assert read_package(moved, verify=False, trusted_keys=keys).signer == signer_of(moved)
    bundle(tmp_path / "bundle", [moved])
    assert read_package(tmp_path / "bundle" / "portable", trusted_keys=public).signer is not None
    # The library by itself is of the same opinion.
    config = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=public)
    config.verify(moved, moved / SIGNATURE_NAME)


def test_one_flipped_bit_in_any_file_is_refused(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert {SIGNATURE_NAME, "qsample.json", "manifest.json", "decoder.onnx.data"} <= {
        path.name for path in files
    }
    for path in files:
        content = path.read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(PackageError, match=re.escape(path.name)):
                read_package(folder, verify=False, trusted_keys=public)
        path.write_bytes(content)
    read_package(folder, trusted_keys=public)


def test_other_files_and_a_manifest_that_was_written_anew_are_refused(
    signed: tuple[Path, Path],
) -> None:
    folder, public = signed

    def refused(message: str) -> None:
        with pytest.raises(PackageError, match=message):
            read_package(folder, trusted_keys=public)

    (folder / "tokenizer" / "added.json").write_text("{}")
    refused("'tokenizer/added.json' was added or removed since")
    (folder / "tokenizer" / "added.json").unlink()
    manifest = folder / "qsample.json"
    text = manifest.read_text()
    entry = json.loads(text)["files"]["tokenizer/extra.json"]
    (folder / "tokenizer" / "extra.json").write_text("[]")  # of the same length
    digest = package_module.sha256_of(folder / "tokenizer" / "extra.json")
    manifest.write_text(text.replace(entry["sha256"], digest))
    read_package(folder)  # its hashes fit
    refused("'qsample.json' was altered since the package was signed")
    changed = json.loads(text)
    del changed["files"]["tokenizer/extra.json"]
    manifest.write_text(json.dumps(changed))
    (folder / "tokenizer" / "extra.json").unlink()
    refused("'qsample.json' was altered since")
    manifest.write_text(text)
    refused("tokenizer/extra.json is missing")
    (folder / "tokenizer" / "extra.json").write_text("{}")
    (folder / SIGNATURE_NAME).unlink()
    refused("is not signed: it has no model.sig")


def test_other_signers_are_refused(signed: tuple[Path, Path], tmp_path: Path) -> None:
    folder, public = signed
    another_private, another = key_pair(tmp_path / "another")
    with pytest.raises(
        PackageError, match=r"model\.sig is by the key sha256:[0-9a-f]{64}, which is not trusted"
    ):
        read_package(folder, trusted_keys=[another])
    # A signature that claims to be by the trusted key.
    trusted = signer_of(folder)
    assert trusted is not None
    sign(folder, private_key=another_private, overwrite=True)
    forged = json.loads((folder / SIGNATURE_NAME).read_text())
    forged["verificationMaterial"]["publicKey"]["hint"] = trusted.fingerprint
    (folder / SIGNATURE_NAME).write_text(json.dumps(forged))
    with pytest.raises(
        PackageError, match=r"is not a valid signature by the key .*InvalidSignature"
    ):
        read_package(folder, trusted_keys=public)


def test_what_cannot_be_a_key(signed: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = signed
    (tmp_path / "empty").mkdir()
    private = tmp_path / "keys" / "private.key"
    for keys, message in (
        ((private,), "cannot read .*private.key .* give a public key"),
        ((tmp_path / "empty",), "which is not trusted"),
        ((tmp_path / "missing.pem",), "cannot read .*missing.pem"),
    ):
        with pytest.raises(QsampleError, match=message):
            read_package(folder, trusted_keys=keys)
    for wrong in ((), "sigstore:a@b.c", ["sigstore:a,b", "sigstore:c,d"]):
        with pytest.raises(
            ValueError,
            match=r"trusted_keys is .*; give PEM files, folders, or one sigstore:ACCOUNT",
        ):
            read_package(folder, trusted_keys=wrong)


def test_certificates(tmp_path: Path) -> None:
    folder = write(tmp_path / "package").path
    root, stranger = (
        authority(tmp_path / "roots", "root"),
        authority(tmp_path / "strangers", "root"),
    )
    private, public = key_pair(tmp_path / "keys")
    own = signing_certificate(private, root)
    sign(folder, private_key=private, certificate=own, certificate_chain=[root[2]])
    signer = read_package(folder, trusted_keys=tmp_path / "roots").signer
    assert signer is not None
    assert signer.kind == "certificate"
    with pytest.raises(PackageError, match="is not a valid signature by the certificate"):
        read_package(folder, trusted_keys=stranger[2])
    with pytest.raises(PackageError, match="is not trusted"):
        read_package(folder, trusted_keys=public)


def test_sigstore_asks_for_the_account(
    signed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library is asked without a trust configuration; it then needs a network."""
    folder, public = signed
    bundle: dict[str, Any] = json.loads((folder / SIGNATURE_NAME).read_text())
    bundle["verificationMaterial"] = {"certificate": {"rawBytes": "MDA="}, "tlogEntries": []}
    (folder / SIGNATURE_NAME).write_text(json.dumps(bundle))
    with pytest.raises(PackageError, match=r"by the sigstore sha256:.*, which is not trusted"):
        read_package(folder, trusted_keys=public)
    asked: list[Any] = []
    monkeypatch.setattr(
        model_signing.verifying.Config,
        "use_sigstore_verifier",
        lambda _, **given: asked.append(given),
    )
    with pytest.raises(PackageError, match="is not a valid signature"):
        read_package(folder, trusted_keys=["sigstore:a@b.c,https://issuer"])
    wanted = {"identity": "a@b.c", "oidc_issuer": "https://issuer", "trust_config": None}
    assert asked == [wanted]


def test_files_that_change_between_the_check_and_the_use(signed: tuple[Path, Path]) -> None:
    """Even if the name, the size and the time of the last writing are put back."""
    folder, public = signed
    victim, seen = folder / "tokenizer" / "extra.json", []
    content, status = victim.read_bytes(), victim.stat()

    def use(package: package_module.Package) -> bytes:
        if not seen:
            victim.write_bytes(b"[]")
        seen.append(victim.read_bytes())
        victim.write_bytes(content)
        os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
        return seen[-1]

    with pytest.raises(PackageError, match="replaced over and over"):
        use_package(folder, use, trusted_keys=public)
    assert seen[0] == b"[]"
    assert set(seen[1:]) == {content}
    opened = read_package(folder, trusted_keys=public)
    opened.check_not_replaced()
    os.utime(victim, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(PackageError, match="was replaced while it was in use"):
        opened.check_not_replaced()
