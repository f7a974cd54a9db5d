"""A checkpoint with GPTQ or AWQ weights enters; a float copy of it that transformers can load leaves, and beside it the
same integers in blocks, for the loaded model's layers.

Neither the library that quantized the checkpoint nor a GPU is needed. A layer of the model gets its blocks back by what
its weight holds: whatever transformers renames is found, and what it merges or an adapter changes stays float.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qsample.errors import QsampleError, UnsupportedModelError
from qsample.exporters.checkpoints.float32_copy import WeightWriter, finish_checkpoint, to_float32
from qsample.exporters.checkpoints.gptq_awq_layouts import (
    WORD,
    GroupedWeight,
    dequantize,
    to_blocks,
    unpack_awq,
    unpack_gptq,
)
from qsample.exporters.graph.nbits import BLOCK_SIZES
from qsample.tensors import Array
from qsample.transforms.packed import PackedWeight, pack_layer

_PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")
_PACKED_PARTS: Final = ("blocks", "scales", "zero_points", "order")
_BITS: Final = {"gptq": (2, 3, 4, 8), "awq": (4,)}
_DEQUANTIZED: Final = ("fp8", "mxfp4")  # transformers turns these into float if it is asked to
_ADVICE: Final = "export the unquantized checkpoint that it was made from, and compile that with weights='int4'"


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """What a checkpoint says of its weights. method: "gptq" or "awq". bits: 2, 3, 4 or 8, unless a layer's own tensors
    say otherwise. group_size: inputs that share a scale; -1 = all of them. version: of GPTQ's format."""

    method: str
    bits: int
    group_size: int
    symmetric: bool = True
    version: int = 1


def quantization_of(config: PretrainedConfig, model_id: str) -> CheckpointQuantization | None:
    """The quantization that `config` states; None = none, or one that transformers undoes: `config` then asks for that.

    Raises UnsupportedModelError for a method, a format or a number of bits that cannot be read.
    """
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        return None
    options: Mapping[str, Any] = stated if isinstance(stated, dict) else stated.to_dict()
    method = str(getattr(options.get("quant_method"), "value", options.get("quant_method"))).lower()
    if method in _DEQUANTIZED:
        if method == "fp8" and find_spec("accelerate") is None:
            raise UnsupportedModelError(
                f"{model_id} is quantized with {method}, which transformers turns into float with the help of "
                f"accelerate; `pip install accelerate`, or {_ADVICE}"
            )
        config.quantization_config = {**options, "dequantize": True}
        return None
    if method not in _BITS:
        raise UnsupportedModelError(
            f"{model_id} is quantized with {method}; what can be read is float weights, gptq and awq (and "
            f"{' and '.join(_DEQUANTIZED)}, which become float); {_ADVICE}"
        )
    form = _format(options, method)
    bits = int(options.get("bits", options.get("w_bit", 4)))
    if form is None or bits not in _BITS[method] or options.get("pack_dtype", "int32") != "int32":
        known = "gptq or gptq_v2, in int32, with 2, 3, 4 or 8 bits" if method == "gptq" else "gemm, with 4 bits"
        given = {
            name: options[name]
            for name in ("checkpoint_format", "format", "version", "backend", "is_marlin_format", "pack_dtype", "bits")
            if options.get(name) is not None
        }
        raise UnsupportedModelError(
            f"{model_id} is quantized with {method} in a form that cannot be read ({given}); what can is {known}; "
            f"{_ADVICE}"
        )
    group_size = int(options.get("group_size", options.get("q_group_size", 128)))
    return CheckpointQuantization(method, bits, group_size, bool(options.get("sym", True)), form)


def _format(options: Mapping[str, Any], method: str) -> int | None:
    """The version of a format that can be read."""
    if method == "awq":
        form = str(options.get("version") or options.get("format") or "gemm").lower()
        return 1 if form == "gemm" and options.get("backend") != "llm-awq" else None
    form = str(options.get("checkpoint_format") or options.get("format") or "gptq").lower()
    return {"gptq": 1, "gptq_v2": 2}.get(form) if not options.get("is_marlin_format") else None


class PackedCheckpoint:
    """The float copy of a quantized checkpoint in a scratch folder, and the blocks of its layers.

    layers: how many layers are quantized. unfit: those without blocks, which stay float.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.layers: list[str] = []
        self.unfit: list[str] = []
        self._biases: set[str] = set()  # of quantized layers, but for zeros, which some tools write everywhere
        self._forms: dict[str, tuple[int, int]] = {}  # digest of a weight → bits, block size
        self._placed: dict[str, Path] = {}  # DIGEST.PART of a packed weight → its file

    def attach(self, model: PreTrainedModel) -> int:
        """Give each layer of `model` whose weight was read from blocks those blocks, which stay mapped from their file.

        Warns of what stays float. Returns how many layers are packed.
        """
        attached = 0
        for layer in model.modules():
            if type(layer).forward not in (nn.Linear.forward, Conv1D.forward):  # subclasses may do more than multiply
                continue
            assert isinstance(layer.weight, Tensor)
            key = digest(layer.weight.detach())
            if key in self._forms:
                pack_layer(layer, self._packed(key))
                attached += 1
        reasons = []
        if self.unfit:
            reasons.append(f"{len(self.unfit)} because no block of {min(BLOCK_SIZES)} inputs lies within one group")
        if (rest := len(self.layers) - len(self.unfit) - attached) > 0:
            reasons.append(f"{rest} because they were merged into other weights, or changed by an adapter")
        if reasons:
            stay = len(self.layers) - attached
            warnings.warn(
                f"{stay} of {len(self.layers)} quantized matrices become float: {'; '.join(reasons)}", stacklevel=2
            )
        return attached

    def check_loaded(self, missing: Collection[str], unexpected: Collection[str]) -> None:
        """Raise QsampleError where the model has weights that the checkpoint does not hold, or the other way round."""
        lost = sorted(set(unexpected) & ({f"{layer}.weight" for layer in self.layers} | self._biases))
        if missing or lost:
            what = f"lacks {_listed(missing)}" if missing else f"has {_listed(lost)}, which the model does not know"
            raise QsampleError(f"the quantized checkpoint {what}; it is damaged, or of another model than it says")

    def _packed(self, key: str) -> PackedWeight:
        tensors = {}
        for part in _PACKED_PARTS:
            if (file := self._placed.get(f"{key}.{part}")) is not None:
                with safe_open(file, "pt") as opened:
                    tensors[part] = opened.get_tensor(f"{key}.{part}")
        bits, block_size = self._forms[key]
        return PackedWeight(bits, block_size, **tensors)


def unpack_checkpoint(
    source: Path,
    files: list[Path],
    destination: Path,
    quantization: CheckpointQuantization,
    *,
    dtype: torch.dtype,
    transposed: Collection[str] = (),
) -> PackedCheckpoint:
    """Write the checkpoint in `source`, whose weights are `files`, to the empty folder `destination` in float, and the
    blocks of its quantized layers into a folder inside of it: one layer at a time is in memory.

    dtype: of weights and scales. transposed: last names of layers whose weight is [K, N] (Conv1D). Raises QsampleError
    where a layer is incomplete or its tensors do not fit one another.
    """
    made = PackedCheckpoint(destination)
    folder = destination / "qsample-blocks"
    folder.mkdir()
    weights, blocks = WeightWriter(destination), WeightWriter(folder, "blocks")
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        place = {name: tensors for tensors in opened for name in tensors.keys()}  # noqa: SIM118 - it is no mapping
        layers = {name.removesuffix(".qweight") for name in place if name.endswith(".qweight")}
        _check_names(place, layers, source)
        for name in place:
            layer, _, part = name.rpartition(".")
            if layer not in layers or part not in _PARTS:
                tensor = place[name].get_tensor(name)
                if layer in layers and part == "bias" and tensor.any():
                    made._biases.add(name)
                weights.add(name, to_float32(tensor) if dtype == torch.float32 else tensor)
            elif part == "qweight":
                parts = {
                    part: place[f"{layer}.{part}"].get_tensor(f"{layer}.{part}")
                    for part in _PARTS
                    if f"{layer}.{part}" in place
                }
                grouped = _grouped(layer, parts, quantization)
                weight = torch.from_numpy(dequantize(grouped)).to(dtype)
                weight = weight.T.contiguous() if layer.rpartition(".")[2] in transposed else weight
                weights.add(f"{layer}.weight", weight)
                made.layers.append(layer)
                packed, key = to_blocks(grouped, dtype), digest(weight)
                if packed is None:
                    made.unfit.append(layer)
                elif key not in made._forms:
                    made._forms[key] = packed.bits, packed.block_size
                    for kind in _PACKED_PARTS:
                        if (array := getattr(packed, kind)) is not None:
                            blocks.add(f"{key}.{kind}", array)
    finish_checkpoint(source, weights, destination)
    blocks.flush()
    made._placed.update({name: folder / file for name, file in blocks.placed.items()})
    return made


def conv1d_names(model: nn.Module) -> set[str]:
    """Last names of the layers of `model` that hold their weight as [K, N]."""
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Conv1D)}


def digest(weight: Tensor) -> str:
    """sha256 of a weight: dtype, shape and bytes."""
    content = hashlib.sha256(f"{weight.dtype} {tuple(weight.shape)}".encode())
    content.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def _grouped(layer: str, parts: Mapping[str, Tensor], quantization: CheckpointQuantization) -> GroupedWeight:
    """The integers of one layer. Its own shapes say how many bits it has: some checkpoints mix them."""
    words = {name: tensor.numpy() for name, tensor in parts.items() if name != "scales"}
    scales = parts["scales"].to(torch.float32).numpy()
    try:
        if quantization.method == "awq":
            if "qzeros" not in words:
                raise ValueError("it has no qzeros")
            return unpack_awq(words["qweight"], scales, words["qzeros"], group_size=quantization.group_size)
        return unpack_gptq(
            words["qweight"],
            scales,
            words.get("qzeros"),
            words.get("g_idx"),
            bits=_bits(words, quantization.bits),
            group_size=quantization.group_size,
            symmetric=quantization.symmetric,
            version=quantization.version,
        )
    except (ValueError, IndexError) as error:
        raise QsampleError(
            f"the quantized layer {layer} cannot be read: {error}; download the checkpoint again, or {_ADVICE}"
        ) from error


def _bits(words: Mapping[str, Array], stated: int) -> int:
    if "g_idx" not in words or len(words["g_idx"]) == 0:
        return stated
    return len(words["qweight"]) * WORD // len(words["g_idx"])


def _check_names(names: Collection[str], layers: set[str], source: Path) -> None:
    """What belongs to quantized weights must be known: a scale that nobody applies would go unnoticed."""
    incomplete = sorted(layer for layer in layers if f"{layer}.scales" not in names)
    known = {f"{layer}.{part}" for layer in layers for part in _PARTS}
    strays = sorted(name for name in names if name.rpartition(".")[2] in _PARTS and name not in known)
    if not layers:
        raise QsampleError(f"{source} says that it is quantized, and holds no qweight; download the checkpoint again")
    if incomplete:
        raise QsampleError(f"{source} holds no scales for {_listed(incomplete)}; download the checkpoint again")
    if strays:
        raise UnsupportedModelError(
            f"{source} scales more than the weights of its linear layers ({_listed(strays)}), which cannot be "
            f"exported; {_ADVICE}"
        )


def _listed(names: Collection[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
