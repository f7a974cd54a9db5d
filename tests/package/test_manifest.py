"""Manifests: written and read back the same, and refused if anything about them is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsample.contract.interface import Features
from qsample.package.manifest import FileEntry, GraphPart, TokenIds, model_package
from qsample.package.package import (
    MANIFEST_NAME,
    Compilation,
    Manifest,
    Package,
    PackageError,
    read_package,
)
from tests.helpers.small_packages import INTERFACE, manifest, write


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return write(tmp_path / "package")


def test_device_manifest_round_trip() -> None:
    compilation = Compilation(
        "cuda",
        ("CUDAExecutionProvider", "CPUExecutionProvider"),
        None,
        512,
        {"CUDAExecutionProvider": {"MatMul": 5}},
        {"tokens": 8, "agreeing": 8},
        {"enable_cuda_graph": "1"},
    )
    made = manifest(kind="device", compilation=compilation)
    with pytest.raises(PackageError, match=r"lists no decoder.onnx, initial_state.onnx"):
        Manifest.from_json(made.to_json())
    data = json.loads(made.to_json())
    data["files"] = {name: {"sha256": "00", "bytes": 5 << 30} for name in INTERFACE.graphs}
    # Of packages before gates had a single level, before the files' hashes, and before packages were reproducible.
    data["compilation"]["verify"], data["source"]["weight_hash"], data["timing"] = (
        "full",
        "ab" * 32,
        [],
    )
    assert replace(Manifest.from_json(json.dumps(data)), files={}) == made
    assert "parts" not in data["compilation"], "older versions read packages without parts"
    part = GraphPart("decoder-1-of-1.onnx", (0, 2), 5 << 30)
    parted = replace(made, compilation=replace(compilation, parts=(part,)), files=made.files)
    data["compilation"]["parts"] = json.loads(parted.to_json())["compilation"]["parts"]
    with pytest.raises(PackageError, match=r"lists no decoder-1-of-1.onnx"):
        Manifest.from_json(json.dumps(data))
    data["files"][part.file] = {"sha256": "00", "bytes": 1}
    assert replace(Manifest.from_json(json.dumps(data)), files={}) == parted
    data["compilation"]["execution_providers"] = []
    with pytest.raises(
        PackageError,
        match=r"execution_providers in qsample.json is empty; compile the package again",
    ):
        Manifest.from_json(json.dumps(data))


def test_a_graph_with_a_seed_input_is_refused() -> None:
    data = json.loads(manifest().to_json())
    data["files"] = {name: {"sha256": "00", "bytes": 1} for name in INTERFACE.graphs}
    data["interface"]["features"]["seed"] = False
    Manifest.from_json(json.dumps(data))
    data["interface"]["features"]["seed"] = True
    with pytest.raises(PackageError, match=r"an input for seeds .* export the package again"):
        Manifest.from_json(json.dumps(data))


def test_filters_round_trip() -> None:
    features = Features(filters=("mirostat", "xtc"), filter_order="llama.cpp")
    made = manifest(interface=replace(INTERFACE, features=features))
    data = json.loads(made.to_json())
    data["files"] = {name: {"sha256": "00", "bytes": 1} for name in INTERFACE.graphs}
    assert replace(Manifest.from_json(json.dumps(data)), files={}) == made
    data["interface"]["features"]["filters"].append("of a later version")
    with pytest.raises(
        PackageError, match=r"interface\.features in qsample\.json: filters is .*later version"
    ):
        Manifest.from_json(json.dumps(data))


def test_a_device_package_needs_its_compilation() -> None:
    with pytest.raises(ValueError, match="kind is 'device'"):
        manifest(kind="device")


ENTRY = {"sha256": "", "bytes": 0}
GONE = object()


def put(place: str, value: Any) -> Callable[[str], str]:
    """Another value at a place of the manifest; GONE = none."""
    *parents, name = place.split(" ")

    def changed(text: str) -> str:
        data = inner = json.loads(text)
        for parent in parents:
            inner = inner[int(parent) if parent.isdigit() else parent]
        if value is GONE:
            del inner[name]
        else:
            inner[name] = value
        return json.dumps(data)

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text[: len(text) // 2],
            r"qsample.json is not JSON.*export the package again",
        ),
        (lambda text: "[]", "no format_version"),
        (lambda text: "{}", "no format_version"),
        (
            lambda text: put("new_key", 1)(put("format_version", 2)(text)),
            r"has format 2 and .* format 1; upgrade",
        ),
        (put("format_version", 0), "has format 0 .*; export it again"),
        (
            put("contract_version", "10.0"),
            "contract 10.0 and .* runs 2.0, 2.1, 2.2, 2.3, 2.4, 2.5; upgrade qsample",
        ),
        (put("surprise", 1), "manifest in qsample.json .*: unknown surprise"),
        (put("source", GONE), "missing source"),
        (put("source model_type", GONE), r"manifest.source .*: missing model_type"),
        (put("interface features telepathy", True), "unknown telepathy"),
        (put("interface vocab_size", "100"), "interface.vocab_size .* is '100'; it must be int"),
        (put("interface vocab_size", True), "interface.vocab_size .* is True; it must be int"),
        (put("interface vocab_size", 0), "vocab_size .* is 0; it must be 1 or more"),
        (put("interface dtype", "int4"), "dtype is 'int4'"),
        (put("interface key_values 1 head_dim", None), r"key_values\[1\].head_dim .* None"),
        (
            put("interface features max_loras", 2),
            "max_loras in qsample.json is 2, and 0 layers take adapters",
        ),
        (put("kind", "magic"), "manifest.kind .* is 'magic'; it must be 'portable' or 'device'"),
        (put("kind", "device"), "a device package has a compilation"),
        (put("files", []), r"manifest.files .* is \[\]"),
        (put("files decoder.onnx", GONE), r"lists no decoder.onnx"),
        (put("files ../x", ENTRY), r"'../x', which lies outside"),
        (put("files /etc/x", ENTRY), "lies outside"),
    ],
)
def test_wrong_manifest(change: Callable[[str], str], message: str, package: Package) -> None:
    path = package.path / MANIFEST_NAME
    path.write_text(change(path.read_text()))
    with pytest.raises(PackageError, match=message) as caught:
        read_package(package.path)
    assert str(package.path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", ["2.0", "2.4"])
def test_a_graph_for_replay_of_an_older_contract_is_compiled_again(
    package: Package, version: str
) -> None:
    """It lacks inputs, and the host writes other states. Other graphs of that contract run as before."""
    path = package.path / MANIFEST_NAME
    changed = {**json.loads(path.read_text()), "contract_version": version}
    path.write_text(json.dumps(changed))
    assert read_package(package.path).manifest.contract_version == version
    changed["interface"]["captured"] = True
    path.write_text(json.dumps(changed))
    wanted = (
        rf"follows decode contract {version} and .* replays graphs of 2\.5; make the package again"
    )
    with pytest.raises(PackageError, match=wanted):
        read_package(package.path)


@pytest.mark.parametrize(
    ("changes", "commands"),
    [
        ({}, "qsample bake some/model OUT"),
        ({"versions": {"transformers": "5"}}, "qsample export some/model OUT"),
        (
            {"versions": {"transformers": "5"}, "source": {"model_id": "a b; c"}},
            "qsample export 'a b; c' OUT",
        ),
        (
            {
                "versions": {"transformers": "5"},
                "kind": "device",
                "compilation": {"provider": "cuda", "ctx_len": 512},
            },
            "qsample export some/model PORTABLE && qsample compile PORTABLE OUT --provider cuda --ctx-len 512",
        ),
        (
            {"versions": None, "source": [], "kind": "device"},
            "qsample bake MODEL PORTABLE && qsample compile PORTABLE OUT --provider cpu --ctx-len 4096",
        ),
    ],
)
def test_a_package_of_an_older_contract_says_what_makes_it_again(
    changes: dict[str, Any], commands: str, package: Package
) -> None:
    path = package.path / MANIFEST_NAME
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "contract_version": "1.0", **changes})
    )
    with pytest.raises(PackageError) as caught:
        read_package(package.path)
    start = (
        "the package's graphs follow decode contract 1.0 and this qsample runs 2.0, 2.1, 2.2, 2.3, 2.4, 2.5; make the "
        "package again: "
    )
    assert str(caught.value).startswith(f"{package.path}: {start}{commands}")


@pytest.mark.parametrize(
    ("token", "eos"),
    [(None, (2, 0)), (2, (2, 0)), (0, (2, 0)), (5, (2, 0, 5)), (9, (2, 0, 9)), (10, (2, 0))],
)
def test_the_tokenizers_ending_is_a_stop_token_more(
    token: int | None, eos: tuple[int, ...]
) -> None:
    ids = TokenIds(4, 1, (2, 0))
    assert ids.ending_at(token, 10) == TokenIds(4, 1, eos)


LISTED = {name: FileEntry("00", 1) for name in INTERFACE.graphs}


def device(**changes: Any) -> Manifest:
    compilation = Compilation("cuda", ("CUDAExecutionProvider",), 2, 512, {}, {})
    compiled = replace(compilation, **changes)
    return manifest(kind="device", compilation=compiled, files=LISTED)


PART = {"file": "decoder.onnx", "layers": [0, 2]}


@pytest.mark.parametrize(
    ("place", "good", "bad"),
    [
        ("files decoder.onnx bytes", (0, 2**63 - 1), (-1, 2**63)),
        ("max_position_embeddings", (None, 1, 2**31 - 1), (0, 2**31)),
        ("compilation batch_size", (None, 1), (0,)),
        ("compilation ctx_len", (1,), (0, None)),
        ("compilation parts", ([PART | {"weight_bytes": 2**63 - 1}],), ([PART | {"weight_bytes": -1}],)),
        # Of values that may be anything, the integers fit into 64 bits.
        ("parity rows", (-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63)),
        ("parity rows", ([2**63 - 1],), ([0, 2**63],)),
    ],
)  # fmt: skip
def test_figures_at_their_limits_and_beyond(
    place: str, good: tuple[Any, ...], bad: tuple[Any, ...]
) -> None:
    text = device().to_json()
    for value in good:
        Manifest.from_json(put(place, value)(text))
    for value in bad:
        with pytest.raises(PackageError, match=place.split(" ")[-1]):
            Manifest.from_json(put(place, value)(text))


@pytest.mark.parametrize("character", ["\x00", "\x1f", "\x7f", "\x9f", chr(0xD800), chr(0xDFFF)])
def test_characters_that_a_terminal_or_a_file_does_not_take(character: str) -> None:
    text = manifest(files=LISTED).to_json()
    for place in ("source model_id", "images token"):
        data = json.loads(put("images", {"token": ""})(text))
        changed = put(place, f"a{character}b")(json.dumps(data))
        where = f"manifest.{place.replace(' ', '.')}"
        with pytest.raises(PackageError, match=rf"^{where} in qsample\.json is 'a.* control"):
            Manifest.from_json(changed)
    with pytest.raises(PackageError, match=r"a key of manifest\.versions .* control characters"):
        Manifest.from_json(put("versions", {f"a{character}b": "1"})(text))
    with pytest.raises(PackageError, match=r"manifest\.token_ids\.eos\[1\] .* control"):
        Manifest.from_json(put("token_ids eos", [1, character])(text))


def test_names_that_are_one_file_on_some_systems_are_refused() -> None:
    for other in ("DECODER.onnx", "QSAMPLE.json"):
        made = manifest(files={**LISTED, other: FileEntry("00", 1)})
        with pytest.raises(PackageError, match=f"lists .*{other}.*which are one file on some"):
            Manifest.from_json(made.to_json())


def test_the_variants_of_a_model_package() -> None:
    """Without a compilation, every graph runs on the processor, and only the decode graph runs on
    another device."""
    compiled = device(execution_providers=("CUDAExecutionProvider", "CPUExecutionProvider"))

    def variant(folder: str, provider: str, file: str) -> dict[str, Any]:
        info = {"ort": {"model_file": file}, "qsample": {"package": "qsample.json"}}
        return {"variant_directory": folder, "ep": provider, "executor_info": info}

    cpu, cuda = "CPUExecutionProvider", "CUDAExecutionProvider"
    decoder, zeros = "decoder.onnx", "initial_state.onnx"
    assert model_package({"a": manifest(), "b": compiled}) == {
        "schema_version": "1.0",
        "components": {
            "decoder": {
                "variants": {"portable": variant("a", cpu, decoder), "cuda": variant("b", cuda, decoder)}
            },
            "initial_state": {
                "variants": {"portable": variant("a", cpu, zeros), "cuda": variant("b", cpu, zeros)}
            },
        },
    }  # fmt: skip
