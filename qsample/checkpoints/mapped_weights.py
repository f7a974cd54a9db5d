"""The weights of safetensors files, mapped: nothing of them is copied, to memory or to the disk.

Float weights become placeholders (`transforms.deferred`) that remember the place of their numbers; a graph can refer to
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qsample.disk.tensor_file import read_header
from qsample.disk.untrusted import open_plain, problem_of_name, read_json
from qsample.errors import QsampleError
from qsample.huggingface.facade import dtype_name
from qsample.transforms.deferred import SMALLEST, defer

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_NO_THREADS: Final = "HF_DEACTIVATE_ASYNC_LOAD"
_LARGEST_HEADER: Final = 100 << 20  # safetensors' limit


class Place(NamedTuple):
    """The place of a tensor's numbers: `length` bytes of a file, from byte `offset` on."""

    path: Path
    offset: int
    length: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder; [] if transformers reads another format. Raises QsampleError for an
    index that does not name the file of each tensor."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        return []
    try:
        names = set(read_json(folder / INDEX)["weight_map"].values())
        if not names:
            raise ValueError("it lists no tensor")
        for name in sorted(names):
            if problem := problem_of_name(name):
                raise ValueError(f"it names the file {name!r:.120}, {problem}")
        return [folder / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise QsampleError(
            f"{folder / INDEX} is not an index of weights, an object whose weight_map gives the file of each tensor "
            f"({error!r}); download the checkpoint again"
        ) from error


def places(file: Path) -> dict[str, Place]:
    """The place of each tensor of a safetensors file (https://huggingface.co/docs/safetensors)."""
    real = file.resolve()  # ONNX Runtime opens no links, and the hub's cache consists of links
    with open_plain(real) as opened:
        header, start = read_header(opened, _LARGEST_HEADER)
    header.pop("__metadata__", None)
    spans = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: Place(real, start + begin, end - begin) for name, (begin, end) in spans.items()}


def open_weights(file: Path) -> Any:
    """A safetensors file, opened. Raises OSError, with its name, if it is missing, cut off or of another format."""
    try:
        return safe_open(file, "pt")
    except FileNotFoundError as error:
        raise OSError(f"{file} is missing; download the checkpoint again") from error
    except SafetensorError as error:
        size = file.stat().st_size
        raise OSError(
            f"{file} is cut off, or no safetensors file: {size} bytes ({error}); download it again"
        ) from error


def mapped_weights(files: list[Path]) -> dict[str, Tensor]:
    """Every tensor of the files by name; float32 and half precision become float32, as placeholders unless small.
    Raises QsampleError for weights that are quantized."""
    weights: dict[str, Tensor] = {}
    for file in files:
        with open_weights(file) as tensors:
            places_of = places(file)
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                weights[name] = named_in_float32(name, tensors.get_tensor(name), places_of[name])
    return weights


def named_in_float32(name: str, tensor: Tensor, place: Place) -> Tensor:
    """`in_float32`. Raises QsampleError for a weight of small numbers: its scales would be passed over."""
    if name.endswith(".weight") and (tensor.itemsize == 1 or not tensor.is_floating_point()):
        raise QsampleError(
            f"{place.path} holds {name} as {dtype_name(tensor.dtype)}, and the config.json beside it does not say how "
            "it is quantized; give the checkpoint with its own config.json"
        )
    return in_float32(tensor, place)


def in_float32(tensor: Tensor, place: Place) -> Tensor:
    """`tensor`, mapped from `place`, as `mapped_weights` has it."""
    if tensor.dtype not in _FLOATS:
        return tensor
    if tensor.numel() < SMALLEST:
        return tensor.to(torch.float32)
    return defer(tensor.shape, torch.float32, lambda: tensor, tensor.dtype, place)


@contextmanager
def loading_in_this_thread() -> Iterator[None]:
    """Keep transformers from reading weights in other threads: `deferring` does not reach them."""
    before = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_THREADS]
        else:
            os.environ[_NO_THREADS] = before
