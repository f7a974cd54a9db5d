"""The command that installs an extra, told by the metadata that installers leave (PEP 610)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qsample.errors import install_hint

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("direct_url", "target"),
    [
        (None, "qsample-onnx[webgpu]"),  # from an index
        ('{"url": "file:///tmp/x.whl", "archive_info": {}}', "qsample-onnx[webgpu]"),
        ('{"url": "file:///tmp/x", "dir_info": {}}', "qsample-onnx[webgpu]"),
        ('{"url": "file:///tmp/x", "dir_info": {"editable": true}}', f"{ROOT}[webgpu]"),
        ("absent", f"{ROOT}[webgpu]"),
    ],
)
def test_the_hint_to_install_an_extra(
    direct_url: str | None, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / (
        "qsample-0.0.2.dist-info" if direct_url == "absent" else "qsample_onnx-0.2.0.dist-info"
    )
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {folder.name.split('-')[0]}\nVersion: 0.2.0\n")
    if direct_url is not None:
        (folder / "direct_url.json").write_text(direct_url)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert (
        install_hint("webgpu") == f'pip install {"-e " if target.startswith("/") else ""}"{target}"'
    )
