"""The wheel's software bill of materials, in `.dist-info/sboms/` (PEP 770): a CycloneDX 1.6 document. hatchling calls
it during a build (`[tool.hatch.build.targets.wheel.hooks.custom]`).

It has the requirements with the ranges of pyproject.toml, the Markdown library of the pages, and, if the page of
`qsample web` is built, the npm packages in that page. Two builds give the same document: its serial number follows
from the content, and only SOURCE_DATE_EPOCH gives it a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
MARKDOWN_IT = Path("qsample", "addons", "serve", "markdown", "markdown-it.esm.min.mjs")


def bom(component: dict[str, Any], libraries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The document of `component`, which needs or has in it all `libraries`."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    timestamp = {"timestamp": datetime.fromtimestamp(int(epoch), UTC).isoformat()} if epoch else {}
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {**timestamp, "component": component},
        "components": sorted(libraries, key=lambda one: str(one["bom-ref"])),
        "dependencies": [
            {"ref": component["bom-ref"], "dependsOn": sorted(one["bom-ref"] for one in libraries)}
        ],
    }
    content = json.dumps(document, sort_keys=True)
    return {**document, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}"}


def library(purl: str, **facts: Any) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "purl": purl, **facts}


def required(name: str, requirements: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """The distributions that the project `name` requires. requirements: extra ("" for none) → its requirements."""
    found: dict[str, dict[str, Any]] = {}
    for extra, lines in requirements.items():
        for line in lines:
            match = NAME.match(line)
            assert match is not None, line
            normal = re.sub(r"[-_.]+", "-", match[0]).lower()
            if normal == name:  # an extra that brings another extra
                continue
            one = found.setdefault(
                normal, library(f"pkg:pypi/{normal}", name=normal, scope="optional", properties=[])
            )
            one["properties"].append(
                {"name": f"qsample:requirement:{extra or 'always'}", "value": line}
            )
            one["scope"] = one["scope"] if extra else "required"
    return list(found.values())


def bundled(lock: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The npm packages of a package-lock.json that are in the built page."""
    found = {
        path.rpartition("node_modules/")[2]: entry
        for path, entry in lock["packages"].items()
        if path
    }
    return [
        library(
            f"pkg:npm/{name.replace('@', '%40')}@{entry['version']}",
            name=name,
            version=entry["version"],
            **({"licenses": [{"expression": entry["license"]}]} if "license" in entry else {}),
        )
        for name, entry in found.items()
        if not entry.get("dev") and not name.startswith("@types/")
    ]


def markdown_it(root: Path) -> dict[str, Any]:
    """The Markdown library in the folder `root` of the sources; its first line has its version."""
    first_line = (root / MARKDOWN_IT).read_text("utf-8").splitlines()[0]
    match = re.search(r"markdown-it (\S+)", first_line)
    assert match is not None, first_line
    version, licenses = match[1], [{"expression": "MIT AND BSD-2-Clause"}]
    return library(
        f"pkg:npm/markdown-it@{version}", name="markdown-it", version=version, licenses=licenses
    )


class WheelBom(BuildHookInterface):
    """Adds the document to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root, core = Path(self.root), self.metadata.core
        libraries = required(core.name, {"": core.dependencies, **core.optional_dependencies})
        libraries.append(markdown_it(root))
        if (root / "qsample" / "assets" / "web").is_dir():
            lock = root / "examples" / "web" / "package-lock.json"
            libraries += bundled(json.loads(lock.read_text("utf-8")))
        own = library(
            f"pkg:pypi/{core.name}@{self.metadata.version}",
            name=core.name,
            version=self.metadata.version,
            licenses=[{"expression": core.license_expression}],
        )
        self._folder = Path(tempfile.mkdtemp())
        path = self._folder / f"{core.name}.cdx.json"
        path.write_text(json.dumps(bom(own, libraries), indent=2) + "\n", encoding="utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._folder)
