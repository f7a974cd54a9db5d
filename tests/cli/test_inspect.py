"""`qsample inspect`: every tensor and file, as a table and as JSON."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from qsample.package.package import read_package
from tests.helpers.fake_package import fake_package


def test_inspect_shows_every_tensor_of_the_contract(run: Any, llama_package: Path) -> None:
    status, out, err = run("inspect", llama_package)
    assert (status, err) == (0, "")
    package = read_package(llama_package)
    decoder = package.interface.decoder
    for spec in (*decoder.inputs, *decoder.states[:7], *decoder.outputs):
        assert re.search(rf"^ *{re.escape(spec.name)} +{spec.dtype}", out, re.MULTILINE), spec.name
    for name in package.manifest.files:
        assert name in out
    assert "u[t]" in out, "brackets in a meaning are text, not markup"
    assert "max_error" in out


def test_inspect_shows_filters(run: Any, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", filters=("mirostat", "dry"), filter_order="llama.cpp", seed=True)
    _, out, _ = run("inspect", package.path)
    assert "sampler, filters dry mirostat, filter_order llama.cpp, seed" in out
    for name in ("dry_sequence_breakers", "mirostat_mu", "seed"):
        assert re.search(rf"^ *{name} +\w+ \[B", out, re.MULTILINE), name
    assert not re.search(r"^ *noise ", out, re.MULTILINE)


def test_inspect_json_holds_manifest_and_graphs(run: Any, llama_package: Path) -> None:
    status, out, _ = run("inspect", llama_package, "--json")
    assert status == 0
    shown, package = json.loads(out), read_package(llama_package)
    manifest = json.loads((llama_package / "qsample.json").read_text())
    assert {key: shown[key] for key in manifest} == manifest
    for name, graph in package.interface.graphs.items():
        assert [entry["name"] for entry in shown["graphs"][name]["inputs"]] == [spec.name for spec in graph.inputs]
        assert {
            entry["name"]: entry["next"] for entry in shown["graphs"][name]["states"] if entry["next"]
        } == graph.retained
    assert shown["axes"]["V"] == package.interface.vocab_size


def test_inspect_names_a_damaged_file(run: Any, exported: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(exported("llama"), tmp_path / "damaged")
    data = bytearray((folder / "decoder.onnx.data").read_bytes())
    data[100] ^= 1
    (folder / "decoder.onnx.data").write_bytes(data)
    status, _, err = run("inspect", folder)
    assert status == 1
    assert "decoder.onnx.data was altered" in err
    assert run("inspect", folder, "--no-verify")[0] == 0
