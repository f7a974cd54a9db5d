"""A package as an ML-BOM: a CycloneDX 1.6 document (https://cyclonedx.org/docs/1.6/json/) of files, origin, versions.

The same package gives the same document: its serial number follows from the content, and it has a time only if
SOURCE_DATE_EPOCH states one.
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
from qsample.package.package import Package


def ml_bom(package: Package) -> dict[str, Any]:
    """The document, JSON-ready."""
    manifest = package.manifest
    source = package.manifest.source
    compilation = package.manifest.compilation
    base = source.model_id.partition(" + ")[0]
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    stated: dict[str, Any] = (
        {"licenses": [{"license": {"name": source.license}}]} if source.license else {}
    )
    checkpoint = {
        "type": "machine-learning-model",
        "bom-ref": "checkpoint",
        "name": base,
        **stated,
        "components": _files("checkpoint", source.files),
    }
    if source.revision:
        stated["version"] = checkpoint["version"] = source.revision
        checkpoint["purl"] = f"pkg:huggingface/{base}@{source.revision}"
    made = {"version": manifest.versions}
    figures: dict[str, Any] = dict(manifest.parity or {})
    if compilation is not None:
        made |= {"compile:version": compilation.versions, "compile:option": compilation.options}
        figures |= (compilation.quantization or {}).get("divergence", {})
    properties = {
        f"{kind}:{name}": value for kind, values in made.items() for name, value in values.items()
    }
    model = {
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
                "inputs": [
                    {"format": "token ids"},
                    *([{"format": "images"}] if manifest.images is not None else []),
                ],
                "outputs": [{"format": "token ids"}],
            },
            "quantitativeAnalysis": {
                "performanceMetrics": [
                    {"type": name, "value": str(value)} for name, value in sorted(figures.items())
                ]
            },
        },
        "properties": [
            {"name": f"qsample:{key}", "value": str(value)}
            for key, value in sorted(properties.items())
        ],
    }
    version = properties.get("compile:version:onnxruntime") or properties.get(
        "version:onnxruntime", ""
    )
    runtime = {
        "type": "library",
        "bom-ref": "onnxruntime",
        "name": "onnxruntime",
        "version": version,
    }
    files = _files("package", {name: entry.sha256 for name, entry in manifest.files.items()})
    tool = {"type": "application", "name": DISTRIBUTION, "version": qsample.__version__}
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"tools": {"components": [tool]}, "component": model},
        "components": [
            *files,
            {**runtime, "purl": f"pkg:pypi/onnxruntime@{version}"} if version else runtime,
        ],
        "dependencies": [
            {"ref": "package", "dependsOn": [*(file["bom-ref"] for file in files), "onnxruntime"]}
        ],
    }
    if epoch.isdecimal():
        document["metadata"]["timestamp"] = datetime.fromtimestamp(int(epoch), UTC).isoformat()  # type: ignore[index]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return {**document, "serialNumber": f"urn:uuid:{serial}"}


def _files(owner: str, hashes: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "bom-ref": f"{owner}/{name}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": sha256}],
        }
        for name, sha256 in sorted(hashes.items())
    ]
