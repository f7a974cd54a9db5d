"""Decoder files as a source of models: which paths are decoders, what they take, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample.addons.bake import bake as bakery
from qsample.addons.bake import describe as descriptions
from qsample.addons.bake.describe import Description
from qsample.addons.bake.source import DECODER, DecoderSource, bake_installed
from qsample.checkpoints import checkpoint as checkpoints
from qsample.checkpoints.source import HubOptions
from qsample.contract.interface import Features
from qsample.errors import QsampleError
from qsample.exporters import huggingface_reference
from qsample.models.sources import SourceRequest

HUB = HubOptions(revision="v2", token="secret")


@pytest.mark.parametrize(
    ("names", "is_decoder"),
    [
        (["model.onnx"], True),
        (["onnx/model.onnx"], True),
        (["config.json", "model.onnx", "model.onnx.data"], True),
        (["model.onnx", "model.safetensors"], False),
        (["onnx/model.onnx", "pytorch_model.bin"], False),
        (["deep/model.onnx"], False),
        (["config.json"], False),
        ([], False),
    ],
)
def test_folders_with_decoders(names: list[str], is_decoder: bool, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert DECODER.holds_graph(tmp_path) is is_decoder
    found = DECODER.find(SourceRequest(name=str(tmp_path)))
    assert (found is not None) is is_decoder
    if not is_decoder:
        assert DECODER.describe(tmp_path) is None


def test_files_of_decoders(tmp_path: Path) -> None:
    for name in ("model.onnx", "model.gguf"):
        (tmp_path / name).touch()
    assert DECODER.holds_graph(tmp_path / "model.onnx")
    assert not DECODER.holds_graph(tmp_path / "model.gguf")
    assert not DECODER.holds_graph(tmp_path / "none.onnx")
    assert DECODER.precedence == 20  # after GGUF


def test_what_a_request_becomes(tmp_path: Path) -> None:
    request = SourceRequest(name="me/m", file="onnx/a.onnx", tokenizer="me/t", hub=HUB)
    assert DECODER.find(request) == DecoderSource(
        model_id="me/m", file="onnx/a.onnx", tokenizer="me/t", hub=HUB
    )
    assert DECODER.find(SourceRequest(name="me/m")) is None  # a checkpoint of the hub


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"adapter": "me/a"},
            "m is a decoder file, whose weights are as they are; leave adapter out",
        ),
        ({"dtype": "float16"}, "leave dtype out"),
        ({"adapter": "me/a", "dtype": "float16"}, "leave adapter out"),
        ({"images": True}, "is a file of the language model alone"),
    ],
)
def test_what_a_decoder_does_not_take(options: dict[str, Any], words: str) -> None:
    with pytest.raises(QsampleError, match=words):
        DECODER.find(SourceRequest(name="m", file="a.onnx", **options))


def test_what_a_source_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    source = DecoderSource(model_id="m", tokenizer=None)
    assert (source.kind, source.rope, source.reference) == ("decoder file", None, None)
    assert source.notice == "m holds a decoder file; it is used as `qsample bake` writes it"
    monkeypatch.setattr("qsample.models.sources.identity_of", lambda *given: ["identity"])
    assert source.identity() == {
        "model": ["identity"],
        "file": None,
        "tokenizer": None,
        "rope": None,
        "reference": None,
    }
    other = DecoderSource(model_id="m", rope="long", reference="me/r").identity()
    assert (other["rope"], other["reference"]) == ("long", "me/r")


def test_a_source_is_baked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        bakery, "bake", lambda *given, **more: calls.append((given, more)) or "made"
    )

    def progress(stage: str, fraction: float) -> None: ...

    features = Features(logprobs=True)
    plain = DecoderSource(model_id="m")
    made = plain.write_package(Path("out"), features, overwrite=True, progress=progress)
    assert made == "made"
    ((source, path, options), more) = calls[0]
    assert (source, path, more) == (plain, Path("out"), {"progress": progress})
    assert (options.features, options.rope, options.overwrite) == (features, None, True)
    assert options.compare is None
    compared = DecoderSource(model_id="m", rope="long", reference="me/r", hub=HUB)
    compared.write_package(Path("out"), features, overwrite=False, progress=None)
    options = calls[1][0][2]
    assert (options.rope, options.overwrite) == ("long", False)

    monkeypatch.setattr(checkpoints, "Checkpoint", lambda *given, **more: (given, more))
    monkeypatch.setattr(huggingface_reference, "compare_with_checkpoint", lambda *given: given)
    reference, *rest = options.compare(Path("folder"), "interface", 0.5)
    assert reference == (("me/r",), {"hub": HUB.for_another_repository()})
    assert rest == [Path("folder"), "interface", 0.5]


def described(**changes: Any) -> Description:
    plain: dict[str, Any] = {
        "file": "model.onnx",
        "made_by": "pytorch 2",
        "opset": 18,
        "inputs": ("input_ids",),
        "operators": {"Softmax": 2},
        "refusal": None,
    }
    return Description(**plain | changes)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, {"bake": "takes it; it runs the file to measure its attention, and compares"}),
        ({"refusal": "no cache"}, {"bake": "no cache"}),
        ({"states": 2}, {"states": "2 recurrent or convolutional"}),
        ({"states": 1}, {"states": "1 recurrent or convolutional"}),
        (
            {"dtype": "float16", "vocab_size": 9},
            {"numbers": "float16 caches, vocabulary 9"},
        ),
        ({"bits": (4, 8)}, {"weights": "packed in 4 and 8 bits"}),
        ({"layers": "2 attend"}, {"layers": "2 attend"}),
    ],
)
def test_the_facts_of_a_file(
    changes: dict[str, Any], facts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.onnx").touch()
    given = described(**changes)
    asked = []
    monkeypatch.setattr(descriptions, "describe", lambda path: asked.append(path) or [given])
    found = DECODER.describe(tmp_path)
    assert asked == [tmp_path]
    assert found is not None
    (document,) = found.document
    assert (document["file"], document["operators"]) == ("model.onnx", {"Softmax": 2})
    plain = {
        "made by": "pytorch 2, opset 18",
        "inputs": ("input_ids",),
        "operators": {"Softmax": 2},
        "layers": "",
        "bake": "takes it; it runs the file to measure its attention, and compares",
    }
    assert found.tables == {"model.onnx": plain | facts}


@pytest.mark.parametrize("name", ["onnx", "onnx_ir"])
def test_a_library_that_is_not_installed(name: str) -> None:
    with (
        pytest.raises(QsampleError, match=rf"decoder files need {name}: `.*bake"),
        bake_installed(),
    ):
        raise ModuleNotFoundError(name=name)


def test_other_errors_pass() -> None:
    for error in (ModuleNotFoundError(name="torch"), ValueError("x")):
        with pytest.raises(type(error)) as caught, bake_installed():
            raise error
        assert caught.value is error
    with bake_installed():
        pass
