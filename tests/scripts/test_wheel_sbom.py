"""The wheel's SBOM lists what pyproject.toml requires, twice alike, and fits CycloneDX's schema."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts import wheel_sbom
from tests.helpers.cyclonedx import check_bom

ROOT = Path(__file__).resolve().parents[2]
MARKDOWN_FILES = ("LICENSE", "markdown.js", "markdown-it.esm.min.mjs")


@pytest.mark.ci
def test_the_bom_of_a_wheel(tmp_path: Path) -> None:
    texts = []
    for number in range(2):
        command = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            "wheel",
            "-d",
            str(tmp_path / str(number)),
        ]
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(number),
            "SOURCE_DATE_EPOCH": "1700000000",
        }
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        (wheel,) = (tmp_path / str(number)).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (one for one in archive.namelist() if "/sboms/" in one)
            texts.append(archive.read(name).decode())
            assert {f"qsample/addons/serve/markdown/{file}" for file in MARKDOWN_FILES} <= {
                *archive.namelist()
            }
            assert any(
                one.endswith("licenses/qsample/addons/serve/markdown/LICENSE")
                for one in archive.namelist()
            )
    assert name.split("/")[0].endswith(".dist-info")
    assert texts[0] == texts[1]
    document = json.loads(texts[0])
    check_bom(document)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    wanted = {re.split(r"[\[<>=;~ ]", line)[0].lower().replace("_", "-") for line in lines} - {
        project["name"]
    }
    listed = {
        one["name"]: one for one in document["components"] if one["purl"].startswith("pkg:pypi/")
    }
    assert listed.keys() == wanted
    assert (listed["numpy"]["scope"], listed["torch"]["scope"]) == ("required", "optional")
    assert document["metadata"]["component"]["name"] == project["name"]
    (library,) = (one for one in document["components"] if one["name"] == "markdown-it")
    assert re.fullmatch(r"pkg:npm/markdown-it@\d+\.\d+\.\d+", library["purl"])


def test_the_npm_packages_of_the_page() -> None:
    lock: Any = json.loads((ROOT / "examples" / "web" / "package-lock.json").read_text("utf-8"))
    found = {one["name"]: one for one in wheel_sbom.bundled(lock)}
    assert found["@huggingface/jinja"]["purl"].startswith("pkg:npm/%40huggingface/jinja@0.")
    assert "onnxruntime-web" in found
    assert "vite" not in found, "it builds the page, and is not in it"
    own = wheel_sbom.library("pkg:pypi/x@1", name="x", version="1")
    check_bom(wheel_sbom.bom(own, [*found.values()]))
