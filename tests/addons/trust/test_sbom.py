"""ML-BOMs: valid by CycloneDX's schema, with the hashes of the files and the origin of the model, twice the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qsample.addons.trust.sbom import ml_bom
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
