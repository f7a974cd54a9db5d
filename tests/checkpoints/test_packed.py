"""Safetensors files of packed layers, with a format of two tensors, and configurations that state a method."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qsample.checkpoints import packed
from qsample.checkpoints.packed import packing_of, read_packed
from qsample.checkpoints.stored_matrices import FloatMatrix, StoredMatrix
from qsample.errors import QsampleError, UnsupportedModelError
from qsample.extensions import CHECKPOINTS


@dataclass
class Doubled:
    """Levels and scales of a layer; the matrix remembers what it was made of."""

    mark: str = "levels"
    parts: tuple[str, ...] = ("levels", "scales")
    unread: tuple[str, ...] = ("order",)
    floats: bool = False

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> Any:
        levels, scales = parts[self.mark], parts["scales"]
        if levels.shape[0] != scales.shape[0]:
            raise ValueError("its scales do not fit")
        shape = levels.shape[0], levels.shape[1]
        if self.floats and layer == "a.one":
            return FloatMatrix(layer, shape, lambda: levels * scales)
        return StoredMatrix(layer, shape, lambda rows: (levels[rows], scales[rows]))  # type: ignore[arg-type,return-value]


ONE = torch.arange(6, dtype=torch.int8).reshape(2, 3)
TWO = torch.arange(8, dtype=torch.int8).reshape(4, 2)


def tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    """Of two layers and others. changes: by name with _ for dots; None leaves a tensor out."""
    everything = {
        "a.one.levels": ONE,
        "a.one.scales": torch.ones(2, 1),
        "a.one.bias": torch.zeros(2),
        "a.one.order": torch.arange(3),
        "a.two.levels": TWO,
        "a.two.scales": torch.full((4, 1), 2.0),
        "a.two.bias": torch.tensor([0.0, 0.0, 0.0, 3.0]),
        "norm.weight": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "norm.bias": torch.ones(2),
    }
    everything |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: tensor for name, tensor in everything.items() if tensor is not None}


def files(folder: Path, given: dict[str, Tensor]) -> list[Path]:
    """In two files, so that a layer's parts lie in both."""
    names = sorted(given)
    paths = [folder / "1.safetensors", folder / "2.safetensors"]
    for path, half in zip(paths, (names[::2], names[1::2]), strict=True):
        save_file({name: given[name] for name in half}, path)
    return paths


def test_layers_and_the_other_tensors(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no float weights, no warning
        found = read_packed(files(tmp_path, tensors()), Doubled())
    assert [(matrix.layer, matrix.shape) for matrix in found.matrices] == [
        ("a.one", (2, 3)),
        ("a.two", (4, 2)),
    ]
    assert all(isinstance(matrix, StoredMatrix) for matrix in found.matrices)
    levels, scales = found.matrices[1].read(slice(1, 3))  # type: ignore[call-arg,misc]
    assert levels.tolist() == [[2, 3], [4, 5]]
    assert scales.tolist() == [[2.0], [2.0]]
    # Neither packed parts nor what is not read; floats become float32.
    assert sorted(found.others) == ["a.one.bias", "a.two.bias", "norm.bias", "norm.weight"]
    assert found.others["norm.weight"].dtype == torch.float32
    assert found.others["norm.weight"].tolist() == [1.5, 2.5]
    # Zeros add nothing, and a norm is no quantized layer.
    assert found.biases == {"a.two.bias"}


def test_layers_without_biases(tmp_path: Path) -> None:
    given = tensors(a__one__bias=None, a__two__bias=None)
    assert read_packed(files(tmp_path, given), Doubled()).biases == frozenset()


def test_bytes_are_those_of_stored_integers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="1 of 2 quantized matrices hold floats"):
        found = read_packed(files(tmp_path, tensors()), Doubled(floats=True))
    sizes = {"a.two": 100}
    monkeypatch.setattr(
        StoredMatrix,
        "bytes_in_blocks",
        lambda matrix, dtype: sizes[matrix.layer] * dtype.itemsize,
    )
    assert found.bytes_in_blocks(torch.float16) == 200
    found.matrices.append(found.matrices[1])
    assert found.bytes_in_blocks(torch.float32) == 800


def test_float_matrices_are_announced_with_their_memory(tmp_path: Path) -> None:
    large = {
        "a.one.levels": torch.zeros(500, 1000, dtype=torch.int8),
        "a.one.scales": torch.ones(500, 1),
    }
    with pytest.warns(UserWarning, match=r"^1 of 1 .* become float32, 0\.002 GB, and compile"):
        read_packed(files(tmp_path, large), Doubled(floats=True))


@pytest.mark.parametrize(
    ("changes", "packing", "error", "message"),
    [
        ({"a__two__scales": None}, Doubled(), QsampleError,
         "the quantized layer a.two cannot be read: it has no scales; download"),
        ({"a__one__scales": torch.ones(5, 1)}, Doubled(), QsampleError,
         "the quantized layer a.one cannot be read: its scales do not fit"),
        ({"a__two__weight": torch.ones(2)}, Doubled(), QsampleError,
         r"holds both a levels and a weight for a\.two; download"),
        ({}, Doubled(mark="qweight", parts=("qweight", "scales")), QsampleError, "holds no qweight; download"),
        # Scales of what is no quantized layer would go unnoticed.
        ({"b__scales": torch.ones(2)}, Doubled(), UnsupportedModelError,
         r"scales more than the weights of its linear layers \(b\.scales\)"),
        ({"b__weight": torch.ones(2, dtype=torch.int8)}, Doubled(), QsampleError, "holds b.weight as int8"),
    ],
)  # fmt: skip
def test_what_does_not_fit(
    changes: dict[str, Tensor | None],
    packing: Doubled,
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message) as raised:
        read_packed(files(tmp_path, tensors(**changes)), packing)
    assert type(raised.value) is error


def test_a_weight_may_be_a_part(tmp_path: Path) -> None:
    """Then it may also be stored in other layers, as floats."""
    given = {
        "a.weight": ONE,
        "a.scales": torch.ones(2, 1),
        "b.weight": torch.ones(2),
    }
    packing = Doubled(mark="scales", parts=("weight", "scales"), unread=())

    def matrix(layer: str, parts: Mapping[str, Tensor]) -> Any:
        return SimpleNamespace(layer=layer, shape=tuple(parts["weight"].shape))

    packing.matrix = matrix  # type: ignore[method-assign]
    found = read_packed(files(tmp_path, given), packing)
    assert [(one.layer, one.shape) for one in found.matrices] == [("a", (2, 3))]
    assert list(found.others) == ["b.weight"]


class Options:
    """As transformers keeps some of the options."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def to_dict(self) -> dict[str, Any]:
        return self._options


@pytest.mark.parametrize("as_object", [True, False])
def test_the_format_of_a_configuration(as_object: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def format_of(options: Any, config: Any, model_id: str) -> str:
        assert not hasattr(config, "quantization_config"), "transformers would look for a library"
        assert not hasattr(config, "quantization")
        asked.append((options, model_id))
        return "the format"

    def load(group: str, name: str) -> Any:
        assert (group, name) == (CHECKPOINTS, "gptq")
        return SimpleNamespace(format_of=format_of)

    monkeypatch.setattr(packed, "load_extension", load)
    options = {"quant_method": "gptq", "bits": 4}
    config: Any = SimpleNamespace(
        quantization_config=Options(**options) if as_object else options,
        quantization={"bits": 4},
        compression_config=None,
        hidden_size=5,
    )
    assert packing_of(config, "some/model") == "the format"
    assert asked == [(options, "some/model")]
    assert config.hidden_size == 5


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_float_weights_have_no_format(config: dict[str, Any]) -> None:
    assert packing_of(SimpleNamespace(**config), "some/model") is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "has_accelerate", "times"),
    [("fp8", True, "4"), ("mxfp4", True, "7.5"), ("mxfp4", False, "7.5"), ("fp8", False, None)],
)
def test_weights_that_transformers_turns_into_floats(
    method: str, has_accelerate: bool, times: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> Any:
        assert name == "accelerate"
        return object() if has_accelerate else None

    monkeypatch.setattr(packed, "find_spec", find_spec)
    options = {"quant_method": method, "bits": 8}
    config: Any = SimpleNamespace(quantization_config=dict(options))
    if times is None:
        with pytest.raises(
            UnsupportedModelError, match=r"some/model is quantized with fp8.*accelerate"
        ):
            packing_of(config, "some/model")
        return
    with pytest.warns(
        UserWarning,
        match=f"^some/model: its {method} weights become float32, in memory and in {times} times",
    ):
        assert packing_of(config, "some/model") is None
    assert config.quantization_config == {**options, "dequantize": True}
