"""Describes a package as an ML-BOM, a CycloneDX 1.6 document
(https://cyclonedx.org/docs/1.6/json/).

The same package gives the same document: its serial number follows from the content, and it has a
time only if the environment variable SOURCE_DATE_EPOCH states one.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import qsample
from qsample.errors import DISTRIBUTION
from qsample.package.manifest import Manifest, Source
from qsample.package.package import Package


def ml_bom(package: Package) -> dict[str, Any]:
    """The document about a package: its files, the origin of the model, and versions. It is ready
    for JSON."""
    manifest = package.manifest
    files = _files("package", {name: entry.sha256 for name, entry in manifest.files.items()})
    tool = {"type": "application", "name": DISTRIBUTION, "version": qsample.__version__}
    metadata: dict[str, Any] = {"tools": {"components": [tool]}, "component": _model(manifest)}
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    if epoch.isdecimal():
        metadata["timestamp"] = datetime.fromtimestamp(int(epoch), UTC).isoformat()
    needed = [*(file["bom-ref"] for file in files), "onnxruntime"]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": metadata,
        "components": [*files, _runtime(manifest)],
        "dependencies": [{"ref": "package", "dependsOn": needed}],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return {**document, "serialNumber": f"urn:uuid:{serial}"}


def _model(manifest: Manifest) -> dict[str, Any]:
    """The component of the model in the package."""
    source = manifest.source
    checkpoint = _checkpoint(source)
    inputs = [{"format": "token ids"}]
    if manifest.images is not None:
        inputs.append({"format": "images"})
    metrics = [
        {"type": name, "value": str(value)} for name, value in sorted(_figures(manifest).items())
    ]
    properties = [
        {"name": f"qsample:{key}", "value": str(value)}
        for key, value in sorted(_properties(manifest).items())
    ]
    stated: dict[str, Any] = {
        key: checkpoint[key] for key in ("licenses", "version") if key in checkpoint
    }
    return {
        "type": "machine-learning-model",
        "bom-ref": "package",
        "name": source.model_id,
        **stated,
        "description": f"{manifest.kind} package, {manifest.interface.dtype}: an ONNX graph with its sampler",
        "pedigree": {"ancestors": [checkpoint]},
        "modelCard": {
            "modelParameters": {
                "task": "text-generation",
                "architectureFamily": source.model_type,
                "modelArchitecture": source.architecture,
                "inputs": inputs,
                "outputs": [{"format": "token ids"}],
            },
            "quantitativeAnalysis": {"performanceMetrics": metrics},
        },
        "properties": properties,
    }


def _checkpoint(source: Source) -> dict[str, Any]:
    """The component of the checkpoint that was exported."""
    base = source.model_id.partition(" + ")[0]
    checkpoint: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": "checkpoint",
        "name": base,
    }
    if source.license not in (None, ""):
        checkpoint["licenses"] = [{"license": {"name": source.license}}]
    checkpoint["components"] = _files("checkpoint", source.files)
    if source.revision not in (None, ""):
        checkpoint["version"] = source.revision
        checkpoint["purl"] = f"pkg:huggingface/{base}@{source.revision}"
    return checkpoint


def _runtime(manifest: Manifest) -> dict[str, Any]:
    """The component of ONNX Runtime, with the version that compiled or made the package."""
    properties = _properties(manifest)
    version = properties.get("compile:version:onnxruntime") or properties.get(
        "version:onnxruntime", ""
    )
    runtime = {
        "type": "library",
        "bom-ref": "onnxruntime",
        "name": "onnxruntime",
        "version": version,
    }
    if version:
        runtime["purl"] = f"pkg:pypi/onnxruntime@{version}"
    return runtime


def _properties(manifest: Manifest) -> dict[str, Any]:
    """The versions and the options of the export and the compilation."""
    properties = {f"version:{name}": version for name, version in manifest.versions.items()}
    compilation = manifest.compilation
    if compilation is not None:
        for name, version in compilation.versions.items():
            properties[f"compile:version:{name}"] = version
        for name, value in compilation.options.items():
            properties[f"compile:option:{name}"] = value
    return properties


def _figures(manifest: Manifest) -> dict[str, Any]:
    """The results of the comparisons with the original model and with the float model."""
    figures = dict(manifest.parity or {})
    if manifest.compilation is not None:
        figures |= (manifest.compilation.quantization or {}).get("divergence", {})
    return figures


def _files(owner: str, hashes: Mapping[str, str]) -> list[dict[str, Any]]:
    """The components of files. owner: The component that they belong to. hashes: Their sha256 by
    name."""
    return [
        {
            "type": "file",
            "bom-ref": f"{owner}/{name}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": sha256}],
        }
        for name, sha256 in sorted(hashes.items())
    ]
