"""Packages with a trusted signature: every file is compared, whenever it is opened; and graphs that are opened late."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from qsample.errors import PackageError
from qsample.package.package import Package, read_package, use_package
from tests.helpers.small_packages import FILES, write

pytest.importorskip("model_signing")
from qsample.addons.trust.signing import sign
from tests.helpers.signing_keys import key_pair

NESTED = "tokenizer/extra.json"


def graph(data: str | None = None) -> bytes:
    """A graph that refers to a file with a byte, or to none."""
    weights = []
    if data is not None:
        weights = [
            TensorProto(name="w", dims=[1], data_type=TensorProto.UINT8, data_location="EXTERNAL")
        ]
        for key, value in (("location", data), ("offset", "0"), ("length", "1")):
            weights[0].external_data.add(key=key, value=value)
    made = helper.make_graph([], "g", [], [], weights)
    content: bytes = helper.make_model(made).SerializeToString()
    return content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"late.onnx": graph("late.data"), "late.data": b"w", "plain.onnx": graph()}
    return write(tmp_path / "package", FILES | files).path


@pytest.fixture
def key(folder: Path, tmp_path: Path) -> Path:
    """The public key of the folder's signature."""
    private, public = key_pair(tmp_path / "keys")
    sign(folder, private_key=private)
    return public


def test_a_signed_package_knows_its_signer_and_its_files(folder: Path, key: Path) -> None:
    package, plain = read_package(folder, trusted_keys=key), read_package(folder)
    assert package == plain, "neither the signer nor the versions are compared"
    assert package.signer is not None
    assert package.signer.kind == "key"
    assert (plain.signer, plain.pinned, plain.place) == (None, None, folder)
    assert package.pinned is not None
    assert package.place == package.pinned.path
    assert package.file(NESTED).read_bytes() == FILES[NESTED]
    assert package.identity is not None
    assert plain.identity is not None
    # The manifest; then each file, and the folder of a nested one.
    assert len(plain.identity) == 1
    assert len(package.identity) >= 1 + len(package.manifest.files) + 1


@pytest.mark.parametrize("name", [NESTED, "late.data", "decoder.onnx.data"])
def test_a_trusted_key_implies_that_every_file_is_compared(
    name: str, folder: Path, key: Path
) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + b"?")
    assert read_package(folder, verify=False).signer is None
    with pytest.raises(PackageError, match=f"^{folder / name} was altered"):
        read_package(folder, verify=False, trusted_keys=key)


def test_a_signed_package_is_replaced_if_any_of_its_files_is_written_to(
    folder: Path, key: Path
) -> None:
    """The content may be the same."""
    package, plain = read_package(folder, trusted_keys=key), read_package(folder)
    assert not package.is_replaced()
    os.utime(folder / NESTED, (1, 1))
    assert package.is_replaced()
    assert not plain.is_replaced()
    with pytest.raises(PackageError, match="was replaced while it was in use; open it again"):
        package.check_not_replaced()
    uses: list[Package] = []

    def use(given: Package) -> int:
        uses.append(given)
        if len(uses) == 1:
            os.utime(folder / NESTED, (2, 2))
        return len(uses)

    assert use_package(folder, use, trusted_keys=key) == 2
    assert use_package(folder, lambda given: given.signer, trusted_keys=key) == package.signer
    assert use_package(folder, lambda given: given.signer) is None


def test_texts_are_compared_when_they_are_read(folder: Path, key: Path) -> None:
    package, plain = read_package(folder, trusted_keys=key), read_package(folder)
    assert package.read_text(NESTED) == "{}"
    (folder / NESTED).write_text("[]")
    assert plain.read_text(NESTED) == "[]"
    for read in (package.read_text, package.read_json):
        with pytest.raises(PackageError, match=f"^{folder / NESTED} was altered: its sha256"):
            read(NESTED)


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_graph_that_is_opened_late_is_compared_before_and_after(
    is_signed: bool, folder: Path, key: Path
) -> None:
    package = read_package(folder, trusted_keys=key if is_signed else None)
    for name in ("late.onnx", "plain.onnx"):
        with package.verified_again(name):
            sha256 = hashlib.sha256(package.file(name).read_bytes()).hexdigest()
            assert sha256 == package.manifest.files[name].sha256
    for name in ("late.onnx", "late.data"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + b"?")
        words = rf"^{folder} is no longer the package that was opened \(.*{name} was altered"
        with pytest.raises(PackageError, match=words), package.verified_again("late.onnx"):
            pytest.fail("its body ran")
        with package.verified_again("plain.onnx"):
            pass
        (folder / name).write_bytes(content)
        words = r"\(.*late\.onnx was written to while it was opened\)"
        with pytest.raises(PackageError, match=words), package.verified_again("late.onnx"):
            os.utime(folder / name, (1, 1))  # the clock may stand still for some milliseconds
    with pytest.raises(LookupError, match="own"), package.verified_again("late.onnx"):
        raise LookupError("its own error")


def test_a_graph_must_refer_to_listed_files_alone(tmp_path: Path) -> None:
    content = graph("planted.data")
    files = FILES | {"late.onnx": content, "broken.onnx": b"nothing"}
    package = write(tmp_path / "package", files)
    (package.path / "planted.data").write_bytes(b"w")
    for check in (package.check_graph, lambda name: package.verified_again(name).__enter__()):
        with pytest.raises(PackageError, match=r"late\.onnx refers to the file 'planted\.data'"):
            check("late.onnx")
    with pytest.raises(PackageError, match=r"broken\.onnx is not an ONNX file: "):
        package.check_graph("broken.onnx")
    with pytest.raises(PackageError, match=r"decoder\.onnx refers to the file 'planted\.data'"):
        write(tmp_path / "other", FILES | {"decoder.onnx": content})
