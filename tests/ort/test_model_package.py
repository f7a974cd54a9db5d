"""Bundles: variants of a model in a folder, opened by ONNX Runtime itself and by `load`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from qsample import AutoModelForCausalLM
from qsample.errors import PackageError
from qsample.ort.model_package import bundle, package_in
from qsample.package.manifest import MANIFEST_NAME, MODEL_PACKAGE_NAME
from qsample.runtime import load


@pytest.fixture(scope="module")
def compiled(llama_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "cpu"
    AutoModelForCausalLM.from_pretrained(llama_package).compile(path, ctx_len=64)
    return path


@pytest.fixture
def bundled(llama_package: Path, compiled: Path, tmp_path: Path) -> Path:
    out = tmp_path / "all"
    assert bundle(out, [llama_package, compiled]) == ["portable", "cpu"]
    return out


@pytest.mark.ci
def test_onnxruntime_opens_packages_and_bundles(llama_package: Path, bundled: Path) -> None:
    ort = pytest.importorskip("onnxruntime", minversion="1.32")
    for folder, variants in ((llama_package, ["portable"]), (bundled, ["cpu", "portable"])):
        context = ort.ModelPackageContext(str(folder))
        assert sorted(context.get_component_names()) == ["decoder", "initial_state"]
        assert sorted(context.get_variant_names("decoder")) == variants
        for variant in variants:
            assert context.get_variant_ep_name("decoder", variant) == "CPUExecutionProvider"
        info = ort.ModelPackage.open(str(folder)).get_info()
        assert len(info["components"]) == 2


def test_load_takes_the_variant_for_the_device(
    llama_package: Path, compiled: Path, bundled: Path
) -> None:
    assert load(bundled).package.path == bundled / "cpu"
    assert load(bundled, "cpu").package.path == bundled / "cpu"
    assert package_in(bundled, ["CPUExecutionProvider"]) == bundled / "portable"
    assert package_in(bundled, "cuda") == bundled / "portable"
    shutil.rmtree(bundled / "portable")
    manifest = json.loads((bundled / MODEL_PACKAGE_NAME).read_text())
    for component in manifest["components"].values():
        del component["variants"]["portable"]
    (bundled / MODEL_PACKAGE_NAME).write_text(json.dumps(manifest))
    with pytest.raises(PackageError, match="no variant for 'cuda'; it has cpu"):
        load(bundled, "cuda")
    expected = (
        load(compiled).generate([[5, 6, 7]], max_new_tokens=5, temperature=0.9, seed=1).token_ids
    )
    assert (
        load(bundled).generate([[5, 6, 7]], max_new_tokens=5, temperature=0.9, seed=1).token_ids
        == expected
    )
    opened = AutoModelForCausalLM.from_pretrained(bundled)
    assert (
        opened.generate([[5, 6, 7]], max_new_tokens=5, temperature=0.9, seed=1).token_ids
        == expected
    )


def test_equal_files_are_one_on_the_disk(bundled: Path) -> None:
    tokenizers = [bundled / name / "config.json" for name in ("cpu", "portable")]
    assert os.path.samefile(*tokenizers)
    assert not os.path.samefile(*(bundled / name / MANIFEST_NAME for name in ("cpu", "portable")))


def test_a_damaged_variant_is_refused(bundled: Path) -> None:
    data = bundled / "cpu" / "decoder.onnx"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(PackageError, match="was altered"):
        load(bundled)


def test_a_file_that_is_copied_wrong_is_refused(
    llama_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copyfile

    def copy_wrong(source: Path, target: Path) -> None:
        copy(source, target)
        if target.name == "decoder.onnx":
            content = target.read_bytes()
            target.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    monkeypatch.setattr(shutil, "copyfile", copy_wrong)
    with pytest.raises(PackageError, match=r"decoder\.onnx was altered"):
        bundle(tmp_path / "new", [llama_package])
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_bundle_of_one_model_is_refused(
    llama_package: Path, compiled: Path, bundled: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(compiled, other)
    manifest = json.loads((other / MANIFEST_NAME).read_text())
    manifest["token_ids"]["pad"] += 1
    (other / MANIFEST_NAME).write_text(json.dumps(manifest))
    shutil.copytree(llama_package, tmp_path / "copy")
    cases = (
        ([], "no package was given"),
        ([llama_package, tmp_path / "copy"], "both portable"),
        ([llama_package, other], "variants of one model"),
        ([tmp_path / "missing"], "is missing"),
    )
    for packages, message in cases:
        with pytest.raises(PackageError, match=message):
            bundle(tmp_path / "new", packages)
        assert not (tmp_path / "new").exists()
    with pytest.raises(PackageError, match="already holds a bundle"):
        bundle(bundled, [compiled])
    for notes in (bundled / "notes.txt", bundled / "cpu" / "notes.txt"):
        notes.write_text("mine")
        with pytest.raises(
            PackageError, match=rf"not its bundle's \({notes.relative_to(bundled)}\)"
        ):
            bundle(bundled, [compiled], overwrite=True)
        notes.unlink()
    assert bundle(bundled, [compiled], overwrite=True) == ["cpu"]
    assert sorted(path.name for path in bundled.iterdir()) == ["cpu", MODEL_PACKAGE_NAME]
    with pytest.raises(PackageError, match="not a qsample bundle"):
        bundle(compiled, [llama_package], overwrite=True)


def test_a_bundle_names_its_own_folders_only(bundled: Path) -> None:
    text = (bundled / MODEL_PACKAGE_NAME).read_text()
    (bundled / MODEL_PACKAGE_NAME).write_text(
        text.replace('"variant_directory": "cpu"', '"variant_directory": ".."')
    )
    with pytest.raises(PackageError, match="a folder of the bundle itself"):
        load(bundled)
