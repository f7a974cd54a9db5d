"""Headers of GGUF files: read as the gguf package writes them, and refused if they are damaged."""

from __future__ import annotations

import itertools
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from qsample.addons.formats.gguf.file import TENSOR_TYPES, is_gguf, read_gguf
from qsample.errors import QsampleError, UnsupportedModelError

gguf = pytest.importorskip("gguf")
STRING, ARRAY, UINT32 = 8, 9, 4


def text(value: str | bytes) -> bytes:
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ARCHITECTURE = entry("general.architecture", STRING, text("llama"))


def tensor(name: str, sizes: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def header(*entries: bytes, tensors: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, len(tensors), len(entries))
    content = b"GGUF" + counts + b"".join(entries) + b"".join(tensors)
    return content + b"\0" * (-len(content) % 32)


def test_a_file_of_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "model"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_custom_alignment(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_token_list(["a", "é", "\u2581b"])
    writer.add_token_scores([0.5, -1.0, 0.0])
    writer.add_bool("qwen3.flag", True)
    writer.add_array("qwen3.flags", [True, False])
    writer.add_int64("qwen3.number", -(2**40))
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    blocks = np.arange(4 * 2 * 34, dtype=np.uint8).reshape(4, 68)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    link = tmp_path / "link"
    link.symlink_to(path)
    file = read_gguf(link)
    assert is_gguf(link)
    assert (file.path, file.architecture, list(file.tensors)) == (
        path,
        "qwen3",
        ["matrix", "blocks"],
    )
    assert file.value("attention.layer_norm_rms_epsilon") == 1e-6  # a float32 that is not 1e-6
    assert file.value("rope.freq_base") == 1e6
    assert (file.value("flag"), file.value("flags"), file.value("number")) == (
        True,
        [True, False],
        -(2**40),
    )
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "é", "\u2581b"]
    assert file.metadata["tokenizer.ggml.scores"] == [0.5, -1.0, 0.0]
    assert file.value("none", 7) == 7
    stored = file.tensors["matrix"]
    assert (stored.shape, stored.type, stored.length) == ((2, 3), "F32", 24)
    assert np.array_equal(file.raw(stored).view(np.float32), matrix)
    stored = file.tensors["blocks"]
    assert (stored.shape, stored.type) == ((4, 64), "Q8_0")
    assert np.array_equal(file.raw(stored), blocks)


def test_sizes_of_the_types() -> None:
    assert {
        number: (kind.name, kind.size, kind.length) for number, kind in TENSOR_TYPES.items()
    } == {
        int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        for kind in map(gguf.GGMLQuantizationType, TENSOR_TYPES)
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "cannot mmap an empty file"),
        (b"GGUF\3\0", "ends behind the end of the file"),
        (b"GGML" + bytes(60), "begins with b'GGML'"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0),
            "says that it has 9223372036854775808 tensors",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "9223372036854775808 keys"),
        (header(struct.pack("<Q", 2**63) + b"key"), "a key ends behind the end of the file"),
        (
            header(entry("a", STRING, struct.pack("<Q", 2**63))),
            "'a' ends behind the end of the file",
        ),
        (header(entry("a", STRING, text(b"\xff\xfe"))), "'a' is not UTF-8"),
        (header(text(b"\xff") + struct.pack("<I", 4)), "a key is not UTF-8"),
        (
            header(entry("a", ARRAY, struct.pack("<IQ", 4, 2**62))),
            "more than 4194304 values, 4611686018427387904",
        ),
        (
            header(entry("a", ARRAY, struct.pack("<IQ", 4, 2**20))),
            "'a' ends behind the end of the file",
        ),
        (
            header(entry("a", ARRAY, struct.pack("<IQIQ", ARRAY, 1, 4, 0))),
            "'a' has .* arrays in an array",
        ),
        (header(entry("a", 13, b"")), "'a' has a value of type 13"),
        (header(entry("a", 7, b"\2")), "truth value"),
        (header(ARCHITECTURE, ARCHITECTURE), "'general.architecture' twice"),
        (header(), "general.architecture is None"),
        (header(entry("general.architecture", UINT32, bytes(4))), "general.architecture is 0"),
        (
            header(ARCHITECTURE, tensors=(tensor("x"), tensor("x"))) + bytes(64),
            "the tensor 'x' twice",
        ),
        (
            header(ARCHITECTURE, tensors=(text("x") + struct.pack("<I", 2**31),)),
            "'x' of 2147483648 axes",
        ),
        (header(ARCHITECTURE, tensors=(tensor("x", ()),)), "'x' of 0 axes"),
        (header(ARCHITECTURE, tensors=(tensor("x", (0, 4)),)), r"shape \[4, 0\]"),
        (
            header(ARCHITECTURE, tensors=(tensor("x", (33, 4), 8),)) + bytes(999),
            r"Q8_0 has the shape \[4, 33\]",
        ),
        (
            header(ARCHITECTURE, tensors=(tensor("x", (2**63, 2**63)),)) + bytes(64),
            "'x' lies behind its end",
        ),
        (
            header(ARCHITECTURE, tensors=(tensor("x", offset=2**63),)) + bytes(64),
            "'x' lies behind its end",
        ),
        (header(ARCHITECTURE, tensors=(tensor("x"),)) + bytes(31), "'x' lies behind its end"),
        (
            header(ARCHITECTURE, tensors=(tensor("x"), tensor("y"))) + bytes(64),
            "'y' lies within another",
        ),
        (
            header(ARCHITECTURE, tensors=(tensor("x", offset=4),)) + bytes(64),
            "'x' lies .* between two places",
        ),
        (
            header(ARCHITECTURE, entry("general.alignment", UINT32, bytes(4))),
            "general.alignment is 0",
        ),
        (
            header(ARCHITECTURE, entry("general.alignment", UINT32, b"\x18\0\0\0")),
            "general.alignment is 24",
        ),
    ],
    ids=itertools.count(),
)
def test_damage(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(
        QsampleError,
        match=rf"model\.gguf is no GGUF file that can be read: .*({problem}).*; download",
    ):
        read_gguf(path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.gguf", header(version=1), "of version 1; .* versions 2 and 3 are read"),
        ("a.gguf", header(version=3 << 24), "big-endian"),
        (
            "a-00001-of-00003.gguf",
            header(),
            "one of 3 parts of a model; join them: `llama-gguf-split --merge`",
        ),
        ("a.gguf", header(ARCHITECTURE, entry("split.count", 2, b"\2\0")), "one of 2 parts"),
        ("a.gguf", header(entry("general.architecture", STRING, text("clip"))), "projector"),
        (
            "a.gguf",
            header(ARCHITECTURE, entry("general.type", STRING, text("mmproj"))),
            "projector",
        ),
        (
            "a.gguf",
            header(ARCHITECTURE, entry("general.type", STRING, text("adapter"))),
            "LoRA adapter",
        ),
        (
            "a.gguf",
            header(ARCHITECTURE, tensors=(tensor("x", kind=19),)),
            "'x' is of type IQ1_S; the types F32, .*MXFP4",
        ),
        ("a.gguf", header(ARCHITECTURE, tensors=(tensor("x", kind=99),)), "'x' is of type 99"),
    ],
)
def test_other_files(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=problem):
        read_gguf(tmp_path / name)


def test_every_cut_and_changed_byte_of_a_header_is_a_clear_error_or_another_header(
    tmp_path: Path,
) -> None:
    whole = header(
        ARCHITECTURE,
        entry("tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("b")),
        entry("numbers", ARRAY, struct.pack("<IQ2i", 5, 2, 1, -1)),
        tensors=(tensor("x"), tensor("y", (32,), 8, 32)),
    )
    path = tmp_path / "model.gguf"

    def attempt(content: bytes) -> None:
        path.write_bytes(content)
        with suppress(QsampleError):
            read_gguf(path)

    for length in range(0, len(whole), 8):
        attempt(whole[:length])
    for place in range(4, len(whole)):
        attempt(whole[:place] + b"\xff" + whole[place + 1 :] + bytes(96))


def test_a_header_needs_no_torch() -> None:
    code = "import sys, qsample.addons.formats.gguf.file; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (9, "Q8_1"), (15, "Q8_K"), (16, "IQ2_XXS"), (17, "IQ2_XS"), (18, "IQ3_XXS"), (19, "IQ1_S"), (21, "IQ3_S"),
        (22, "IQ2_S"), (24, "I8"), (25, "I16"), (26, "I32"), (27, "I64"), (28, "F64"), (29, "IQ1_M"), (34, "TQ1_0"),
        (41, "Q1_0"),
    ],
)  # fmt: skip
def test_types_that_are_not_read_are_named_as_in_ggml(kind: int, name: str, tmp_path: Path) -> None:
    known = {int(each): each.name for each in gguf.GGMLQuantizationType}
    assert known.get(kind, name) == name
    path = tmp_path / "a.gguf"
    path.write_bytes(header(ARCHITECTURE, tensors=(tensor("x", kind=kind),)))
    with pytest.raises(UnsupportedModelError, match=f"'x' is of type {name}; the types F32, F16"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("clip", "a projector of images or audio"), ("mmproj", "a projector of images or audio"),
        ("adapter", "a LoRA adapter"), ("controlvector", "a control vector"), ("imatrix", "an importance matrix"),
    ],
)  # fmt: skip
def test_kinds_of_files_that_are_no_models(name: str, words: str, tmp_path: Path) -> None:
    """By their architecture, or their type beside one."""
    path = tmp_path / "a.gguf"
    for entries in (
        (entry("general.architecture", STRING, text(name)),),
        (ARCHITECTURE, entry("general.type", STRING, text(name))),
    ):
        path.write_bytes(header(*entries))
        with pytest.raises(UnsupportedModelError, match=f"a.gguf is {words}; give "):
            read_gguf(path)


SCALARS: dict[str, tuple[str, list[float]]] = {
    "UINT8": ("B", [0, 255]), "INT8": ("b", [-128, 127]), "UINT16": ("H", [65535]), "INT16": ("h", [-32768]),
    "UINT32": ("I", [2**32 - 1]), "INT32": ("i", [-(2**31)]), "FLOAT32": ("f", [0.5, -2.0]),
    "BOOL": ("?", [True, False]), "UINT64": ("Q", [2**64 - 1]), "INT64": ("q", [-(2**63)]), "FLOAT64": ("d", [0.1]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_a_value_alone_and_in_a_list(name: str, version: int, tmp_path: Path) -> None:
    code, values = SCALARS[name]
    kind = int(gguf.GGUFValueType[name])
    packed = struct.pack(f"<{len(values)}{code}", *values)
    one = entry("one", kind, struct.pack(f"<{code}", values[0]))
    many = entry("many", ARRAY, struct.pack("<IQ", kind, len(values)) + packed)
    none = entry("none", ARRAY, struct.pack("<IQ", kind, 0))
    path = tmp_path / "a.gguf"
    path.write_bytes(header(ARCHITECTURE, one, many, none, version=version))
    found = read_gguf(path).metadata
    assert (found["one"], found["many"], found["none"]) == (values[0], values, [])
    assert type(found["one"]) is type(values[0])


@pytest.mark.parametrize(
    ("alignment", "is_good"),
    [(8, True), (1 << 20, True), (4, False), (1 << 21, False), (12, False), (-8, False)],
)
def test_alignments_at_their_limits(alignment: int, is_good: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    stated = entry("general.alignment", 5, struct.pack("<i", alignment))
    path.write_bytes(header(ARCHITECTURE, stated, tensors=(tensor("x"),)) + bytes(1 << 20))
    if is_good:
        found = read_gguf(path).tensors["x"]
        assert (found.offset % alignment, found.length, found.shape) == (0, 32, (2, 4))
    else:
        with pytest.raises(QsampleError, match=f"general.alignment is {alignment}; it must be a"):
            read_gguf(path)
