"""`qsample inspect`, `qsample pull` and `qsample cache`, and commands that are given a
checkpoint."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.compiler.options import CompileOptions
from qsample.models.model import SourceModel
from qsample.package.package import Package, read_package
from tests.helpers.command_line import qsample
from tests.helpers.fake_package import compilation, fake_package
from tests.helpers.flags import unlike


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


@pytest.mark.ci
def test_inspect_shows_the_processing_of_images(
    run: Any, smolvlm_package: Path, tmp_path: Path
) -> None:
    """Of SmolVLM's processor: 48 pixels at most in tiles of 24, and the whole: five tiles of nine
    tokens."""
    import onnx

    _, out, _ = run("inspect", smolvlm_package)
    shown = " ".join(out.split())
    assert (
        "images split, <image>; tokens: 45 for 640 x 480 pixels, 45 for 1920 x 1080 pixels; vision: "
        in shown
    )
    nodes = onnx.load(smolvlm_package / "vision.onnx", load_external_data=False).graph.node
    assert f"MatMul {sum(node.op_type == 'MatMul' for node in nodes)}, " in shown
    broken = shutil.copytree(smolvlm_package, tmp_path / "broken")
    manifest = json.loads((broken / "qsample.json").read_text())
    manifest["images"]["family"] = "none"
    (broken / "qsample.json").write_text(json.dumps(manifest))
    status, out, _ = run("inspect", broken, "--no-verify")
    assert (status, "export the package again" in " ".join(out.split())) == (0, True)


def test_inspect_shows_filters(run: Any, tmp_path: Path) -> None:
    package = fake_package(
        tmp_path / "package", filters=("mirostat", "dry"), filter_order="llama.cpp"
    )
    _, out, _ = run("inspect", package.path)
    assert "sampler, filters dry mirostat, filter_order llama.cpp" in out
    for name in ("dry_sequence_breakers", "mirostat_mu"):
        assert re.search(rf"^ *{name} +\w+ \[B", out, re.MULTILINE), name


def test_inspect_json_holds_manifest_and_graphs(run: Any, llama_package: Path) -> None:
    status, out, _ = run("inspect", llama_package, "--json")
    assert status == 0
    shown, package = json.loads(out), read_package(llama_package)
    manifest = json.loads((llama_package / "qsample.json").read_text())
    assert {key: shown[key] for key in manifest} == manifest
    for name, graph in package.interface.graphs.items():
        assert [entry["name"] for entry in shown["graphs"][name]["inputs"]] == [
            spec.name for spec in graph.inputs
        ]
        assert {
            entry["name"]: entry["next"]
            for entry in shown["graphs"][name]["states"]
            if entry["next"]
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


def test_a_bundle(run: Any, fake: Callable[..., Package], tmp_path: Path) -> None:
    package = fake()
    assert run("bundle", tmp_path / "both", package.path)[0] == 0
    status, out, err = run("inspect", tmp_path / "both")
    assert status == 0, err
    assert re.search(r"portable +portable +fake +\d", out)
    assert "inspect" in err
    described = json.loads(run("inspect", tmp_path / "both", "--json")[1])
    assert described["path"] == str(tmp_path / "both")
    alone = json.loads(run("inspect", package.path, "--json")[1])
    assert described["variants"]["portable"] | {"path": ""} == alone | {"path": ""}


@pytest.fixture
def made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: Callable[..., Package]
) -> list[dict[str, Any]]:
    """The options of each package that was made, which is a fake package in place of a compiled
    one."""
    monkeypatch.setenv("QSAMPLE_CACHE", str(tmp_path / "cache"))
    calls: list[dict[str, Any]] = []

    def make(self: SourceModel, path: Path, *, provider: str, options: Any, progress: Any) -> None:
        calls.append({"provider": provider, "weights": options.weights, "preset": options.preset})
        progress("publishing", 0.9)
        shutil.copytree(fake().path, path)

    monkeypatch.setattr(SourceModel, "_make", make)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    return calls


def test_a_checkpoint_is_made_once_for_each_of_its_options(
    run: Any, made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("generate", tmp_path / "model", "-p", "ab", "--greedy", "--max-new-tokens", "3")
    status, first, err = run(*arguments)
    assert status == 0, err
    assert "model is in the cache now (" in err
    assert "later runs start at once; --weights int4 takes about a seventh" in err
    again = run(*arguments)
    assert again[:2] == (0, first)
    assert "cache" not in again[2]
    status, path, err = run("pull", tmp_path / "model", "--weights", "int8")
    assert (status, Path(path.rstrip()).parent) == (0, tmp_path / "cache")
    assert "--weights int4" not in err
    assert run(*arguments, "--weights", "int8")[:2] == (0, first)
    monkeypatch.setattr(
        CompileOptions, "_check_quantization", lambda options: None
    )  # it would be given a text
    assert run("pull", tmp_path / "model", "--weights", "int8", "--preset", "speed")[1] != path
    assert made == [
        {"provider": "cpu", "weights": None, "preset": "quick"},
        {"provider": "cpu", "weights": "int8", "preset": "quick"},
        {"provider": "cpu", "weights": "int8", "preset": "speed"},
    ]
    (tmp_path / "model" / "config.json").write_text('{"changed": 1}')
    run(*arguments)
    assert len(made) == 4


def test_a_package_for_serving_is_a_separate_package(
    run: Any, made: list[Any], tmp_path: Path
) -> None:
    plain, serving = (run("pull", tmp_path / "model", *more)[1] for more in ([], ["--for-serving"]))
    assert plain != serving
    assert len(made) == 2
    assert run("pull", tmp_path / "model", "--for-serving")[1] == serving
    assert len(made) == 2


def test_list_and_clear(
    run: Any, made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = run("cache", "list")
    assert empty[0] == 0
    assert empty[1].startswith("no model, 0 B of at most 50.0 GB, in ")
    for weights in ("int4", "int8"):
        run("pull", tmp_path / "model", "--weights", weights)
    listed = json.loads(run("cache", "list", "--json")[1])
    assert listed["folder"] == str(tmp_path / "cache")
    assert [len(listed["entries"]), listed["bytes"]] == [2, 2 * listed["entries"][0]["bytes"]]
    name = listed["entries"][0]["model"]
    assert name == str(tmp_path / "model"), "with its path, which is not in the package"
    assert f" {name} " in run("cache", "list")[1]
    status, _, err = run("cache", "clear", "elsewhere/model")
    assert (status, err.split(";")[0]) == (2, "qsample: elsewhere/model is not in the cache")
    assert run("cache", "clear", name)[2] == "2 removed\n"
    run("pull", tmp_path / "model")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    status, _, err = run("cache", "clear")
    assert (status, err[:23]) == (2, "qsample: this removes 1")
    assert "give --yes, or name the models" in err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "Remove 1 model, " in run("cache", "clear")[2]
    assert len(json.loads(run("cache", "list", "--json")[1])["entries"]) == 1
    assert run("cache", "clear", "--yes")[2] == "1 removed\n"
    assert run("cache", "clear")[2] == "0 removed\n"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".locks"]


@pytest.mark.parametrize(
    ("packed", "shown"),
    [
        (None, "float32"),
        ({"bits": [4, 8]}, "4 and 8 bits"),
        ({"bits": [4, 8], "experts": 16}, "4 and 8 bits"),
        ({"bits": [4, 8], "type": "Q4_1"}, "Q4_1"),
    ],
)
def test_list_names_the_type_of_weights(
    packed: dict[str, Any] | None,
    shown: str,
    run: Any,
    made: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake: Callable[..., Package],
) -> None:
    figures = packed and {"matrices": 3, "block_sizes": [32], "bytes": 9, **packed}
    for weights, expected in ((None, shown), ("int8", "int8")):
        quantization = {"packed_matrices": 3} if weights is None else {"dtype": weights}
        package = fake(
            manifest={"packed_weights": figures},
            compilation=replace(compilation(), quantization=quantization),
        )
        monkeypatch.setattr(
            SourceModel, "_make", lambda *_, made=package, **__: shutil.copytree(made.path, _[1])
        )
        run("pull", tmp_path / "model", *([] if weights is None else ["--weights", weights]))
        (entry, *_) = json.loads(run("cache", "list", "--json")[1])["entries"]
        assert entry["options"][:3] == ["cpu", expected, f"{compilation().ctx_len} tokens"]
        run("cache", "clear", "--yes")
    experts = " and 16 experts" if packed is not None and "experts" in packed else ""
    kind = "Q4_1, " if shown == "Q4_1" else ""
    packed_line = f"3 matrices{experts} of the checkpoint, {kind}4 and 8 bits, blocks of 32"
    assert (packed_line in " ".join(run("inspect", package.path)[1].split())) == (
        packed is not None
    )


def test_inspect_shows_a_gguf_file(run: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "blob", "gemma3n")
    writer.add_name("Some [model]")
    writer.add_tensor("token_embd.weight", np.zeros((3, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    status, out, _ = run("inspect", tmp_path / "blob")
    assert status == 0
    for row in (
        "architecture +gemma3n",
        r"name +Some \[model\]",
        "weights +F32 12",
        "refusal +.*architecture 'gemma3n'",
    ):
        assert re.search(row, " ".join(out.split())), (
            row
        )  # whose lines are as long as the path lets them be
    assert json.loads(run("inspect", tmp_path / "blob", "--json")[1])["weights"] == {"F32": 12}
    status, _, err = run("generate", tmp_path / "blob", "-p", "x")
    assert (status, "torch" in err, "llama, qwen2, qwen3" in err) == (1, False, True)


@pytest.mark.slow
def test_a_gguf_file_is_given_directly(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.helpers.gguf_files import tiny_lm_gguf

    path = tiny_lm_gguf(tmp_path / "sha256-0123", "Q4_0").rename(tmp_path / "blob")
    variables = {"QSAMPLE_CACHE": str(tmp_path / "cache")}
    command = [
        "generate",
        path,
        "-p",
        "And the LORD spake unto",
        "--temperature",
        "0",
        "--max-new-tokens",
        "12",
    ]
    first = qsample(*command, **variables)
    assert first.stdout.startswith("And the LORD spake unto Moses, saying,"), first.stderr
    assert "Loading weights" not in first.stderr, "no notices of the libraries"
    assert f"{path} is in the cache now (" in first.stderr
    again = qsample(*command, **variables)
    assert (again.stdout, "cache" in again.stderr) == (first.stdout, False)
    path.rename(tmp_path / "other")
    assert (
        qsample(*command[:1], tmp_path / "other", *command[2:], **variables).stdout == first.stdout
    )
    verified = qsample(
        "verify",
        tmp_path / "other",
        "--against",
        tmp_path / "other",
        "--max-mean",
        "0.05",
        **variables,
    )
    assert verified.returncode == 0, verified.stderr


FLAGS = {
    "inspect": "package PACKAGE required; --verify/--no-verify = True; --bits; --json",
    "pull": "model MODEL required; --ctx-len >=2; --provider; --text-only; --for-serving",
    "cache list": "--json",
    "cache clear": "model [MODEL]...; --yes/-y",
}


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags(command: str) -> None:
    assert unlike(FLAGS[command], *command.split()) == []
