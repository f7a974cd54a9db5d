"""The weights of safetensors files, mapped: they are copied neither to memory nor to the disk.

Float weights become placeholders (`transforms.deferred`) that remember the place of their numbers,
and a graph can refer to that place.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qsample.errors import QsampleError, listed
from qsample.package.disk.tensor_file import read_header
from qsample.package.disk.untrusted import open_plain, problem_of_name, read_json
from qsample.request.huggingface.facade import dtype_name
from qsample.transforms.deferred import SMALLEST, defer

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_FLOAT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
# transformers reads weights in the calling thread if this environment variable is set.
_NO_THREADS_VARIABLE: Final = "HF_DEACTIVATE_ASYNC_LOAD"
# The limit of safetensors itself.
_MAX_HEADER_BYTES: Final = 100 << 20


class Place(NamedTuple):
    """The place of a tensor's numbers.

    Attributes:
        path: the file, without links.
        offset: the first byte.
        length: the number of bytes.
    """

    path: Path
    offset: int
    length: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder; [] if the folder has weights of another format.
    Raises QsampleError for an index that does not name the file of each tensor."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        return []
    try:
        names = set(read_json(folder / INDEX)["weight_map"].values())
        if not names:
            raise ValueError("it lists no tensor")
        for name in sorted(names):
            problem = problem_of_name(name)
            if problem is not None:
                raise ValueError(f"it names the file {name!r:.120}, {problem}")
        return [folder / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise QsampleError(
            f"{folder / INDEX} is not an index of weights, an object whose weight_map gives the file of each tensor "
            f"({error!r}); download the checkpoint again"
        ) from error


def places(file: Path) -> dict[str, Place]:
    """The place of each tensor of a safetensors file (https://huggingface.co/docs/safetensors). Raises
    QsampleError for a header that safetensors takes and RFC 8259 leaves open."""
    real = file.resolve()  # ONNX Runtime opens no links, and the hub's cache consists of links
    try:
        with open_plain(real) as opened:
            header, start = read_header(opened, _MAX_HEADER_BYTES)
    except ValueError as error:
        raise QsampleError(f"{file} cannot be read: {error}; download it again") from error
    header.pop("__metadata__", None)
    found: dict[str, Place] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = Place(real, start + begin, end - begin)
    return found


def open_weights(file: Path) -> Any:
    """A safetensors file, opened. Raises OSError, with its name, if it is missing, cut off or of
    another format."""
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
    """Every tensor of the files by name. float32, float16 and bfloat16 become float32, as
    placeholders unless they are small. Raises QsampleError for weights that are quantized."""
    weights: dict[str, Tensor] = {}
    for file in files:
        with open_weights(file) as tensors:
            places_by_name = places(file)
            check_held_once(weights.keys() & places_by_name.keys(), file)
            for name in tensors.keys():  # noqa: SIM118 - it is not a mapping
                tensor = tensors.get_tensor(name)
                weights[name] = named_in_float32(name, tensor, places_by_name[name])
    return weights


def check_held_once(repeated: Collection[str], file: Path) -> None:
    """Raise QsampleError if a file has tensors that an earlier file of the checkpoint has, too: the
    files do not say which of them counts.

    Args:
        repeated: the names of these tensors.
        file: the later file.
    """
    if repeated:
        raise QsampleError(
            f"{file} holds {listed(repeated)}, which another file of the checkpoint holds, too; download the "
            "checkpoint again into an empty folder"
        )


def named_in_float32(name: str, tensor: Tensor, place: Place) -> Tensor:
    """As `in_float32`. Raises QsampleError for a weight of integers or small floats, whose scales
    would be ignored."""
    if name.endswith(".weight") and (tensor.itemsize == 1 or not tensor.is_floating_point()):
        raise QsampleError(
            f"{place.path} holds {name} as {dtype_name(tensor.dtype)}, and the config.json beside it does not say how "
            "it is quantized; give the checkpoint with its own config.json"
        )
    return in_float32(tensor, place)


def in_float32(tensor: Tensor, place: Place) -> Tensor:
    """A mapped tensor as `mapped_weights` has it. place: the place of its numbers."""
    if tensor.dtype not in _FLOAT_DTYPES:
        return tensor
    if tensor.numel() < SMALLEST:
        return tensor.to(torch.float32)
    return defer(tensor.shape, torch.float32, lambda: tensor, tensor.dtype, place)


@contextmanager
def loading_in_this_thread() -> Iterator[None]:
    """Keep transformers from reading weights in other threads, which `deferring` does not reach."""
    before = os.environ.get(_NO_THREADS_VARIABLE)
    os.environ[_NO_THREADS_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_THREADS_VARIABLE]
        else:
            os.environ[_NO_THREADS_VARIABLE] = before
