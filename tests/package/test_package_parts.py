"""What a package says of itself, which features it lacks, and whose files a folder has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.contract.interface import Features
from qsample.errors import PackageError, QsampleError
from qsample.package import package as module
from qsample.package.manifest import MANIFEST_NAME, FileEntry
from qsample.package.package import (
    Package,
    PackageWriter,
    Unpublished,
    check_features,
    check_file,
    check_references,
    faster_way,
    foreign_files,
    read_package,
    sha256_of,
    use_package,
)
from tests.helpers.small_packages import FILES, INTERFACE, manifest, write


def package(**changes: Any) -> Package:
    return Package(Path("/folder"), manifest(**changes))


COMPILATION: Any = SimpleNamespace(provider="cuda", ctx_len=512)


def test_a_package_in_one_line() -> None:
    assert package().summary == "/folder, portable package of some/model, float16"
    assert repr(package()) == "Package(/folder, portable package of some/model, float16)"
    device = package(kind="device", compilation=COMPILATION)
    assert device.summary == ("/folder, device package of some/model for cuda, 512 tokens, float16")
    assert package().interface is INTERFACE
    assert package().place == Path("/folder")


@pytest.mark.parametrize(
    ("wanted", "dtype", "message"),
    [
        (Features(logprobs=True), None, None),
        (Features(), "float16", None),
        (Features(top_logprobs=0), None, None),
        (Features(sampler=False), None, "was exported with include_sampler=True; open it with that"),
        (Features(filter_order="llama.cpp"), None, "was exported with filter_order='huggingface'; open"),
        (Features(logprobs_mode="processed_logprobs"), None, "was exported with logprobs_mode='raw_logprobs'"),
        (Features(logit_bias=True, top_logprobs=2), None, "was exported without .*logit_bias.*; export it again with"),
        (Features(top_logprobs=2), None, "was exported without top_logprobs;"),
        (Features(filters=("top_a",)), None, "was exported without the filter top_a;"),
        (Features(), "float32", "holds float16, not float32; leave dtype out, or export it again with that"),
        (Features(), "bfloat16", r'holds float16, not bfloat16; .*compile it with provider="cuda", dtype="bfloat16"'),
    ],
)  # fmt: skip
def test_features_that_a_package_has(
    wanted: Features, dtype: str | None, message: str | None
) -> None:
    if message is None:
        check_features(package(), wanted, dtype)
    else:
        with pytest.raises(QsampleError, match=f"/folder {message}"):
            check_features(package(), wanted, dtype)


def test_a_package_may_have_more() -> None:
    many = Features(logprobs=True, top_logprobs=5, filters=("top_a", "dry"))
    rich = package(interface=replace(INTERFACE, features=many))
    check_features(rich, Features(top_logprobs=5, filters=("dry",)), None)
    with pytest.raises(QsampleError, match="without top_logprobs, the filter typical_p;"):
        check_features(rich, Features(top_logprobs=6, filters=("dry", "typical_p")), None)


def test_advice_for_large_portable_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_BYTES_FOR_ADVICE", 100)
    sizes = {"a": FileEntry("a" * 64, 60), "b": FileEntry("a" * 64, 40)}
    large = {"files": sizes}
    advice = faster_way(package(**large))
    assert advice is not None
    assert "`qsample compile /folder OUT --weights int4`" in advice
    assert faster_way(package(files={**sizes, "b": FileEntry("a" * 64, 39)})) is None
    assert faster_way(package(**large, kind="device", compilation=COMPILATION)) is None
    packed = faster_way(package(**large, packed_weights=SimpleNamespace()))
    assert packed is not None
    assert "with the same weights" in packed
    assert "int4" not in packed


def test_files_that_do_not_fit_their_entries(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    check_file(tmp_path, "file", FileEntry("", 5))
    for size, problem in ((6, "truncated"), (4, "altered")):
        with pytest.raises(
            PackageError, match=f"is {problem}: it has 5 bytes and the manifest says {size}"
        ):
            check_file(tmp_path, "file", FileEntry("", size))
    with pytest.raises(PackageError, match="nothing is missing"):
        check_file(tmp_path, "nothing", FileEntry("", 5))
    (tmp_path / "folder").mkdir()
    with pytest.raises(PackageError, match="folder is missing"):
        check_file(tmp_path, "folder", FileEntry("", 5))
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "file")
    with pytest.raises(PackageError, match="is a link that leads out of the package"):
        check_file(tmp_path / "folder", "link", FileEntry("", 5))
    (tmp_path / "inside").symlink_to("file")
    check_file(tmp_path, "inside", FileEntry("", 5))
    with pytest.raises(PackageError, match=r"cannot read .*nothing: No such file"):
        sha256_of(tmp_path / "nothing")


def test_references_to_files_that_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "referenced_files", lambda path: {"b", "a", path.name})
    check_references(tmp_path, "graph", ["graph", "a", "b", "c"])
    with pytest.raises(PackageError, match=r"graph refers to the file 'a', which .* does not list"):
        check_references(tmp_path, "graph", ["graph"])


def test_foreign_files_of_a_folder(tmp_path: Path) -> None:
    """Those that the manifest does not list; without a readable manifest, those of other kinds."""
    made = write(tmp_path / "package")
    assert list(foreign_files(made.path)) == []
    (made.path / "mine.txt").write_text("x")
    (made.path / "more.onnx").write_text("x")
    (made.path / ".DS_Store").write_text("x")
    (made.path / "sub").mkdir()
    (made.path / "sub" / "decoder.onnx").write_text("x")
    (made.path / "link").symlink_to(tmp_path)
    assert sorted(foreign_files(made.path)) == ["link", "mine.txt", "more.onnx", "sub/decoder.onnx"]
    for text in ("{}", "[]", '{"files": 5}', "no JSON"):
        (made.path / MANIFEST_NAME).write_text(text)
        assert sorted(foreign_files(made.path)) == ["link", "mine.txt"], text


def test_a_package_in_a_scratch_folder_is_its_writers(tmp_path: Path) -> None:
    """Its graphs are not read again, and only its sources may have changed."""
    checked: list[int] = []
    sources: Any = SimpleNamespace(check=lambda: checked.append(1))
    made = Unpublished(tmp_path / "nowhere", manifest(), sources=sources)
    made.check_graph("decoder.onnx")
    made.check_not_replaced()
    assert checked == [1]
    with pytest.raises(PackageError, match="is not an ONNX file"):
        package().check_graph("decoder.onnx")


def test_a_rejected_package_has_a_free_name(tmp_path: Path) -> None:
    writer = PackageWriter(tmp_path / "scratch", tmp_path / "target")
    assert writer.manifest is None
    assert writer.put_aside() == tmp_path / "target.rejected"
    assert writer.target == tmp_path / "target.rejected"
    for name in ("target.rejected", "target.rejected1"):
        (tmp_path / name).mkdir()
    again = PackageWriter(tmp_path / "scratch", tmp_path / "target")
    assert again.put_aside() == again.target == tmp_path / "target.rejected2"


def replace_manifest(folder: Path) -> None:
    """The same package, under another version of its manifest."""
    path = folder / MANIFEST_NAME
    text = path.read_text()
    path.unlink()
    path.write_text(json.dumps(json.loads(text), indent=5))


def test_a_package_that_is_replaced_is_read_again(tmp_path: Path) -> None:
    made = write(tmp_path / "package")
    assert not made.is_replaced()
    made.check_not_replaced()
    seen: list[Package] = []

    def use(given: Package) -> str:
        seen.append(given)
        if len(seen) == 1:
            replace_manifest(given.path)
        return f"use {len(seen)}"

    assert use_package(made.path, use) == "use 2"
    assert (seen[0].is_replaced(), seen[1].is_replaced()) == (True, False)
    assert made.is_replaced()
    with pytest.raises(
        PackageError, match="package was replaced while it was in use; open it again"
    ):
        made.check_not_replaced()
    assert not replace(made, identity=None).is_replaced()
    assert made == read_package(made.path), "the version is no part of what is compared"


def test_errors_of_a_package_that_is_replaced_meanwhile_do_not_count(tmp_path: Path) -> None:
    made = write(tmp_path / "package")
    uses: list[int] = []

    def fail_once(given: Package) -> int:
        uses.append(1)
        if len(uses) == 1:
            replace_manifest(given.path)
            raise LookupError("half of a package")
        return len(uses)

    assert use_package(made.path, fail_once) == 2

    def fail(given: Package) -> None:
        uses.append(1)
        raise LookupError("its own error")

    uses.clear()
    with pytest.raises(LookupError, match="its own error"):
        use_package(made.path, fail)
    assert len(uses) == 1

    def always(given: Package) -> None:
        replace_manifest(given.path)

    with pytest.raises(PackageError, match="is replaced over and over while it is read"):
        use_package(made.path, always)


def test_texts_and_json_of_files(tmp_path: Path) -> None:
    files = {
        "text": "é".encode(),
        "bytes": b"\xff",
        "list.json": b"[]",
        "cut.json": b"{",
        "good.json": b'{"a": 1}',
    }
    made = write(tmp_path / "package", FILES | files)
    assert made.read_text("text") == "é"
    assert made.read_text("text", 2) == "é"
    assert made.file("text") == made.path / "text"
    assert made.read_json("good.json") == {"a": 1}
    assert made.read_json("absent.json") == {}
    for call, problem in (
        (lambda: made.read_text("text", 1), "cannot read .*text: "),
        (lambda: made.read_text("bytes"), "cannot read .*bytes: .*utf-8"),
        (lambda: made.read_text("absent"), "package has no file absent"),
        (lambda: made.file("absent"), "package has no file absent"),
        (
            lambda: made.read_json("list.json"),
            "list.json is not a JSON object; export the package again",
        ),
        (lambda: made.read_json("cut.json"), "cannot read .*cut.json"),
    ):
        with pytest.raises(PackageError, match=problem):
            call()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "package is missing; give a package's folder"),
        (lambda path: path.write_text("x"), "package is not a folder; give"),
        (lambda path: path.mkdir(), r"package is not a qsample package: it has no qsample\.json"),
    ],
)
def test_what_is_no_package(make: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path / "package")
    with pytest.raises(PackageError, match=message):
        read_package(tmp_path / "package")


def test_only_a_verified_package_is_hashed(tmp_path: Path) -> None:
    made = write(tmp_path / "package")
    content = (made.path / "decoder.onnx").read_bytes()
    (made.path / "decoder.onnx").write_bytes(b"X" + content[1:])
    assert read_package(made.path, verify=False) == made
    with pytest.raises(PackageError, match=r"decoder\.onnx was altered: its sha256 is not"):
        read_package(made.path)


def test_files_of_browsers_and_the_kinds_of_files_of_a_package(tmp_path: Path) -> None:
    names = (".DS_Store", "Thumbs.db", "desktop.ini", "model.sig")
    made = write(tmp_path / "package")
    for name in names:
        (made.path / name).write_text("x")
    assert list(foreign_files(made.path)) == []
    for name in ("a.json", "a.jinja", "a.onnx", "a.onnx.data", "a.data", "a.safetensors"):
        (made.path / "tokenizer" / name).write_text("x")
    listed = list(foreign_files(made.path))
    assert len(listed) == 6
    (made.path / MANIFEST_NAME).unlink()
    assert list(foreign_files(made.path)) == ["tokenizer/a.data", "tokenizer/a.safetensors"]
