"""Reads a checkpoint with GPTQ or AWQ weights: as float, computed when needed, and the same integers in blocks for the
layers of the loaded model. Neither the library that quantized the checkpoint nor a GPU is needed.

A float weight is a placeholder (`transforms.deferred`); it identifies its layer wherever transformers puts it. Weights
that transformers merges, or an adapter changes, stay float.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qsample.checkpoints.gptq_awq_layouts import ADVICE, BITS, WORD, Quantization, dequantize, read_layer, to_blocks
from qsample.checkpoints.mapped_weights import in_float32, open_weights, places
from qsample.checks import is_integer
from qsample.contract.tensors import BLOCK_SIZES
from qsample.errors import QsampleError, UnsupportedModelError, listed
from qsample.transforms.deferred import SMALLEST, Deferred, defer, deferred, numbers
from qsample.transforms.quantized_linear import QuantizedWeight, set_quantized_weight

_STORED_PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")
_BLOCK_PARTS: Final = ("blocks", "scales", "zero_points", "order")
_FILE_BYTES: Final = 128 * 2**20
_DEQUANTIZED: Final = ("fp8", "mxfp4")  # transformers turns these into float if it is asked to


def quantization_of(config: PretrainedConfig, model_id: str) -> Quantization | None:
    """The quantization that `config` states; None for float weights, and if transformers undoes it: `config` then asks
    for that. Raises UnsupportedModelError for a method, format or number of bits that cannot be read."""
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    if not isinstance(stated, dict) and not hasattr(stated, "to_dict"):
        raise UnsupportedModelError(
            f"{model_id}: quantization_config is {stated!r}; it must be an object with a quant_method"
        )
    options: Mapping[str, Any] = stated if isinstance(stated, dict) else stated.to_dict()
    method = str(getattr(options.get("quant_method"), "value", options.get("quant_method"))).lower()
    if method in _DEQUANTIZED:
        if method == "fp8" and find_spec("accelerate") is None:
            raise UnsupportedModelError(
                f"{model_id} is quantized with {method}, which transformers turns into float with the help of "
                f"accelerate; `pip install accelerate`, or {ADVICE}"
            )
        config.quantization_config = {**options, "dequantize": True}
        return None
    if method not in BITS:
        raise UnsupportedModelError(
            f"{model_id} is quantized with {method}; only float weights, gptq and awq can be read (and "
            f"{' and '.join(_DEQUANTIZED)}, which become float); {ADVICE}"
        )
    version = _format_version(options, method)
    bits = _integer(options, ("bits", "w_bit"), 4, model_id)
    if version is None or bits not in BITS[method] or options.get("pack_dtype", "int32") != "int32":
        known = "gptq or gptq_v2, in int32, with 2, 3, 4 or 8 bits" if method == "gptq" else "gemm, with 4 bits"
        given = {
            name: options[name]
            for name in ("checkpoint_format", "format", "version", "backend", "is_marlin_format", "pack_dtype", "bits")
            if options.get(name) is not None
        }
        raise UnsupportedModelError(
            f"{model_id} is quantized with {method} in a form that cannot be read ({given}); accepted is {known}; "
            f"{ADVICE}"
        )
    group_size = _integer(options, ("group_size", "q_group_size"), 128, model_id)
    if group_size != -1 and group_size < 1:
        raise UnsupportedModelError(
            f"{model_id}: the quantization's group_size is {group_size}; it must be 1 or more, or -1 for one group of "
            f"all inputs; {ADVICE}"
        )
    symmetric = options.get("sym", True)
    if not isinstance(symmetric, bool):
        raise UnsupportedModelError(f"{model_id}: the quantization's sym is {symmetric!r}; it must be true or false")
    return Quantization(method, bits, group_size, symmetric, version, mixed=bool(options.get("dynamic")))


def _integer(options: Mapping[str, Any], names: tuple[str, ...], default: int, model_id: str) -> int:
    """The first of `names` that `options` hold; UnsupportedModelError if it is not an integer."""
    name = next((name for name in names if name in options), names[0])
    value = options.get(name, default)
    if not is_integer(value):
        raise UnsupportedModelError(
            f"{model_id}: the quantization's {name} is {value!r}; it must be an integer; {ADVICE}"
        )
    return value


def _format_version(options: Mapping[str, Any], method: str) -> int | None:
    """The version of the format; None for a format that cannot be read."""
    if method == "awq":
        layout = str(options.get("version") or options.get("format") or "gemm").lower()
        return 1 if layout == "gemm" and options.get("backend") != "llm-awq" else None
    layout = str(options.get("checkpoint_format") or options.get("format") or "gptq").lower()
    return {"gptq": 1, "gptq_v2": 2}.get(layout) if not options.get("is_marlin_format") else None


class BlockStore:
    """Quantized weights in safetensors files of a folder, filled by `add`, then `flush`. Weights from `read` stay
    mapped from their file, the large parts as placeholders that a graph can refer to."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._files: dict[str, Path] = {}  # part of a weight → file
        self._layouts: dict[str, tuple[int, int]] = {}  # weight → bits, block size

    def __contains__(self, key: str) -> bool:
        return key in self._layouts

    def add(self, key: str, weight: QuantizedWeight) -> None:
        self._layouts[key] = weight.bits, weight.block_size
        for part in _BLOCK_PARTS:
            if (tensor := getattr(weight, part)) is not None:
                self._pending[f"{key}.{part}"] = tensor
        if sum(tensor.nbytes for tensor in self._pending.values()) >= _FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the pending weights; also to be called after the last `add`."""
        if self._pending:
            file = self._folder / f"blocks-{len(set(self._files.values())):05}.safetensors"
            save_file(self._pending, file)
            self._files.update(dict.fromkeys(self._pending, file))
            self._pending = {}

    def read(self, key: str) -> QuantizedWeight:
        parts = {part: self._read(f"{key}.{part}") for part in _BLOCK_PARTS if f"{key}.{part}" in self._files}
        bits, block_size = self._layouts[key]
        return QuantizedWeight(bits, block_size, **parts)

    def _read(self, name: str) -> Tensor:
        file = self._files[name]
        with safe_open(file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        if tensor.numel() < SMALLEST:
            return tensor
        return defer(tensor.shape, tensor.dtype, lambda: tensor, tensor.dtype, places(file)[name])


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A quantized checkpoint as float, and the blocks of its layers.

    Attributes:
        weights: every tensor by name; a quantized tensor is a placeholder.
        layers: the placeholders of the quantized layers, with their names.
        without_blocks: names of the layers that no block size fits; they stay float.
        biases: names of the layers' biases, except zeros: some tools write these everywhere.
        blocks: of the other layers, by name.
    """

    weights: dict[str, Tensor]
    layers: Mapping[Deferred, str]
    without_blocks: tuple[str, ...]
    biases: frozenset[str]
    blocks: BlockStore

    def attach(self, model: PreTrainedModel) -> int:
        """Give each layer of `model` whose weight was read from blocks those blocks, still mapped from their file.
        Warns of layers that stay float; returns how many layers have blocks."""
        attached = 0
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            found = deferred(weight) if isinstance(weight, Tensor) else None
            if found not in self.layers or found is None or weight is None:
                continue
            key = self.layers[found]
            multiplies = type(layer).forward in (nn.Linear.forward, Conv1D.forward)  # subclasses may do more than that
            if multiplies and key in self.blocks and weight.is_contiguous():
                set_quantized_weight(layer, self.blocks.read(key))
                attached += 1
            elif weight.numel() < SMALLEST:
                layer.weight = nn.Parameter(numbers(weight.detach()), requires_grad=False)
        reasons = []
        if self.without_blocks:
            count = len(self.without_blocks)
            reasons.append(f"{count} because no block of {min(BLOCK_SIZES)} inputs lies within one group")
        if (rest := len(self.layers) - len(self.without_blocks) - attached) > 0:
            reasons.append(f"{rest} because they were merged into other weights, or changed by an adapter")
        if reasons:
            stay = len(self.layers) - attached
            warnings.warn(
                f"{stay} of {len(self.layers)} quantized matrices become float: {'; '.join(reasons)}", stacklevel=2
            )
        return attached

    def check_loaded(self, missing: Collection[str], unexpected: Collection[str]) -> None:
        """Raise QsampleError if the checkpoint lacks weights of the model, or has a layer or bias too many."""
        lost = sorted(set(unexpected) & ({f"{layer}.weight" for layer in self.layers.values()} | self.biases))
        if missing or lost:
            problem = f"lacks {listed(missing)}" if missing else f"has {listed(lost)}, which the model does not know"
            raise QsampleError(f"the quantized checkpoint {problem}; it is damaged, or of another model than it says")


def read_checkpoint(
    files: list[Path],
    scratch: Path,
    quantization: Quantization,
    *,
    dtype: torch.dtype,
    shapes: Mapping[str, torch.Size],
    transposed: Collection[str],
) -> QuantizedCheckpoint:
    """Read the safetensors `files` of a checkpoint with quantized weights, one layer at a time in memory.

    Args:
        scratch: a folder that lives as long as the result; the blocks are written into a new folder inside it.
        dtype: of weights and scales.
        shapes, transposed: of the model that the checkpoint will be loaded into, as in `checkpoint.Outline`.

    Raises QsampleError if a layer is incomplete, or its tensors do not fit one another or the model.
    """
    weights: dict[str, Tensor] = {}
    layers: dict[Deferred, str] = {}
    without_blocks: list[str] = []
    biases: set[str] = set()
    blocks = BlockStore(scratch / "qsample-blocks")
    with ExitStack() as stack:
        opened = {file: stack.enter_context(open_weights(file)) for file in files}
        file_of = {name: file for file, tensors in opened.items() for name in tensors.keys()}  # noqa: SIM118
        places_of = {name: place for file in files for name, place in places(file).items()}
        quantized = {name.removesuffix(".qweight") for name in file_of if name.endswith(".qweight")}
        _check_names(file_of, quantized, files[0].parent)
        for name, file in file_of.items():
            layer, _, part = name.rpartition(".")
            if layer not in quantized or part not in _STORED_PARTS:
                tensor = opened[file].get_tensor(name)
                if layer in quantized and part == "bias" and tensor.any():
                    biases.add(name)
                weights[name] = in_float32(tensor, places_of[name])
            elif part == "qweight":
                names = {part: f"{layer}.{part}" for part in _STORED_PARTS if f"{layer}.{part}" in file_of}
                stored = {part: opened[file_of[name]].get_tensor(name) for part, name in names.items()}
                turned = layer.rpartition(".")[2] in transposed
                grouped = read_layer(layer, stored, quantization)
                weight = _float_weight(layer, stored, quantization, dtype, grouped.levels.shape, turned)
                _check_shape(layer, weight, shapes)
                weights[f"{layer}.weight"] = weight
                found = deferred(weight)
                assert found is not None
                layers[found] = layer
                in_blocks = to_blocks(grouped, dtype)
                if in_blocks is None:
                    without_blocks.append(layer)
                else:
                    blocks.add(layer, in_blocks)
    blocks.flush()
    return QuantizedCheckpoint(weights, layers, tuple(without_blocks), frozenset(biases), blocks)


def bytes_in_blocks(files: list[Path], quantization: Quantization, dtype: torch.dtype) -> int:
    """About how many bytes `read_checkpoint` writes for the quantized layers in `files`, by their shapes."""
    total = 0
    for file in files:
        with open_weights(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                if name.endswith(".qweight"):
                    shape = tensors.get_slice(name).get_shape()
                    total += _layer_bytes(math.prod(shape), shape[0] if shape else 0, quantization, dtype)
    return total


def _layer_bytes(words: int, rows: int, quantization: Quantization, dtype: torch.dtype) -> int:
    """words: of 32 bits, in each of `rows`."""
    levels, stored = words * WORD // quantization.bits, max(4, quantization.bits)
    inputs = rows if quantization.method == "awq" else rows * WORD // quantization.bits
    group = inputs if quantization.group_size == -1 else quantization.group_size
    block = max((size for size in BLOCK_SIZES if group % size == 0), default=min(BLOCK_SIZES))
    return levels * stored // 8 + levels // block * (dtype.itemsize + 1)  # with a scale and a zero point a block


def _float_weight(
    layer: str,
    stored: Mapping[str, Tensor],
    quantization: Quantization,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    turned: bool,
) -> Tensor:
    """A placeholder for the float weight of a layer, of `sizes` N, K; `turned`: the model has it as [K, N]."""

    def compute() -> Tensor:
        weight = torch.from_numpy(dequantize(read_layer(layer, stored, quantization))).to(dtype)
        return weight.T.contiguous() if turned else weight

    return defer(sizes[::-1] if turned else sizes, dtype, compute, dtype)


def conv1d_names(model: nn.Module) -> frozenset[str]:
    """Last names of the layers of `model` that hold their weight as [K, N]."""
    return frozenset(name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Conv1D))


def _check_shape(layer: str, weight: Tensor, shapes: Mapping[str, torch.Size]) -> None:
    """`shapes`: of the model's weights, except renamed weights: transformers' loading checks those."""
    wanted = shapes.get(f"{layer}.weight")
    if wanted is not None and weight.shape != wanted:
        raise QsampleError(
            f"the quantized layer {layer} stands for a weight of {list(weight.shape)}, and the model's is "
            f"{list(wanted)}; the checkpoint is damaged, or of another model or number of bits than it says"
        )


def _check_names(names: Collection[str], layers: set[str], source: Path) -> None:
    """Every part of quantized weights must be known: a scale that is never applied would go unnoticed."""
    incomplete = sorted(layer for layer in layers if f"{layer}.scales" not in names)
    known = {f"{layer}.{part}" for layer in layers for part in _STORED_PARTS}
    strays = sorted(name for name in names if name.rpartition(".")[2] in _STORED_PARTS and name not in known)
    if not layers:
        raise QsampleError(f"{source} says that it is quantized, and holds no qweight; download the checkpoint again")
    if twice := sorted(layer for layer in layers if f"{layer}.weight" in names):
        raise QsampleError(
            f"{source} holds both a qweight and a weight for {listed(twice)}; download the checkpoint again"
        )
    if incomplete:
        raise QsampleError(f"{source} holds no scales for {listed(incomplete)}; download the checkpoint again")
    if strays:
        raise UnsupportedModelError(
            f"{source} scales more than the weights of its linear layers ({listed(strays)}), which cannot be "
            f"exported; {ADVICE}"
        )
