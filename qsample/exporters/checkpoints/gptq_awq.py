"""Turns a checkpoint with GPTQ or AWQ weights into a float copy that transformers can load, and keeps the same integers
in blocks for the layers of the loaded model.

Neither the library that quantized the checkpoint nor a GPU is needed. A layer gets its blocks back by the digest of its
float weight, so that transformers may rename it. What transformers merges or an adapter changes stays float.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qsample.errors import QsampleError, UnsupportedModelError
from qsample.exporters.checkpoints.float32_copy import WeightWriter, finish_checkpoint, to_float32
from qsample.exporters.checkpoints.gptq_awq_checks import check_layer
from qsample.exporters.checkpoints.gptq_awq_layouts import (
    GroupedWeight,
    dequantize,
    to_blocks,
    unpack_awq,
    unpack_gptq,
)
from qsample.exporters.checkpoints.quantization_config import ADVICE, CheckpointQuantization
from qsample.exporters.graph.nbits import BLOCK_SIZES
from qsample.transforms.quantized_linear import QuantizedWeight, set_quantized_weight

_STORED_PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")
_BLOCK_PARTS: Final = ("blocks", "scales", "zero_points", "order")


class BlockStore:
    """Quantized weights in safetensors files of a folder, each under the digest of the float weight that it stands for.

    Filled by `add`, then `flush`; what `read` returns stays mapped from its file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._writer = WeightWriter(folder, "blocks")
        self._layouts: dict[str, tuple[int, int]] = {}  # digest → bits, block size

    def __contains__(self, key: str) -> bool:
        return key in self._layouts

    def add(self, key: str, weight: QuantizedWeight) -> None:
        self._layouts[key] = weight.bits, weight.block_size
        for part in _BLOCK_PARTS:
            if (tensor := getattr(weight, part)) is not None:
                self._writer.add(f"{key}.{part}", tensor)

    def flush(self) -> None:
        self._writer.flush()

    def read(self, key: str) -> QuantizedWeight:
        tensors = {}
        for part in _BLOCK_PARTS:
            if (file := self._writer.files.get(f"{key}.{part}")) is not None:
                with safe_open(self._folder / file, "pt") as opened:
                    tensors[part] = opened.get_tensor(f"{key}.{part}")
        bits, block_size = self._layouts[key]
        return QuantizedWeight(bits, block_size, **tensors)


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """A quantized checkpoint as float, and the blocks of its layers.

    folder: of the float copy. layers: names of the quantized layers. without_blocks: those of them that no block size
    fits, which stay float. biases: names of their biases, but for zeros, which some tools write everywhere. blocks: of
    the other layers.
    """

    folder: Path
    layers: tuple[str, ...]
    without_blocks: tuple[str, ...]
    biases: frozenset[str]
    blocks: BlockStore

    def attach(self, model: PreTrainedModel) -> int:
        """Give each layer of `model` whose weight was read from blocks those blocks, which stay mapped from their file.

        Warns of what stays float. Returns how many layers have blocks.
        """
        attached = 0
        for layer in model.modules():
            if type(layer).forward not in (nn.Linear.forward, Conv1D.forward):  # subclasses may do more than multiply
                continue
            assert isinstance(layer.weight, Tensor)
            key = digest(layer.weight.detach())
            if key in self.blocks:
                set_quantized_weight(layer, self.blocks.read(key))
                attached += 1
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
        """Raise QsampleError where the model has weights that the checkpoint does not hold, or the other way round."""
        lost = sorted(set(unexpected) & ({f"{layer}.weight" for layer in self.layers} | self.biases))
        if missing or lost:
            what = f"lacks {_listed(missing)}" if missing else f"has {_listed(lost)}, which the model does not know"
            raise QsampleError(f"the quantized checkpoint {what}; it is damaged, or of another model than it says")


def dequantize_checkpoint(
    source: Path,
    files: list[Path],
    destination: Path,
    quantization: CheckpointQuantization,
    *,
    dtype: torch.dtype,
    model: nn.Module,
) -> QuantizedCheckpoint:
    """Write the checkpoint in `source`, whose weights are `files`, to the empty folder `destination` in float, and the
    blocks of its quantized layers into a folder inside of it: one layer at a time is in memory.

    dtype: of weights and scales. model: what the checkpoint will be loaded into, without memory for its weights. Raises
    QsampleError where a layer is incomplete, or its tensors do not fit one another or the model.
    """
    layers, without_blocks, biases = [], [], set()
    transposed, shapes = _conv1d_names(model), {name: weight.shape for name, weight in model.state_dict().items()}
    weights, blocks = WeightWriter(destination), BlockStore(destination / "qsample-blocks")
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        file_of = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is no mapping
        quantized = {name.removesuffix(".qweight") for name in file_of if name.endswith(".qweight")}
        _check_names(file_of, quantized, source)
        for name, file in file_of.items():
            layer, _, part = name.rpartition(".")
            if layer not in quantized or part not in _STORED_PARTS:
                tensor = file.get_tensor(name)
                if layer in quantized and part == "bias" and tensor.any():
                    biases.add(name)
                weights.add(name, to_float32(tensor) if dtype == torch.float32 else tensor)
            elif part == "qweight":
                names = {part: f"{layer}.{part}" for part in _STORED_PARTS if f"{layer}.{part}" in file_of}
                stored = {part: file_of[name].get_tensor(name) for part, name in names.items()}
                grouped = read_layer(layer, stored, quantization)
                weight = torch.from_numpy(dequantize(grouped)).to(dtype)
                weight = weight.T.contiguous() if layer.rpartition(".")[2] in transposed else weight
                _check_shape(layer, weight, shapes)
                weights.add(f"{layer}.weight", weight)
                layers.append(layer)
                in_blocks, key = to_blocks(grouped, dtype), digest(weight)
                if in_blocks is None:
                    without_blocks.append(layer)
                elif key not in blocks:
                    blocks.add(key, in_blocks)
    finish_checkpoint(source, weights, destination)
    blocks.flush()
    return QuantizedCheckpoint(destination, tuple(layers), tuple(without_blocks), frozenset(biases), blocks)


def _conv1d_names(model: nn.Module) -> set[str]:
    """Last names of the layers of `model` that hold their weight as [K, N]."""
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Conv1D)}


def digest(weight: Tensor) -> str:
    """sha256 of a weight: dtype, shape and bytes."""
    content = hashlib.sha256(f"{weight.dtype} {tuple(weight.shape)}".encode())
    content.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def read_layer(layer: str, parts: Mapping[str, Tensor], quantization: CheckpointQuantization) -> GroupedWeight:
    """The integers of one layer; QsampleError where its parts do not fit one another or `quantization`."""
    try:
        bits = check_layer(parts, quantization)
        words = {name: tensor.numpy() for name, tensor in parts.items() if name != "scales"}
        scales = parts["scales"].to(torch.float32).numpy()
        if quantization.method == "awq":
            return unpack_awq(words["qweight"], scales, words["qzeros"], group_size=quantization.group_size)
        return unpack_gptq(
            words["qweight"],
            scales,
            words.get("qzeros"),
            words.get("g_idx"),
            bits=bits,
            group_size=quantization.group_size,
            symmetric=quantization.symmetric,
            version=quantization.version,
        )
    except ValueError as error:
        raise QsampleError(
            f"the quantized layer {layer} cannot be read: {error}; download the checkpoint again, or {ADVICE}"
        ) from error


def _check_shape(layer: str, weight: Tensor, shapes: Mapping[str, torch.Size]) -> None:
    """shapes: of the model's weights, by name. What transformers renames is not there, and left to its loading."""
    wanted = shapes.get(f"{layer}.weight")
    if wanted is not None and weight.shape != wanted:
        raise QsampleError(
            f"the quantized layer {layer} stands for a weight of {list(weight.shape)}, and the model's is "
            f"{list(wanted)}; the checkpoint is damaged, or of another model or number of bits than it says"
        )


def _check_names(names: Collection[str], layers: set[str], source: Path) -> None:
    """What belongs to quantized weights must be known: a scale that nobody applies would go unnoticed."""
    incomplete = sorted(layer for layer in layers if f"{layer}.scales" not in names)
    known = {f"{layer}.{part}" for layer in layers for part in _STORED_PARTS}
    strays = sorted(name for name in names if name.rpartition(".")[2] in _STORED_PARTS and name not in known)
    if not layers:
        raise QsampleError(f"{source} says that it is quantized, and holds no qweight; download the checkpoint again")
    if twice := sorted(layer for layer in layers if f"{layer}.weight" in names):
        raise QsampleError(
            f"{source} holds both a qweight and a weight for {_listed(twice)}; download the checkpoint again"
        )
    if incomplete:
        raise QsampleError(f"{source} holds no scales for {_listed(incomplete)}; download the checkpoint again")
    if strays:
        raise UnsupportedModelError(
            f"{source} scales more than the weights of its linear layers ({_listed(strays)}), which cannot be "
            f"exported; {ADVICE}"
        )


def _listed(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
