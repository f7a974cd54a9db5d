"""Signed packages: moved, verified; refused after a flipped bit in any file, with another key, with another file."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from qsample.addons.trust.signing import sign
from qsample.errors import PackageError, QsampleError
from qsample.ort.model_package import bundle
from qsample.package import package as package_module
from qsample.package.disk.replace import exchange
from qsample.package.package import read_package, use_package
from qsample.package.signature import SIGNATURE_NAME, files_to_sign, signer_of
from tests.helpers.small_packages import FILES, write

model_signing = pytest.importorskip("model_signing")
from tests.helpers.signing_keys import authority, key_pair, signing_certificate  # noqa: E402


@pytest.fixture
def few_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that changes all the time is given up soon."""
    monkeypatch.setattr(package_module, "_MAX_READINGS", 5)


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


def test_a_bundle_has_all_that_was_signed(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path / "keys")
    folder = write(tmp_path / "package").path
    (folder / "docs").mkdir()
    for name in ("README.md", "docs/card.md", ".gitattributes"):
        (folder / name).write_text(f"the {name}")
    sign(folder, private_key=private)
    out = tmp_path / "bundle"
    bundle(out, [folder])
    assert read_package(out / "portable", trusted_keys=public).signer is not None
    assert (out / "portable" / "docs" / "card.md").read_text() == "the docs/card.md"
    # The copies may go, the user's own files may not.
    bundle(out, [folder], overwrite=True)
    for name, text in (("mine.txt", "mine"), ("README.md", "my own")):
        path = out / "portable" / name
        old = path.read_text() if path.exists() else None
        path.write_text(text)
        with pytest.raises(PackageError, match=f"not its bundle's .portable/{name}"):
            bundle(out, [folder], overwrite=True)
        if old is None:
            path.unlink()
        else:
            path.write_text(old)
    # What its verification would refuse is not bundled.
    for change in (
        lambda: (folder / "README.md").write_text("changed"),
        lambda: (folder / "README.md").unlink(),
        lambda: [(folder / "README.md").write_text("the README.md"), (folder / "new").touch()],
    ):
        change()
        with pytest.raises(PackageError, match=r"is not what was signed: '(README\.md|new)'"):
            bundle(tmp_path / "other", [folder])
        assert not (tmp_path / "other").exists()


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


def test_a_link_to_a_folder_is_refused(signed: tuple[Path, Path], tmp_path: Path) -> None:
    """Its files could change, or more of them come, without a change of the package."""
    folder, public = signed
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "more.json").write_text("{}")
    for link in (folder / "linked", folder / "tokenizer" / "linked"):
        for target in (tmp_path / "elsewhere", folder / "tokenizer"):
            link.symlink_to(target)
            with pytest.raises(PackageError, match=r"linked is not a plain file; a signed package"):
                read_package(folder, trusted_keys=public)
            with pytest.raises(QsampleError, match=r"linked' because it is a symlink"):
                sign(folder, private_key=tmp_path / "keys" / "private.key", overwrite=True)
            link.unlink()
    read_package(folder, trusted_keys=public)


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


@pytest.mark.parametrize("term", [(-1, 1), (-300, -200), (200, 300)])
def test_certificates(tmp_path: Path, term: tuple[int, int]) -> None:
    """Today's date does not matter: the term of a certificate may have ended, and a clock may be wrong."""
    folder = write(tmp_path / "package").path
    root, stranger = (
        authority(tmp_path / "roots", "root", term),
        authority(tmp_path / "strangers", "root", term),
    )
    private, public = key_pair(tmp_path / "keys")
    own = signing_certificate(private, root, term)
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


@pytest.mark.usefixtures("few_readings")
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins a folder")
@pytest.mark.parametrize("around", [False, True])
def test_a_folder_that_is_exchanged_and_put_back(
    signed: tuple[Path, Path], tmp_path: Path, around: bool
) -> None:
    """While files are opened, another package has the name of the verified one."""
    folder, public = signed
    inner = tmp_path / "outer" / "package"
    shutil.copytree(folder, inner)
    other = tmp_path / "others" / "package"
    shutil.copytree(folder, other)
    for name in ("decoder.onnx", "tokenizer/extra.json"):
        (other / name).write_bytes(b"x" * (other / name).stat().st_size)
    names = (inner.parent, other.parent) if around else (inner, other)

    def use(package: package_module.Package) -> list[bytes]:
        assert exchange(*names)
        try:
            return [
                package.file(name).read_bytes() for name in ("decoder.onnx", "tokenizer/extra.json")
            ]
        finally:
            assert exchange(*names)

    assert use_package(inner, use, trusted_keys=public) == [b"graph" * 1000, b"{}"]

    def fail(package: package_module.Package) -> None:
        raise PackageError(f"{package.file('decoder.onnx')} is what it is")

    with pytest.raises(PackageError, match=f"^{re.escape(str(inner))}/decoder.onnx is what"):
        use_package(inner, fail, trusted_keys=public)


@pytest.mark.usefixtures("few_readings")
@pytest.mark.parametrize("name", ["decoder.onnx", "tokenizer"])
def test_an_entry_that_is_exchanged_and_put_back(
    signed: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    folder, public = signed
    other = tmp_path / "other"
    if (folder / name).is_dir():
        shutil.copytree(folder / name, other)
    else:
        other.write_bytes(b"x" * (folder / name).stat().st_size)

    def use(package: package_module.Package) -> None:
        for first, second in ((folder / name, other), (other, folder / name)):
            first.rename(tmp_path / "aside")
            second.rename(first)
            (tmp_path / "aside").rename(second)
            first, second = second, first

    with pytest.raises(PackageError, match="replaced over and over"):
        use_package(folder, use, trusted_keys=public)


def test_texts_are_the_signed_ones_whenever_they_are_read(signed: tuple[Path, Path]) -> None:
    folder, public = signed
    name = "tokenizer/extra.json"
    package = read_package(folder, trusted_keys=public)
    unsigned = read_package(folder)
    copied = pickle.loads(pickle.dumps(package))
    assert (package.read_json(name), package.read_text(name)) == ({}, "{}")
    (folder / name).write_text("[]")
    for read in (package.read_json, package.read_text, copied.read_json):
        with pytest.raises(PackageError, match=r"^/.*package/tokenizer/extra\.json was altered"):
            read(name)
    assert unsigned.read_text(name) == "[]"


def test_a_graph_that_is_opened_late(signed: tuple[Path, Path]) -> None:
    """The files of small_packages are no graphs, so this is one with weights in a file."""
    folder, public = signed
    weights = onnx.TensorProto(
        name="w", dims=[1], data_type=onnx.TensorProto.UINT8, data_location=1
    )
    for key, value in (("location", "late.data"), ("offset", "0"), ("length", "1")):
        weights.external_data.add(key=key, value=value)
    graph = helper.make_graph([], "late", [], [], [weights])
    files = {
        **FILES,
        "late.onnx": helper.make_model(graph).SerializeToString(),
        "late.data": b"w",
        "plain.onnx": helper.make_model(helper.make_graph([], "g", [], [])).SerializeToString(),
    }
    package = write(folder, files, overwrite=True)
    for opened in (package, sign_and_read(package, folder, public)):
        for name in ("late.onnx", "plain.onnx"):
            with opened.verified_again(name):
                assert opened.file(name).read_bytes() == files[name]
        for name in ("late.onnx", "late.data"):
            path = folder / name
            path.write_bytes(files[name][:-1] + b"?")
            with (
                pytest.raises(PackageError, match=f"no longer the package .*{name} was altered"),
                opened.verified_again("late.onnx"),
            ):
                pytest.fail("its body ran")
            path.write_bytes(files[name])
            with (
                pytest.raises(PackageError, match=r"late\.onnx was written to while"),
                opened.verified_again("late.onnx"),
            ):
                path.write_bytes(files[name])
        with (
            pytest.raises(ValueError, match="an error of the body"),
            opened.verified_again("late.onnx"),
        ):
            raise ValueError("an error of the body")
    # A new package that has the same graph is as good; one without it is not.
    write(folder, files, overwrite=True)
    with package.verified_again("late.onnx"):
        pass
    write(folder, overwrite=True)
    with pytest.raises(PackageError, match="missing"), package.verified_again("late.onnx"):
        pytest.fail("its body ran")


def sign_and_read(package: package_module.Package, folder: Path, public: Path) -> Any:
    sign(package.path, private_key=public.with_name("private.key"))
    return read_package(folder, trusted_keys=public)


def test_the_signature_and_files_of_git_are_not_signed(tmp_path: Path) -> None:
    """At the top, as the library leaves them out; a signature or such a file below is one of the
    package's."""
    for folder in (tmp_path, tmp_path / "a"):
        for name in (SIGNATURE_NAME, ".git/config", ".gitattributes", ".github/x", ".gitignore"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    (tmp_path / ".gitmodules").touch()
    below = [SIGNATURE_NAME, ".git/config", ".gitattributes", ".github/x", ".gitignore"]
    assert {*files_to_sign(tmp_path)} == {".gitmodules", *(f"a/{name}" for name in below)}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PackageError, match="pipe is not a plain file; a signed package has no"):
        list(files_to_sign(tmp_path))
