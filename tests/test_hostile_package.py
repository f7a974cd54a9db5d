"""Packages from strangers, as docs/security.md promises: whatever the bytes are, a package or one PackageError."""

from __future__ import annotations

import json
import os
import random
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from qsample.cli.inspect import describe, show
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.contract.interface import Features, Interface, KeyValueShape, RecurrentShape
from qsample.package.package import (
    MANIFEST_NAME,
    Compilation,
    Package,
    PackageError,
    copy_package,
    read_package,
    write_package,
)
from qsample.runtime import load
from tests.helpers.fake_package import byte_tokenizer, fake_package
from tests.helpers.small_packages import FILES, manifest, write

INTERFACE = Interface(
    100,
    (KeyValueShape(2, 8), KeyValueShape(1, 16, 3)),
    "float16",
    Features(logprobs=True),
    "int8",
    True,
    (RecurrentShape(1, "conv_state", 0, (8, 3), "float32"),),
)
COMPILATION = Compilation(
    "cuda",
    ("CUDAExecutionProvider", "CPUExecutionProvider"),
    4,
    512,
    {"CUDAExecutionProvider": {"MatMul": 5}},
    {"tokens": 8, "agreeing": 8},
    {"enable_cuda_graph": "1"},
    {
        "divergence": {"kl": 0.1},
        "dtype": "int4",
        "matrices": 3,
        "bytes_before": 9,
        "bytes_after": 4,
    },
)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A small package whose manifest has something in every field."""
    with write_package(tmp_path_factory.mktemp("device") / "package") as writer:
        for name in INTERFACE.graphs:
            (writer.directory / name).write_bytes(name.encode())
        packed = {"matrices": 3, "bits": [4], "block_sizes": [32], "bytes": 100}
        writer.finish(
            manifest(
                kind="device", interface=INTERFACE, compilation=COMPILATION, packed_weights=packed
            )
        )
    return read_package(
        writer.directory if writer.directory.exists() else writer.directory.parents[1] / "package"
    )


def attempt(folder: Path, text: bytes | str) -> Package | None:
    """Read a package with this manifest; None if it was refused, as it should be."""
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    (folder / MANIFEST_NAME).write_bytes(content)
    try:
        return read_package(folder, verify=False)
    except PackageError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 1000
        assert str(folder) in message
        assert not any(unicodedata.category(character).startswith("C") for character in message)
        return None


# Manifests.

HUGE = [10**30, -(10**30), 2**63, -1, 0, 1e300, 10**400]
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1.5,
        "",
        "x",
        "..",
        "\0",
        "\ud800",
        "\x1b[2J",
        [],
        {},
        [[]],
        {"": {}},
    ),
    *HUGE,
    *({"a": [{}]}, [None] * 3, "x" * 10_000, {"x" * 10_000: 1}),
]


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a JSON document, itself included."""
    yield path
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


def changed(data: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """A copy in which `change(container, key)` has altered one place."""
    holder = {"": json.loads(json.dumps(data))}
    container, key = holder, ""
    for step in path:
        container, key = container[key], step
    change(container, key)
    return holder.get("")


def put(value: Any) -> Callable[[Any, Any], None]:
    return lambda container, key: container.__setitem__(key, value)


def remove(container: Any, key: Any) -> None:
    del container[key]


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_place_of_a_manifest_with_every_odd_value(
    stride: int, device: Package, tmp_path: Path
) -> None:
    folder = shutil.copytree(device.path, tmp_path / "package")
    data = json.loads((folder / MANIFEST_NAME).read_text())
    changes = [(path, change) for path in places(data) for change in (remove, *map(put, ODD))][
        ::stride
    ]
    read = sum(
        attempt(folder, json.dumps(changed(data, path, change))) is not None
        for path, change in changes
    )
    assert 0.02 < read / len(changes) < 0.3  # figures may be anything, and texts


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_inspect_shows_whatever_a_manifest_says(
    stride: int, device: Package, tmp_path: Path
) -> None:
    folder = shutil.copytree(device.path, tmp_path / "package")
    data = json.loads((folder / MANIFEST_NAME).read_text())
    values = [*ODD, "[/bold]", "[link=file:///x]y", {"a": "[/]"}, {"[/]": 1}]
    changes = [(path, change) for path in places(data) for change in (remove, *map(put, values))][
        ::stride
    ]
    shown = 0
    for path, change in changes:
        package = attempt(folder, json.dumps(changed(data, path, change)))
        if package is not None:
            show(package)
            describe(package)
            shown += 1
    assert shown > 10


WRONG_TEXTS = [
    *(
        b"",
        b"\0",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b"1",
        b'""',
        b"\xef\xbb\xbf{}",
        b" " * (9 << 20),
    ),
    *(b"{" * 100_000, b"[" * 1_000_000, b'{"a":' * 100_000),
    *(
        b'{"format_version": 1e400}',
        b'{"format_version": ' + b"9" * 10_000 + b"}",
        b'{"format_version": true}',
    ),
    b'{"format_version": 1, "contract_version": ' + b"[" * 63 + b"]" * 63 + b"}",
]


@pytest.mark.parametrize("text", WRONG_TEXTS, ids=range(len(WRONG_TEXTS)))
def test_texts_that_are_no_manifest(text: bytes, tmp_path: Path) -> None:
    assert attempt(tmp_path, text) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"max_error": 1e-06', '"max_error": NaN'),
        ('"max_error": 1e-06', '"max_error": -Infinity'),
        ('"max_error": 1e-06', '"max_error": 1e400'),
        ('"kind": "portable"', '"kind": "portable", "kind": "portable"'),
        ('"rows": 3', '"rows": ' + "[" * 70 + "]" * 70),
        ('"rows": 3', '"rows": ' + "9" * 400),
        ('"rows": 3', '"rows\\u001b[2J": 3'),
        ('"some/model"', '"some\\nmodel"'),
        ('"some/model"', '"\\ud800"'),
        ('"vocab_size": 100', '"vocab_size": 0'),
        ('"vocab_size": 100', '"vocab_size": 2147483648'),
        ('"pad": 4', '"pad": -1'),
        ('"head_dim": 8', '"head_dim": 0'),
        ('"layer": null', '"layer": 1'),  # of both layers
        ('"bytes": 5000', '"bytes": -5000'),
    ],
)
def test_manifests_that_are_almost_right(old: str, new: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "package").path
    text = (folder / MANIFEST_NAME).read_text()
    assert old in text
    assert attempt(folder, text.replace(old, new)) is None
    assert attempt(folder, text) is not None


@pytest.mark.parametrize("count", [300, pytest.param(30_000, marks=pytest.mark.slow)])
def test_manifests_with_altered_bytes(count: int, device: Package, tmp_path: Path) -> None:
    folder = shutil.copytree(device.path, tmp_path / "package")
    whole, generator = (folder / MANIFEST_NAME).read_bytes(), random.Random(3)
    pieces = [
        *(bytes([one]) for one in b'{}[]",:-'),
        b"NaN",
        b"9" * 50,
        b"\\u0000",
        b"../",
        b"\xff",
        b"null",
        b"e9",
    ]
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(generator.choice([1, 1, 1, 2, 4])):
            start = generator.randrange(len(content))
            stop = min(len(content), start + generator.choice([0, 0, 1, 1, 5, 200]))
            other = generator.randrange(len(content))
            content[start:stop] = generator.choice(
                [
                    generator.choice(pieces),
                    bytes([generator.randrange(256)]),
                    bytes(content[other : other + 30]),
                ]
            )
        attempt(folder, bytes(content))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(value=JSON, choice=st.integers(min_value=0))
def test_manifests_with_any_value_anywhere(
    value: Any, choice: int, device: Package, tmp_path: Path
) -> None:
    (tmp_path / "package").mkdir(exist_ok=True)
    for path in device.path.iterdir():
        shutil.copyfile(path, tmp_path / "package" / path.name)
    data = json.loads((device.path / MANIFEST_NAME).read_text())
    ways = list(places(data))
    attempt(tmp_path / "package", json.dumps(changed(data, ways[choice % len(ways)], put(value))))


# Folders: what is done to them, and the words of the error.

NAMES = [
    *(
        "..\\x",
        "C:\\x",
        "C:x",
        "\\\\server\\x",
        "//server/x",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "",
        ".",
        "a//b",
    ),
    *(
        "NUL",
        "com1.json",
        "a.",
        "a\0b",
        "a\nb",
        "a:b",
        "x" * 300,
        "\ud800",
        "DECODER.ONNX",
        "decoder.onnx/x",
    ),
    *("Qsample.json", "qsample.json", "tokenizer"),
]


def lists(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        data = json.loads((folder / MANIFEST_NAME).read_text())
        data["files"][name] = {"sha256": "00" * 32, "bytes": 0}
        assert attempt(folder, json.dumps(data)) is None

    return change


def links(name: str, target: str) -> Callable[[Path], object]:
    return lambda folder: (os.remove(folder / name), (folder / name).symlink_to(target))


def leads_out(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / "outside")
        (folder / name).symlink_to(folder.parent / "outside")

    return change


def pipes(name: str) -> Callable[[Path], object]:
    return lambda folder: (os.remove(folder / name), os.mkfifo(folder / name))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((lists(name), r"do not use this package|control characters") for name in NAMES),
        (
            leads_out("initial_state.onnx"),
            r"initial_state.onnx is a link that leads out of the package",
        ),
        (leads_out("tokenizer"), r"extra.json is a link that leads out"),
        *(
            (links("decoder.onnx", to), r"decoder.onnx")
            for to in ("decoder.onnx", "nowhere", "/dev/zero", ".")
        ),
        (pipes(MANIFEST_NAME), "not a plain file"),
        (pipes("decoder.onnx"), "is missing"),
    ],
)
def test_folders_with_something_wrong(
    change: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "package").path
    change(folder)
    for verify in (True, False):
        with pytest.raises(PackageError, match=words):
            read_package(folder, verify=verify)


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "x/" * 3000])
def test_paths_that_no_system_takes(path: str) -> None:
    with pytest.raises(PackageError, match=r"is missing; give a package's folder"):
        read_package(path)


def test_links_inside_and_a_link_to_the_package(tmp_path: Path) -> None:
    folder = write(tmp_path / "package").path
    (folder / "initial_state.onnx").rename(folder / "moved")
    (folder / "initial_state.onnx").symlink_to("moved")
    (tmp_path / "link").symlink_to("package")
    assert read_package(tmp_path / "link").path == tmp_path / "link"


def test_the_cache_of_the_hub_works_and_what_only_looks_like_it_does_not(tmp_path: Path) -> None:
    """huggingface_hub lays a download out as links from a snapshot to the files of all snapshots."""
    snapshot = tmp_path / "hub" / "models--me--package" / "snapshots" / "0123abc"
    blobs = snapshot.parents[1] / "blobs"
    shutil.copytree(fake_package(tmp_path / "package").path, snapshot)
    blobs.mkdir()
    for index, path in enumerate([path for path in snapshot.rglob("*") if path.is_file()]):
        path.rename(blobs / str(index))
        path.symlink_to(os.path.relpath(blobs / str(index), path.parent))
    assert load(snapshot).generate([[5, 6]], max_new_tokens=2, do_sample=False).token_ids
    assert copy_package(read_package(snapshot), tmp_path / "copy").has("decoder.onnx")
    blobs.rename(tmp_path / "home")
    blobs.symlink_to(tmp_path / "home")
    with pytest.raises(PackageError, match=r"is a link that leads out"):
        read_package(snapshot)


def test_such_names_are_not_written_either(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"a device on Windows"):
        write(tmp_path / "package", FILES | {"nul.json": b"{}"})
    assert os.listdir(tmp_path) == []


# Other JSON files.


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        "[" * 100_000,
        '{"a": ' * 70 + "1" + "}" * 70,
        "\ud800",
    ],
)
def test_other_files(text: str, tmp_path: Path) -> None:
    content = text.encode("utf-8", "surrogatepass")
    package = write(tmp_path / "package", FILES | {"generation_config.json": content})
    with pytest.raises(
        PackageError, match=r"generation_config.json.*export the package again"
    ) as caught:
        package.read_json("generation_config.json")
    assert "\n" not in str(caught.value)


TOKENIZERS = [
    "",
    "{}",
    "[" * 100_000,
    '{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}',
    '{"model": {"type": "Unigram", "vocab": [], "unk_id": 7}}',
    '{"model": {"type": "WordLevel", "vocab": {"a": 99999999999999999999}, "unk_token": "x"}}',
    '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": {"type": "Split", "invert": false, '
    '"pattern": {"Regex": "("}, "behavior": "Isolated"}}',
]


def byte_level(**changes: Any) -> str:
    return json.dumps(json.loads(byte_tokenizer().to_str()) | changes)


TOKENIZERS += [byte_level(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})]


@pytest.mark.parametrize("text", TOKENIZERS, ids=range(len(TOKENIZERS)))
def test_tokenizers(text: str, tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", files={"tokenizer.json": text})
    with pytest.raises(PackageError, match=r"cannot read .*tokenizer.json"):
        load(package.path)


def test_tokenizers_that_fail_on_a_text(tmp_path: Path) -> None:
    """They lack a token for unknown texts, cut off more than the text, or have ids beyond the model's."""
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "z"}
    cut = {"type": "Strip", "content": "a", "start": 1, "stop": 1}
    beyond = json.loads(byte_level())["model"]
    beyond["vocab"]["a"] = 10**6
    made = [
        load(
            fake_package(
                tmp_path / str(index), files={"tokenizer.json": byte_level(**changes)}
            ).path
        )
        for index, changes in enumerate([{"model": words}, {"decoder": cut}, {"model": beyond}])
    ]
    with pytest.raises(PackageError, match=r"tokenizer.json cannot encode 'a b'"):
        made[0].generate("a b", max_new_tokens=3)
    with pytest.raises(PackageError, match=r"tokenizer.json cannot decode \[68\]"):
        made[1].tokenizer.decode([68])  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"a text has .a., token 1000000 of the tokenizer"):
        made[2].generate("a b", max_new_tokens=3)


# Graphs that refer to files.


def refer_to(location: str) -> Callable[[onnx.ModelProto], None]:
    """Move a weight into a file."""

    def edit(model: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "w_head")
        tensor.ClearField("raw_data")
        tensor.ClearField("float_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)

    return edit


def run_context(file: str) -> Callable[[onnx.ModelProto], None]:
    node = helper.make_node(
        "EPContext", [], ["unused"], domain="com.microsoft", embed_mode=0, ep_cache_context=file
    )
    return lambda model: model.graph.node.append(node)


@pytest.mark.parametrize(
    "edit",
    [
        *map(
            refer_to,
            [
                "unlisted.bin",
                "../secret",
                "/etc/passwd",
                "./listed.bin",
                "listed.bin\0",
                "LISTED.bin",
                "",
            ],
        ),
        *map(run_context, ["engine.bin", "../engine.bin"]),
    ],
)
def test_a_file_that_the_manifest_does_not_list(edit: Any, tmp_path: Path) -> None:
    with pytest.raises(
        PackageError,
        match=r"decoder.onnx refers to the file .*does not list; do not use this package",
    ):
        fake_package(tmp_path / "package", edit=edit, files={"listed.bin": "x" * 100_000})
    for path in (tmp_path / "package" / "unlisted.bin", tmp_path / "secret"):
        path.write_bytes(b"\0" * 100_000)
    for use in (read_package, load):
        with pytest.raises(PackageError, match=r"refers to the file"):
            use(tmp_path / "package")
    with pytest.raises(PackageError, match=r"refers to the file"):
        read_package(tmp_path / "package", verify=False)


def test_a_file_that_it_lists(tmp_path: Path) -> None:
    fake_package(
        tmp_path / "package", edit=refer_to("listed.bin"), files={"listed.bin": "\0" * 100_000}
    )
    assert load(tmp_path / "package").generate([[5]], max_new_tokens=2, do_sample=False).token_ids


def test_what_was_altered_since_the_package_was_opened(tmp_path: Path) -> None:
    """The graph is looked at again when a session is opened, and when the package is compiled."""
    package = fake_package(tmp_path / "package")
    model = onnx.load(package.path / "decoder.onnx")
    refer_to("../secret")(model)
    onnx.save(model, package.path / "decoder.onnx")
    from qsample.ort.session import open_sessions

    with pytest.raises(PackageError, match=r"refers to the file '../secret'"):
        open_sessions(package)
    with pytest.raises(PackageError, match=r"refers to the file '../secret'"):
        compile_package(package, tmp_path / "out", CompileOptions(ctx_len=32))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"no graph", b"\x3b" * 100])
def test_graphs_that_are_none(content: bytes, tmp_path: Path) -> None:
    with write_package(tmp_path / "package") as writer:
        source = fake_package(tmp_path / "source")
        for name in source.manifest.files:
            shutil.copyfile(source.path / name, writer.directory / name)
        (writer.directory / "decoder.onnx").write_bytes(content)
        writer.finish(source.manifest)
    with pytest.raises(PackageError, match=r"decoder.onnx"):
        load(tmp_path / "package")
