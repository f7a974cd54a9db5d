"""ML-BOMs: valid by CycloneDX's schema, with the hashes of the files and the origin of the model, twice the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import qsample
from qsample.addons.trust.sbom import ml_bom
from qsample.errors import DISTRIBUTION
from qsample.package.manifest import Compilation, Source
from tests.helpers.cyclonedx import check_bom
from tests.helpers.small_packages import write


def test_a_package_as_an_ml_bom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    small = write(tmp_path / "package")
    source = Source(
        "some/model",
        "c0ffee",
        "llama",
        "LlamaForCausalLM",
        {"model.safetensors": "ab" * 32},
        "apache-2.0",
    )
    compiled = Compilation(
        *("cpu", ("CPUExecutionProvider",), None, 64, {}, {}),
        quantization={"divergence": {"kl": 0.01}},
        options={"weights": "int4"},
        versions={"qsample": "0.2.0", "onnxruntime": "1.32.0"},
    )
    package = replace(
        small, manifest=replace(small.manifest, kind="device", source=source, compilation=compiled)
    )
    document = ml_bom(package)
    check_bom(document)
    assert document == ml_bom(package)
    assert "timestamp" not in document["metadata"]
    files = {
        one["name"]: one["hashes"][0]["content"]
        for one in document["components"]
        if one["type"] == "file"
    }
    assert files == {name: entry.sha256 for name, entry in small.manifest.files.items()}
    model = document["metadata"]["component"]
    assert (model["type"], model["licenses"]) == (
        "machine-learning-model",
        [{"license": {"name": "apache-2.0"}}],
    )
    (ancestor,) = model["pedigree"]["ancestors"]
    assert ancestor["purl"] == "pkg:huggingface/some/model@c0ffee"
    assert ancestor["components"][0]["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert {"name": "qsample:compile:option:weights", "value": "int4"} in model["properties"]
    assert {"type": "kl", "value": "0.01"} in model["modelCard"]["quantitativeAnalysis"][
        "performanceMetrics"
    ]
    (runtime,) = (one for one in document["components"] if one["name"] == "onnxruntime")
    assert runtime["purl"] == "pkg:pypi/onnxruntime@1.32.0"
    other = ml_bom(replace(package, manifest=replace(package.manifest, files={})))
    assert other["serialNumber"] != document["serialNumber"]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert ml_bom(package)["metadata"]["timestamp"] == "1970-01-01T00:00:00+00:00"
    check_bom(ml_bom(small))


def test_every_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    small = write(tmp_path / "package")
    source = Source(
        "me/m + adapter", None, "llama", "LlamaForCausalLM", {"b": "2" * 64, "a": "1" * 64}
    )
    manifest = replace(
        small.manifest,
        source=source,
        files={},
        parity={"z": 1, "a": 0.5},
        versions={"onnxruntime": "1.0", "torch": "2"},
        images={"x": 1},
    )
    document = ml_bom(replace(small, manifest=manifest))
    assert document.pop("serialNumber").startswith("urn:uuid:")
    (tool,) = document["metadata"]["tools"]["components"]
    assert (tool["type"], tool["name"]) == ("application", DISTRIBUTION)
    assert tool["version"] == qsample.__version__
    assert "timestamp" not in document["metadata"]

    def file(name: str, content: str) -> dict[str, object]:
        hashes = [{"alg": "SHA-256", "content": content}]
        return {"type": "file", "bom-ref": f"checkpoint/{name}", "name": name, "hashes": hashes}

    checkpoint = {
        "type": "machine-learning-model",
        "bom-ref": "checkpoint",
        "name": "me/m",
        "components": [file("a", "1" * 64), file("b", "2" * 64)],
    }
    model = document["metadata"].pop("component")
    assert model.pop("description").startswith(f"portable package, {manifest.interface.dtype}")
    assert model == {
        "type": "machine-learning-model",
        "bom-ref": "package",
        "name": "me/m + adapter",
        "pedigree": {"ancestors": [checkpoint]},
        "modelCard": {
            "modelParameters": {
                "task": "text-generation",
                "architectureFamily": "llama",
                "modelArchitecture": "LlamaForCausalLM",
                "inputs": [{"format": "token ids"}, {"format": "images"}],
                "outputs": [{"format": "token ids"}],
            },
            "quantitativeAnalysis": {
                "performanceMetrics": [{"type": "a", "value": "0.5"}, {"type": "z", "value": "1"}]
            },
        },
        "properties": [
            {"name": "qsample:version:onnxruntime", "value": "1.0"},
            {"name": "qsample:version:torch", "value": "2"},
        ],
    }
    del document["metadata"]
    runtime = {
        "type": "library",
        "bom-ref": "onnxruntime",
        "name": "onnxruntime",
        "version": "1.0",
        "purl": "pkg:pypi/onnxruntime@1.0",
    }
    assert document == {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [runtime],
        "dependencies": [{"ref": "package", "dependsOn": ["onnxruntime"]}],
    }


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    small = write(tmp_path / "package")
    source = Source("me/m", "", "llama", "LlamaForCausalLM", {}, "")
    compiled = Compilation(*("cpu", ("CPUExecutionProvider",), None, 64, {}, {}))
    manifest = replace(
        small.manifest,
        kind="device",
        source=source,
        versions={},
        parity=None,
        images=None,
        compilation=compiled,
    )
    document = ml_bom(replace(small, manifest=manifest))
    model = document["metadata"]["component"]
    (ancestor,) = model["pedigree"]["ancestors"]
    assert {"licenses", "version", "purl"}.isdisjoint({*model, *ancestor})
    assert model["modelCard"]["modelParameters"]["inputs"] == [{"format": "token ids"}]
    assert model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"] == []
    runtime = document["components"][-1]
    assert (runtime["version"], "purl" in runtime) == ("", False)
    assert document["dependencies"][0]["dependsOn"][-1] == "onnxruntime"
    assert len(document["dependencies"][0]["dependsOn"]) == len(small.manifest.files) + 1
