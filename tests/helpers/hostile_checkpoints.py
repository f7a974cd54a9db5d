"""Packed checkpoints, damaged at random, are opened in a process with little memory; what came of each is printed.

    python -m tests.helpers.hostile_checkpoints --count 60 --seed 0

Each line is a JSON object: the case, the seconds it took, the error and whether it is one of qsample's.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.packed import unpack
from tests.helpers.quantized_checkpoints import Scheme, save_quantized

SPARE_BYTES = 1 << 30
CASE_TIMEOUT_S = 30
WEIGHTS = "model.safetensors"
SECOND_WEIGHTS = "second.safetensors"
INDEX = "model.safetensors.index.json"
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 3, 9, -1, -2, 2**31, 2**40, 2**63, 10**30, 10**390),
    *(0.5, -0.5, 1e308, float("inf"), "", "4", "x", "../x", "/etc/passwd", "\x1b[31m", "\ud800"),
    *([], [[]], [1], ["x"], {}, {"": {}}, {"x": [None]}, "x" * 300),
)
TYPES = (
    *("F64", "F32", "F16", "BF16", "I64", "I32", "U32", "I16", "U8", "I8", "BOOL", "F8_E4M3"),
    *("F8_E8M0", "F4", "C64", "x", "", 4),
)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
DTYPES += (torch.uint32, torch.int16, torch.uint8, torch.int8, torch.bool, torch.complex64)


def make_sources(folder: Path) -> list[Path]:
    """A whole checkpoint of each kind."""
    names = ("compressed_tensors", "mlx", "bitsandbytes", "bitsandbytes_nf4")
    sources = [unpack(name, folder / name) for name in names]
    schemes = (Scheme("gptq", act_order=True), Scheme("gptq", bits=3), Scheme("awq"))
    for number, scheme in enumerate(schemes):
        source = folder / f"{scheme.method}{number}"
        save_quantized(source, "llama", scheme)
        sources.append(source)
    return sources


def damage(folder: Path, rng: random.Random) -> str:
    """Damage a checkpoint; what was done is returned."""
    return rng.choice(DAMAGES)(folder, rng)


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_header(file: Path, header: Any, numbers: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def change_header(folder: Path, rng: random.Random) -> str:
    """One field of a tensor's entry, or an entry."""
    file = folder / WEIGHTS
    header, numbers = header_of(file)
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    kind = rng.choice(["dtype", "shape", "offsets", "field", "entry", "name", "none", "extra"])
    if kind == "dtype":
        entry["dtype"] = rng.choice(TYPES)
    elif kind == "shape":
        entry["shape"] = rng.choice([[0], [], [2**50, 1], entry["shape"][::-1], [-1], [1.5], "x"])
    elif kind == "offsets":
        begin, end = entry["data_offsets"]
        other = rng.choice([header[other] for other in header if other != "__metadata__"])
        changed = [[begin, begin], [end, begin], [begin, 2**62], [-1, end], [0, len(numbers)]]
        entry["data_offsets"] = rng.choice([*changed, other["data_offsets"], [begin], None])
    elif kind == "field":
        entry[rng.choice([*entry])] = rng.choice(ODD)
    elif kind == "entry":
        header[name] = rng.choice(ODD)
    elif kind == "name":
        header[rng.choice(["", "x" * 100_000, "../x", "\x1b[31m", name + ".weight"])] = entry
        del header[name]
    elif kind == "none":
        del header[name]
    else:
        header[rng.choice(["__metadata__", "x", "x.weight"])] = rng.choice(ODD)
    write_header(file, header, numbers)
    return f"header: {kind} of {name}"


def change_bytes(folder: Path, rng: random.Random) -> str:
    """The length of the header, its bytes, or the end of the file."""
    file = folder / WEIGHTS
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    kind = rng.choice(["length", "byte", "cut", "longer", "empty", "nested", "huge", "twice"])
    if kind == "length":
        wrong = rng.choice([0, 1, length - 1, length + 1, 100 << 20, 2**63, 2**64 - 1])
        content[:8] = wrong.to_bytes(8, "little")
    elif kind == "byte":
        for _ in range(rng.choice([1, 1, 8])):
            content[rng.randrange(8 + length)] = rng.randrange(256)
    elif kind == "cut":
        content = content[: rng.choice([0, 4, 8, 8 + length // 2, 8 + length, len(content) - 1])]
    elif kind == "longer":
        content += bytes(rng.choice([1, 8, 100_000]))
    elif kind == "empty":
        content = bytearray()
    else:
        text = {
            "nested": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "huge": b"{" + b" " * (101 << 20) + b"}",
            "twice": content[8 : 8 + length].rstrip()[:-1] + b"," + content[9 : 8 + length],
        }[kind]
        content[: 8 + length] = len(text).to_bytes(8, "little") + text
    file.write_bytes(content)
    return f"bytes: {kind}"


def change_tensor(folder: Path, rng: random.Random) -> str:
    """One tensor, in a file that is whole."""
    tensors = load_file(folder / WEIGHTS)
    layer = rng.choice([name for name in tensors if "proj" in name])
    other = rng.choice([*tensors])
    kind, change = rng.choice([*TENSOR_CHANGES.items()])
    if kind == "missing":
        del tensors[layer]
    elif kind == "another name":
        tensors[f"{layer}.weight"] = tensors.pop(layer)
    elif kind == "another's":
        tensors[layer] = tensors[other].clone()
    elif kind == "more":
        part = rng.choice(["g_idx", "qzeros", "scales", "biases", "SCB", "weight", "weight_format"])
        tensors[f"{layer.rpartition('.')[0]}.{part}"] = torch.zeros(rng.choice([0, 1, 64]))
    else:
        tensors[layer] = change(tensors[layer], rng).contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return f"tensor: {kind} {layer}"


def filled(value: float) -> Callable[[Tensor, random.Random], Tensor]:
    """Some of the numbers become `value`, as far as the dtype has it."""

    def change(tensor: Tensor, rng: random.Random) -> Tensor:
        numbers = tensor.clone().reshape(-1)
        if not numbers.dtype.is_floating_point:
            bounds = torch.iinfo(numbers.dtype) if numbers.dtype != torch.bool else None
            whole = 0 if value != value or bounds is None else value
            whole = max(bounds.min, min(bounds.max, whole)) if bounds else 0
            numbers[:: rng.choice([1, 7])] = int(whole)
            return numbers.reshape(tensor.shape)
        if numbers.itemsize > 1:
            numbers[:: rng.choice([1, 7])] = torch.tensor(value).to(numbers.dtype)
        return numbers.reshape(tensor.shape)

    return change


def other_type(tensor: Tensor, rng: random.Random) -> Tensor:
    return tensor.to(torch.float32).to(rng.choice(DTYPES))


def other_shape(tensor: Tensor, rng: random.Random) -> Tensor:
    flat = tensor.reshape(-1)
    if tensor.ndim == 0:
        return rng.choice([flat, flat[:0], flat.repeat(3)])
    shapes = [flat, flat[:0], flat[:1], flat[:1].reshape(()), tensor[None], tensor.T, tensor[:-1]]
    return rng.choice([*shapes, tensor[:0], tensor[..., :1], tensor[..., :0], flat.repeat(3)])


def as_bits(tensor: Tensor, rng: random.Random) -> Tensor:
    """The same bytes as another dtype."""
    flat = tensor.reshape(-1).view(torch.uint8)
    fitting = [dtype for dtype in DTYPES if flat.numel() % dtype.itemsize == 0]
    return flat.view(rng.choice([d for d in fitting if d != torch.bool]))


def shuffled(tensor: Tensor, rng: random.Random) -> Tensor:
    order = [*range(tensor.numel())]
    rng.shuffle(order)
    return tensor.reshape(-1)[order].reshape(tensor.shape)


TENSOR_CHANGES: dict[str, Callable[[Tensor, random.Random], Tensor]] = {
    **{f"filled with {value}": filled(value) for value in (float("nan"), float("inf"), -1, 0)},
    **{f"filled with {value}": filled(value) for value in (float("-inf"), 1e300, -(2.0**31), 127)},
    "dtype": other_type,
    "shape": other_shape,
    "bits": as_bits,
    "order": shuffled,
    **{kind: filled(0) for kind in ("missing", "another name", "another's", "more")},
}


def change_quantization(folder: Path, rng: random.Random) -> str:
    """A value of the quantization in config.json."""
    config = json.loads((folder / "config.json").read_text())
    keys = [key for key in ("quantization_config", "quantization") if key in config]
    paths = [(key, *path) for key in keys for path in places(config[key])]
    path = rng.choice(paths)
    value = rng.choice(ODD)
    replace(config, path, value)
    if rng.random() < 0.3:
        second = rng.choice(paths)
        replace(config, second, rng.choice(ODD))
    write_json(folder / "config.json", config)
    return f"config: {path} = {value!r:.40}"


def change_model(folder: Path, rng: random.Random) -> str:
    """A size of the model in config.json."""
    config = json.loads((folder / "config.json").read_text())
    sizes = [name for name, value in config.items() if type(value) is int]
    name = rng.choice(sizes)
    value = rng.choice([*ODD, 10**4, 10**6, 10**8])
    config[name] = value
    write_json(folder / "config.json", config)
    return f"config: {name} = {value!r:.40}"


def change_index(folder: Path, rng: random.Random) -> str:
    """Two files and their index, whose values are wrong, or whose files hold a tensor twice."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"first.safetensors": names[::2], SECOND_WEIGHTS: names[1::2]}
    weight_map: dict[str, Any] = {}
    for file, held in parts.items():
        weight_map |= dict.fromkeys(held, file)
    kind = rng.choice(["twice", "value", "map", "missing", "name"])
    if kind == "twice":
        parts[SECOND_WEIGHTS].append(parts["first.safetensors"][0])
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
    document: Any = {"metadata": {}, "weight_map": weight_map}
    if kind == "value":
        weight_map[rng.choice(names)] = rng.choice(ODD)
    elif kind == "map":
        document["weight_map"] = rng.choice(ODD)
    elif kind == "missing":
        (folder / SECOND_WEIGHTS).unlink()
    elif kind == "name":
        bad = ["../x.safetensors", "/etc/passwd", "a/../../x", "..", ".", "", "nul", "x\0", "a\\b"]
        weight_map[names[0]] = rng.choice(bad)
    write_json(folder / INDEX, document)
    return f"index: {kind}"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a document."""
    yield path
    inner = ()
    if isinstance(value, dict):
        inner = tuple(value.items())
    elif isinstance(value, list):
        inner = tuple(enumerate(value))
    for key, item in inner:
        yield from places(item, (*path, key))


def replace(document: Any, path: tuple[Any, ...], value: Any) -> None:
    """Replace a value, if the path still leads somewhere."""
    try:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value
    except (TypeError, LookupError):
        return


def write_json(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document), encoding="utf-8")


DAMAGES = (
    *(change_header, change_header, change_bytes, change_tensor, change_tensor),
    *(change_quantization, change_quantization, change_model, change_index),
)


def limit_memory() -> None:
    """Let this process have `SPARE_BYTES` more than it has now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * resource.getpagesize() + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def attempt(open_checkpoint: Callable[[], object]) -> dict[str, Any]:
    """Open a checkpoint. How long that took, and its error."""
    from qsample.errors import QsampleError

    started = time.monotonic()
    result: dict[str, Any] = {"error": "", "kind": "", "own": True}
    signal.alarm(CASE_TIMEOUT_S)
    try:
        open_checkpoint()
    except QsampleError as error:
        result |= {"error": str(error), "kind": type(error).__name__}
    except BaseException as error:
        where = "".join(traceback.format_exception(error)[-4:])
        result |= {"error": f"{error!r:.500}\n{where:.3000}", "own": False}
        result["kind"] = type(error).__name__
    finally:
        signal.alarm(0)
    return result | {"seconds": round(time.monotonic() - started, 2)}


def run(count: int, seed: int, only: int | None) -> None:
    from qsample.checkpoints.checkpoint import Checkpoint
    from qsample.checkpoints.source import check_checkpoint

    warnings.simplefilter("ignore")

    def out_of_time(*_: object) -> None:
        raise TimeoutError(f"it took more than {CASE_TIMEOUT_S} s")

    signal.signal(signal.SIGALRM, out_of_time)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sources = make_sources(folder / "sources")

        def opened(checkpoint: Path, scratch: Path) -> None:
            check_checkpoint(checkpoint)
            Checkpoint(str(checkpoint), tokenizer=None).load(scratch=scratch)

        for source in sources:
            (folder / "scratch").mkdir()
            opened(source, folder / "scratch")
            shutil.rmtree(folder / "scratch")
        limit_memory()
        for number in range(count) if only is None else [only]:
            rng = random.Random(f"{seed} {number}")
            source = sources[number % len(sources)]
            checkpoint = folder / "checkpoint"
            scratch = folder / "scratch"
            shutil.copytree(source, checkpoint)
            scratch.mkdir()
            what = f"{source.name}: {damage(checkpoint, rng)}"
            result = attempt(lambda c=checkpoint, s=scratch: opened(c, s))
            result["error"] = result["error"].replace(str(checkpoint), "CHECKPOINT")
            print(json.dumps({"number": number, "case": what, **result}), flush=True)
            shutil.rmtree(checkpoint)
            shutil.rmtree(scratch)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of a single case")
    options = parser.parse_args(arguments)
    run(options.count, options.seed, options.only)


if __name__ == "__main__":
    main(sys.argv[1:])
